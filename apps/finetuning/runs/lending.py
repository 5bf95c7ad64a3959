"""Pools that borrow the machines of another pool, for runs of a lower class.

A pool that borrows has a queue and a price, and no machine. Machines take its runs only while no run of their own pool
could start on what they have free or lend. When one waits, the newest borrowed runs are asked back: they save a
checkpoint and queue again, as on a spot machine that is taken away.
"""

import datetime
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

from django.db import transaction
from django.db.models import F, Min, Q

from apps.accounts.shares import list_sharing
from apps.finetuning import events
from apps.finetuning.lifecycle import RUN_HOLDING_LEASE, JobStatus, RunStatus
from apps.finetuning.models import FineTuningJob, GpuPool, Run, RunMember, Worker
from apps.finetuning.quotes.pool_facts import live_worker_filter
from apps.finetuning.runs.groups import has_room
from apps.finetuning.runs.queue.candidates import list_candidates
from apps.finetuning.usage.occupancy import Held, held_of
from apps.finetuning.usage.offers import could_join, read_offer
from apps.finetuning.usage.quotas import limit_reached

MAX_LEFT_IN_AN_HOUR = 5  # jobs that were cancelled, or moved away, before they started
_PATIENCE = datetime.timedelta(seconds=15)  # of a waiting run: a free machine takes it within seconds


class _Return(NamedTuple):
    """What a machine gets back so that it has room: the fewest GPUs are best."""

    gpus: int
    machine: str
    asked: list[Run]


def list_borrowers(*, pool: GpuPool) -> list[GpuPool]:
    """Return the pools with queued runs that borrow from this one, that of the oldest run first."""
    waiting = GpuPool.objects.filter(borrows_from=pool, runs__status=RunStatus.QUEUED)
    oldest = Min("runs__created_at", filter=Q(runs__status=RunStatus.QUEUED))
    return list(waiting.annotate(oldest_at=oldest).order_by("oldest_at", "pk"))


def may_lend(*, worker: Worker, base_models: Sequence[str] | None, now: datetime.datetime) -> bool:
    """Return whether no queued run of the worker's own pool could start on it, even if all that it lends came back."""
    lent = _runs_by_machine(_lent(worker.pool))[worker.pk]
    return next(_startable(worker, lent, base_models, now), None) is None


def ask_machines_back(*, now: datetime.datetime) -> int:
    """Ask for lent machines for which runs of the pools that lend wait; return the number of runs asked.

    For each pool they are those of one waiting run. The next follow when these machines are back.
    """
    lends = GpuPool.objects.filter(borrowers__runs__status__in=RUN_HOLDING_LEASE).distinct()
    return sum(_ask_back(pool, now) for pool in lends.order_by("pk"))


def _ask_back(pool: GpuPool, now: datetime.datetime) -> int:
    lent = _lent(pool)
    if any(run.return_requested_at for run in lent):
        return 0
    machines = list(Worker.objects.filter(live_worker_filter(now), pool=pool).order_by("pk"))
    on_machine = _runs_by_machine(lent)
    for lender in (each for each in machines if on_machine[each.pk]):
        for job, waits_since in _startable(lender, on_machine[lender.pk], None, now):
            able = [each for each in machines if _could_take(each, job)]
            if now - waits_since >= _PATIENCE and (asked := _choose(job, on_machine, able)):
                return sum(_ask_run(run, pool, now) for run in asked)
    return 0


def _choose(job: FineTuningJob, on_machine: Mapping[str, list[Run]], machines: list[Worker]) -> list[Run]:
    """Return the runs to ask, so that enough machines have room for the job; none if it has, or if that does not help.

    Those of the machines on which the fewest GPUs are asked back, and on each the newest ones.
    """
    held = held_of(workers={each.pk for each in machines})
    plans = [
        plan
        for each in machines
        if (plan := _plan_of(each, held.get(each.pk, Held()), on_machine[each.pk], job)) is not None
    ]
    if len(plans) < job.node_count:
        return []
    best = sorted(plans, key=lambda plan: plan[:2])[: job.node_count]
    return list({run.pk: run for plan in best for run in plan.asked}.values())


def _plan_of(machine: Worker, held: Held, lent: list[Run], job: FineTuningJob) -> _Return | None:
    """Return which of the runs that are lent on the machine to ask, newest first; None if that makes no room."""
    for count in range(len(lent) + 1):
        left = _without(held, lent[:count])
        has_memory = has_room(left, worker=machine, host_bytes=job.estimate.get("host_bytes"))
        if has_memory and machine.gpu_count - left.gpus >= job.gpus_per_node:
            return _Return(held.gpus - left.gpus, machine.pk, lent[:count])
    return None


