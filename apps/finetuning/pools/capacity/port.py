"""The port to an engine that has machines: request a node, list nodes, release one. Queueing stays with the engine."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol


class CapacityError(Exception):
    """The engine did not do it. The message is for the operator and holds no secret."""


@dataclass(frozen=True, kw_only=True)
class NodeRequest:
    """A node that is to run one worker: a trainer that ends when it was idle, or a replica that runs until its release.

    `name` is unique; `token` enrols once, in the node's own pool.
    """

    name: str
    pool: str
    token: str = field(repr=False)
    internal_url: str
    idle_seconds: int
    is_replica: bool = False
    gpus: int = 1  # if the pool has GPUs
    is_spot: bool | None = None  # None: the pool does not mix both kinds, and its settings say which one it has

    @property
    def kind(self) -> str:
        """Return the kind of its worker."""
        return "replica" if self.is_replica else "trainer"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Return the arguments of Python that run its worker."""
        if self.is_replica:
            return "-m", "gpu_workers.serving.node"
        return "-m", "gpu_workers.trainer.polling", "--exit-when-idle", str(self.idle_seconds)

    @property
    def variables(self) -> dict[str, str]:
        """Return its worker's environment, apart from what depends on the engine. A replica uses all GPUs at once."""
        variables = {"ANNEAL_INTERNAL_URL": self.internal_url, "ANNEAL_POOL": self.pool}
        if self.is_replica and self.gpus > 1:
            variables["ANNEAL_ENGINE_EXTRA_ARGUMENTS"] = f"--tensor-parallel-size {self.gpus}"
        return variables


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
