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
    START_DELETED = "start_deleted"
    # Faults of the platform or a provider: the time is not billed.
    OUT_OF_MEMORY = "out_of_memory"
    BASE_MODEL_UNAVAILABLE = "base_model_unavailable"
    OBJECT_STORE_UNAVAILABLE = "object_store_unavailable"
    DISK_FULL = "disk_full"
    # The checkpoint to resume from is set aside in favour of the one before.
    CHECKPOINT_INVALID = "checkpoint_invalid"
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
    FailureCode.LOSS_IS_ZERO: "The loss reached zero: the rows have nothing left for the model to learn.",
    FailureCode.START_DELETED: "The model that the job starts from was deleted.",
    FailureCode.OUT_OF_MEMORY: "Training ran out of memory, even after we reduced what it needs.",
    FailureCode.BASE_MODEL_UNAVAILABLE: "The base model could not be downloaded, or was not the expected version.",
    FailureCode.OBJECT_STORE_UNAVAILABLE: "A file could not be read from or written to storage.",
    FailureCode.DISK_FULL: "The machine's disk was full.",
    FailureCode.CHECKPOINT_INVALID: "No checkpoint could be used.",
    FailureCode.GPU_FAULT: "The GPU reported a fault.",
    FailureCode.WORKER_LOST: "The job lost its machine too many times.",
    FailureCode.PREEMPTED: "The job's spot machines were interrupted too many times.",
    FailureCode.STALLED: "The run stalled twice: it made no progress for far too long.",
    FailureCode.INCOMPLETE_TRAINING: "Training ended before its last step.",
    FailureCode.ADAPTER_REJECTED: "The serving engine can't load the finished adapter.",
    FailureCode.DELIVERY_FAILED: "The result could not be exported.",
    FailureCode.CRASH_LOOP: "Three attempts in a row made no progress.",
    FailureCode.INTERNAL_ERROR: "Training stopped because of a problem on our side.",
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
        FailureCode.START_DELETED,
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
