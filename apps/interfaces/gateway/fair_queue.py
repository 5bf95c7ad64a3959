"""A fair choice of the replica for a request, and of the waiting request that gets free places.

Each replica has a fixed number of places. A request takes one for each sequence that the engine writes for it. While
places are free, the least busy replica answers. When all are full, requests wait in a queue for each tenant, and freed
places go to the waiting tenant with the fewest places on that replica. The last places are kept for tenants with few
places there, so that one tenant's burst does not make the next tenant wait for a whole answer. Each gateway process
counts its places separately.

A request may need more places than are free when its turn comes. So that others use these places meanwhile, each tenant
on the replica may take as many as the request needs, for a limited time. Then freed places are kept until they are
enough for it, except for a few that tenants with few places may still take. This lasts for a limited time, and is then
not repeated for a while, so that places are in use most of the time even if answers are long.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from apps.core.errors import RateLimited, Unavailable

MAX_WAITING = 256  # requests per tenant
MAX_WAIT_SECONDS = 60.0
# Others may pass a request for so long after its turn came, and twice as long after it came itself. In the rest of its
# wait, answers in progress end.
MAX_PASSED_SECONDS = 20.0
MIN_PASSED_SECONDS = 5.0  # even if it came long ago
# A replica keeps free places for so long, and then none in the pause: it keeps some a quarter of the time at most.
MAX_KEPT_SECONDS = 20.0
KEEPING_PAUSE_SECONDS = 60.0
_KEPT_SHARE = 8  # one place in this many


def _kept(places: int) -> int:
    return max(1, places // _KEPT_SHARE) if places > 1 else 0


@dataclass(slots=True, eq=False)
class _Waiting:
    tenant: str
    replica_ids: Collection[str]
    count: int  # the places that it needs
    given: "asyncio.Future[str]"
    since: float  # on the loop's clock
    turn_at: str = ""  # the replica where it is next


@dataclass(slots=True, eq=False)
class _Replica:
    """The places of one replica in use, by tenant."""

    places: int
    taken: int = 0
    by_tenant: Counter[str] = field(default_factory=Counter)
    next: _Waiting | None = None  # it did not fit when its turn came
    passes: int = 0  # places that others may take before it
    passes_until: float = 0.0  # on the loop's clock
    keeping: asyncio.TimerHandle | None = None  # it ends the turn; others were refused places that are free
    next_turn_from: float = 0.0  # on the loop's clock

    def has_places_for(self, tenant: str, count: int) -> bool:
        left, kept = self.places - self.taken - count, _kept(self.places)
        return left >= kept or (left >= 0 and self.by_tenant[tenant] + count <= kept)

    def has_spare(self, count: int) -> bool:
        """Return whether half of the places stay free. An unused replica of few places takes a large request too."""
        return not self.taken or 2 * (self.taken + count) <= self.places

    def may_pass(self, tenant: str, count: int) -> bool:
        """Return whether the request may take places before the one whose turn it is."""
        if self.next is None:
            return True
        if self.next.given.get_loop().time() > self.passes_until:
            self.passes = min(self.passes, 0)
        kept = _kept(self.places)
        return self.passes > (-kept if self.by_tenant[tenant] + count <= kept else 0)

    def begin_turn(self, waiting: _Waiting, replica_id: str) -> None:
        """Limit how many may pass the request from now on, unless another is next. One replica is enough for it.

        A single sequence does not need this: it gets the next place that its tenant may have. A request that does not
        fit beside its own tenant's answers waits for these, so it takes no turn.
        """
        if waiting.count == 1 or self.next is not None or waiting.turn_at:
            return
        if self.by_tenant[waiting.tenant] + waiting.count > self.places - _kept(self.places):
            return
        now = waiting.given.get_loop().time()
        if now < self.next_turn_from:
            return
        self.next, waiting.turn_at = waiting, replica_id
        self.passes = waiting.count * max(1, len(self.by_tenant))
        until = min(now + MAX_PASSED_SECONDS, waiting.since + 2 * MAX_PASSED_SECONDS)
        self.passes_until = max(until, now + MIN_PASSED_SECONDS)

    def end_turn(self) -> None:
        """Keep nothing any longer, and if places were kept from others, nothing for a while either."""
        if self.next and self.keeping:
            self.keeping.cancel()
            self.next_turn_from = self.next.given.get_loop().time() + KEEPING_PAUSE_SECONDS
        self.next = self.keeping = None

    def take(self, tenant: str, count: int) -> None:
        self.passes -= count
        self.taken += count
        self.by_tenant[tenant] += count

    def give_back(self, tenant: str, count: int) -> None:
        self.taken -= count
        self.by_tenant[tenant] -= count
        if not self.by_tenant[tenant]:
            del self.by_tenant[tenant]


class FairQueue:
    """Gives out the replicas' places. Use inside one event loop."""

    def __init__(self, *, places: int) -> None:
        self._places = places
        self._replicas: dict[str, _Replica] = {}
        self._queues: dict[str, deque[_Waiting]] = {}  # the tenant served longest ago comes first

    @property
    def most_at_once(self) -> int:
        """Return the most places that one request can get: all but those that are kept for others."""
        return self._places - _kept(self._places)

    def count_waiting(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def count_open(self, replica_id: str) -> int:
        """Return the number of the replica's places in use."""
        return self._of(replica_id).taken

    async def take(self, tenant: str, replica_ids: Collection[str], count: int = 1) -> str:
        """Return the replica on which the tenant now has so many places, at most `most_at_once`.

        Raises RateLimited, Unavailable.
        """
        return self.take_free(tenant, replica_ids, count) or await self._wait(tenant, replica_ids, count)

    def take_free(self, tenant: str, replica_ids: Collection[str], count: int = 1) -> str | None:
        """Return the replica on which the tenant now has the places; None if it must wait for them."""
        # Waiting requests could not use these places when they came free: they were offered to them first.
        free = []
        for one in replica_ids:
            replica = self._of(one)
            if replica.has_places_for(tenant, count) and self._may_pass(replica, tenant, count):
                free.append(one)
        if not free:
            return None
        chosen = free[0] if len(free) == 1 else min(free, key=self.count_open)
        self._of(chosen).take(tenant, count)
        return chosen

    def take_spare(self, tenant: str, replica_ids: Collection[str], count: int = 1) -> str:
        """Return the replica on which a request of a batch now has places: it stays half free, or was unused.

        Raises Unavailable if there is none, or while other requests wait for each of them.
        """
        awaited = {each for queue in self._queues.values() for waiting in queue for each in waiting.replica_ids}
        spare = [one for one in replica_ids if one not in awaited and self._of(one).has_spare(count)]
        chosen = self.take_free(tenant, spare, count)
        if chosen is None:
            raise Unavailable("All places are used or kept for live requests.", retry_after_seconds=2)
        return chosen

    def require_spare(self, tenant: str, replica_ids: Collection[str], count: int = 1) -> None:
        """Raise Unavailable unless a request of a batch would get places now."""
        self.give_back(tenant, self.take_spare(tenant, replica_ids, count), count)

    async def _wait(self, tenant: str, replica_ids: Collection[str], count: int) -> str:
        assert count <= self.most_at_once, "it would wait in vain"
        queue = self._queues.setdefault(tenant, deque())
        if len(queue) >= MAX_WAITING:
            raise RateLimited(
                f"{MAX_WAITING} requests of your organization already wait for a free replica. Send fewer at once.",
                retry_after_seconds=2,
            )
        loop = asyncio.get_running_loop()
        waiting = _Waiting(tenant, replica_ids, count, loop.create_future(), loop.time())
        queue.append(waiting)
        try:
            async with asyncio.timeout(MAX_WAIT_SECONDS):
                return await waiting.given
        except BaseException as error:
            self._leave(waiting)
            if isinstance(error, TimeoutError):
                raise Unavailable("All replicas of this model are busy. Try again shortly.") from error
            raise

    def _leave(self, waiting: _Waiting) -> None:
        """Undo a wait that was abandoned, even if it got places at the same moment."""
        if waiting.given.done() and not waiting.given.cancelled():
            self.give_back(waiting.tenant, waiting.given.result(), waiting.count)
            return
        queue = self._queues[waiting.tenant]
        queue.remove(waiting)
        if not queue:
            del self._queues[waiting.tenant]
        self._end_turn(waiting)

    def give_back(self, tenant: str, replica_id: str, count: int = 1) -> None:
        """Free the places and give free places to waiting requests."""
        self._of(replica_id).give_back(tenant, count)
        self._give_free(replica_id)

    def _give_free(self, replica_id: str) -> None:
        while self._queues and (waiting := self._choose(replica_id)):
            queue = self._queues.pop(waiting.tenant)
            queue.remove(waiting)
            if queue:
                self._queues[waiting.tenant] = queue  # goes behind the others
            self._of(replica_id).take(waiting.tenant, waiting.count)
            waiting.given.set_result(replica_id)
            self._end_turn(waiting)

    def _choose(self, replica_id: str) -> _Waiting | None:
        """Return the waiting request that gets places of the replica now."""
        replica = self._of(replica_id)
        for tenant in sorted(self._queues, key=lambda one: replica.by_tenant[one]):
            first = replica.next if replica.next and replica.next.tenant == tenant else None
            if first and not first.given.done() and replica.has_places_for(tenant, first.count):
                return first
            too_many = replica.places + 1
            for waiting in self._queues[tenant]:
                if waiting.count >= too_many or replica_id not in waiting.replica_ids or waiting.given.done():
                    continue
                if replica.has_places_for(tenant, waiting.count):
                    if self._may_pass(replica, tenant, waiting.count):
                        return waiting
                    break
                replica.begin_turn(waiting, replica_id)
                too_many = waiting.count
                if not replica.has_places_for(tenant, 1):
                    break
        return None

    def _may_pass(self, replica: _Replica, tenant: str, count: int) -> bool:
        """Return whether the request may have free places. Places that it is refused are kept for a limited time."""
        if replica.may_pass(tenant, count):
            return True
        if replica.next and not replica.keeping:
            loop = replica.next.given.get_loop()
            replica.keeping = loop.call_later(MAX_KEPT_SECONDS, self._end_turn, replica.next)
        return False

    def _end_turn(self, waiting: _Waiting) -> None:
        """Give to others what was kept for a request that waits no longer, or that had its turn long enough."""
        if waiting.turn_at:
            replica_id, waiting.turn_at = waiting.turn_at, ""
            self._of(replica_id).end_turn()
            self._give_free(replica_id)

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
