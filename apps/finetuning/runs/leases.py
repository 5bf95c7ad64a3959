"""Leases on runs: claims, heartbeats and the reaper. Only the database's clock decides."""

import datetime
import hashlib
import itertools
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from django.conf import settings
from django.db import transaction

from apps.catalog.models import BaseModel
from apps.catalog.queries import open_hub_token
from apps.contracts.failures import FailureCode
from apps.contracts.runs import BaseModelRef, CheckpointRef, DatasetRef, Hyperparameters, RunSpec
from apps.contracts.worker_api import ClaimResponse, HeartbeatRequest, HeartbeatResponse
from apps.core.database.clock import db_now
from apps.core.database.prepared import columns_of, fetch_prepared, read_row
from apps.core.database.transitions import advance, try_advance
from apps.core.errors import DomainError, Status
from apps.core.ids import new_id
from apps.core.objects.store import store
from apps.datasets.models import DatasetVersion
from apps.finetuning import events
from apps.finetuning.lifecycle import (
    HEARTBEAT_SECONDS,
    JOB_TRANSITIONS,
    LEASE_SECONDS,
    MAX_CHECKPOINT_SECONDS,
    NO_LEASE,
    RUN_HOLDING_LEASE,
    RUN_TRANSITIONS,
    SELF_FENCE_SECONDS,
    JobStatus,
    RunStatus,
)
from apps.finetuning.models import Checkpoint, FineTuningJob, GpuPool, Run, Worker, WorkerKind
from apps.finetuning.quotes.pool_facts import live_worker_filter
from apps.finetuning.quotes.rehearsals import stored_rehearsal
from apps.finetuning.recipes.start_points import signed_ref, start_ref
from apps.finetuning.recipes.stored_requests import stored_request
from apps.finetuning.runs import attempts, stalls
from apps.finetuning.runs.queue_order import Candidate, list_candidates, lock_first
from apps.finetuning.runs.trackers import open_trackers
from apps.finetuning.usage import charges
from apps.finetuning.usage.occupancy import leased_gpus
from apps.finetuning.usage.quotas import reason_to_wait

_URL_SECONDS = 3600
_MIN_CHECKPOINT_SECONDS = 15.0
_SEEN = "UPDATE finetuning_worker SET last_seen_at = clock_timestamp() WHERE id = %(worker)s RETURNING *"
_READ_RUN = f"""
    SELECT {columns_of(Run, "run")}, {columns_of(FineTuningJob, "job")}, {columns_of(BaseModel, "base_model")},
        {columns_of(DatasetVersion, "training_file")}, {columns_of(DatasetVersion, "validation_file")}
    FROM finetuning_run run
    JOIN finetuning_finetuningjob job ON job.id = run.job_id
    JOIN {BaseModel._meta.db_table} base_model ON base_model.id = job.base_model_id
    JOIN {DatasetVersion._meta.db_table} training_file ON training_file.id = job.training_file_id
    LEFT JOIN {DatasetVersion._meta.db_table} validation_file ON validation_file.id = job.validation_file_id
    WHERE run.id = %(run)s
"""  # noqa: S608 - constants
_ENDED = f"""
    SELECT count(*) FILTER (WHERE status = '{RunStatus.LOST}'),
        sum(extract(epoch FROM finished_at - training_started_at)::float8)
    FROM finetuning_run WHERE pool_id = %(pool)s AND training_started_at IS NOT NULL AND finished_at >= %(since)s
"""  # noqa: S608 - constants
_FAILURE_WINDOW = datetime.timedelta(days=30)
_MIN_FAILURES = 3  # fewer are no evidence; until then the interval is the cautious one
_HOST_BYTES = "job__estimate__host_bytes"  # of the machine's own memory, which runs on other GPUs share
_RETRY = datetime.timedelta(seconds=30)  # after which a run that a limit of the month held back is tried again
_LATE_CLAIM = datetime.timedelta(seconds=30)  # longer than a worker repeats a claim
# Parallelism that keeps the whole model on every GPU; any other is sharded.
_WHOLE_ON_EACH = {"single": "single", "ddp": "ddp"}


class StaleLease(DomainError):
    """The lease ended or another worker has it: the worker must stop the child at once and drop the run."""

    code = "stale_lease"
    status = Status.CONFLICT


