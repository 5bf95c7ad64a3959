"""A fair choice of the replica for a request, and of the waiting request that gets a free place.

Each replica has a fixed number of places. While places are free, the least busy replica answers. When all are full,
requests wait in a queue for each tenant, and a freed place goes to the waiting tenant with the fewest requests on that
replica. The last places are kept for tenants with few requests there, so that one tenant's burst does not make the next
tenant wait for a whole answer. Each gateway process counts its places separately.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from apps.core.errors import RateLimited, Unavailable

MAX_WAITING = 256  # per tenant
MAX_WAIT_SECONDS = 60.0
_KEPT_SHARE = 8  # one place in this many


@dataclass(slots=True)
class _Replica:
    """The requests in progress on one replica, by tenant."""

    places: int
    taken: int = 0
    by_tenant: Counter[str] = field(default_factory=Counter)

    def has_place_for(self, tenant: str) -> bool:
        kept = max(1, self.places // _KEPT_SHARE) if self.places > 1 else 0
        free = self.places - self.taken
        return free > kept or (free > 0 and self.by_tenant[tenant] < kept)

    def take(self, tenant: str) -> None:
        self.taken += 1
        self.by_tenant[tenant] += 1

    def give_back(self, tenant: str) -> None:
        self.taken -= 1
        self.by_tenant[tenant] -= 1
        if not self.by_tenant[tenant]:
            del self.by_tenant[tenant]


@dataclass(slots=True)
class _Waiting:
    replica_ids: Collection[str]
    given: "asyncio.Future[str]"


class FairQueue:
    """Gives out the replicas' places. Use inside one event loop."""

    def __init__(self, *, places: int) -> None:
        self._places = places
        self._replicas: dict[str, _Replica] = {}
        self._queues: dict[str, deque[_Waiting]] = {}  # the tenant served longest ago comes first

    def count_waiting(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def count_open(self, replica_id: str) -> int:
        return self._of(replica_id).taken

    async def take(self, tenant: str, replica_ids: Collection[str]) -> str:
        """Return the replica on which the tenant now has a place. Raises RateLimited, Unavailable."""
        return self.take_free(tenant, replica_ids) or await self._wait(tenant, replica_ids)

    def take_free(self, tenant: str, replica_ids: Collection[str]) -> str | None:
        """Return the replica on which the tenant now has a place; None if all are full."""
        # These places belong to no waiting request, because a freed place is given away at once.
        free = [one for one in replica_ids if self._of(one).has_place_for(tenant)]
        if not free:
            return None
        chosen = free[0] if len(free) == 1 else min(free, key=self.count_open)
        self._of(chosen).take(tenant)
        return chosen

    def take_spare(self, tenant: str, replica_ids: Collection[str]) -> str:
        """Return the replica on which a request of a batch now has a place: one that is more than half free.

        Raises Unavailable if there is none, or while other requests wait for each of them.
        """
        awaited = {each for queue in self._queues.values() for waiting in queue for each in waiting.replica_ids}
        spare = [one for one in replica_ids if one not in awaited and 2 * self._of(one).taken < self._places]
        chosen = self.take_free(tenant, spare)
        if chosen is None:
            raise Unavailable("All places are used or kept for live requests.", retry_after_seconds=2)
        return chosen

    def require_spare(self, tenant: str, replica_ids: Collection[str]) -> None:
        """Raise Unavailable unless a request of a batch would get a place now."""
        self.give_back(tenant, self.take_spare(tenant, replica_ids))

    async def _wait(self, tenant: str, replica_ids: Collection[str]) -> str:
        queue = self._queues.setdefault(tenant, deque())
        if len(queue) >= MAX_WAITING:
            raise RateLimited(
                f"{MAX_WAITING} requests of your organization already wait for a free replica. Send fewer at once.",
                retry_after_seconds=2,
            )
        waiting = _Waiting(replica_ids, asyncio.get_running_loop().create_future())
        queue.append(waiting)
        try:
            async with asyncio.timeout(MAX_WAIT_SECONDS):
                return await waiting.given
        except BaseException as error:
            self._leave(tenant, waiting)
            if isinstance(error, TimeoutError):
                raise Unavailable("All replicas of this model are busy. Try again shortly.") from error
            raise

    def _leave(self, tenant: str, waiting: _Waiting) -> None:
        """Undo a wait that was abandoned, even if it got a place at the same moment."""
        if waiting.given.done() and not waiting.given.cancelled():
            self.give_back(tenant, waiting.given.result())
            return
        queue = self._queues.get(tenant)
        if queue is not None and waiting in queue:
            queue.remove(waiting)
            if not queue:
                del self._queues[tenant]

    def give_back(self, tenant: str, replica_id: str) -> None:
        """Free the place and give free places to waiting requests."""
        self._of(replica_id).give_back(tenant)
        while self._queues and self._give_one(replica_id):
            pass

    def _give_one(self, replica_id: str) -> bool:
        replica = self._of(replica_id)
        entitled = [tenant for tenant in self._queues if replica.has_place_for(tenant)]
        for tenant in sorted(entitled, key=lambda one: replica.by_tenant[one]):
            fitting = (one for one in self._queues[tenant] if replica_id in one.replica_ids and not one.given.done())
            waiting = next(fitting, None)
            if waiting is None:
                continue
            queue = self._queues.pop(tenant)
            queue.remove(waiting)
            if queue:
                self._queues[tenant] = queue  # goes behind the others
            replica.take(tenant)
            waiting.given.set_result(replica_id)
            return True
        return False

    def _of(self, replica_id: str) -> _Replica:
        found = self._replicas.get(replica_id)
        if found is None:
            found = self._replicas[replica_id] = _Replica(self._places)
        return found


# --- Replicas that fail -----------------------------------------------------------------------------------------------

_FAILURES = 5
_MIN_REST_SECONDS, _MAX_REST_SECONDS = 1.0, 10.0


@dataclass(slots=True)
class _Health:
    failures: int = 0  # in a row
    tenants: set[str] = field(default_factory=set)  # owners of the failed requests
    is_replicas: bool = False  # one of the failures was the replica's own fault
    rests_until: float = 0.0

    @property
    def is_unwell(self) -> bool:
        """Return whether the replica counts as broken.

        Failures of a single tenant's requests are not enough, because the requests may be the cause.
        """
        return self.failures >= _FAILURES and (self.is_replicas or len(self.tenants) > 1)


class Breaker:
    """Pauses a replica after several failures in a row, then lets one request test it."""

    def __init__(self) -> None:
        self._health: dict[str, _Health] = {}

    def allowed(self, replica_ids: Iterable[str]) -> list[str]:
        """Return the replicas that may be asked now."""
        if not self._health:
            return list(replica_ids)
        now = time.monotonic()
        return [one for one in replica_ids if one not in self._health or self._health[one].rests_until <= now]

    def record_success(self, replica_id: str) -> None:
        self._health.pop(replica_id, None)

    def record_failure(self, replica_id: str, tenant: str, *, is_replicas: bool = False) -> None:
        """Count a failure of this tenant's request. `is_replicas`: the replica caused it; no request could have."""
        health = self._health.setdefault(replica_id, _Health())
        health.failures += 1
        health.tenants.add(tenant)
        health.is_replicas |= is_replicas
        if health.is_unwell:
            rest = min(_MIN_REST_SECONDS * 2 ** (health.failures - _FAILURES), _MAX_REST_SECONDS)
            health.rests_until = time.monotonic() + rest

    def record_trial(self, replica_id: str) -> None:
        """Keep other requests away from a replica after its pause until the current request has its result."""
        health = self._health.get(replica_id)
        if health is not None and health.is_unwell:
            health.rests_until = time.monotonic() + _MIN_REST_SECONDS
