"""Pools that borrow the machines of another pool, for runs of a lower class.

A pool that borrows has a queue and a price, and no machine. Machines take its runs only while no run of their own pool
could start. When one waits, the newest borrowed runs are asked back: they save a checkpoint and queue again, as on a
spot machine that is taken away.
"""

import datetime
from collections import defaultdict
from collections.abc import Iterator

from django.db import transaction

from apps.accounts.shares import list_sharing
from apps.finetuning import events
from apps.finetuning.lifecycle import RUN_HOLDING_LEASE
from apps.finetuning.models import FineTuningJob, GpuPool, Run, RunMember, Worker
from apps.finetuning.quotes.pool_facts import live_worker_filter
from apps.finetuning.runs.queue.queue_order import queue_order
from apps.finetuning.usage.occupancy import leased_gpus
from apps.finetuning.usage.offers import could_join
from apps.finetuning.usage.quotas import reason_to_wait

_PATIENCE = datetime.timedelta(seconds=15)  # of a waiting run: a free machine takes it within seconds
_LOOKED_AT = 20  # runs of the pool that lends


def list_borrowers(*, pool: GpuPool) -> list[GpuPool]:
    """Return the pools that borrow from this one, by name."""
    return list(GpuPool.objects.filter(borrows_from=pool).order_by("name"))


def may_lend(*, pool: GpuPool, now: datetime.datetime) -> bool:
    """Return whether no queued run of the pool could start on its machines."""
    return next(_startable(pool, _machines_of(pool, now), now), None) is None


def ask_machines_back(*, now: datetime.datetime) -> int:
    """Ask for lent machines for which runs of the pools that lend wait; return the number of runs asked.

    For each pool they are those of one waiting run. The next follow when these machines are back.
    """
    lends = GpuPool.objects.filter(borrowers__runs__status__in=RUN_HOLDING_LEASE).distinct()
    return sum(_ask_back(pool, now) for pool in lends.order_by("pk"))


def _ask_back(pool: GpuPool, now: datetime.datetime) -> int:
    machines = _machines_of(pool, now)
    waiting = next((run for run in _startable(pool, machines, now) if now - run.created_at >= _PATIENCE), None)
    lent = list(_lent(pool))
    if waiting is None or any(run.return_requested_at for run in lent):
        return 0
    asked = _choose(waiting.job, lent, [each for each in machines if _could_take(each, waiting.job)])
    return sum(_ask_run(run, pool, now) for run in asked)


def _choose(job: FineTuningJob, lent: list[Run], machines: list[Worker]) -> list[Run]:
    """Return the runs to ask, so that enough machines have the GPUs that the job needs; none if that does not help.

    Those of the machines on which the fewest GPUs are asked back, and on each the newest ones.
    """
    taken = leased_gpus(workers={each.pk for each in machines})
    on_machine = _runs_by_machine(lent)
    plans: list[tuple[int, str, list[Run]]] = []
    for machine in machines:
        free, asked = machine.gpu_count - taken.get(machine.pk, 0), list[Run]()
        for run in on_machine[machine.pk]:
            if free >= job.gpus_per_node:
                break
            asked.append(run)
            free += run.job.gpus_per_node
        if free >= job.gpus_per_node:
            plans.append((sum(run.job.gpus_per_node for run in asked), machine.pk, asked))
    if len(plans) < job.node_count:
        return []
    plans.sort(key=lambda plan: plan[:2])
    return list({run.pk: run for _, _, asked in plans[: job.node_count] for run in asked}.values())


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


def _lent(pool: GpuPool) -> Iterator[Run]:
    runs = Run.objects.filter(pool__borrows_from=pool, status__in=RUN_HOLDING_LEASE)
    yield from runs.select_related("job").order_by("pk")


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


def _startable(pool: GpuPool, machines: list[Worker], now: datetime.datetime) -> Iterator[Run]:
    """Yield queued runs of the pool that its machines could take and whose organizations may start them, in order."""
    runs = queue_order(pool=pool, now=now, limit=_LOOKED_AT)
    holders = list_sharing(organizations={run.organization_id for run in runs})
    for run in runs:
        job, holder = run.job, holders[run.organization_id]
        able = sum(_could_take(each, job) for each in machines)
        if able < job.node_count or (run.retry_at is not None and run.retry_at > now):
            continue
        if not reason_to_wait(job=job, holder=holder, now=now, planned=[]):
            yield run


def _could_take(machine: Worker, job: FineTuningJob) -> bool:
    """Return whether the machine, with nothing else to do, could run the job, or its part of it."""
    if job.node_count > 1:
        return could_join(machine, gpus=job.gpus_per_node, base_model=job.base_model_id)
    return machine.gpu_count >= job.gpus_per_node


def _machines_of(pool: GpuPool, now: datetime.datetime) -> list[Worker]:
    """Return the live machines of the pool."""
    return list(Worker.objects.filter(live_worker_filter(now), pool=pool).order_by("pk"))
