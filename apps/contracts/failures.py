"""Failures of a run: a stable code, who is to blame, the cause in a sentence, and whether a retry may help.

Only codes are transferred; evidence and suggestions are added where the job is known.
"""

from enum import StrEnum


class Blame(StrEnum):
    CUSTOMER = "customer"
    PLATFORM = "platform"
    PROVIDER = "provider"  # of hardware, storage or models: neither the customer nor this software


class FailureCode(StrEnum):
    # Faults of the customer: never retried.
    INVALID_TRAINING_FILE = "invalid_training_file"
    NO_TRAINABLE_TOKENS = "no_trainable_tokens"
    LOSS_NOT_FINITE = "loss_not_finite"
    LOSS_IS_ZERO = "loss_is_zero"
    # Faults of the platform or a provider: the time is not billed.
    OUT_OF_MEMORY = "out_of_memory"
    BASE_MODEL_UNAVAILABLE = "base_model_unavailable"
    OBJECT_STORE_UNAVAILABLE = "object_store_unavailable"
    DISK_FULL = "disk_full"
    CHECKPOINT_INVALID = "checkpoint_invalid"  # the checkpoint to resume from: set aside in favour of the one before
    GPU_FAULT = "gpu_fault"
    WORKER_LOST = "worker_lost"
    PREEMPTED = "preempted"
    STALLED = "stalled"  # alive, and without progress: retried once
    INCOMPLETE_TRAINING = "incomplete_training"
    ADAPTER_REJECTED = "adapter_rejected"
    DELIVERY_FAILED = "delivery_failed"  # no adapter is served, and the model that is delivered instead is missing
    CRASH_LOOP = "crash_loop"
    INTERNAL_ERROR = "internal_error"

    @property
    def blame(self) -> Blame:
        """Who is to blame. Durable steps are billed only when it is the customer."""
        if self in _CUSTOMER_FAILURES:
            return Blame.CUSTOMER
        return Blame.PROVIDER if self in _PROVIDER_FAILURES else Blame.PLATFORM

    @property
    def is_retryable(self) -> bool:
        """Whether a new attempt from the last verified checkpoint may succeed without help."""
        return self in _RETRYABLE


CAUSES: dict[FailureCode, str] = {
    FailureCode.INVALID_TRAINING_FILE: "A row of the training file cannot be used.",
    FailureCode.NO_TRAINABLE_TOKENS: "After rows were cut to max_length, none had a token left to train on.",
    FailureCode.LOSS_NOT_FINITE: "Training diverged, as it does when the learning rate is too high.",
    FailureCode.LOSS_IS_ZERO: "The loss was zero: the rows hold nothing the model could still learn.",
    FailureCode.OUT_OF_MEMORY: "Training needed more memory than the machine has, also after it was made smaller.",
    FailureCode.BASE_MODEL_UNAVAILABLE: "The base model could not be fetched, or was not the one pinned.",
    FailureCode.OBJECT_STORE_UNAVAILABLE: "The object store did not take or give a file.",
    FailureCode.DISK_FULL: "The disk of the machine was full.",
    FailureCode.CHECKPOINT_INVALID: "No checkpoint could be resumed from.",
    FailureCode.GPU_FAULT: "The GPU reported a fault.",
    FailureCode.WORKER_LOST: "The machines that trained the job were lost too often.",
    FailureCode.PREEMPTED: "The machines that trained the job were taken away too often.",
    FailureCode.STALLED: "The run stood still twice: no step, no transferred byte and no new phase for far too long.",
    FailureCode.INCOMPLETE_TRAINING: "Training ended before its last step.",
    FailureCode.ADAPTER_REJECTED: "The finished adapter is not one that the serving engine takes.",
    FailureCode.DELIVERY_FAILED: "The only form in which the result is delivered could not be made.",
    FailureCode.CRASH_LOOP: "Three attempts in a row ended without getting further.",
    FailureCode.INTERNAL_ERROR: "A fault of our own software ended the training.",
}
_PROVIDER_FAILURES = frozenset(
    {
        FailureCode.BASE_MODEL_UNAVAILABLE,
        FailureCode.OBJECT_STORE_UNAVAILABLE,
        FailureCode.GPU_FAULT,
        FailureCode.WORKER_LOST,
        FailureCode.PREEMPTED,
    }
)
_CUSTOMER_FAILURES = frozenset(
    {
        FailureCode.INVALID_TRAINING_FILE,
        FailureCode.NO_TRAINABLE_TOKENS,
        FailureCode.LOSS_NOT_FINITE,
        FailureCode.LOSS_IS_ZERO,
    }
)
_RETRYABLE = frozenset(
    {
        FailureCode.OBJECT_STORE_UNAVAILABLE,
        FailureCode.DISK_FULL,
        FailureCode.CHECKPOINT_INVALID,
        FailureCode.GPU_FAULT,
        FailureCode.WORKER_LOST,
        FailureCode.PREEMPTED,
        FailureCode.STALLED,
        FailureCode.INCOMPLETE_TRAINING,
        FailureCode.INTERNAL_ERROR,
    }
)
