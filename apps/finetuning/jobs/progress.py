"""Progress of a job: the share of its steps, its cost, its speed, and the time left at its own pace."""

import datetime
from dataclasses import dataclass
from statistics import median

from apps.finetuning import queries
from apps.finetuning.lifecycle import JOB_TERMINAL, JobStatus
from apps.finetuning.models import FineTuningJob, JobEvent, Run
from apps.finetuning.usage import charges

_SPEED_REPORTS = 15  # a checkpoint's pause slows one report, but not the median of 15


@dataclass(frozen=True, kw_only=True)
class _StepReport:
    """A worker's figures after a step; None if it did not report them."""

    reported_at: datetime.datetime
    tokens_per_second: float | None
    training_seconds: float
    eta_seconds: float | None


@dataclass(frozen=True, kw_only=True)
class JobProgress:
    """The progress of a job at one moment, as pages, streams and the API show it.

    `spent_nano` is the cost of stopping now, or the actual cost of a job that paused or ended. `seconds_left` runs to
    the end of the job. It is None if unknown: in the queue, after the last step, and past the estimate.
    """

    percent: int
    spent_nano: int
    seconds_left: float | None
    tokens_per_second: float | None


def get_progress(*, job: FineTuningJob, now: datetime.datetime) -> JobProgress:
    run = None if job.status in JOB_TERMINAL or job.status == JobStatus.PAUSED else queries.get_active_run(job=job)
    reports = _reports(job, run) if run else []
    speeds = [report.tokens_per_second for report in reports if report.tokens_per_second]
    return JobProgress(
        percent=percent_of(job),
        spent_nano=_spent_nano(job, run, reports, now),
        seconds_left=_seconds_left(job, run, reports, now) if run else None,
        tokens_per_second=median(speeds) if speeds else None,
    )


def percent_of(job: FineTuningJob) -> int:
    """Return the percentage of steps done; 100 only after success."""
    if job.status == JobStatus.SUCCEEDED:
        return 100
    return min(100 * job.step // job.total_steps, 99) if job.total_steps else 0


def finish_of(progress: JobProgress, *, now: datetime.datetime) -> datetime.datetime | None:
    """Return when the job will be done, always in the future; None if unknown."""
    left = progress.seconds_left
    return None if left is None else now + datetime.timedelta(seconds=max(left, 1.0))


def _reports(job: FineTuningJob, run: Run) -> list[_StepReport]:
    """Return the attempt's latest step reports, newest first."""
    steps = JobEvent.objects.filter(job=job, type="metrics", data__attempt=run.attempt).order_by("-sequence")
    return [
        _StepReport(
            reported_at=reported_at,
            tokens_per_second=data.get("tokens_per_second"),
            training_seconds=data.get("training_seconds", 0.0),
            eta_seconds=data.get("eta_seconds"),
        )
        for reported_at, data in steps.values_list("created_at", "data")[:_SPEED_REPORTS]
    ]


def _spent_nano(job: FineTuningJob, run: Run | None, reports: list[_StepReport], now: datetime.datetime) -> int:
    if run is None:
        return job.cost_nano
    trained_seconds = reports[0].training_seconds if reports else 0.0
    return charges.cost_of(job=job, gpu_ms=charges.spent_ms(job=job, run=run, seconds=trained_seconds, now=now))


def _seconds_left(job: FineTuningJob, run: Run, reports: list[_StepReport], now: datetime.datetime) -> float | None:
    if job.status != JobStatus.RUNNING or run.leased_at is None:
        return None
    undone = 1 - job.step / job.total_steps if job.total_steps else 1.0
    if undone <= 0:
        return None
    estimate = job.estimate
    if reports and (pace := reports[0].eta_seconds) is not None:
        reported_at = reports[0].reported_at
        beside = (estimate.get("evaluation_seconds") or 0.0) + (estimate.get("checkpoint_seconds") or 0.0)
        left = pace + beside * undone
    else:
        training, whole = estimate.get("train_seconds_p50"), estimate.get("run_seconds_p50")
        if training is None:
            return None
        reported_at = run.leased_at
        left = max((whole or training) - training, 0.0) + training * undone
    left -= (now - reported_at).total_seconds()
    return left if left > 0 else None