@dataclass(frozen=True)
class Lease:
    """The credentials that a worker sends with each call under its lease."""

    id: str
    token: str


def claim(
    *,
    worker: Worker,
    base_models: tuple[str, ...] | None,
    software: Mapping[str, str] | None = None,
    free_gpus: int | None = None,
    gpu_count: int | None = None,
    held: Collection[str] | None = None,
) -> ClaimResponse | None:
    """Lease the next run of the worker's pool that its free GPUs can take; return None if none may start.

    `software` is the worker's currently installed software, and `free_gpus` the GPUs that it does not use. `gpu_count`
    is the number of GPUs that it may use; if it is less than at enrolment, the worker counts as one with fewer GPUs.
    `held` are the leases under which it works, if it reports them. Its other leases end: the process that had them is
    gone, or never got the answer. The newest ones do not: a claim that arrives twice, late, does not name them.
    """
    if held is not None:
        leases = Run.objects.filter(worker=worker, status__in=RUN_HOLDING_LEASE)
        forgotten = leases.filter(leased_at__lt=db_now() - _LATE_CLAIM).exclude(lease_id__in=held)
        for run_id, lease_id in list(forgotten.values_list("pk", "lease_id")):
            _reclaim(run_id, lease_id=lease_id)
    return _claim(worker, base_models, software, free_gpus, gpu_count)


@transaction.atomic
def _claim(
    worker: Worker,
    base_models: tuple[str, ...] | None,
    software: Mapping[str, str] | None,
    free_gpus: int | None,
    gpu_count: int | None,
) -> ClaimResponse | None:
    changed: dict[str, Any] = {"software": dict(software)} if software and dict(software) != worker.software else {}
    if gpu_count is not None and gpu_count < len(worker.gpus):
        changed["gpus"] = worker.gpus[:gpu_count]
    if changed:
        Worker.objects.filter(pk=worker.pk).update(**changed)
    # The update locks the worker's row: of two claims at once, the second counts the GPUs that the first has leased.
    (worker,) = Worker.objects.raw(_SEEN, {"worker": worker.pk})
    now = worker.last_seen_at or db_now()
    if worker.kind != WorkerKind.TRAINER or worker.cordoned_at or worker.drain_requested_at or worker.revoked_at:
        return None
    held = list(worker.runs.filter(status__in=RUN_HOLDING_LEASE).values_list("job__gpu_count", _HOST_BYTES))
    free = worker.gpu_count - sum(gpus for gpus, _ in held)
    host_bytes = sum(needed or 0 for _, needed in held)
    if free_gpus is not None:
        free = min(free, free_gpus)
    if free <= 0:
        return None
    free_bytes = worker.memory_bytes - host_bytes if held and worker.memory_bytes is not None else None
    candidates = list_candidates(worker=worker, free_gpus=free, free_bytes=free_bytes, base_models=base_models, now=now)
    while candidates:
        fitting = list(itertools.takewhile(lambda candidate: candidate.fits, candidates))
        if not fitting:
            if _keeps_gpus_for(candidates.pop(0), worker, now):
                return None
        elif (locked := lock_first(fitting)) is None:
            del candidates[: len(fitting)]
        else:
            place, is_free = locked
            if is_free and (response := _try_claim(fitting[place], worker, now)):
                return response
            del candidates[: place + 1]
    return None


def _keeps_gpus_for(candidate: Candidate, worker: Worker, now: datetime.datetime) -> bool:
    """Return whether the worker lets no later run overtake this one, for which too few GPUs or memory are free.

    Of the workers with too few GPUs, only the one with the most free does; the others continue with smaller runs. A
    worker that lacks only memory of the machine does as well.
    """
    live = worker.pool.workers.filter(live_worker_filter(now))
    able = {each.pk: each.gpu_count for each in live if each.gpu_count >= candidate.gpu_count}
    leased = leased_gpus(workers=able)
    free = {pk: gpus - leased.get(pk, 0) for pk, gpus in able.items()}
    # The others have enough free GPUs, and did not take it.
    short = [
        pk for pk, gpus in free.items() if gpus < candidate.gpu_count or (pk == worker.pk and not candidate.has_memory)
    ]
    if max(short, key=lambda pk: (free[pk], pk), default=None) != worker.pk:
        return False
    job = FineTuningJob.objects.get(runs=candidate.run_id)
    return not reason_to_wait(job=job, holder=candidate.holder, now=now)


