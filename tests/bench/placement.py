"""Zipf traffic over 2,000 adapters and 8 replicas, placed by the product's own function: `make bench-placement`.

A second at a time: requests are drawn, cold ones ask for a place at once as a gateway does, every five seconds all
places are given out anew, and each replica loads one adapter a second, as its agent does while it is busy. Every
minute two adapters become popular that were not. The fleet starts as replicas do: what the placement wanted before any
traffic is loaded before they are ready.

`--empty` starts with nothing loaded, `--loss` takes a replica away in the middle for a minute and brings it back empty,
`--places` changes the adapters a replica can register, `--exponent` the skew. The last line is one JSON object.
"""

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import exp

from apps.serving.placement import (
    QUICK_SECONDS,
    SLOW_SECONDS,
    AdapterDemand,
    ReplicaCapacity,
    count_moves,
    demand_after,
    place,
)

ADAPTERS, REPLICAS, ORGANIZATIONS = 2_000, 8, 200
TICK_SECONDS = 5
_MAX_WAIT_SECONDS = 20


@dataclass(frozen=True)
class Setup:
    seconds: int = 600
    requests_per_second: int = 200
    exponent: float = 1.0
    places: int = 256
    slots: int = 32
    is_prewarmed: bool = True
    loses_replica: bool = False
    seed: int = 7


@dataclass
class Outcome:
    """Counts after the first minute, but for `by_minute`: share of requests that found their adapter loaded."""

    requests: int = 0
    warm: int = 0
    moves: int = 0
    most_moves_a_minute: int = 0
    refused: int = 0
    waits: list[int] = field(default_factory=list)
    by_minute: list[float] = field(default_factory=list)

    @property
    def warm_share(self) -> float:
        return self.warm / self.requests


class Fleet:
    """Replicas that load what is placed on them, one adapter a second, the most asked for first."""

    def __init__(self, setup: Setup) -> None:
        self.rooms = [ReplicaCapacity(f"rep{i}", setup.places, setup.slots, 16, 16) for i in range(REPLICAS)]
        self.placed: dict[str, frozenset[str]] = {room.replica_id: frozenset() for room in self.rooms}
        self.loaded: dict[str, set[str]] = {room.replica_id: set() for room in self.rooms}
        self.gone: set[str] = set()

    def give_places(self, wishes: list[AdapterDemand], now: float) -> int:
        rooms = [room for room in self.rooms if room.replica_id not in self.gone]
        after = place(wishes, rooms, holding=self.placed, settled=self.loaded, now=now)
        moves = count_moves(self.placed, after)
        self.placed = {room.replica_id: after.get(room.replica_id, frozenset()) for room in self.rooms}
        return moves

    def work(self, demand: Mapping[str, float]) -> None:
        """Let a second pass on every replica."""
        for replica_id, placed in self.placed.items():
            loaded = self.loaded[replica_id]
            loaded &= placed
            if missing := placed - loaded:
                loaded.add(max(missing, key=lambda id: (demand.get(id, 0.0), id)))

    def load_all(self) -> None:
        self.loaded = {replica_id: set(placed) for replica_id, placed in self.placed.items()}

    def warm(self) -> set[str]:
        return set().union(*(held for id, held in self.loaded.items() if id not in self.gone))

    def lose(self, replica_id: str) -> None:
        self.gone.add(replica_id)
        self.loaded[replica_id] = set()


class Demand:
    """What gateways note of requests, and how it fades, as in the database."""

    def __init__(self) -> None:
        self._noted: dict[int, tuple[float, float, float]] = {}  # quick, slow, at

    def note(self, counts: Counter[int], now: float) -> None:
        for adapter, count in counts.items():
            quick, slow, at = self._noted.get(adapter, (0.0, 0.0, now))
            quick = quick * exp((at - now) / QUICK_SECONDS) + count / QUICK_SECONDS
            slow = slow * exp((at - now) / SLOW_SECONDS) + count / SLOW_SECONDS
            self._noted[adapter] = quick, slow, now

    def quick(self) -> dict[str, float]:
        return {f"v{adapter}": noted[0] for adapter, noted in self._noted.items()}

    def wishes(self, now: float) -> list[AdapterDemand]:
        found = []
        for adapter in range(ADAPTERS):
            quick, slow, at = self._noted.get(adapter, (0.0, 0.0, 0.0))
            rate = demand_after(quick, slow, now - at)
            found.append(AdapterDemand(f"v{adapter}", f"org{adapter % ORGANIZATIONS}", 8, at, rate))
        return found


