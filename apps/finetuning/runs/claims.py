"""Claims of workers: the next run in fair order that the worker's free GPUs can take, under a new lease."""

import datetime
import itertools
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from django.conf import settings
from django.db import transaction
from django.db.models import Q

from apps.billing.budgets import holds_of_budget
from apps.billing.models import HoldPurpose, HoldStatus
from apps.catalog.models import BaseModel
from apps.contracts.failures import FailureCode
from apps.contracts.runs import RunSpec
from apps.contracts.worker_api import ClaimResponse
from apps.core.database.clock import db_now
from apps.core.database.prepared import columns_of, fetch_prepared, read_row
from apps.core.database.transitions import advance, try_advance
from apps.core.errors import NotFound
from apps.core.ids import new_id
from apps.datasets.models import DatasetVersion
from apps.finetuning import events
from apps.finetuning.lifecycle import (
    HEARTBEAT_SECONDS,
    JOB_TRANSITIONS,
    LEASE_SECONDS,
    RUN_HOLDING_LEASE,
    RUN_TRANSITIONS,
    SELF_FENCE_SECONDS,
    JobStatus,
    RunStatus,
)
from apps.finetuning.models import FineTuningJob, GpuPool, Run, Worker
from apps.finetuning.queries import latest_checkpoint
from apps.finetuning.quotes.pool_facts import live_worker_filter
from apps.finetuning.recipes.stored_requests import stored_request
from apps.finetuning.runs.attempts import fail_job
from apps.finetuning.runs.groups import bind, find_others, keepers, master_of
from apps.finetuning.runs.leases import Lease, reclaim, sha256_hex
from apps.finetuning.runs.lending import list_borrowers, may_lend
from apps.finetuning.runs.queue.candidates import OVERTAKEN_AT_MOST, Candidate, list_candidates, lock_first, rank
from apps.finetuning.runs.queue.machines import EARLIEST, Kept, held_on, machines_of
from apps.finetuning.runs.specs import build_spec
from apps.finetuning.usage.occupancy import Held, held_of, leased_gpus
from apps.finetuning.usage.offers import Offer
from apps.finetuning.usage.quotas import Reached, ReachedLimit, limit_reached

_SEEN = f"""
    UPDATE finetuning_worker worker SET last_seen_at = clock_timestamp() WHERE id = %(worker)s
    RETURNING {columns_of(Worker, "worker")}
"""  # noqa: S608 - constants
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
_RETRY = datetime.timedelta(
    seconds=30
)  # after which a run that a limit of the month or a budget held back is tried again
_MOST_HELD_BACK = 200  # runs of an allowance or a budget, by one claim
LATE_CLAIM = datetime.timedelta(seconds=30)  # longer than a worker repeats a claim


def claim(
    *,
    worker: Worker,
    base_models: tuple[str, ...] | None,
    software: Mapping[str, str] | None = None,
    free_gpus: int | None = None,
    gpu_count: int | None = None,
    held: Collection[str] | None = None,
    offer: Offer | None = None,
) -> ClaimResponse | None:
    """Lease the next run of the worker's pool that its free GPUs can take; return None if none may start.

    `software` is the worker's currently installed software, and `free_gpus` the GPUs that it does not use. `gpu_count`
    is the number of GPUs that it may use; if it is less than at enrolment, the worker counts as one with fewer GPUs.
    `held` are the leases under which it works, if it reports them. Its other leases end: the process that had them is
    gone, or never got the answer. The newest ones do not: a claim that arrives twice, late, does not name them.
    With an `offer`, it may train together with other machines (groups.py). If no run of its pool could start, it takes
    one of a pool that borrows its machines (lending.py).
    """
    if held is not None:
        leases = Run.objects.filter(worker=worker, status__in=RUN_HOLDING_LEASE)
        forgotten = leases.filter(leased_at__lt=db_now() - LATE_CLAIM).exclude(lease_id__in=held)
        for run_id, lease_id in list(forgotten.values_list("pk", "lease_id")):
            reclaim(run_id, lease_id=lease_id)
    may_take = worker.takes_work and (free_gpus is None or free_gpus > 0)
    if may_take:
        rank(pool_id=worker.pool_id)
    response = _claim(worker, worker.pool, base_models, software, free_gpus, gpu_count, offer)
    if response is None and may_take:
        for pool in list_borrowers(pool=worker.pool):
            rank(pool_id=pool.pk)
            if response := _claim(worker, pool, base_models, software, free_gpus, gpu_count, offer):
                break
    return response


