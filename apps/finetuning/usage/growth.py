"""Machines that an elastic pool is starting, or may still start, and how long that takes."""

import datetime
from dataclasses import dataclass
from statistics import median

from apps.finetuning.lifecycle import NODE_ENDED, NodeStatus
from apps.finetuning.models import CapacityNode, GpuPool, PoolCapacity

START_SECONDS = 300.0  # from a node's request to its enrolment, until some were measured
_MEASURED = 20  # newest nodes
_LEAST_SECONDS = 30.0  # until a late node enrols


@dataclass(frozen=True, kw_only=True)
class Growth:
    """`gpus` of each further machine, and the seconds until each can take work, the first one at the front."""

    gpus: int = 0
    ready_after: tuple[float, ...] = ()


NO_GROWTH = Growth()


def growth_of(*, pool: GpuPool, now: datetime.datetime) -> Growth:
    """Return the machines that the pool can have beside those that have enrolled.

    There are none while its engine fails or has no machine free, or while starts pause: then it is unknown when one
    comes.
    """
    capacity = getattr(pool, "capacity", None)
    if capacity is None or not capacity.is_elastic:
        return NO_GROWTH
    if capacity.failures or (capacity.retry_at is not None and capacity.retry_at > now):
        return NO_GROWTH
    of_pool = CapacityNode.objects.filter(pool=pool, fleet=None)
    nodes = list(of_pool.exclude(status__in=NODE_ENDED))
    coming = [node for node in nodes if node.worker_id is None and node.status != NodeStatus.DRAINING]
    if any(node.reason for node in coming):
        return NO_GROWTH
    enrolled = of_pool.exclude(worker=None).order_by("-requested_at").values_list("requested_at", "worker__created_at")
    taken = [(since - requested).total_seconds() for requested, since in enrolled[:_MEASURED]]
    seconds = max(median(taken), 0.0) if taken else START_SECONDS
    left = [max(seconds - (now - node.requested_at).total_seconds(), _LEAST_SECONDS) for node in coming]
    further = [seconds] * _count_further(capacity, len(nodes))
    return Growth(gpus=capacity.gpus_per_node, ready_after=(*sorted(left), *further))


def _count_further(capacity: PoolCapacity, count: int) -> int:
    """Return how many nodes the maximum and the budget allow beside so many; replicas may leave less of the budget."""
    most = capacity.maximum
    if capacity.budget_nano_per_hour is not None and capacity.node_nano_per_hour:
        most = min(most, capacity.budget_nano_per_hour // capacity.node_nano_per_hour)
    return max(most - count, 0)
