"""The machines of a group beside the first one: a claim gives them a place, heartbeats keep it, and they leave.

Their tokens open nothing else: the first machine alone reports, stores and finishes.
"""

import secrets

import msgspec
from django.db import transaction

from apps.contracts import worker_api as wire
from apps.contracts.failures import FailureCode
from apps.contracts.runs import Failed, Stopped
from apps.core.database.clock import db_now
from apps.finetuning.lifecycle import LEASE_SECONDS, RUN_HOLDING_LEASE
from apps.finetuning.models import FineTuningJob, Run, RunMember, Worker
from apps.finetuning.runs import claims, endings, groups, leases
from apps.finetuning.runs.leases import Lease, StaleLease, sha256_hex
from apps.finetuning.runs.specs import build_spec


def claim(*, worker: Worker, request: wire.ClaimRequest) -> wire.ClaimResponse | None:
    """Return the worker's place in a group if it waits for it, else the next run that it may lease, else None."""
    offer = groups.offer_of(request)
    if offer is not None:
        _drop_forgotten(worker, request.leases)
        if place := _hand_out(worker, request.leases or ()):
            return place
    return claims.claim(
        worker=worker,
        base_models=request.base_models,
        software=request.software,
        free_gpus=request.free_gpus,
        gpu_count=request.gpu_count,
        held=request.leases,
        offer=offer,
    )


def find_holder(*, lease: Lease) -> str | None:
    """Return the worker that holds the lease, or the place under it that the token opens; None if there is none."""
    token_sha256 = sha256_hex(lease.token)
    run = Run.objects.filter(lease_id=lease.id, lease_token_sha256=token_sha256).first()
    place = RunMember.objects.filter(run__lease_id=lease.id, token_sha256=token_sha256).first() if run is None else None
    held = run or place
    return held.worker_id if held else None


@transaction.atomic
def heartbeat(*, lease: Lease) -> wire.HeartbeatResponse:
    """Keep the machine's place. The run's own heartbeat extends the lease as far as every place is kept.

    Only a drain of this machine is passed on: the first one learns of a customer's request. Raises StaleLease.
    """
    now, member = db_now(), _find(lease)
    kept = RunMember.objects.filter(pk=member.pk, left_at=None)
    if not kept.update(heartbeat_at=now, started_at=member.started_at or now):
        raise StaleLease("This lease is not held any more.")
    Worker.objects.filter(pk=member.worker_id).update(last_seen_at=now)
    return wire.HeartbeatResponse(
        lease_seconds=LEASE_SECONDS, is_drain_requested=member.worker.drain_requested_at is not None
    )


@transaction.atomic
def leave(*, lease: Lease, outcome: wire.LeaveRequest) -> None:
    """Free the machine, whose part is done; with an outcome, end the whole attempt by it. Raises StaleLease.

    No failure that it reports ends the job, is billed or sets a checkpoint aside: only the first machine may say that,
    and that the run stalled, which ends the job the second time.
    """
    found = _find(lease)
    job = FineTuningJob.objects.select_for_update().get(pk=found.run.job_id)
    member = _find(lease)  # again, under the lock
    RunMember.objects.filter(pk=member.pk).update(left_at=db_now())
    if outcome.outcome is not None:
        endings.end_attempt(member.run, job, _believed(outcome.outcome))


def _believed(outcome: Failed | Stopped) -> Failed | Stopped:
    if isinstance(outcome, Stopped):
        return outcome
    if outcome.code.is_retryable and outcome.code not in (FailureCode.CHECKPOINT_INVALID, FailureCode.STALLED):
        return outcome
    return msgspec.structs.replace(outcome, code=FailureCode.INTERNAL_ERROR)


def _find(lease: Lease) -> RunMember:
    held = RunMember.objects.filter(
        run__lease_id=lease.id,
        token_sha256=sha256_hex(lease.token),
        run__status__in=RUN_HOLDING_LEASE,
        left_at=None,
        worker__revoked_at=None,
    )
    member = held.select_related("run", "worker").first()
    if member is None:
        raise StaleLease("This lease is not held any more.")
    return member


def _drop_forgotten(worker: Worker, held: tuple[str, ...] | None) -> None:
    """Release the groups of which this worker had a place that its claim no longer names: its process is gone."""
    if held is None:
        return
    places = worker.memberships.filter(run__status__in=RUN_HOLDING_LEASE, left_at=None)
    forgotten = places.filter(handed_at__lt=db_now() - claims.LATE_CLAIM).exclude(run__lease_id__in=held)
    for run_id, lease_id in list(forgotten.values_list("run_id", "run__lease_id")):
        leases.reclaim(run_id, lease_id=lease_id)


def _hand_out(worker: Worker, held: tuple[str, ...]) -> wire.ClaimResponse | None:
    """Answer a claim with a place that waits for this worker; until it is used, each claim gets it with a new token."""
    waiting = worker.memberships.filter(run__status__in=RUN_HOLDING_LEASE, started_at=None, left_at=None)
    run_id = waiting.exclude(run__lease_id__in=held).values_list("run_id", flat=True).first()
    return None if run_id is None else _hand_out_place(worker, run_id)


@transaction.atomic
def _hand_out_place(worker: Worker, run_id: str) -> wire.ClaimResponse | None:
    job = FineTuningJob.objects.select_for_update().get(runs=run_id)
    run = Run.objects.select_related("resume_from__upload").get(pk=run_id)
    member = run.members.filter(worker=worker, started_at=None, left_at=None).first()
    if member is None or run.lease_id is None:
        return None
    lease, now = Lease(id=run.lease_id, token=secrets.token_urlsafe(32)), db_now()
    RunMember.objects.filter(pk=member.pk).update(token_sha256=sha256_hex(lease.token), handed_at=now)
    Worker.objects.filter(pk=worker.pk).update(last_seen_at=now)
    spec = build_spec(run=run, job=job, checkpoint=run.resume_from, now=now, member=member)
    return claims.answer_claim(msgspec.structs.replace(spec, rehearsal=None, trackers=()), lease)
