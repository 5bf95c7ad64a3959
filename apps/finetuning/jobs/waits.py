"""Why a queued job waits, and when it will start: computed when it is asked for, and stored nowhere."""

import datetime
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate

from django.utils.translation import gettext, ngettext

from apps.accounts.models import Organization, is_allowed
from apps.billing.queries import stop_reasons
from apps.core.database.tenancy import system
from apps.finetuning.lifecycle import JobStatus, RunStatus
from apps.finetuning.models import FineTuningJob, GpuPool, Run, Worker
from apps.finetuning.quotes.pool_facts import live_worker_filter
from apps.finetuning.runs.queue.machines import (
    EARLIEST,
    LATEST,
    Machine,
    first_free,
    held_on,
    machines_of,
    seconds_left,
)
from apps.finetuning.runs.queue.queue_order import queue_order, queue_positions
from apps.finetuning.runs.queue.startable import held_back, startable
from apps.finetuning.usage.growth import Growth, growth_of
from apps.finetuning.usage.occupancy import leased_gpus
from apps.finetuning.usage.quotas import ReachedLimit, limits_of_waiting

_LOOKED_AT = 200  # runs before it in the queue; behind more, the time of its start is unknown


class WaitCause(StrEnum):
    """What a queued job waits for."""

    CAPACITY = "capacity"  # a machine, or GPUs that others use
    GROUP = "group"  # several machines at once, of which too few are online or free
    SHARE = "share"  # the turn of organizations that used less for their weight
    QUOTA = "quota"  # a limit of its own organization
    BUDGET = "budget"  # its organization owes, is suspended, or has used up a budget that pauses jobs
    REGION = "region"  # a machine in a region that its organization may use


@dataclass(frozen=True, kw_only=True)
class Wait:
    """`position` is 1 for the run that starts next. `starts_after` are the least and the most seconds expected.

    Both are None if unknown: for jobs that may not start now, or that no machine could take.
    """

    cause: WaitCause
    reason: str
    position: int | None = None
    starts_after: tuple[float, float] | None = None


@dataclass(frozen=True)
class _Floor:
    """A pool's live machines, the jobs that hold them, and the places of queued runs: `order` has those that may start.

    Those that it was asked about are among them even if no claim takes them yet.
    """

    pool: GpuPool
    workers: Sequence[Worker]
    held: Sequence[tuple[str, FineTuningJob]]
    order: Sequence[Run]
    positions: Mapping[str, int]
    now: datetime.datetime
    growth: Growth
    before: Sequence[Run] = ()  # runs of the pool from which it borrows that may start
    lent: Sequence[tuple[str, FineTuningJob]] = ()  # to pools that borrow from it; these come back

    def further(self) -> list[Machine]:
        """Return the machines that an elastic pool is starting or may start."""
        return [Machine(self.growth.gpus, joins=True, ready_after=seconds) for seconds in self.growth.ready_after]

    def starts(self) -> dict[str, tuple[float, float]]:
        """Return the least and the most seconds until each run of the order starts, by the estimates before it."""
        least, most = (self._starts(of) for of in (EARLIEST, LATEST))
        return {pk: (least[pk], max(least[pk], most[pk])) for pk in least}

    def is_free(self, run: Run) -> bool:
        """Return whether the run could start now although what is lent is not back yet."""
        return self._starts(EARLIEST, self.lent).get(run.pk) == 0.0

    def _starts(self, of: str, lent: Sequence[tuple[str, FineTuningJob]] = ()) -> dict[str, float]:
        live = machines_of(self.workers, (*self.held, *lent), of=of)
        machines, starts = [*live.values(), *self.further()], {}
        for run in (*self.before, *self.order):
            if taken := first_free(run.job, machines):
                starts[run.pk] = max(taken[-1].start_of(run.job), held_back(run, now=self.now))
            for machine in taken:
                machine.take(run.job.gpus_per_node, seconds_left(run.job, of))
        return starts


def explain_wait(*, job: FineTuningJob, now: datetime.datetime) -> Wait | None:
    """Return why the job waits and when it will start; None unless it is queued."""
    return explain_waits(jobs=[job], now=now).get(job.pk)