def _try_claim(candidate: Candidate, worker: Worker, now: datetime.datetime) -> ClaimResponse | None:
    """Lease a locked run; if a limit of its organization forbids that, have no claim try it again for a while."""
    run = _read_run(candidate.run_id)
    if reason_to_wait(job=run.job, holder=candidate.holder, now=now):
        Run.objects.filter(pk=run.pk).update(retry_at=now + _RETRY)
        return None
    run.pool = worker.pool
    return _lease(run, run.job, worker, now)


def _read_run(run_id: str) -> Run:
    """Return the run with its job, base model and files, by a statement that is not compiled again for each claim."""
    ((values),) = (iter(row) for row in fetch_prepared(_READ_RUN, {"run": run_id}))
    run, job = read_row(Run, values), read_row(FineTuningJob, values)
    base_model, training_file = read_row(BaseModel, values), read_row(DatasetVersion, values)
    assert run is not None and job is not None and base_model is not None and training_file is not None
    run.job, job.base_model = job, base_model
    job.training_file, job.validation_file = training_file, read_row(DatasetVersion, values)
    return run


def _lease(run: Run, job: FineTuningJob, worker: Worker, now: datetime.datetime) -> ClaimResponse:
    lease = Lease(id=new_id("lease"), token=secrets.token_urlsafe(32))
    checkpoint = attempts.latest_checkpoint(job=job) if run.attempt > 1 else None
    advance(
        run,
        to=RunStatus.LEASED,
        transitions=RUN_TRANSITIONS,
        lease_id=lease.id,
        lease_token_sha256=sha256_hex(lease.token),
        lease_expires_at=now + datetime.timedelta(seconds=LEASE_SECONDS),
        heartbeat_at=now,
        leased_at=now,
        worker=worker,
        resume_from=checkpoint,
    )
    try_advance(job, to=JobStatus.RUNNING, transitions=JOB_TRANSITIONS, started_at=job.started_at or now)
    events.append(job, type="state", message=f"Picked up by {run.pool.name}", attempt=run.attempt)
    return ClaimResponse(
        spec=build_spec(run=run, job=job, checkpoint=checkpoint, now=now),
        lease_id=lease.id,
        lease_token=lease.token,
        lease_seconds=LEASE_SECONDS,
        heartbeat_seconds=HEARTBEAT_SECONDS,
        self_fence_seconds=SELF_FENCE_SECONDS,
        stall_seconds=settings.STALL_SECONDS,
    )


def build_spec(*, run: Run, job: FineTuningJob, checkpoint: Checkpoint | None, now: datetime.datetime) -> RunSpec:
    """Return the immutable specification of the attempt, with URLs that expire."""
    base, requested = job.base_model, stored_request(job)
    recipe = msgspec.convert(job.hyperparameters, Hyperparameters)
    is_on_cpu = run.pool.gpu_type_id == "cpu"
    # A checkpoint's plan may be smaller than the job's.
    rehearsal = (
        None
        if checkpoint
        else stored_rehearsal(base_model=base, recipe=recipe, estimate=job.estimate, is_on_cpu=is_on_cpu)
    )
    return RunSpec(
        run_id=run.pk,
        job_id=job.pk,
        organization_id=job.organization_id,
        attempt=run.attempt,
        base_model=BaseModelRef(
            id=base.pk,
            name=base.name,
            path=base.path or None,
            repo=base.repo or None,
            revision=base.revision or None,
            files_sha256=base.files_sha256,
            chat_template=base.chat_template,
            chat_template_sha256=base.chat_template_sha256,
            hub_token=open_hub_token(base_model=base),
        ),
        training=_dataset_ref(job.training_file),
        validation=_dataset_ref(job.validation_file) if job.validation_file else None,
        hyperparameters=recipe,
        resume_from=_checkpoint_ref(checkpoint) if checkpoint else None,
        gpu_count=job.gpu_count,
        parallelism=_WHOLE_ON_EACH.get(job.estimate.get("parallelism") or "single", "fsdp"),
        start_from=start_ref(job=job, expires_seconds=_URL_SECONDS),
        seconds_between_failures=_seconds_between_failures(pool=run.pool, now=now),
        expected_training_seconds=job.estimate.get("train_seconds_p50"),
        checkpoint_interval_seconds=checkpoint_interval(job.estimate.get("train_seconds_p50")),
        estimated_peak_bytes=job.estimate.get("peak_bytes"),
        rehearsed_bytes=rehearsal.peak_bytes if rehearsal else None,
        rehearsal=rehearsal.request if rehearsal and rehearsal.peak_bytes is None else None,
        evaluation=requested.evaluation,
        exports=requested.exports,
        trackers=open_trackers(job=job),
    )