@transaction.atomic
def _claim(
    worker: Worker,
    pool: GpuPool,
    base_models: tuple[str, ...] | None,
    software: Mapping[str, str] | None,
    free_gpus: int | None,
    gpu_count: int | None,
    offer: Offer | None,
) -> ClaimResponse | None:
    worker = _seen(worker, software, gpu_count, offer)
    now = worker.last_seen_at or db_now()
    if not worker.takes_work:
        return None
    held = held_of(workers=[worker.pk]).get(worker.pk, Held())
    free = worker.gpu_count - held.gpus
    if free_gpus is not None:
        free = min(free, free_gpus)
    if free <= 0 or (pool.borrows_from_id and not may_lend(worker=worker, base_models=base_models, now=now)):
        return None
    free_bytes = worker.memory_bytes - held.host_bytes if held.gpus and worker.memory_bytes is not None else None
    kept: dict[str, Kept] = {}  # by workers whose free GPUs wait for a run earlier in the order
    for candidates in list_candidates(
        worker=worker, pool_id=pool.pk, free_gpus=free, free_bytes=free_bytes, base_models=base_models, now=now
    ):
        response = _claim_first(candidates, worker, pool, kept, now)
        if response is not None or worker.pk in kept:
            return response
    return None


def _claim_first(
    candidates: list[Candidate], worker: Worker, pool: GpuPool, kept: dict[str, Kept], now: datetime.datetime
) -> ClaimResponse | None:
    """Lease the first of these runs that may start. Add to `kept` the workers that keep their GPUs for one before it.

    If the worker itself is among those, only runs count that leave these GPUs free in time. Return None if none may
    start.
    """
    is_kept = False
    while candidates:
        fitting = list(itertools.takewhile(lambda candidate: candidate.fits, candidates))
        if not fitting:
            _keep(kept, _keepers(candidates.pop(0), worker, kept, now))
        else:
            locked = lock_first(fitting)
            skipped = fitting if locked is None else fitting[: locked[0]]
            for candidate in skipped:  # another claim looks at it, and may find too few machines
                _keep(kept, _keepers_of_group(candidate, worker, kept, now))
            del candidates[: len(skipped)]
            if locked is not None and (is_kept or worker.pk not in kept):
                candidate, is_free = candidates.pop(0), locked[1]
                if is_free and (response := _try_claim(candidate, worker, pool, kept, now)):
                    return response
                _keep(kept, _keepers_of_group(candidate, worker, kept, now))
        if worker.pk in kept and not is_kept:
            is_kept, candidates = True, _leaving(candidates, kept[worker.pk])
    return None


def _keep(kept: dict[str, Kept], further: Mapping[str, Kept]) -> None:
    kept |= {pk: kept[pk].with_another(each) if pk in kept else each for pk, each in further.items()}


def _leaving(candidates: Sequence[Candidate], kept: Kept) -> list[Candidate]:
    """Return the runs that leave free in time what the worker keeps."""
    fitting = [each.run_id for each in candidates if each.fits and each.node_count == 1]
    runs = Run.objects.filter(pk__in=fitting).select_related("job")
    allowed = {run.pk for run in runs if kept.allows(run.job)}
    return [each for each in candidates if each.run_id in allowed]


