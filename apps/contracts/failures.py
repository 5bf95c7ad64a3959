"""Why a run ended badly: a stable code, who is to blame, and whether another attempt may help.

Only the codes travel; wording for people lives with the pages and the API that show it.
"""

from enum import StrEnum


class Blame(StrEnum):
    USER = "user"
    PLATFORM = "platform"


class FailureCode(StrEnum):
    # The customer's to fix: never retried.
    INVALID_TRAINING_FILE = "invalid_training_file"
    NO_TRAINABLE_TOKENS = "no_trainable_tokens"
    LOSS_NOT_FINITE = "loss_not_finite"
    LOSS_IS_ZERO = "loss_is_zero"
    # Ours: the time is not billed.
    OUT_OF_MEMORY = "out_of_memory"
    BASE_MODEL_UNAVAILABLE = "base_model_unavailable"
    OBJECT_STORE_UNAVAILABLE = "object_store_unavailable"
    DISK_FULL = "disk_full"
    CHECKPOINT_INVALID = "checkpoint_invalid"  # the one to resume from: set it aside, use the one before
    GPU_FAULT = "gpu_fault"
    WORKER_LOST = "worker_lost"
    PREEMPTED = "preempted"
    INCOMPLETE_TRAINING = "incomplete_training"
    ADAPTER_REJECTED = "adapter_rejected"
    CRASH_LOOP = "crash_loop"
    INTERNAL_ERROR = "internal_error"

    @property
    def blame(self) -> Blame:
        """Whose fault it is: a user's failure bills the steps done, the platform's bills nothing further."""
        return Blame.USER if self in _USER_FAILURES else Blame.PLATFORM

    @property
    def is_retryable(self) -> bool:
        """Whether a new attempt from the last verified checkpoint may succeed without anyone's help."""
        return self in _RETRYABLE


_USER_FAILURES = frozenset(
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
        FailureCode.INCOMPLETE_TRAINING,
        FailureCode.INTERNAL_ERROR,
    }
)
