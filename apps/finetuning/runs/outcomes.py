"""Actual figures of a finished run beside its estimate: one row, written in the transaction that ends the run."""

import datetime

import msgspec

from apps.catalog.models import BaseModel
from apps.estimates.calibration import PHYSICS
from apps.estimates.requests import Correction
from apps.finetuning.lifecycle import CalibrationOutcome
from apps.finetuning.models import CalibrationPoint, FineTuningJob, Run
from apps.finetuning.quotes.inputs import architecture_of
from apps.finetuning.recipes.stored_requests import stored_request
from apps.finetuning.usage.charges import trained_ms

# Field of the row -> member of the estimate stored with the job.
_ESTIMATED = {
    "estimated_seconds": "train_seconds_p50",
    "estimated_seconds_p10": "train_seconds_p10",
    "estimated_seconds_p90": "train_seconds_p90",
    "estimated_beside_seconds": "beside_seconds_p50",
    "estimated_tokens_per_second": "tokens_per_second",
    "estimated_peak_bytes": "peak_bytes",
    "estimated_peak_bytes_p10": "peak_bytes_p10",
    "estimated_peak_bytes_p90": "peak_bytes_p90",
    "estimated_cost_nano": "cost_nano_p50",
    "estimated_cost_nano_p10": "cost_nano_p10",
    "estimated_cost_nano_p90": "cost_nano_p90",
}

# Of a job on several machines: its time rests on a network that was not measured, so it teaches nothing about the pool.
_ASSUMED_NETWORK = "several machines"
_SEVERAL_POOLS = "several pools"  # of a job that moved after it began: its time is not that of one pool


def record_success(*, run: Run, job: FineTuningJob, tokens: int | None, now: datetime.datetime) -> None:
    """Record the job's actual figures. Call after billing the job: time and cost cover all its attempts.

    The time of a job with exports is not recorded, because a quote has no time for exports.
    """
    seconds = trained_ms(job=job) / 1000 / job.gpu_count
    started_at = None if stored_request(job).exports else job.started_at
    _record(
        run,
        job,
        outcome=CalibrationOutcome.SUCCEEDED,
        actual_seconds=seconds or None,
        wall_seconds=(now - started_at).total_seconds() if started_at else None,
        actual_tokens_per_second=tokens / seconds if tokens and seconds else None,
        actual_peak_bytes=max((each.peak_memory_bytes or 0 for each in job.runs.all()), default=0) or None,
        actual_cost_nano=job.cost_nano,
    )


def record_out_of_memory(*, run: Run, job: FineTuningJob) -> None:
    """Record that a run did not fit although it was quoted to fit; its real memory need is unknown."""
    _record(run, job, outcome=CalibrationOutcome.OUT_OF_MEMORY)


def _record(run: Run, job: FineTuningJob, *, outcome: CalibrationOutcome, **actual: object) -> None:
    correction = job.estimate.get("correction") or {}
    CalibrationPoint.objects.create(
        organization_id=job.organization_id,
        run=run,
        pool_id=run.pool.machines_id,
        outcome=outcome,
        family=job.estimate.get("family", ""),
        method=job.method,
        attempts=run.attempt,
        physics=_physics_of(job),
        version=correction.get("version", 0),
        time_factor=correction.get("time_factor", 1.0),
        memory_factor=correction.get("memory_factor", 1.0),
        beside_factor=correction.get("beside_factor", 1.0),
        **{field: job.estimate.get(member) or None for field, member in _ESTIMATED.items()},
        **actual,
    )


def _physics_of(job: FineTuningJob) -> str:
    if job.moved_gpu_ms:
        return _SEVERAL_POOLS
    return job.estimate.get("physics", "") if job.node_count == 1 else _ASSUMED_NETWORK


def provenance(*, base_model: BaseModel, correction: Correction | None) -> dict[str, object]:
    """Return the facts at launch that make a stored estimate usable for calibration."""
    return {
        "physics": PHYSICS,
        "family": architecture_of(base_model).model_type,
        "correction": msgspec.to_builtins(correction),
    }