def _seen(worker: Worker, software: Mapping[str, str] | None, gpu_count: int | None, offer: Offer | None) -> Worker:
    """Store what the worker reports, and return it with its row locked.

    So of two claims at once, the second counts the GPUs that the first has leased.
    """
    changed: dict[str, Any] = {"software": dict(software)} if software and dict(software) != worker.software else {}
    if gpu_count is not None and gpu_count < len(worker.gpus):
        changed["gpus"] = worker.gpus[:gpu_count]
    if offer or worker.offer:
        changed["offer"] = msgspec.to_builtins(offer)
    if changed:
        Worker.objects.filter(pk=worker.pk).update(**changed)
    ((values),) = (iter(row) for row in fetch_prepared(_SEEN, {"worker": worker.pk}))
    seen = read_row(Worker, values)
    assert seen is not None
    seen.pool = worker.pool
    return seen


def _keepers_of_group(
    candidate: Candidate, worker: Worker, kept: Collection[str], now: datetime.datetime
) -> dict[str, Kept]:
    """Return what workers keep for a run which the worker did not take; nothing for one machine."""
    return _keepers(candidate, worker, kept, now) if candidate.node_count > 1 else {}


def _keepers(candidate: Candidate, worker: Worker, kept: Collection[str], now: datetime.datetime) -> dict[str, Kept]:
    """Return what workers keep for a run for which too few GPUs or memory are free: for a group at once.

    For one machine, runs may overtake it for a while. Of the workers with too few GPUs, only the one with the most free
    keeps them then; the others continue with smaller runs. A worker that lacks only memory of the machine does as well.
    Workers that are `kept` for an earlier run come last.
    """
    if candidate.node_count == 1 and now - candidate.created_at < OVERTAKEN_AT_MOST:
        return {}
    job = FineTuningJob.objects.filter(runs=candidate.run_id, status=JobStatus.QUEUED).first()
    if job is None or limit_reached(job=job, holder=candidate.holder, now=now):
        return {}
    if job.node_count > 1:
        return keepers(job=job, worker=worker, kept=kept, now=now)
    live = worker.pool.workers.filter(live_worker_filter(now))
    able = {each.pk: each.gpu_count for each in live if each.gpu_count >= candidate.gpu_count}
    leased = leased_gpus(workers=able)
    free = {pk: gpus - leased.get(pk, 0) for pk, gpus in able.items()}
    # The others have enough free GPUs, and did not take it.
    short = [
        pk for pk, gpus in free.items() if gpus < candidate.gpu_count or (pk == worker.pk and not candidate.has_memory)
    ]
    if not short:
        return {}
    keeper = max(short, key=lambda pk: (pk not in kept, free[pk], pk))
    if keeper != worker.pk or not candidate.has_memory:
        return {keeper: Kept(seconds=0.0)}
    machine = machines_of([worker], held_on([worker]), of=EARLIEST)[keeper]
    start = machine.start_of(job)
    return {keeper: Kept(seconds=start, spare_gpus=machine.spare_at(start, job))}


def _try_claim(
    candidate: Candidate, worker: Worker, pool: GpuPool, kept: Collection[str], now: datetime.datetime
) -> ClaimResponse | None:
    """Lease a locked run, for a group if all its machines are free.

    If a limit of the month or a budget forbids that, no claim tries it again for a while. If what it starts from was
    deleted, its job fails.
    """
    run = _read_run(candidate.run_id)
    if reached := limit_reached(job=run.job, holder=candidate.holder, now=now):
        if reached.limit is not ReachedLimit.CONCURRENT_GPUS:
            _try_later(run, reached, now)
        return None
    others = [] if candidate.node_count == 1 else find_others(job=run.job, worker=worker, kept=kept, now=now)
    if others is None:
        return None
    run.pool = pool
    try:
        with transaction.atomic():
            return _lease(run, run.job, worker, now, others)
    except NotFound as gone:
        _end_without_start(run.pk, gone, now)
        return None


