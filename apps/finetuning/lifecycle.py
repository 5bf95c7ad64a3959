"""Statuses of jobs and runs, their legal transitions, and the limits of leases and attempts."""

from enum import StrEnum

from apps.core.database.transitions import Transitions, terminal_states


class JobStatus(StrEnum):
    """Where a job is. Customers see it; the OpenAI API maps it to its own words."""

    VALIDATING_FILES = "validating_files"
    QUEUED = "queued"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class RunStatus(StrEnum):
    """Where one attempt of a job is."""

    QUEUED = "queued"
    LEASED = "leased"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    PAUSED = "paused"
    LOST = "lost"


class NodeStatus(StrEnum):
    """Where a machine that was requested for an elastic pool is. A running one has enrolled."""

    REQUESTED = "requested"
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    RELEASED = "released"
    LOST = "lost"


class ConversionStatus(StrEnum):
    """Where the later conversion of a finished model is, or its push to a hub."""

    WAITING = "waiting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class RetrainingStatus(StrEnum):
    """Where a retraining is: it trains, its model is compared with production, and then promoted or kept aside."""

    WAITING = "waiting"
    TRAINING = "training"
    COMPARING = "comparing"  # on the held-out rows
    CHECKING = "checking"  # for a regression
    PROMOTING = "promoting"
    PROMOTED = "promoted"
    KEPT = "kept"  # trained, and not promoted
    SKIPPED = "skipped"
    REFUSED = "refused"
    FAILED = "failed"


class RetrainingTrigger(StrEnum):
    """Why a retraining began."""

    SCHEDULE = "schedule"
    GROWTH = "growth"
    REQUEST = "request"


class RetrainingCode(StrEnum):
    """Why a retraining ended as it did, where no error of the API says it."""

    NOTHING_NEW = "nothing_new"
    ABOVE_MAXIMUM = "above_maximum"
    JOB_FAILED = "job_failed"
    JOB_PAUSED = "job_paused"
    COMPARISON_FAILED = "comparison_failed"
    NOT_BETTER = "not_better"
    REGRESSION = "regression"
    ALIAS_DELETED = "alias_deleted"
    BETTER = "better"


class Cadence(StrEnum):
    """How often a plan is due: each so many days, on a day of the week (1 is Monday), or on a day of the month."""

    DAYS = "days"
    WEEK = "week"
    MONTH = "month"


class CalibrationOutcome(StrEnum):
    """What a run whose figures are kept for calibration came to."""

    SUCCEEDED = "succeeded"
    OUT_OF_MEMORY = "out_of_memory"


JOB_TRANSITIONS: Transitions = {
    JobStatus.VALIDATING_FILES: frozenset({JobStatus.QUEUED, JobStatus.FAILED, JobStatus.CANCELLED}),
    JobStatus.QUEUED: frozenset({JobStatus.RUNNING, JobStatus.FAILED, JobStatus.CANCELLED}),
    JobStatus.RUNNING: frozenset(
        {JobStatus.QUEUED, JobStatus.PAUSING, JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED}
    ),
    JobStatus.PAUSING: frozenset(
        {JobStatus.PAUSED, JobStatus.RUNNING, JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED}
    ),
    JobStatus.PAUSED: frozenset({JobStatus.QUEUED, JobStatus.FAILED, JobStatus.CANCELLED}),
    JobStatus.SUCCEEDED: frozenset(),
    JobStatus.FAILED: frozenset(),
    JobStatus.CANCELLED: frozenset(),
}
JOB_TERMINAL = terminal_states(JOB_TRANSITIONS)
JOB_OPEN = tuple(status for status in JobStatus if status not in JOB_TERMINAL)
JOB_ACTIVE = tuple(status for status in JOB_OPEN if status != JobStatus.PAUSED)  # proceeds without a person

