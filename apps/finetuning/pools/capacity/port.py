"""The port to an engine that has machines: request a node, list nodes, release one. Queueing stays with the engine."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol


class CapacityError(Exception):
    """The engine did not do it. The message is for the operator and holds no secret."""


@dataclass(frozen=True, kw_only=True)
class NodeRequest:
    """A node that is to run one worker. `name` is unique; `token` enrols once, in the node's own pool."""

    name: str
    pool: str
    token: str = field(repr=False)
    internal_url: str
    idle_seconds: int
    gpus: int = 1  # if the pool has GPUs
    is_spot: bool | None = None  # None: the pool does not mix both kinds, and its settings say which one it has


@dataclass(frozen=True, kw_only=True)
class ListedNode:
    """A node that the engine knows and that has not ended. `reason` says why it waits, if it does.

    `is_waiting`: it is in the engine's queue and has no machine yet.
    """

    external_id: str
    reason: str = ""
    is_waiting: bool = False


class Capacity(Protocol):
    """What each adapter offers. Every call ends within some seconds and raises CapacityError."""

    def request(self, node: NodeRequest) -> str:
        """Return the engine's id of the new node."""
        ...

    def list_nodes(self, *, prefix: str) -> dict[str, ListedNode]:
        """Return the nodes whose names begin with `prefix`, by name."""
        ...

    def release(self, *, external_ids: Collection[str]) -> None:
        """Stop the nodes; those that have ended are no error. Their workers have time for a checkpoint."""
        ...