def simulate(setup: Setup) -> Outcome:
    """Return what requests met in `setup.seconds`."""
    random_numbers = random.Random(setup.seed)
    popularity = list(range(ADAPTERS))
    random_numbers.shuffle(popularity)
    cumulated = list(accumulate(1 / (rank + 1) ** setup.exponent for rank in range(ADAPTERS)))
    fleet, demand, outcome = Fleet(setup), Demand(), Outcome()
    fleet.give_places(demand.wishes(0), 0)
    if setup.is_prewarmed:
        fleet.load_all()
    waiting: dict[int, int] = {}
    minute_requests = minute_warm = minute_moves = 0
    for second in range(setup.seconds):
        if second % 60 == 0 and second:
            _change_fashion(popularity, random_numbers)
        if setup.loses_replica and second == setup.seconds // 2:
            fleet.lose("rep3")
        if second == setup.seconds // 2 + 60:
            fleet.gone.clear()
        asked = random_numbers.choices(popularity, cum_weights=cumulated, k=setup.requests_per_second)
        warm = fleet.warm()
        cold = {adapter for adapter in asked if f"v{adapter}" not in warm}
        demand.note(Counter(asked), second)
        moves = 0
        if second % TICK_SECONDS == 0 or cold:
            moves = fleet.give_places(demand.wishes(second), second)
        fleet.work(demand.quick())
        for adapter in cold:
            waiting.setdefault(adapter, second)
        _end_waits(fleet.warm(), waiting, second, outcome)
        minute_requests += len(asked)
        minute_warm += sum(f"v{adapter}" in warm for adapter in asked)
        minute_moves += moves
        if second % 60 == 59:
            _end_minute(outcome, minute_requests, minute_warm, minute_moves)
            minute_requests = minute_warm = minute_moves = 0
    return outcome


def _change_fashion(popularity: list[int], random_numbers: random.Random) -> None:
    for _ in range(2):
        rising, falling = random_numbers.randrange(500, ADAPTERS), random_numbers.randrange(20)
        popularity[rising], popularity[falling] = popularity[falling], popularity[rising]


def _end_waits(warm: set[str], waiting: dict[int, int], second: int, outcome: Outcome) -> None:
    for adapter, since in list(waiting.items()):
        waited = second + 1 - since
        if f"v{adapter}" in warm or waited > _MAX_WAIT_SECONDS:
            del waiting[adapter]
            if outcome.by_minute:
                outcome.waits.append(waited)
                outcome.refused += waited > _MAX_WAIT_SECONDS


def _end_minute(outcome: Outcome, requests: int, warm: int, moves: int) -> None:
    if outcome.by_minute:
        outcome.requests += requests
        outcome.warm += warm
        outcome.moves += moves
        outcome.most_moves_a_minute = max(outcome.most_moves_a_minute, moves)
    outcome.by_minute.append(round(warm / requests, 4))


def best_possible(setup: Setup) -> float:
    """Return the share of requests for as many of the most popular adapters as there are places."""
    weights = [1 / (rank + 1) ** setup.exponent for rank in range(ADAPTERS)]
    return sum(weights[: REPLICAS * setup.places]) / sum(weights)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=Setup.seconds)
    parser.add_argument("--exponent", type=float, default=Setup.exponent)
    parser.add_argument("--places", type=int, default=Setup.places)
    parser.add_argument("--empty", action="store_true")
    parser.add_argument("--loss", action="store_true")
    given = parser.parse_args()
    setup = Setup(
        seconds=given.seconds,
        exponent=given.exponent,
        places=given.places,
        is_prewarmed=not given.empty,
        loses_replica=given.loss,
    )
    outcome = simulate(setup)
    waits = sorted(outcome.waits) or [0]
    figures = {
        "warm_share": round(outcome.warm_share, 5),
        "best_possible_share": round(best_possible(setup), 5),
        "worst_minute": min(outcome.by_minute[1:]),
        "requests": outcome.requests,
        "moves": outcome.moves,
        "most_moves_a_minute": outcome.most_moves_a_minute,
        "cold_wait_p95_seconds": waits[int(0.95 * (len(waits) - 1))],
        "refused": outcome.refused,
    }
    sys.stdout.write(json.dumps(figures) + "\n")
    return 0 if outcome.warm_share >= 0.99 else 1


if __name__ == "__main__":
    sys.exit(main())
