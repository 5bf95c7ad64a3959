"""Leases on runs: heartbeats and the reaper. Only the database's clock decides."""

import datetime
import hashlib
from dataclasses import dataclass

from django.db import transaction
from django.utils.translation import gettext_noop

from apps.contracts.failures import FailureCode
from apps.contracts.worker_api import HeartbeatRequest, HeartbeatResponse
from apps.core.database.clock import db_now
from apps.core.database.transitions import try_advance
from apps.core.errors import DomainError, Status
from apps.finetuning import events
from apps.finetuning.lifecycle import LEASE_SECONDS, NO_LEASE, RUN_HOLDING_LEASE, RUN_TRANSITIONS, RunStatus
from apps.finetuning.models import FineTuningJob, Run, Worker
from apps.finetuning.results.attempt_traces import trace_attempt
from apps.finetuning.runs import attempts, stalls
from apps.finetuning.runs.groups import explain_loss, is_draining, lease_end
from apps.finetuning.usage import charges

_RESTORED = (FailureCode.PREEMPTED, gettext_noop("The platform was restored from a backup"))


class StaleLease(DomainError):
    """The lease ended or another worker has it: the worker must stop the child at once and drop the run."""

    code = "stale_lease"
    status = Status.CONFLICT


@dataclass(frozen=True)
class Lease:
    """The credentials that a worker sends with each call under its lease."""

    id: str
    token: str


@transaction.atomic
def lock_run(*, lease: Lease) -> tuple[Run, FineTuningJob]:
    """Lock and return the lease's run and job, job first. Raises StaleLease."""
    held = Run.objects.filter(
        lease_id=lease.id,
        lease_token_sha256=sha256_hex(lease.token),
        status__in=RUN_HOLDING_LEASE,
        worker__revoked_at=None,
    )
    job_id = held.values_list("job_id", flat=True).first()
    if job_id is None:
        raise StaleLease("This lease is not held any more.")
    job = FineTuningJob.objects.select_for_update().get(pk=job_id)
    run = held.select_for_update(of=("self",)).first()
    if run is None:
        raise StaleLease("This lease is not held any more.")
    return run, job


@transaction.atomic
def heartbeat(*, lease: Lease, beat: HeartbeatRequest) -> HeartbeatResponse:
    """Extend the lease, and return whether a cancel, pause or drain is requested. Raises StaleLease."""
    run, job = lock_run(lease=lease)
    now = db_now()
    changes = stalls.heartbeat_changes(run=run, beat=beat, now=now) | {
        "lease_expires_at": lease_end(run=run, job=job, now=now),
        "heartbeat_at": now,
    }
    Run.objects.filter(pk=run.pk).update(**changes)
    Worker.objects.filter(pk=run.worker_id).update(last_seen_at=now)
    if _is_at_cap(job, run, beat, now):
        attempts.request_pause_at_cap(job=job, now=now)
    return HeartbeatResponse(
        lease_seconds=LEASE_SECONDS,
        is_cancel_requested=job.cancel_requested_at is not None,
        is_pause_requested=job.pause_requested_at is not None,
        is_drain_requested=is_draining(run=run, job=job),
    )


def _is_at_cap(job: FineTuningJob, run: Run, beat: HeartbeatRequest, now: datetime.datetime) -> bool:
    if beat.training_seconds <= 0 or job.pause_requested_at or job.cancel_requested_at:
        return False
    passed = (now - run.training_started_at).total_seconds() if run.training_started_at else 0.0
    trained_ms = int(min(beat.training_seconds, passed) * 1000) * job.gpu_count
    return charges.is_at_cap(job=job, gpu_ms=charges.billed_ms(job=job, before=run) + trained_ms)


def reclaim_expired_leases() -> int:
    """Take runs from silent workers and queue their successors; return the number taken."""
    expired = Run.objects.filter(status__in=RUN_HOLDING_LEASE, lease_expires_at__lt=db_now())
    return sum(reclaim(run_id) for run_id in expired.values_list("pk", flat=True))


def end_leases() -> int:
    """Take all runs from their workers, after a restore, and queue their successors; return the number taken.

    What a worker did after the backup is not in the database, so it must not continue.
    """
    held = Run.objects.filter(status__in=RUN_HOLDING_LEASE).values_list("pk", "lease_id")
    return sum(reclaim(run_id, lease_id=lease_id, cause=_RESTORED) for run_id, lease_id in list(held))


@transaction.atomic
def reclaim(run_id: str, *, lease_id: str | None = None, cause: tuple[FailureCode, str] | None = None) -> bool:
    """Take the run from its worker if its lease has expired, or is the given one. `cause` is why, if that is known."""
    job_id = Run.objects.values_list("job_id", flat=True).get(pk=run_id)
    job = FineTuningJob.objects.select_for_update().get(pk=job_id)
    run = Run.objects.get(pk=run_id)
    now = db_now()
    code, message = cause or explain_loss(run=run, job=job, now=now)
    is_lost = try_advance(
        run,
        to=RunStatus.LOST,
        transitions=RUN_TRANSITIONS,
        guard={"lease_id": lease_id} if lease_id else {"lease_expires_at__lt": now},
        finished_at=now,
        failure_code=code,
        **NO_LEASE,
    )
    if is_lost:
        events.append(job, type="state", level="warn", message=message, attempt=run.attempt)
        trace_attempt(run=run, job=job)
        attempts.continue_or_give_up(job=job, run=run, code=code, now=now)
    return is_lost


def sha256_hex(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
