"""Placement: which replica of one base model holds which adapters, by demand, within rank classes, with few moves.

Every adapter in use is on one replica, and a hot one on several. An adapter without recent requests is on none. If more
adapters are in use than there are places, organizations first take turns for half of their fair share: the busiest
adapter of each comes before the second of any. Demand decides about the other places.

An adapter stays where it is: loading one delays every token of that engine, and an unloaded one still fills the
engine's cache. Adapters that customers wait for displace others only as fast as replicas load them; the rest wait.
Otherwise a fleet could unload faster than it loads, and answer no request.

The result depends only on the arguments, so two placers with the same facts agree.
"""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import msgspec

IDLE_SECONDS = 24 * 3600.0  # without a request for longer than this: on no replica until the next request
ACTIVE_SECONDS = 900.0  # requested since: before all others
WAITING_SECONDS = 30.0  # requested since and on no replica: a customer waits for it
HOT_SHARE = 0.25  # of a replica's fair share of the traffic; above it, another replica is added
MIN_SHARE_PER_SECOND = 1.0  # requests; below it one replica is enough, however little other traffic there is
STICKINESS = 1.5  # factor on the demand of adapters that are held already
MAX_TO_LOAD = 4  # per replica at a time, in place of others
MAX_REBALANCING_MOVES = 2  # per placement; loads that a customer waits for are not counted
QUICK_SECONDS = 20.0  # decay time of the quick sum: a hot adapter spreads at once
SLOW_SECONDS = 300.0  # decay time of the slow sum: it gives up replicas after minutes
_UNEVEN = 1.25  # times the mean load; a replica above it gives adapters away
_KEPT, _ACTIVE, _COPY, _RARE, _REFUSED = range(5)


class AdapterDemand(msgspec.Struct, frozen=True):
    """An adapter that may be requested. Times are seconds of one clock.

    `regions` are those it may be in; None means any.
    """

    version_id: str
    organization_id: str
    rank: int
    last_used_at: float
    requests_per_second: float = 0.0
    is_kept: bool = False  # keep-warm is paid for: placed regardless of demand
    is_refused: bool = False  # by an engine, and another may accept it: after all others
    regions: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class ReplicaCapacity:
    """A replica. `capacity`: adapters registered at once; `slots`: adapters in one batch without loss of speed.

    `rank_class` is the highest rank that an operator accepted. `max_rank` is the part of it that the engine supports.
    Preference goes by the class, so a replica cannot attract adapters by reporting less.
    """

    replica_id: str
    capacity: int
    slots: int
    max_rank: int
    rank_class: int
    is_draining: bool = False  # keeps its adapters and gets no new ones
    region: str = ""

    def is_allowed(self, wish: AdapterDemand) -> bool:
        return wish.regions is None or self.region in wish.regions

    def fits(self, wish: AdapterDemand) -> bool:
        return wish.rank <= self.max_rank and self.is_allowed(wish)


@dataclass(slots=True)
class _State:
    """A replica while the plan fills it."""

    room: ReplicaCapacity
    held: set[str]
    load: float = 0.0
    hot: int = 0

    @property
    def has_place(self) -> bool:
        return len(self.held) < self.room.capacity


Placed = dict[str, frozenset[str]]


def place(
    wishes: Iterable[AdapterDemand],
    rooms: Collection[ReplicaCapacity],
    *,
    holding: Mapping[str, Collection[str]],
    settled: Mapping[str, Collection[str]],
    now: float,
    unable: Collection[tuple[str, str]] = (),
) -> Placed:
    """Return the version ids that each replica should hold.

    `holding` is what each should hold so far, and `settled` the part that it has loaded or could not load. `unable` are
    the pairs (replica, version) that failed.
    """
    known = {wish.version_id: wish for wish in wishes}
    open_rooms = sorted((room for room in rooms if not room.is_draining), key=lambda room: room.replica_id)
    plan = _Plan(known, open_rooms, holding, frozenset(unable))
    # Adapters that replicas are still loading count against those that may displace others now.
    missing = {room.replica_id: set(holding.get(room.replica_id, ())) for room in open_rooms}
    most_pushed_out = sum(max(0, MAX_TO_LOAD - len(missing[id] - set(settled.get(id, ())))) for id in missing)
    plan.select(now, most_pushed_out=most_pushed_out)
    plan.settle()
    plan.rebalance()
    placed: Placed = {state.room.replica_id: frozenset(state.held) for state in plan.states}
    for room in rooms:
        if room.is_draining:
            held = holding.get(room.replica_id, ())
            placed[room.replica_id] = frozenset(id for id in held if id in known and room.is_allowed(known[id]))
    return placed


def demand_after(quick: float, slow: float, age_seconds: float) -> float:
    """Return requests per second from the two decaying sums. Each request adds 1 / decay time to them."""
    age = max(0.0, age_seconds)
    return max(quick * math.exp(-age / QUICK_SECONDS), slow * math.exp(-age / SLOW_SECONDS))


def count_moves(before: Mapping[str, Collection[str]], after: Placed) -> int:
    """Return how many adapters must be loaded."""
    return sum(len(held - set(before.get(replica_id, ()))) for replica_id, held in after.items())