def explain_waits(*, jobs: Sequence[FineTuningJob], now: datetime.datetime) -> dict[str, Wait]:
    """Return why each queued job waits and when it will start, by its id; others have no entry.

    The statements are as many for one job as for all of one organization's jobs in the same pools.
    """
    queued = [job.pk for job in jobs if job.status == JobStatus.QUEUED]
    if not queued:
        return {}
    waits: dict[str, Wait] = {}
    with system():  # the queue is shared: other tenants' runs are counted, and never shown
        runs = list(Run.objects.filter(job__in=queued, status=RunStatus.QUEUED).select_related("job", "pool__capacity"))
        owners = Organization.objects.in_bulk({run.organization_id for run in runs})
        waits |= _stopped(runs, owners)
        limited = {pk: each.regions for pk, each in owners.items() if each.regions is not None}
        waits |= {id: wait for id, wait in _elsewhere(runs, limited).items() if id not in waits}
        admitted = [run for run in runs if run.job_id not in waits]
        for id, (limit, reason) in limits_of_waiting(jobs=[run.job for run in admitted], now=now).items():
            cause = WaitCause.BUDGET if limit is ReachedLimit.BUDGET else WaitCause.QUOTA
            waits[id] = Wait(cause=cause, reason=reason)
        pools: dict[GpuPool, list[Run]] = {}
        for run in admitted:
            if run.job_id not in waits:
                pools.setdefault(run.pool, []).append(run)
        for pool, waiting in pools.items():
            floor = _look_at(pool, waiting, now)
            starts, newest = floor.starts(), _newest_before(floor.order)
            for run in waiting:
                waits[run.job_id] = _wait_of(run, floor, starts.get(run.pk), newest.get(run.pk, run.created_at))
        waits |= _held_in_regions(admitted, waits, limited, now)
    return waits


def _elsewhere(runs: Sequence[Run], limited: Mapping[str, list[str]]) -> dict[str, Wait]:
    """Return the waits of runs in pools that their organizations may not use any more, by their jobs' ids."""
    waits = {}
    for run in runs:
        regions = limited.get(run.organization_id)
        if is_allowed(regions, run.pool.region_id):
            continue
        text = gettext("%(pool)s is in %(region)s, and only pools in %(regions)s may run it. Move it to one of these.")
        known = {"pool": run.pool.name, "region": run.pool.region_id, "regions": ", ".join(regions or ())}
        waits[run.job_id] = Wait(cause=WaitCause.REGION, reason=text % known)
    return waits


def _held_in_regions(
    runs: Sequence[Run], waits: Mapping[str, Wait], limited: Mapping[str, list[str]], now: datetime.datetime
) -> dict[str, Wait]:
    """Return the waits for a machine that would be none if the organization might use pools in other regions."""
    held = [
        run
        for run in runs
        if run.organization_id in limited
        and (wait := waits[run.job_id]).cause in (WaitCause.CAPACITY, WaitCause.GROUP)
        and wait.starts_after != (0.0, 0.0)
    ]
    free = _free_machines(now) if held else []
    found = {}
    for run in held:
        regions, job = limited[run.organization_id], run.job
        able = Counter(
            worker.pool for worker, gpus in free
            if gpus >= job.gpus_per_node and (worker.offer is not None or job.node_count == 1)
        )  # fmt: skip
        ready = [pool for pool, machines in able.items() if machines >= job.node_count]
        if ready and not any(is_allowed(regions, pool.region_id) for pool in ready):
            text = gettext("Only pools in %(regions)s may run it, and none has enough free GPUs.")
            reason = text % {"regions": ", ".join(regions)}
            found[run.job_id] = replace(waits[run.job_id], cause=WaitCause.REGION, reason=reason)
    return found


def _free_machines(now: datetime.datetime) -> list[tuple[Worker, int]]:
    """Return the live workers of open pools, and how many GPUs of each are free."""
    live = list(Worker.objects.filter(live_worker_filter(now), pool__is_open=True).select_related("pool"))
    leased = leased_gpus(workers={worker.pk for worker in live})
    return [(worker, worker.gpu_count - leased.get(worker.pk, 0)) for worker in live]


def _stopped(runs: Sequence[Run], owners: Mapping[str, Organization]) -> dict[str, Wait]:
    """Return the waits of runs whose organization may not spend, by their jobs' ids."""
    stopped = stop_reasons(organizations=set(owners))
    suspended = [pk for pk, owner in owners.items() if owner.suspended_at is not None]
    stopped |= dict.fromkeys(suspended, "Your organization is suspended.")
    return {
        run.job_id: Wait(cause=WaitCause.BUDGET, reason=stopped[run.organization_id])
        for run in runs
        if run.organization_id in stopped
    }


