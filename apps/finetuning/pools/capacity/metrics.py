"""Queue and capacity of each pool in Prometheus' text format, also for what scales pools from outside, such as KEDA."""

import datetime
from collections.abc import Callable, Sequence

from django.db.models import Count, Min, Q

from apps.core.database.clock import db_now
from apps.finetuning.lifecycle import RUN_HOLDING_LEASE, NodeStatus, RunStatus
from apps.finetuning.models import CapacityNode, GpuPool, Run, WorkerKind
from apps.finetuning.pools.capacity.demand import Limits, wanted_nodes
from apps.finetuning.pools.capacity.needs import needs_of
from apps.finetuning.runs.queue.queue_order import queue_order
from apps.finetuning.runs.queue.startable import startable
from apps.finetuning.usage.occupancy import leased_gpus
from apps.serving.metrics import format_series

_LOOKED_AT = 200  # queued runs of a pool
_MOST_MACHINES = 64  # that a static pool is said to need


def render_pool_metrics() -> str:
    """Return the series of all pools, static ones included."""
    pools = list(GpuPool.objects.select_related("capacity").order_by("name"))
    runs = Run.objects.filter(status__in=[RunStatus.QUEUED, *RUN_HOLDING_LEASE]).order_by()
    is_queued = Q(status=RunStatus.QUEUED)
    counted = runs.values_list("pool_id").annotate(
        queued=Count("pk", filter=is_queued),
        unfinished=Count("pk"),
        oldest_at=Min("created_at", filter=is_queued),
    )
    held = {pool: rest for pool, *rest in counted}
    running = CapacityNode.objects.filter(status=NodeStatus.RUNNING, fleet=None).order_by()
    nodes = dict(running.values_list("pool_id").annotate(Count("pk")))
    now = db_now()
    startable_of = {pool.pk: _look_at(pool, now) for pool in pools if held.get(pool.pk, (0,))[0]}

    def startable_in(pool: GpuPool) -> Sequence[Run]:
        return startable_of.get(pool.pk, ())

    def leased(pool: GpuPool) -> float:
        waiting, unfinished, _ = held.get(pool.pk, (0, 0, None))
        return unfinished - waiting

    def waited(pool: GpuPool) -> float:
        since = held.get(pool.pk, (0, 0, None))[2]
        return max((now - since).total_seconds(), 0.0) if since else 0.0

    figures: dict[str, tuple[str, Callable[[GpuPool], float]]] = {
        "queued_runs": ("Runs that wait for a worker.", lambda pool: held.get(pool.pk, (0,))[0]),
        "startable_runs": (
            f"Queued runs that no limit holds back, of the first {_LOOKED_AT}.",
            lambda pool: len(startable_in(pool)),
        ),
        "leased_runs": ("Runs that a worker has.", leased),
        "oldest_wait_seconds": ("How long the oldest queued run has waited.", waited),
        "oldest_startable_wait_seconds": (
            "How long the oldest of the runs has waited that no limit holds back.",
            lambda pool: max(((now - run.created_at).total_seconds() for run in startable_in(pool)), default=0.0),
        ),
        "needed_machines": (
            "Machines that the queue needs, with those that work; 0 for a pool that borrows.",
            lambda pool: _needed(pool, startable_in(pool), now),
        ),
        "wanted_nodes": ("Nodes that the queue needs within the limits; 0 for a static pool.", _wanted),
        "running_nodes": ("Requested nodes that train and have enrolled.", lambda pool: nodes.get(pool.pk, 0)),
        "borrows": ("1 for a pool that borrows the machines of another one.", lambda pool: pool.machines_id != pool.pk),
    }
    return "".join(
        format_series(
            f"anneal_pool_{name}", "gauge", words, [({"pool": pool.name}, float(count(pool))) for pool in pools]
        )
        for name, (words, count) in figures.items()
    )


def _look_at(pool: GpuPool, now: datetime.datetime) -> list[Run]:
    """Return the queued runs of the pool that only machines are missing for."""
    return startable(queue_order(pool=pool, now=now, limit=_LOOKED_AT, depth=_LOOKED_AT), now=now)


def _needed(pool: GpuPool, runs: Sequence[Run], now: datetime.datetime) -> float:
    """Return what an elastic pool wants, and for a static one as many machines as large as its largest."""
    if pool.borrows_from_id:
        return 0
    if _is_elastic(pool):
        return _wanted(pool)
    workers = list(pool.workers.filter(kind=WorkerKind.TRAINER, revoked_at=None).only("gpus"))
    gpus = max((worker.gpu_count for worker in workers), default=1)
    limits = Limits(minimum=0, maximum=_MOST_MACHINES, gpus_per_node=gpus)
    busy = list(leased_gpus(workers=[worker.pk for worker in workers]).values())
    waiting = needs_of(runs, busy=busy, limits=limits, now=now) if runs else ()
    return wanted_nodes(waiting=waiting, busy=busy, limits=limits)


def _is_elastic(pool: GpuPool) -> bool:
    capacity = getattr(pool, "capacity", None)
    return capacity is not None and capacity.is_elastic


def _wanted(pool: GpuPool) -> float:
    return pool.capacity.wanted if _is_elastic(pool) else 0