class _Plan:
    def __init__(
        self,
        wishes: dict[str, AdapterDemand],
        rooms: list[ReplicaCapacity],
        holding: Mapping[str, Collection[str]],
        unable: frozenset[tuple[str, str]],
    ) -> None:
        self._wishes = wishes
        self._unable = unable
        self.states = [_State(room, set()) for room in rooms]
        self._holders: dict[str, list[_State]] = defaultdict(list)
        for state in self.states:
            for version_id in holding.get(state.room.replica_id, ()):
                if version_id in wishes and self._may_hold(state, wishes[version_id]):
                    self._holders[version_id].append(state)
        total = sum(wish.requests_per_second for wish in wishes.values())
        self._share = max(MIN_SHARE_PER_SECOND, HOT_SHARE * total / max(1, len(rooms)))
        self._copies: dict[str, int] = {}
        ranks = sorted({room.max_rank for room in rooms})
        self._places = {rank: sum(r.capacity for r in rooms if r.max_rank >= rank) for rank in ranks}
        self._taken = dict.fromkeys(ranks, 0)
        self._classes: dict[int, list[int]] = {}
        self._limited: Counter[frozenset[str]] = Counter()  # copies of adapters that may be in these regions alone

    def _may_hold(self, state: _State, wish: AdapterDemand) -> bool:
        return state.room.fits(wish) and (state.room.replica_id, wish.version_id) not in self._unable

    # --- selection --------------------------------------------------------------------------------------------------

    def select(self, now: float, *, most_pushed_out: int) -> None:
        """Choose as many (adapter, copy) pairs as there are places, the most needed first."""
        held = sum(len(states) for states in self._holders.values())
        newcomers = max(0, sum(state.room.capacity for state in self.states) - held) + most_pushed_out
        for _, _, _, _, _, version_id in sorted(self._candidates(now)):
            is_new = self._copies.get(version_id, 0) >= len(self._holders.get(version_id, ()))
            if (not is_new or newcomers > 0) and self._take_place(self._wishes[version_id]):
                newcomers -= is_new

    def _candidates(self, now: float) -> list[tuple[int, int, bool, float, float, str]]:
        by_organization: dict[str, list[tuple[int, bool, float, float, str]]] = defaultdict(list)
        for wish in self._wishes.values():
            kind = _kind(wish, now)
            if kind is not None:
                is_held = bool(self._holders.get(wish.version_id))
                is_waited_for = not is_held and now - wish.last_used_at < WAITING_SECONDS
                demand = wish.requests_per_second * (STICKINESS if is_held else 1.0)
                entry = (kind, not is_waited_for, -demand, -wish.last_used_at, wish.version_id)
                by_organization[wish.organization_id].append(entry)
        places = sum(state.room.capacity for state in self.states)
        guaranteed = max(1, places // (2 * max(1, len(by_organization))))
        found: list[tuple[int, int, bool, float, float, str]] = []
        for entries in by_organization.values():
            for turn, (kind, is_settled, demand, age, version_id) in enumerate(sorted(entries)):
                found.append((kind, min(turn, guaranteed), is_settled, demand, age, version_id))
                for copy in range(1, self._wanted_copies(version_id)):
                    found.append((_COPY, copy, is_settled, demand, age, version_id))
        return found

    def _wanted_copies(self, version_id: str) -> int:
        """Return how many replicas should hold the adapter. It rises at once, and falls only when demand has halved."""
        demand = self._wishes[version_id].requests_per_second
        if self._wishes[version_id].is_refused or 2 * demand <= self._share:
            return 1
        wanted = math.ceil(demand / self._share)
        kept = min(len(self._holders.get(version_id, ())), math.ceil(2 * demand / self._share))
        most = sum(self._may_hold(state, self._wishes[version_id]) for state in self.states)
        return min(most, max(wanted, kept))

    def _take_place(self, wish: AdapterDemand) -> bool:
        """Count one more copy if the classes of this rank and below, and its regions, still have a place for it."""
        affected = self._affected(wish.rank)
        if not affected:
            return False
        if wish.regions is not None:
            places = sum(state.room.capacity for state in self.states if state.room.is_allowed(wish))
            if self._limited[wish.regions] >= places:
                return False
        for rank in affected:
            if self._taken[rank] >= self._places[rank]:
                return False
        for rank in affected:
            self._taken[rank] += 1
        if wish.regions is not None:
            self._limited[wish.regions] += 1
        self._copies[wish.version_id] = self._copies.get(wish.version_id, 0) + 1
        return True

    def _affected(self, adapter_rank: int) -> list[int]:
        """Return the rank classes in which an adapter takes a place: the lowest that fits and those below it.

        Empty if none fits.
        """
        if adapter_rank not in self._classes:
            own = next((rank for rank in self._places if rank >= adapter_rank), None)
            self._classes[adapter_rank] = [rank for rank in self._places if own is not None and rank <= own]
        return self._classes[adapter_rank]

    # --- assignment -------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Leave adapters where they are, then assign the others to the least loaded replicas; high ranks first."""
        left = dict(self._copies)
        for version_id, copies in self._copies.items():
            stays = self._holders.get(version_id, [])
            if len(stays) > 1:
                stays = sorted(stays, key=lambda state: _affinity(version_id, state.room))
            for state in [s for s in stays if s.has_place][:copies]:
                self._put(version_id, state)
                left[version_id] -= 1
        ordered = sorted(left, key=lambda id: (-self._wishes[id].rank, -self._part(id), id))
        newcomers = [version_id for version_id in ordered for _ in range(left[version_id])]
        while newcomers:
            newcomers += self._put_newcomer(newcomers.pop(0))

    def _put_newcomer(self, version_id: str) -> list[str]:
        """Assign the version.

        Return the adapter that it displaced, if any: one of lower rank on a replica for higher ranks.
        """
        wish = self._wishes[version_id]
        fitting = [s for s in self.states if self._may_hold(s, wish) and version_id not in s.held]
        if free := [state for state in fitting if state.has_place]:
            self._put(version_id, min(free, key=lambda state: self._cost(state, version_id)))
            return []
        for state in fitting:
            lower = [id for id in state.held if self._wishes[id].rank <= self._rank_below(state.room.max_rank)]
            if lower and wish.rank > self._rank_below(state.room.max_rank):
                leaves = min(lower, key=lambda id: (self._part(id), id))
                self._remove(leaves, state)
                self._put(version_id, state)
                return [leaves]
        return [] if wish.regions is None else self._put_in_region(version_id, fitting)

    def _put_in_region(self, version_id: str, fitting: Iterable[_State]) -> list[str]:
        """Assign the version to the place of an adapter that has a free place in another region.

        Return that adapter.
        """
        free = [state for state in self.states if state.has_place]
        for state in fitting:
            movable = [
                id
                for id in state.held
                if any(id not in other.held and self._may_hold(other, self._wishes[id]) for other in free)
            ]
            if movable:
                leaves = min(movable, key=lambda id: (self._part(id), id))
                self._remove(leaves, state)
                self._put(version_id, state)
                return [leaves]
        return []

    def _cost(self, state: _State, version_id: str) -> tuple[int, bool, float, int, int]:
        """Return the sort key of replicas: own rank class first, then a free slot, then the lowest load."""
        has_no_slot = self._is_hot(version_id) and state.hot >= state.room.slots
        affinity = _affinity(version_id, state.room)
        return state.room.rank_class, has_no_slot, round(state.load, 3), len(state.held), affinity

    def rebalance(self) -> None:
        """Move a few adapters from the busiest replica to the least loaded one of the same rank class."""
        for _ in range(MAX_REBALANCING_MOVES):
            if not any(self._even_out(rank) for rank in self._places):
                return

    def _even_out(self, max_rank: int) -> bool:
        states = [state for state in self.states if state.room.max_rank == max_rank]
        busiest = max(states, key=lambda state: (state.load, state.room.replica_id))
        idlest = min(states, key=lambda state: (state.load, state.room.replica_id))
        gap = busiest.load - idlest.load
        mean = sum(state.load for state in states) / len(states)
        if not idlest.has_place or busiest.load <= max(_UNEVEN * mean, self._share):
            return False
        movable = [
            id
            for id in busiest.held - idlest.held
            if 0 < self._part(id) < gap
            and self._may_hold(idlest, self._wishes[id])
            and not (self._is_hot(id) and idlest.hot >= idlest.room.slots)
        ]
        if not movable:
            return False
        chosen = min(movable, key=lambda id: (abs(self._part(id) - gap / 2), id))
        self._remove(chosen, busiest)
        self._put(chosen, idlest)
        return True

    def _put(self, version_id: str, state: _State) -> None:
        state.held.add(version_id)
        state.load += self._part(version_id)
        state.hot += self._is_hot(version_id)

    def _remove(self, version_id: str, state: _State) -> None:
        state.held.discard(version_id)
        state.load -= self._part(version_id)
        state.hot -= self._is_hot(version_id)

    def _part(self, version_id: str) -> float:
        """Return the requests per second that each replica of the adapter gets."""
        return self._wishes[version_id].requests_per_second / self._copies[version_id]

    def _is_hot(self, version_id: str) -> bool:
        return self._part(version_id) >= MIN_SHARE_PER_SECOND

    def _rank_below(self, max_rank: int) -> int:
        return max((rank for rank in self._places if rank < max_rank), default=0)


def _kind(wish: AdapterDemand, now: float) -> int | None:
    """Return how urgent a first copy is, lowest first; None if it is not needed."""
    age = now - wish.last_used_at
    if wish.is_refused:
        return _REFUSED if age <= IDLE_SECONDS else None
    if wish.is_kept:
        return _KEPT
    if age > IDLE_SECONDS:
        return None
    return _ACTIVE if age <= ACTIVE_SECONDS else _RARE


def _affinity(version_id: str, room: ReplicaCapacity) -> int:
    """Return a stable number for the pair, so that an adapter returns to the replica where it was."""
    return int.from_bytes(hashlib.blake2b(f"{version_id} {room.replica_id}".encode(), digest_size=8).digest(), "big")
