"""Queue and capacity of each pool in Prometheus' text format, also for what scales pools from outside, such as KEDA."""

from collections.abc import Callable

from django.db.models import Count, Min, Q

from apps.core.database.clock import db_now
from apps.finetuning.lifecycle import RUN_HOLDING_LEASE, NodeStatus, RunStatus
from apps.finetuning.models import CapacityNode, GpuPool, Run
from apps.serving.metrics import format_series


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

    def leased(pool: GpuPool) -> float:
        waiting, unfinished, _ = held.get(pool.pk, (0, 0, None))
        return unfinished - waiting

    def waited(pool: GpuPool) -> float:
        since = held.get(pool.pk, (0, 0, None))[2]
        return max((now - since).total_seconds(), 0.0) if since else 0.0

    figures: dict[str, tuple[str, Callable[[GpuPool], float]]] = {
        "queued_runs": ("Runs that wait for a worker.", lambda pool: held.get(pool.pk, (0,))[0]),
        "leased_runs": ("Runs that a worker has.", leased),
        "oldest_wait_seconds": ("How long the oldest queued run has waited.", waited),
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


def _wanted(pool: GpuPool) -> float:
    capacity = getattr(pool, "capacity", None)
    return capacity.wanted if capacity is not None and capacity.is_elastic else 0
