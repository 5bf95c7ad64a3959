"""Statuses of batches and their requests, and the legal transitions of batches."""

from enum import StrEnum

from apps.core.database.transitions import Transitions


class BatchStatus(StrEnum):
    """The status of a batch, in OpenAI's words."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


BATCH_TRANSITIONS: Transitions = {
    BatchStatus.VALIDATING: frozenset(
        {BatchStatus.IN_PROGRESS, BatchStatus.FAILED, BatchStatus.CANCELLING, BatchStatus.EXPIRED}
    ),
    BatchStatus.IN_PROGRESS: frozenset({BatchStatus.FINALIZING, BatchStatus.CANCELLING, BatchStatus.EXPIRED}),
    BatchStatus.FINALIZING: frozenset({BatchStatus.COMPLETED, BatchStatus.FAILED}),
    BatchStatus.CANCELLING: frozenset({BatchStatus.CANCELLED, BatchStatus.FAILED}),
    BatchStatus.COMPLETED: frozenset(),
    BatchStatus.FAILED: frozenset(),
    BatchStatus.EXPIRED: frozenset(),
    BatchStatus.CANCELLED: frozenset(),
}

ACTIVE = tuple(status for status, targets in BATCH_TRANSITIONS.items() if targets)


INTERNAL_PURPOSE = "eval_requests"  # of files that customers do not see


class RequestStatus(StrEnum):
    """Whether a request of a batch has its answer."""

    PENDING = "pending"
    COMPLETED = "completed"
    FAILED = "failed"
