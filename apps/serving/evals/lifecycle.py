"""Statuses of runs and their items, in OpenAI's words."""

from enum import StrEnum

from apps.core.database.transitions import Transitions


class EvalRunStatus(StrEnum):
    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"


RUN_TRANSITIONS: Transitions = {
    EvalRunStatus.QUEUED: frozenset({EvalRunStatus.IN_PROGRESS, EvalRunStatus.FAILED, EvalRunStatus.CANCELED}),
    EvalRunStatus.IN_PROGRESS: frozenset({EvalRunStatus.COMPLETED, EvalRunStatus.FAILED, EvalRunStatus.CANCELED}),
    EvalRunStatus.COMPLETED: frozenset(),
    EvalRunStatus.FAILED: frozenset(),
    EvalRunStatus.CANCELED: frozenset(),
}

ACTIVE = tuple(status for status, targets in RUN_TRANSITIONS.items() if targets)


class EvalPhase(StrEnum):
    """The purpose of a run's current batch."""

    SAMPLING = "sampling"
    GRADING = "grading"


class ItemStatus(StrEnum):
    PENDING = "pending"
    PASS = "pass"  # noqa: S105 - no password
    FAIL = "fail"
    ERROR = "error"