def checkpoint_interval(estimated_seconds: float | None) -> int:
    """Return the seconds between checkpoints: five per job, so that losing a worker costs at most a fifth of the job.

    The lower limit keeps saving worthwhile (Young 1974: sqrt(2 x save x time between failures) for a save of one second
    and a failure every two minutes). The upper limit bounds a customer's loss.
    """
    return int(min(max((estimated_seconds or 0.0) / 5, _MIN_CHECKPOINT_SECONDS), MAX_CHECKPOINT_SECONDS))


def _dataset_ref(version: DatasetVersion) -> DatasetRef:
    url = store().signed_url(version.data_key, "GET", expires_seconds=_URL_SECONDS, base="internal")
    return DatasetRef(
        id=version.pk,
        sha256=version.data_sha256,
        bytes=version.data_bytes,
        rows=version.rows or 0,
        url=url,
        kind=version.kind or "chat",
    )


def _seconds_between_failures(*, pool: GpuPool, now: datetime.datetime) -> float | None:
    """Return the mean training time between two lost attempts of the pool.

    If too few were lost, return the operator's expectation for a spot pool, and None for others. The login for claims
    sees every tenant: the machines are shared, and only the mean is returned.
    """
    ((lost, trained),) = fetch_prepared(_ENDED, {"pool": pool.pk, "since": now - _FAILURE_WINDOW})
    if lost < _MIN_FAILURES:
        return 3600 / pool.interruptions_per_hour if pool.is_spot else None
    return float(trained / lost)


def _checkpoint_ref(checkpoint: Checkpoint) -> CheckpointRef:
    upload = checkpoint.upload
    return signed_ref(
        checkpoint.pk, checkpoint.step, upload.manifest, upload.manifest_sha256, upload.object_prefix, _URL_SECONDS
    )


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
        "lease_expires_at": now + datetime.timedelta(seconds=LEASE_SECONDS),
        "heartbeat_at": now,
    }
    Run.objects.filter(pk=run.pk).update(**changes)
    Worker.objects.filter(pk=run.worker_id).update(last_seen_at=now)
    if _is_at_cap(job, run, beat, now):
        attempts.request_pause_at_cap(job=job, now=now)
    is_draining = run.worker is not None and run.worker.drain_requested_at is not None
    return HeartbeatResponse(
        lease_seconds=LEASE_SECONDS,
        is_cancel_requested=job.cancel_requested_at is not None,
        is_pause_requested=job.pause_requested_at is not None,
        is_drain_requested=is_draining,
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
    return sum(_reclaim(run_id) for run_id in expired.values_list("pk", flat=True))


@transaction.atomic
def _reclaim(run_id: str, *, lease_id: str | None = None) -> bool:
    """Take the run from its worker if its lease has expired, or is the given one."""
    job_id = Run.objects.values_list("job_id", flat=True).get(pk=run_id)
    job = FineTuningJob.objects.select_for_update().get(pk=job_id)
    run = Run.objects.get(pk=run_id)
    now = db_now()
    is_lost = try_advance(
        run,
        to=RunStatus.LOST,
        transitions=RUN_TRANSITIONS,
        guard={"lease_id": lease_id} if lease_id else {"lease_expires_at__lt": now},
        finished_at=now,
        failure_code=FailureCode.WORKER_LOST,
        **NO_LEASE,
    )
    if is_lost:
        events.append(job, type="state", level="warn", message="Lost contact with the worker", attempt=run.attempt)
        attempts.continue_or_give_up(job=job, run=run, code=FailureCode.WORKER_LOST, now=now)
    return is_lost


def sha256_hex(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
