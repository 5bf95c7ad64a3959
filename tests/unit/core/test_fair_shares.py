"""Buckets and places of one process, on a clock that the test moves."""

import asyncio
from collections.abc import Callable

import pytest

from apps.core.http import fair_shares
from apps.core.http.fair_shares import Buckets, Pace, Places, TooManyWaiting


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [1000.0]
    monkeypatch.setattr(fair_shares.time, "monotonic", lambda: now[0])

    def later(seconds: float) -> None:
        now[0] += seconds

    return later


def test_a_bucket_holds_a_minute_and_refills_with_time(wait) -> None:
    buckets = Buckets()
    for _ in range(60):
        assert buckets.wait_seconds("a", 60) == 0
        buckets.take("a", 60)

    assert buckets.wait_seconds("a", 60) == 1 and buckets.wait_seconds("b", 60) == 0
    wait(1.5)
    assert buckets.wait_seconds("a", 60) == 0 and buckets.share_left("a", 60) == 1.5 / 60
    wait(3600)
    assert buckets.share_left("a", 60) == 1


def test_a_debt_is_waited_for(wait) -> None:
    buckets = Buckets()
    buckets.take("a", 20, 25)

    assert buckets.wait_seconds("a", 20, 0) == 15
    wait(16)
    assert buckets.wait_seconds("a", 20, 0) == 0


def test_owners_that_were_silent_are_forgotten(wait) -> None:
    buckets = Buckets()
    for number in range(1000):
        buckets.take(f"owner {number}", 60)
    wait(300)
    buckets.take("another", 60)

    assert len(buckets._buckets) == 1


async def test_a_burst_is_spread_out_and_one_without_end_is_refused(wait, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(round(seconds, 6))

    monkeypatch.setattr(fair_shares.asyncio, "sleep", sleep)
    pace = Pace(prompt=3, per_second=2, wait_seconds=1)
    for _ in range(5):
        await pace.wait_turn("loud")
    with pytest.raises(TooManyWaiting):
        await pace.wait_turn("loud")
    await pace.wait_turn("quiet")
    assert waits == [0.5, 1.0]
    wait(10)
    await pace.wait_turn("loud")
    assert waits == [0.5, 1.0] and list(pace._next_at) == ["loud"]


def served(asked: list[str], *, total: int, most: int) -> list[str]:
    """Return who got a place, in order, where all ask at once and each gives its place back at once."""

    async def scenario() -> list[str]:
        places, found = Places(total, most_waiting=100, wait_seconds=60), []

        async def run(owner: str) -> None:
            await places.take(owner, most=most)
            found.append(owner)
            await asyncio.sleep(0)
            places.give_back(owner)

        await asyncio.gather(*(run(owner) for owner in asked))
        assert places._free == total and not places._queues
        return found

    return asyncio.run(scenario())


def test_places_go_round_the_owners() -> None:
    order = served(["a"] * 8 + ["b"] * 2 + ["c"], total=1, most=1)

    assert order[:5] == ["a", "a", "b", "c", "a"] or order[:4] == ["a", "b", "c", "a"]
    assert order[-5:] == ["a"] * 5


async def test_an_owner_holds_no_more_places_than_it_may() -> None:
    places = Places(4, most_waiting=100, wait_seconds=60)
    await places.take("a", most=2)
    await places.take("a", most=2)
    third = asyncio.ensure_future(places.take("a", most=2))
    await asyncio.sleep(0)
    await places.take("b", most=2)  # a place is free, and it is not for "a"
    assert not third.done()
    places.give_back("a")
    await third


async def test_who_waits_in_vain_leaves_nothing_behind() -> None:
    places = Places(1, most_waiting=1, wait_seconds=0.001)
    await places.take("a", most=1)
    with pytest.raises(TooManyWaiting):
        await places.take("b", most=1)  # nothing came free in time
    gone = asyncio.ensure_future(places.take("b", most=1))
    await asyncio.sleep(0)
    with pytest.raises(TooManyWaiting):
        await places.take("b", most=1)  # one waits already
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    places.give_back("a")
    await places.take("c", most=1)
    assert not places._queues


async def test_a_place_that_comes_as_its_owner_leaves_is_not_lost() -> None:
    places = Places(1, most_waiting=5, wait_seconds=60)
    await places.take("a", most=1)
    leaving = asyncio.ensure_future(places.take("b", most=1))
    await asyncio.sleep(0)
    places.give_back("a")
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await asyncio.wait_for(places.take("c", most=1), 1)
