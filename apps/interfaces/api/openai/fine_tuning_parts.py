"""API objects of what belongs to a job: dry runs, moves, events and checkpoints."""

from typing import Any, Literal, TypedDict

import msgspec

from apps.core.errors import ErrorDetails
from apps.finetuning.jobs.dry_runs import Rehearsal
from apps.finetuning.jobs.moves import Move
from apps.finetuning.jobs.requests import JobRequest
from apps.finetuning.models import Checkpoint, JobEvent
from apps.finetuning.recipes.checkpoint_names import may_answer, name_of
from apps.interfaces.api.native.estimates import DeliveryObject, OptionsObject, usd


class MoveObject(TypedDict):
    """A pool where a queued job would start sooner; `option` and `node_count` are the values that move it there.

    `sooner_seconds` is null if no machine can take the job where it waits. `cost_usd` is the expected cost of the whole
    job with what it has cost so far, `extra_usd` the difference to the job as it is, and `maximum_usd` the most that it
    then costs in all.
    """

    id: str
    object: Literal["fine_tuning.job.move"]
    option: str
    pool: str
    gpu_type: str
    gpu_count: int
    node_count: int
    starts_after_seconds: int
    sooner_seconds: int | None
    cost_usd: str | None
    extra_usd: str | None
    maximum_usd: str | None


class RehearsalObject(TypedDict):
    """`from_project` names what the key's project chose, because the request did not: model, method, suffix, pool."""

    object: Literal["fine_tuning.job.dry_run"]
    model: str
    training_file: str
    validation_file: str | None
    recipe: dict[str, Any]
    left_out_rows: int
    left_out_near_rows: int
    would_start: bool
    refusal: ErrorDetails | None
    pool: str | None
    gpu_count: int | None
    node_count: int | None
    hold_usd: str | None
    from_project: list[str]


class DryRunObject(RehearsalObject, OptionsObject):
    """What creating the job would have done, and its options."""

    delivery: DeliveryObject


class EventObject(TypedDict):
    id: str
    object: Literal["fine_tuning.job.event"]
    created_at: int
    level: str
    message: str
    type: Literal["message", "metrics"]
    data: dict[str, Any] | None


class CheckpointObject(TypedDict):
    id: str
    object: Literal["fine_tuning.job.checkpoint"]
    created_at: int
    fine_tuned_model_checkpoint: str | None
    fine_tuning_job_id: str
    step_number: int
    metrics: dict[str, float]


def dry_run_object(asked: JobRequest, rehearsal: Rehearsal, *, from_project: list[str]) -> RehearsalObject:
    """Return the result that creating the job would have had. `refusal` is the error it would have returned."""
    refusal = rehearsal.refusal
    return {
        "object": "fine_tuning.job.dry_run",
        "model": asked.base_model,
        "training_file": asked.training_file,
        "validation_file": asked.validation_file,
        "recipe": msgspec.to_builtins(rehearsal.recipe),
        "left_out_rows": rehearsal.left_out_rows,
        "left_out_near_rows": rehearsal.near_rows,
        "would_start": refusal is None,
        "refusal": refusal.as_openai()["error"] if refusal else None,
        "pool": rehearsal.pool,
        "gpu_count": rehearsal.gpu_count,
        "node_count": rehearsal.node_count,
        "hold_usd": usd(rehearsal.hold_nano),
        "from_project": from_project,
    }


def move_object(move: Move) -> MoveObject:
    quoted = move.quoted
    return {
        "id": quoted.key,
        "object": "fine_tuning.job.move",
        "option": quoted.key,
        "pool": quoted.pool.name,
        "gpu_type": quoted.pool.gpu_type.name,
        "gpu_count": quoted.gpu_count,
        "node_count": quoted.node_count,
        "starts_after_seconds": round(move.starts_after_seconds),
        "sooner_seconds": None if move.sooner_seconds is None else round(move.sooner_seconds),
        "cost_usd": usd(move.cost_nano),
        "extra_usd": usd(move.extra_nano),
        "maximum_usd": usd(move.maximum_nano),
    }


def event_object(event: JobEvent) -> EventObject:
    return {
        "id": event.pk,
        "object": "fine_tuning.job.event",
        "created_at": int(event.created_at.timestamp()),
        "level": event.level,
        "message": event.message,
        "type": "metrics" if event.type == "metrics" else "message",
        "data": event.data or None,
    }


def checkpoint_object(row: Checkpoint) -> CheckpointObject:
    """Return OpenAI's object. Its model is loaded on demand; its name is None if no engine loads such an adapter."""
    metrics = {name: value for name, value in row.metrics.items() if value is not None}
    return {
        "id": row.pk,
        "object": "fine_tuning.job.checkpoint",
        "created_at": int(row.created_at.timestamp()),
        "fine_tuned_model_checkpoint": name_of(row) if may_answer(row.job) else None,
        "fine_tuning_job_id": row.job_id,
        "step_number": row.step,
        "metrics": metrics,
    }
