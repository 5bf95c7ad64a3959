"""How many nodes a pool needs. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Need = tuple[int, int]  # of a run: the GPUs of each node, and the number of nodes


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What an operator allows. Amounts are nano-USD for an hour; no budget means that only `maximum` limits.

    `on_demand` nodes are on demand, and further ones spot. None: all are alike and cost `node_nano`.
    """

    minimum: int
    maximum: int
    gpus_per_node: int
    node_nano: int = 0
    budget_nano: int | None = None
    on_demand: int | None = None
    spot_nano: int = 0

    @property
    def most(self) -> int:
        """Return the largest number of nodes that maximum and budget allow, if each spot node can be had."""
        base = self.maximum if self.on_demand is None else min(self.on_demand, self.maximum)
        if self.budget_nano is None:
            return self.maximum
        paid = _affordable(base, self.node_nano, self.budget_nano)
        if paid < base:
            return paid
        return base + _affordable(self.maximum - base, self.spot_nano, self.budget_nano - base * self.node_nano)


def wanted_nodes(*, waiting: Sequence[Need], busy: Sequence[int], limits: Limits) -> int:
    """Return the number of nodes: those with leases, those that waiting runs need beside them, within the limits.

    `waiting` are the runs that may start, `busy` the GPUs in use on each node with leases. A run that is larger than a
    node needs none, and neither does a group that the limits do not let be complete now. A node that works is never
    above the limits: it keeps its work.
    """
    left = free_gpus(busy, limits)
    for need in sorted(waiting, reverse=True):
        left = take(need, left, limits) or left
    return max(min(max(len(left), limits.minimum), limits.most), len(busy))


def free_gpus(busy: Sequence[int], limits: Limits) -> list[int]:
    """Return the free GPUs of each node with leases."""
    return [max(limits.gpus_per_node - used, 0) for used in busy]


def take(need: Need, left: Sequence[int], limits: Limits) -> list[int] | None:
    """Return what is left of the nodes, new ones included, once the run has its GPUs of as many nodes as it needs.

    `left` are the free GPUs of each node. None: the limits do not allow all these nodes.
    """
    gpus, count = need
    places = [index for index, free in enumerate(left) if free >= gpus][:count]
    missing = count - len(places)
    if gpus > limits.gpus_per_node or (missing and len(left) + missing > limits.most):
        return None
    rest = [free - gpus if index in places else free for index, free in enumerate(left)]
    return rest + [limits.gpus_per_node - gpus] * missing


def wanted_replicas(*, in_progress: int, per_replica: int, is_needed: bool, others: int) -> int:
    """Return how many replicas answer these requests at once, beside `others`; at least one of all if `is_needed`."""
    needed = max(math.ceil(in_progress / per_replica), int(is_needed))
    return max(needed - others, 0)


def kinds_of_further_nodes(
    count: int, *, alive: Sequence[bool], unfinished: Sequence[bool], limits: Limits, has_spot: bool
) -> list[bool]:
    """Return for each of at most `count` further nodes whether it is spot, as far as the budget pays for them.

    `alive` says the same of the nodes that stay, `unfinished` of all that still cost something. If spot nodes cannot
    be had now, on-demand nodes take their place.
    """
    on_demand, spent = alive.count(False), sum(_cost(is_spot, limits) for is_spot in unfinished)
    kinds: list[bool] = []
    for _ in range(count):
        is_spot = limits.on_demand is not None and has_spot and on_demand >= limits.on_demand
        spent += _cost(is_spot, limits)
        if limits.budget_nano is not None and spent > limits.budget_nano:
            break
        on_demand += not is_spot
        kinds.append(is_spot)
    return kinds


def _cost(is_spot: bool, limits: Limits) -> int:
    return limits.spot_nano if is_spot else limits.node_nano


def _affordable(count: int, nano: int, budget_nano: int) -> int:
    return min(count, budget_nano // nano) if nano else count
