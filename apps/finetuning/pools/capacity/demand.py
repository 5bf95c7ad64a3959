"""How many nodes a pool needs. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What an operator allows. Amounts are nano-USD for an hour; no budget means that only `maximum` limits."""

    minimum: int
    maximum: int
    gpus_per_node: int
    node_nano: int = 0
    budget_nano: int | None = None

    @property
    def most(self) -> int:
        """Return the largest number of nodes that maximum and budget allow."""
        if self.budget_nano is None or not self.node_nano:
            return self.maximum
        return min(self.maximum, self.budget_nano // self.node_nano)


def wanted_nodes(*, waiting: Sequence[int], busy: Sequence[int], limits: Limits) -> int:
    """Return the number of nodes: those with leases, those that waiting runs need beside them, within the limits.

    `waiting` are the GPUs of each run that may start, `busy` the GPUs in use on each node with leases. A run that is
    larger than a node needs none. A node that works is never above the limits: it keeps its work.
    """
    free = [max(limits.gpus_per_node - used, 0) for used in busy]
    for need in sorted(waiting, reverse=True):
        if need > limits.gpus_per_node:
            continue
        place = next((index for index, gpus in enumerate(free) if gpus >= need), None)
        if place is None:
            free.append(limits.gpus_per_node - need)
        else:
            free[place] -= need
    return max(min(max(len(free), limits.minimum), limits.most), len(busy))