def _end_without_start(run_id: str, gone: NotFound, now: datetime.datetime) -> None:
    """Fail a queued job whose starting model or checkpoint was deleted, so that it is not first in every claim.

    Only customers delete models. They pay for the steps that earlier attempts saved.
    """
    run = Run.objects.select_related("job").get(pk=run_id)
    advance(run, to=RunStatus.CANCELLED, transitions=RUN_TRANSITIONS, finished_at=now)
    param = gone.param or ""
    is_model = bool(stored_request(run.job).start_from.version)
    code = FailureCode.START_DELETED if is_model else FailureCode.CHECKPOINT_INVALID
    fail_job(job=run.job, code=code, message=gone.message, now=now, param=param)


def _try_later(run: Run, reached: Reached, now: datetime.datetime) -> None:
    """Let no claim try the run for a while; of an allowance, no queued run that needs as much; of a budget, no run.

    Else a member's many runs would hide those of the others in their organization. Runs that another claim has locked
    are left: claims never wait for each other's runs.
    """
    covered = _covered_by(reached)
    held_back = [run.pk]
    if covered is not None:
        jobs = FineTuningJob.objects.filter(covered, status=JobStatus.QUEUED)
        others = Run.objects.filter(job__in=jobs, status=RunStatus.QUEUED).select_related("job")
        others = others.order_by("created_at", "pk").select_for_update(of=("self",), skip_locked=True)
        needed = _expected_gpu_seconds(run.job) if reached.allowance else 0.0
        held_back += [each.pk for each in others[:_MOST_HELD_BACK] if _expected_gpu_seconds(each.job) >= needed]
    Run.objects.filter(pk__in=held_back).update(retry_at=now + _RETRY)


def _covered_by(reached: Reached) -> Q | None:
    """Return the condition that selects the jobs under the allowance or the budget that was reached."""
    if reached.budget is None:
        return reached.allowance.covered if reached.allowance else None
    holds = holds_of_budget(budget_id=reached.budget.pk).filter(purpose=HoldPurpose.JOB, status=HoldStatus.OPEN)
    return Q(pk__in=holds.values("source"))


def _expected_gpu_seconds(job: FineTuningJob) -> float:
    return float(job.estimate.get("run_seconds_p50") or job.estimate.get("train_seconds_p50") or 0.0) * job.gpu_count


def _read_run(run_id: str) -> Run:
    """Return the run with its job, base model and files, by a statement that is not compiled again for each claim."""
    ((values),) = (iter(row) for row in fetch_prepared(_READ_RUN, {"run": run_id}))
    run, job = read_row(Run, values), read_row(FineTuningJob, values)
    base_model, training_file = read_row(BaseModel, values), read_row(DatasetVersion, values)
    assert run is not None and job is not None and base_model is not None and training_file is not None
    run.job, job.base_model = job, base_model
    job.training_file, job.validation_file = training_file, read_row(DatasetVersion, values)
    return run


def _lease(
    run: Run, job: FineTuningJob, worker: Worker, now: datetime.datetime, others: Sequence[Worker]
) -> ClaimResponse:
    lease = Lease(id=new_id("lease"), token=secrets.token_urlsafe(32))
    checkpoint = latest_checkpoint(job=job) if run.attempt > 1 else None
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
        master=master_of(worker) if others else "",
        resume_from=checkpoint,
    )
    bind(run=run, worker=worker, others=others, now=now)
    try_advance(job, to=JobStatus.RUNNING, transitions=JOB_TRANSITIONS, started_at=job.started_at or now)
    events.append(job, type="state", message=f"Picked up by {run.pool.name}", attempt=run.attempt)
    return answer_claim(build_spec(run=run, job=job, checkpoint=checkpoint, now=now), lease)


def answer_claim(spec: RunSpec, lease: Lease) -> ClaimResponse:
    """Return what a worker gets that now holds the lease, or a place under it."""
    return ClaimResponse(
        spec=spec,
        lease_id=lease.id,
        lease_token=lease.token,
        lease_seconds=LEASE_SECONDS,
        heartbeat_seconds=HEARTBEAT_SECONDS,
        self_fence_seconds=SELF_FENCE_SECONDS,
        stall_seconds=settings.STALL_SECONDS,
    )
