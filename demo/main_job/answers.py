"""What the platform answers beside OpenAI's own members: fields of its objects, and the objects of /api/v1.

Only the members that the main job reads are named. Amounts are decimal strings in dollars.
"""

from enum import StrEnum

import msgspec


class JobStatus(StrEnum):
    """Statuses of a fine-tuning job: OpenAI's, and the two of a pause."""

    VALIDATING_FILES = "validating_files"
    QUEUED = "queued"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


JOB_ENDED = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED)


class JobEstimate(msgspec.Struct, frozen=True):
    """Seconds of training that were quoted for a job; None if its speed was unknown."""

    train_seconds_p10: float | None = None
    train_seconds_p50: float | None = None
    train_seconds_p90: float | None = None


class JobMembers(msgspec.Struct, frozen=True, kw_only=True):
    """Members of a fine-tuning job."""

    step: int
    pool: str | None
    queue_position: int | None
    waiting_reason: str | None
    spend_cap_usd: str | None
    cost_usd: str
    billed_gpu_seconds: float
    estimate: JobEstimate | None


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Data of a metrics event. An evaluation has no training loss."""

    step: int
    total_steps: int = 0
    train_loss: float | None = None
    tokens_per_second: float = 0.0


class SuggestedChange(msgspec.Struct, frozen=True):
    text: str


class ErrorMembers(msgspec.Struct, frozen=True, kw_only=True):
    """Members of a failed job's error."""

    blame: str | None = None
    cause: str | None = None
    suggestion: SuggestedChange | None = None


class Validation(msgspec.Struct, frozen=True):
    rows: int


class FileMembers(msgspec.Struct, frozen=True):
    """Members of a file that is valid."""

    validation: Validation


class ModelMembers(msgspec.Struct, frozen=True):
    """Members of an adapter among the models."""

    status: str
    status_reason: str | None


class ServingState(msgspec.Struct, frozen=True):
    state: str
    reason: str | None


class Percentiles(msgspec.Struct, frozen=True):
    p10: str | None
    p50: str | None
    p90: str | None


class PoolEstimate(msgspec.Struct, frozen=True):
    peak_bytes: int
    capacity_bytes: int
    train_seconds_p50: float | None


class PoolQuote(msgspec.Struct, frozen=True, kw_only=True):
    """What a job would need and cost on one GPU pool, and why it cannot start there now."""

    pool: str
    gpu_type: str
    is_launchable: bool
    block_reason: str | None
    live_workers: int
    cost_usd: Percentiles
    estimate: PoolEstimate


class QuotedRecipe(msgspec.Struct, frozen=True):
    method: str
    epochs: int


class Quotes(msgspec.Struct, frozen=True):
    model: str
    recipe: QuotedRecipe
    pools: tuple[PoolQuote, ...]


class Billing(msgspec.Struct, frozen=True, kw_only=True):
    available_usd: str
    held_usd: str
    inference_usd: str
    tokens_billed: int
    unrated_requests: int
    ledger_sum_nano: int
