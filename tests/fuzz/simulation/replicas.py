"""Replicas that an elastic pool starts: they load a model, report, answer, and fail in every way they can."""

import random

from apps.contracts.serving import EngineLoad, ObservedState
from apps.finetuning.models import CapacityNode, Worker
from apps.serving.models import Replica
from apps.serving.operations import accept_address, record_observed, register_replica

REPORT_SECONDS = 5.0
_LOADING_SECONDS = (5.0, 90.0)


class SimulatedReplica:
    """One engine and its agent, on a node that has just enrolled."""

    def __init__(self, worker: Worker, seeded: random.Random, *, born_at: float) -> None:
        fleet = CapacityNode.objects.select_related("fleet__base_model").get(worker=worker).fleet
        assert fleet is not None
        self.random, self.worker, self.fleet = seeded, worker, fleet
        self.replica, _ = register_replica(
            worker_id=worker.pk, base_model=fleet.base_model, url=f"http://{worker.pk[-12:].lower()}:8003"
        )
        accept_address(replica=self.replica, by="user_operator")
        self.ready_at = born_at + seeded.uniform(*_LOADING_SECONDS)
        self.silent_until = 0.0
        self._reported_at = born_at

    @property
    def is_over(self) -> bool:
        """Return whether its credential is refused, at which its agent ends."""
        return Worker.objects.get(pk=self.worker.pk).revoked_at is not None

    def live(self, now: float, asked: int) -> None:
        """Report; `asked` requests are in progress on all ready replicas of its model together."""
        if now < self.silent_until or now - self._reported_at < REPORT_SECONDS:
            return
        self._reported_at = now
        ready = Replica.objects.filter(base_model=self.fleet.base_model, is_ready=True, draining_at=None).count()
        is_ready, is_draining = now >= self.ready_at, self._stored().draining_at is not None
        running = -(-asked // max(ready, 1)) if is_ready and not is_draining else 0
        observed = ObservedState(
            replica_id=self.replica.pk, generation=1, engine_generation="1", is_ready=is_ready, adapters=(),
            load=EngineLoad(running=running),
        )  # fmt: skip
        record_observed(replica=self._stored(), observed=observed)

    def fail(self, now: float) -> None:
        """Fall silent, stop answering, or answer nothing for hours."""
        if self.random.random() < 0.5:
            self.silent_until = now + self.random.uniform(20, 900)
        else:
            self.ready_at = now + self.random.choice((60.0, 10_000.0))

    def recover(self, now: float) -> None:
        """End every fault."""
        self.silent_until, self.ready_at = 0.0, min(self.ready_at, now)

    def _stored(self) -> Replica:
        return Replica.objects.get(pk=self.replica.pk)
