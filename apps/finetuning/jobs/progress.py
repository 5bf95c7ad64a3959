"""Progress of a job: the share of its steps, its cost, its speed, and the time left at its own pace."""

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from django.db import connection

from apps.finetuning.lifecycle import JOB_ACTIVE, RUN_ACTIVE, RUN_HOLDING_LEASE, JobStatus
from apps.finetuning.models import FineTuningJob, Run
from apps.finetuning.usage import charges

_SPEED_REPORTS = 15  # a checkpoint's pause slows one report, but not the median of 15
# The quoted pace counts as much as measured steps of this time, but of no larger share of the job. So the first steps
# cause no jump, and the run's own pace decides from the first minute.
_QUOTED_SECONDS, _QUOTED_SHARE = 20.0, 0.1
_MOST_SECONDS = 1e8  # three years: a longer time means that a report is wrong
# Each attempt's are read from the end of its job's events, so that long jobs take no longer.
_NEWEST_REPORTS = """
    SELECT run.id, report.created_at, report.data::text FROM finetuning_run AS run CROSS JOIN LATERAL (
        SELECT event.created_at, event.data, event.sequence FROM finetuning_jobevent AS event
        WHERE event.job_id = run.job_id AND event.type = 'metrics' AND event.data -> 'attempt' = to_jsonb(run.attempt)
        ORDER BY event.sequence DESC LIMIT %(most)s
    ) AS report WHERE run.id = ANY(%(runs)s) ORDER BY run.id, report.sequence DESC
"""


@dataclass(frozen=True, kw_only=True)
class _StepReport:
    """A worker's figures after a step; None if it did not report them."""

    reported_at: datetime.datetime
    step: int
    tokens_per_second: float | None
    training_seconds: float


@dataclass(frozen=True, kw_only=True)
class JobProgress:
    """The progress of a job at one moment, as pages, streams and the API show it.

    `spent_nano` is the cost of stopping now, or the actual cost of a job that paused or ended. `seconds_left` runs to
    the end of training, and is above 0. It is None if unknown: in the queue, after the last step, and while it pauses.
    """

    percent: int
    spent_nano: int
    seconds_left: float | None
    tokens_per_second: float | None


@dataclass(frozen=True, kw_only=True)
class ExpectedSeconds:
    """The quoted time of a whole run: to its first step, of its steps with evaluations and checkpoints, and after."""

    loading: float
    training: float
    closing: float


def get_progress(*, job: FineTuningJob, now: datetime.datetime) -> JobProgress:
    return list_progress(jobs=[job], now=now)[job.pk]


def list_progress(*, jobs: Sequence[FineTuningJob], now: datetime.datetime) -> dict[str, JobProgress]:
    """Return the progress of each job by its id, in as many statements for many jobs as for one."""
    live = [job.pk for job in jobs if job.status in JOB_ACTIVE]
    attempts: dict[str, list[Run]] = {}
    if live:
        runs = Run.objects.filter(job__in=live).select_related("resume_from").defer("log_tail").order_by("attempt")
        for run in runs:
            attempts.setdefault(run.job_id, []).append(run)
    reports = _list_reports([run for each in attempts.values() for run in each if run.status in RUN_HOLDING_LEASE])
    return {job.pk: _progress(job, attempts.get(job.pk, []), reports, now) for job in jobs}


def _progress(
    job: FineTuningJob, attempts: Sequence[Run], reports_of: Mapping[str, list[_StepReport]], now: datetime.datetime
) -> JobProgress:
    run = next((run for run in attempts if run.status in RUN_ACTIVE), None)
    reports = reports_of.get(run.pk, []) if run else []
    speeds = [report.tokens_per_second for report in reports if report.tokens_per_second]
    before = [other for other in attempts if run and other.attempt < run.attempt]
    return JobProgress(
        percent=percent_of(job),
        spent_nano=_spent_nano(job, run, before, reports, now),
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


def expected_seconds(*, job: FineTuningJob) -> ExpectedSeconds:
    """Return the parts of the job's estimate; each is 0 if unknown, as all are until its files are valid."""

    def quoted(*parts: str) -> float:
        return sum(job.estimate.get(part) or 0.0 for part in parts)

    between = quoted("evaluation_seconds", "checkpoint_seconds")
    loading = quoted("startup_seconds", "download_seconds", "reference_seconds")
    return ExpectedSeconds(
        loading=loading,
        training=quoted("train_seconds_p50") + between,
        closing=max(quoted("beside_seconds_p50") - between - loading, 0.0),
    )


def _list_reports(runs: Sequence[Run]) -> dict[str, list[_StepReport]]:
    """Return the latest step reports of each attempt, newest first, by the run's id."""
    reports: dict[str, list[_StepReport]] = {run.pk: [] for run in runs}
    if not runs:
        return reports
    with connection.cursor() as cursor:
        cursor.execute(_NEWEST_REPORTS, {"runs": list(reports), "most": _SPEED_REPORTS})
        found = cursor.fetchall()
    for run_id, reported_at, text in found:
        data = json.loads(text)
        reports[run_id].append(
            _StepReport(
                reported_at=reported_at,
                step=data.get("step", 0),
                tokens_per_second=data.get("tokens_per_second"),
                training_seconds=data.get("training_seconds", 0.0),
            )
        )
    return reports


def _spent_nano(
    job: FineTuningJob, run: Run | None, before: Sequence[Run], reports: list[_StepReport], now: datetime.datetime
) -> int:
    if run is None:
        return job.cost_nano
    trained_seconds = reports[0].training_seconds if reports else 0.0
    spent_ms = charges.spent_ms(job=job, run=run, before=before, seconds=trained_seconds, now=now)
    return charges.cost_of(job=job, gpu_ms=spent_ms)


def _seconds_left(job: FineTuningJob, run: Run, reports: list[_StepReport], now: datetime.datetime) -> float | None:
    """Return the time left at the run's own pace, by the database's clock.

    The pace is that of the steps so far, evaluations and checkpoints included, after some steps at the quoted pace.
    Between reports the time left runs down, and more slowly the longer no step comes.
    """
    if job.status != JobStatus.RUNNING or run.leased_at is None:
        return None
    if not job.total_steps or job.step >= job.total_steps:
        return None  # after the last step, the exports that were asked for have no quoted time
    expected = expected_seconds(job=job)
    pace = expected.training / job.total_steps
    begun_at = run.training_started_at
    first = run.resume_from.step if run.resume_from else 0
    since, step = (begun_at, job.step) if begun_at else (run.leased_at, first)
    if begun_at and reports and (done := reports[0].step - first) > 0:
        since = reports[0].reported_at
        quoted = min(_QUOTED_SECONDS / pace, _QUOTED_SHARE * job.total_steps) if pace else 0.0
        pace = (max((since - begun_at).total_seconds(), 0.0) + quoted * pace) / (done + quoted)
    left = pace * (job.total_steps - step) + expected.closing + (0.0 if begun_at else expected.loading)
    if not 0 < left < _MOST_SECONDS:
        return None
    return left * math.exp(-max((now - since).total_seconds(), 0.0) / left) or None