def _without(held: Held, runs: list[Run]) -> Held:
    """Return what is held of a machine once these runs are gone."""
    gpus = sum(run.job.gpus_per_node for run in runs)
    host_bytes = sum(run.job.estimate.get("host_bytes") or 0 for run in runs)
    return Held(gpus=held.gpus - gpus, host_bytes=held.host_bytes - host_bytes)


def _runs_by_machine(lent: list[Run]) -> dict[str, list[Run]]:
    """Return the lent runs of each machine, the newest first; a group's run is on several."""
    found: dict[str, list[Run]] = defaultdict(list)
    by_id = {run.pk: run for run in lent}
    places = RunMember.objects.filter(run__in=by_id, left_at=None).values_list("worker_id", "run_id")
    for machine, run_id in [*((run.worker_id, run.pk) for run in lent), *places]:
        found[str(machine)].append(by_id[run_id])
    return defaultdict(list, {machine: sorted(runs, key=_newest_first) for machine, runs in found.items()})


def _newest_first(run: Run) -> tuple[float, str]:
    return -run.leased_at.timestamp() if run.leased_at else 0.0, run.pk


def _lent(pool: GpuPool) -> list[Run]:
    runs = Run.objects.filter(pool__borrows_from=pool, status__in=RUN_HOLDING_LEASE)
    return list(runs.select_related("job").order_by("pk"))


@transaction.atomic
def _ask_run(run: Run, pool: GpuPool, now: datetime.datetime) -> bool:
    job = FineTuningJob.objects.select_for_update().get(pk=run.job_id)
    held = Run.objects.filter(pk=run.pk, status__in=RUN_HOLDING_LEASE, return_requested_at=None)
    if not held.update(return_requested_at=now):
        return False
    events.append(
        job,
        type="state",
        message=f"Its machine goes back to {pool.name}: the run saves a checkpoint and waits",
        attempt=run.attempt,
    )
    return True


def _startable(
    worker: Worker, lent: list[Run], base_models: Sequence[str] | None, now: datetime.datetime
) -> Iterator[tuple[FineTuningJob, datetime.datetime]]:
    """Yield the jobs whose queued runs the worker could take if it got back what it lends, and since when these wait.

    Of its own pool, in the order of the queue, without those that a limit holds back, and without those of who cancels
    or moves jobs again and again before they start.
    """
    is_fickle = cache(partial(_is_fickle, pool_id=worker.pool_id, now=now))
    own = _without(held_of(workers=[worker.pk]).get(worker.pk, Held()), lent)
    free_bytes = worker.memory_bytes - own.host_bytes if own.gpus and worker.memory_bytes is not None else None
    for candidates in list_candidates(
        worker=worker, pool_id=worker.pool_id, free_gpus=worker.gpu_count - own.gpus, free_bytes=free_bytes,
        base_models=base_models, now=now,
    ):  # fmt: skip
        for each in (found for found in candidates if found.fits):
            job = FineTuningJob.objects.filter(runs=each.run_id, status=JobStatus.QUEUED).first()
            if job is None or is_fickle(each.holder) or limit_reached(job=job, holder=each.holder, now=now):
                continue
            if job.node_count == 1 or _joining(worker, job, now) >= job.node_count:
                yield job, each.created_at


def _is_fickle(holder: str, *, pool_id: str, now: datetime.datetime) -> bool:
    """Return whether a share holder's jobs take no machine back, because many left the queue before they started.

    Each was cancelled or moved to another pool. It may have interrupted a borrowed run, and cost nothing. Jobs that had
    trained before do not count, and neither do those that failed because what they start from was deleted.
    """
    has_never_started = Q(job__started_at=None) & ~Q(job__status=JobStatus.FAILED)
    left = Run.objects.filter(
        has_never_started | Q(job__started_at__gt=F("finished_at")),
        organization__in=list_sharing(organizations=[holder]),
        pool=pool_id,
        status=RunStatus.CANCELLED,
        leased_at=None,
        finished_at__gt=now - datetime.timedelta(hours=1),
    )
    return left.count() >= MAX_LEFT_IN_AN_HOUR


def _joining(worker: Worker, job: FineTuningJob, now: datetime.datetime) -> int:
    """Return how many machines of the worker's pool could train the job together."""
    live = Worker.objects.filter(live_worker_filter(now), pool=worker.pool_id)
    return sum(could_join(each, gpus=job.gpus_per_node, base_model=job.base_model_id) for each in live)


def _could_take(machine: Worker, job: FineTuningJob) -> bool:
    """Return whether the machine, with nothing else to do, could run the job, or its part of it."""
    if job.node_count > 1:
        return could_join(machine, gpus=job.gpus_per_node, base_model=job.base_model_id)
    has_model = machine.offer is None or read_offer(machine.offer).has_model(job.base_model_id)
    return has_model and machine.gpu_count >= job.gpus_per_node