RUN_TRANSITIONS: Transitions = {
    RunStatus.QUEUED: frozenset({RunStatus.LEASED, RunStatus.CANCELLED}),
    RunStatus.LEASED: frozenset(
        {RunStatus.RUNNING, RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.PAUSED, RunStatus.LOST}
    ),
    RunStatus.RUNNING: frozenset(
        {RunStatus.SUCCEEDED, RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.PAUSED, RunStatus.LOST}
    ),
    RunStatus.SUCCEEDED: frozenset(),
    RunStatus.FAILED: frozenset(),
    RunStatus.CANCELLED: frozenset(),
    RunStatus.PAUSED: frozenset(),
    RunStatus.LOST: frozenset(),
}
RUN_TERMINAL = terminal_states(RUN_TRANSITIONS)
RUN_HOLDING_LEASE = (RunStatus.LEASED, RunStatus.RUNNING)
RUN_ACTIVE = (RunStatus.QUEUED, RunStatus.LEASED, RunStatus.RUNNING)
NO_LEASE = {"lease_id": None, "lease_token_sha256": None, "lease_expires_at": None}

_GONE = {NodeStatus.RELEASED, NodeStatus.LOST}
NODE_TRANSITIONS: Transitions = {
    NodeStatus.REQUESTED: frozenset({NodeStatus.STARTING, NodeStatus.RELEASED}),
    NodeStatus.STARTING: frozenset({NodeStatus.RUNNING, NodeStatus.DRAINING} | _GONE),
    NodeStatus.RUNNING: frozenset({NodeStatus.DRAINING} | _GONE),
    NodeStatus.DRAINING: frozenset(_GONE),
    NodeStatus.RELEASED: frozenset(),
    NodeStatus.LOST: frozenset(),
}
NODE_ENDED = terminal_states(NODE_TRANSITIONS)

CONVERSION_TRANSITIONS: Transitions = {
    ConversionStatus.WAITING: frozenset(
        {ConversionStatus.RUNNING, ConversionStatus.FAILED, ConversionStatus.CANCELLED}
    ),
    ConversionStatus.RUNNING: frozenset(
        {ConversionStatus.WAITING, ConversionStatus.SUCCEEDED, ConversionStatus.FAILED}
    ),
    ConversionStatus.SUCCEEDED: frozenset(),
    ConversionStatus.FAILED: frozenset(),
    ConversionStatus.CANCELLED: frozenset(),
}
RETRAINING_TRANSITIONS: Transitions = {
    RetrainingStatus.WAITING: frozenset(
        {RetrainingStatus.TRAINING, RetrainingStatus.SKIPPED, RetrainingStatus.REFUSED}
    ),
    RetrainingStatus.TRAINING: frozenset(
        {RetrainingStatus.COMPARING, RetrainingStatus.REFUSED, RetrainingStatus.FAILED}
    ),
    RetrainingStatus.COMPARING: frozenset(
        {RetrainingStatus.CHECKING, RetrainingStatus.PROMOTING, RetrainingStatus.KEPT, RetrainingStatus.FAILED}
    ),
    RetrainingStatus.CHECKING: frozenset({RetrainingStatus.PROMOTING, RetrainingStatus.KEPT, RetrainingStatus.FAILED}),
    RetrainingStatus.PROMOTING: frozenset({RetrainingStatus.PROMOTED, RetrainingStatus.KEPT}),
    RetrainingStatus.PROMOTED: frozenset(),
    RetrainingStatus.KEPT: frozenset(),
    RetrainingStatus.SKIPPED: frozenset(),
    RetrainingStatus.REFUSED: frozenset(),
    RetrainingStatus.FAILED: frozenset(),
}
RETRAINING_OPEN = tuple(status for status, targets in RETRAINING_TRANSITIONS.items() if targets)

CONVERSION_OPEN = (ConversionStatus.WAITING, ConversionStatus.RUNNING)
CONVERSION_UNMADE = (ConversionStatus.FAILED, ConversionStatus.CANCELLED)

LEASE_SECONDS = 60
HEARTBEAT_SECONDS = 10
SELF_FENCE_SECONDS = 45
REAPER_SECONDS = 15
MAX_CHECKPOINT_SECONDS = 300.0
MAX_LOST_ATTEMPTS = 20
GROUP_RETRY_SECONDS = 15  # doubled by each attempt that not all machines of a group began
GROUP_RETRY_SECONDS_AT_MOST = 600
MAX_ATTEMPTS_WITHOUT_PROGRESS = 3
MAX_STALLED_ATTEMPTS = 2
