"""Stalled runs: their worker is alive but makes no progress. They end here if the worker does not end them itself.

The time between heartbeats is counted. So a machine that slept does not count as stalled, nor does a silent worker,
whose lease expires anyway.
"""

import datetime

from django.conf import settings
from django.db import transaction
from django.db.models import Q

from apps.contracts import runs as wire
from apps.contracts.failures import FailureCode
from apps.contracts.worker_api import HeartbeatRequest
from apps.core.database.clock import db_now
from apps.core.database.transitions import try_advance
from apps.finetuning import events
from apps.finetuning.lifecycle import LEASE_SECONDS, NO_LEASE, RUN_HOLDING_LEASE, RUN_TRANSITIONS, RunStatus
from apps.finetuning.models import FineTuningJob, Run
from apps.finetuning.results.attempt_traces import trace_attempt
from apps.finetuning.runs import attempts

_TIMES_EXPECTED = 10  # of the quoted time of a step
_TIMES_WORKER = 2  # of the time after which the worker itself ends its child; it has better evidence
_MAX_STEPLESS_MS = 24 * 3_600_000  # regardless of the work that a worker reports


def heartbeat_changes(*, run: Run, beat: HeartbeatRequest, now: datetime.datetime) -> dict[str, int]:
    """Return a heartbeat's changes to the run: the reported work, and the time without work or steps."""
    seconds = min((now - run.heartbeat_at).total_seconds(), LEASE_SECONDS) if run.heartbeat_at else 0.0
    passed_ms = int(max(seconds, 0.0) * 1000)
    did_work = beat.work > run.work
    return {
        "work": max(beat.work, run.work),
        "idle_ms": 0 if did_work else run.idle_ms + passed_ms,
        "stepless_ms": run.stepless_ms + passed_ms,
    }


def is_step(event: wire.RunEvent, job: FineTuningJob) -> bool:
    """Return whether an event reports a step that the job had not reached before."""
    return isinstance(event, wire.StepCompleted) and job.step < event.step <= event.total_steps


def end_stalled_runs() -> int:
    """End the runs without progress for too long and queue their successors; return the number ended."""
    idle_ms = _TIMES_WORKER * settings.STALL_SECONDS * 1000
    is_suspect = Q(idle_ms__gt=idle_ms) | Q(stepless_ms__gt=_MAX_STEPLESS_MS)
    suspects = Run.objects.filter(is_suspect, status__in=RUN_HOLDING_LEASE)
    return sum(_end(run_id) for run_id in suspects.values_list("pk", flat=True))


@transaction.atomic
def _end(run_id: str) -> bool:
    job_id = Run.objects.values_list("job_id", flat=True).get(pk=run_id)
    job = FineTuningJob.objects.select_for_update().get(pk=job_id)
    run = Run.objects.get(pk=run_id)
    step_seconds = (job.estimate.get("train_seconds_p50") or 0.0) / job.total_steps if job.total_steps else 0.0
    limit_ms = _TIMES_WORKER * 1000 * max(settings.STALL_SECONDS, _TIMES_EXPECTED * step_seconds)
    still_ms, most_ms = max((run.idle_ms, limit_ms), (run.stepless_ms, _MAX_STEPLESS_MS), key=lambda p: p[0] - p[1])
    if still_ms <= most_ms:
        return False
    now = db_now()
    message = f"No progress for {still_ms // 1000} s while {run.phase or 'preparing'}, after step {job.step}."
    is_ended = try_advance(
        run,
        to=RunStatus.FAILED,
        transitions=RUN_TRANSITIONS,
        finished_at=now,
        failure_code=FailureCode.STALLED,
        failure_message=message,
        **NO_LEASE,
    )
    if is_ended:
        events.append(job, level="warn", message=f"Attempt {run.attempt} was ended: {message}", attempt=run.attempt)
        trace_attempt(run=run, job=job)
        attempts.continue_or_give_up(job=job, run=run, code=FailureCode.STALLED, now=now)
    return is_ended
