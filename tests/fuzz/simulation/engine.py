"""An engine of an elastic pool: it starts machines late, loses them, and fails before or after it acts.

Of spot machines, it has none for a while.
"""

import random
from collections.abc import Collection
from dataclasses import dataclass

from apps.contracts.worker_api import EnrollRequest, GpuInfo
from apps.finetuning.models import Worker
from apps.finetuning.pools import operations
from apps.finetuning.pools.capacity.port import CapacityError, ListedNode, NodeRequest
from apps.finetuning.pools.operations import InvalidWorkerCredential
from tests.factories.finetuning import GIB
from tests.fuzz.simulation.machines import Machine
from tests.fuzz.simulation.replicas import SimulatedReplica

START_SECONDS, STOP_SECONDS = (5.0, 90.0), (0.0, 30.0)
NO_SPOT_SECONDS = 3_000.0


@dataclass
class Node:
    """A machine of the engine; it has a `machine` or a `replica` once its worker has enrolled."""

    request: NodeRequest
    external_id: str
    starts_at: float
    ends_at: float = float("inf")
    machine: Machine | None = None
    replica: SimulatedReplica | None = None


class SimulatedEngine:
    """A `Capacity` whose calls fail with the probability `faults`, before or after they act."""

    def __init__(self, seeded: random.Random, holders: dict[str, str]) -> None:
        self.random, self.holders = seeded, holders
        self.nodes: dict[str, Node] = {}
        self.faults = 0.0
        self.asked = 0  # requests in progress at the replicas
        self.now = 0.0
        self._requests = 0

    def request(self, node: NodeRequest) -> str:
        self._may_fail()
        assert node.name not in self.nodes, f"{node.name} was requested twice"
        self._requests += 1
        wait = self.random.uniform(*START_SECONDS)
        if node.is_spot and self.random.random() < 0.3:
            wait += NO_SPOT_SECONDS
        made = Node(node, f"{self._requests}", self.now + wait)
        self.nodes[node.name] = made
        self._may_fail()
        return made.external_id

    def list_nodes(self, *, prefix: str) -> dict[str, ListedNode]:
        self._may_fail()
        return {
            name: ListedNode(external_id=node.external_id, is_waiting=self.now < node.starts_at)
            for name, node in self.nodes.items()
            if name.startswith(prefix)
        }

    def release(self, *, external_ids: Collection[str]) -> None:
        self._may_fail()
        for node in self.nodes.values():
            if node.external_id in external_ids:
                node.ends_at = min(node.ends_at, self.now + self.random.uniform(*STOP_SECONDS))
        self._may_fail()

    def live(self, now: float) -> None:
        """Start and end machines, and let each do what is due."""
        self.now = now
        for name, node in list(self.nodes.items()):
            if now >= node.ends_at or self._is_over(node, now):
                del self.nodes[name]
            elif node.machine is not None:
                node.machine.live(now)
            elif node.replica is not None:
                node.replica.live(now, self.asked)
            elif now >= node.starts_at and not self._enrol(node):
                del self.nodes[name]  # its worker has no business here, and ends

    def lose(self) -> None:
        """Take a machine away, as a provider does with a spot machine."""
        if self.nodes:
            del self.nodes[self.random.choice(list(self.nodes))]

    @property
    def machines(self) -> list[Machine]:
        return [node.machine for node in self.nodes.values() if node.machine is not None]

    @property
    def replicas(self) -> list[SimulatedReplica]:
        return [node.replica for node in self.nodes.values() if node.replica is not None]

    def _enrol(self, node: Node) -> bool:
        gpu = GpuInfo(key="cpu", name="one", memory_bytes=8 * GIB)
        kind, token = node.request.kind, node.request.token
        request = EnrollRequest(token=token, kind=kind, hostname=node.request.name, gpus=(gpu,))
        try:
            worker, _, _ = operations.enroll(request=request)
        except InvalidWorkerCredential:
            return False
        worker = Worker.objects.get(pk=worker.pk)
        if node.request.is_replica:
            node.replica = SimulatedReplica(worker, self.random, born_at=self.now)
            return True
        node.machine = Machine(worker, 100 + int(node.external_id), self.random, self.holders, born_at=self.now)
        return True

    @staticmethod
    def _is_over(node: Node, now: float) -> bool:
        """Return whether the worker ended by itself: idle, or refused."""
        if node.replica is not None:
            return node.replica.is_over
        machine = node.machine
        if machine is None:
            return False
        return machine.is_refused or now - machine.busy_at > node.request.idle_seconds

    def _may_fail(self) -> None:
        if self.random.random() < self.faults:
            raise CapacityError("the engine did not answer")
