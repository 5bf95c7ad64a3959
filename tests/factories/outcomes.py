"""Runs that finished, as the rows they leave, without training them."""

from typing import Any

from apps.core.database.clock import db_now
from apps.estimates.calibration import PHYSICS
from apps.finetuning.models import CalibrationPoint, FineTuningJob, Run


def leave_queue(job: FineTuningJob) -> FineTuningJob:
    """End the job's queued run, so that other runs of it can be made."""
    Run.objects.filter(job=job, status="queued").update(status="cancelled", finished_at=db_now())
    return job


def teach(job: FineTuningJob, count: int, *, time: float = 1.3, beside: float = 1.0, **fields: Any) -> None:
    """Points of runs that took `time` times what the physics said, as if each had been a job of its own.

    Beside their training, they took `beside` times what it said.
    """
    for _ in range(count):
        run = Run.objects.create(
            organization=job.organization, job=job, attempt=job.runs.count() + 1, pool=job.pool,
            status="cancelled", finished_at=db_now(),
        )  # fmt: skip
        point = {
            "outcome": "succeeded", "family": "llama", "method": "lora", "attempts": 1, "physics": PHYSICS,
            "estimated_seconds": 100.0, "estimated_seconds_p10": 60.0, "estimated_seconds_p90": 150.0,
            "actual_seconds": 100.0 * time, "wall_seconds": 100.0 * time + 20.0 * beside,
            "estimated_beside_seconds": 20.0, "estimated_peak_bytes": 10**9, "actual_peak_bytes": 10**9,
            "estimated_tokens_per_second": 1000.0, "actual_tokens_per_second": 1000.0 / time,
            "estimated_cost_nano": 10**8, "actual_cost_nano": round(10**8 * time),
        } | fields  # fmt: skip
        CalibrationPoint.objects.create(organization=run.organization, run=run, pool=job.pool, **point)