def _look_at(pool: GpuPool, waiting: Collection[Run], now: datetime.datetime) -> _Floor:
    live_workers = Worker.objects.filter(live_worker_filter(now), pool=pool.machines_id)
    workers = list(live_workers.only("gpus", "offer", "pool"))
    positions = queue_positions(pool=pool, runs=waiting, now=now)
    last = max((place for place in positions.values() if place <= _LOOKED_AT), default=0)
    order = queue_order(pool=pool, now=now, limit=last) if last else []
    order = startable(order, now=now, known={run.pk for run in waiting})
    positions |= {run.pk: place for place, run in enumerate(order, start=1)}
    before = _startable(pool.machines, workers, now) if pool.borrows_from_id else []
    held = held_on(workers)
    lent = [each for each in held if not pool.borrows_from_id and each[1].pool_id != pool.pk]
    held = [each for each in held if each not in lent]
    return _Floor(pool, workers, held, order, positions, now, growth_of(pool=pool, now=now), before, lent)


def _startable(pool: GpuPool, workers: Sequence[Worker], now: datetime.datetime) -> list[Run]:
    """Return the pool's first queued runs that no limit holds back and that its machines could take."""
    machines = [Machine.of(worker) for worker in workers]
    runs = startable(queue_order(pool=pool, now=now, limit=_LOOKED_AT), now=now)
    return [run for run in runs if first_free(run.job, machines)]


def _newest_before(order: Sequence[Run]) -> dict[str, datetime.datetime]:
    """Return when the newest of the runs up to each one came."""
    newest = accumulate((run.created_at for run in order), max)
    return {run.pk: moment for run, moment in zip(order, newest, strict=True)}


def _wait_of(
    run: Run, floor: _Floor, starts_after: tuple[float, float] | None, newest_before: datetime.datetime
) -> Wait:
    job, pool, position = run.job, floor.pool.name, floor.positions.get(run.pk)
    able = sum(Machine.of(worker).can_take(job) for worker in floor.workers)
    if able < job.node_count and starts_after is None:
        return Wait(cause=_of_machines(job), reason=_too_few(job, pool, able), position=position)
    delay = held_back(run, now=floor.now)
    if able < job.node_count:
        text = ngettext("%(pool)s starts a machine for it.", "%(pool)s starts machines for it.", job.node_count)
        cause, reason = _of_machines(job), text % {"pool": pool}
    elif delay and starts_after and starts_after[0] <= delay:
        minutes = math.ceil(delay / 60)
        text = ngettext("It is tried again within a minute.", "It is tried again in %(minutes)d minutes.", minutes)
        cause, reason = _of_machines(job), text % {"minutes": minutes}
    elif newest_before > run.created_at:
        text = gettext("Organizations that used less of %(pool)s for their share go first.")
        cause, reason = WaitCause.SHARE, text % {"pool": pool}
    elif floor.before:
        text = gettext("Jobs of %(pool)s go first: this one runs on machines that they do not need.")
        cause, reason = WaitCause.CAPACITY, text % {"pool": floor.pool.machines.name}
    elif starts_after == (0.0, 0.0) and floor.lent and not floor.is_free(run):
        text = gettext("%(pool)s takes a borrowed machine back for it within minutes.")
        return Wait(cause=_of_machines(job), reason=text % {"pool": pool}, position=position)
    elif starts_after == (0.0, 0.0):
        text = gettext("A machine of %(pool)s is free and takes it within seconds.")
        cause, reason = WaitCause.CAPACITY, text % {"pool": pool}
    else:
        text = ngettext(
            "Waiting for a free GPU of %(pool)s.",
            "Waiting for %(gpu_count)d free GPUs of %(pool)s.",
            job.gpu_count,
        )
        cause, reason = _of_machines(job), text % {"pool": pool, "gpu_count": job.gpu_count}
    return Wait(cause=cause, reason=reason, position=position, starts_after=starts_after)


def _of_machines(job: FineTuningJob) -> WaitCause:
    return WaitCause.CAPACITY if job.node_count == 1 else WaitCause.GROUP


def _too_few(job: FineTuningJob, pool: str, online: int) -> str:
    values = {"pool": pool, "nodes": job.node_count, "gpus": job.gpus_per_node, "online": online}
    if job.node_count == 1:
        text = ngettext(
            "No machine of %(pool)s is online now. The job starts when one is.",
            "No machine with %(gpus)d GPUs of %(pool)s is online now. The job starts when one is.",
            job.gpus_per_node,
        )
    else:
        text = ngettext(
            "The job needs %(nodes)d machines that can reach each other. %(pool)s has %(online)d now. "
            "The job starts when all are online.",
            "The job needs %(nodes)d machines with %(gpus)d GPUs that can reach each other. %(pool)s has %(online)d "
            "now. The job starts when all are online.",
            job.gpus_per_node,
        )
    return text % values
