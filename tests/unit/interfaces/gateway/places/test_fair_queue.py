"""Places on replicas: shared out fairly between tenants, never leaked, and not on replicas that fail."""

import asyncio
import random
import selectors
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from statistics import median, quantiles

import pytest

from apps.core.errors import RateLimited, Unavailable
from apps.interfaces.gateway import fair_queue as turning
from apps.interfaces.gateway.fair_queue import Breaker, FairQueue
from tests.support.waiting import settle


async def test_a_batch_gets_a_place_only_while_more_than_half_are_free():
    turns = FairQueue(places=4)
    for _ in range(2):
        turns.take_spare("batch", ["r1"])

    with pytest.raises(Unavailable):
        turns.require_spare("batch", ["r1"])

    turns.give_back("batch", "r1")
    turns.require_spare("batch", ["r1"])
    assert turns.take_spare("batch", ["r1"]) == "r1"


async def test_a_request_that_waits_for_one_replica_keeps_no_batch_from_another():
    turns = FairQueue(places=1)
    await turns.take("live", ["r1"])
    waiting = asyncio.create_task(turns.take("live", ["r1"]))
    await settle()

    assert turns.take_spare("batch", ["r1", "r2"]) == "r2"
    waiting.cancel()


async def test_the_least_busy_replica_is_chosen():
    turns = FairQueue(places=8)
    assert [await turns.take("a", ("r1", "r2")) for _ in range(4)] == ["r1", "r2", "r1", "r2"]


async def test_a_place_that_comes_free_goes_to_the_tenant_with_the_fewest():
    turns = FairQueue(places=4)  # three for all, one kept
    for _ in range(3):
        await turns.take("busy", ("r",))
    await turns.take("quiet", ("r",))
    order: list[str] = []

    async def ask(tenant: str) -> None:
        await turns.take(tenant, ("r",))
        order.append(tenant)

    tasks = [asyncio.create_task(ask(tenant)) for tenant in ("busy", "busy", "new", "quiet")]
    await settle()
    assert order == []
    for tenant in ("busy", "busy", "quiet"):
        turns.give_back(tenant, "r")
        await settle()
    assert order == ["new", "quiet"]  # the last place stays free for an organization that has none
    for task in tasks:
        task.cancel()


async def test_the_last_place_is_kept_for_a_tenant_with_none():
    turns = FairQueue(places=4)
    for _ in range(3):
        await turns.take("burst", ("r",))
    waiting = asyncio.create_task(turns.take("burst", ("r",)))
    await settle()
    assert not waiting.done()

    assert await asyncio.wait_for(turns.take("quiet", ("r",)), 1) == "r"
    waiting.cancel()


async def test_whoever_stops_waiting_leaves_no_place_taken(monkeypatch):
    monkeypatch.setattr(turning, "MAX_WAIT_SECONDS", 0.02)

    turns = FairQueue(places=1)
    await turns.take("a", ("r",))
    with pytest.raises(Unavailable):
        await turns.take("b", ("r",))
    cancelled = asyncio.create_task(turns.take("c", ("r",)))
    await settle()
    turns.give_back("a", "r")  # given to c in the instant in which it leaves
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)

    assert (turns.count_open("r"), turns.count_waiting()) == (0, 0)
    assert await turns.take("d", ("r",)) == "r"


async def test_a_tenant_may_have_only_so_many_waiting(monkeypatch):
    monkeypatch.setattr(turning, "MAX_WAITING", 2)

    turns = FairQueue(places=1)
    await turns.take("a", ("r",))
    waiting = [asyncio.create_task(turns.take("a", ("r",))) for _ in range(2)]
    await settle()
    with pytest.raises(RateLimited) as refused:
        await turns.take("a", ("r",))
    assert refused.value.data["retry_after_seconds"] >= 1
    for one in waiting:
        one.cancel()


async def test_waiting_for_one_replica_takes_no_place_on_another():
    turns = FairQueue(places=1)
    await turns.take("a", ("r1",))
    await turns.take("a", ("r2",))
    waiting = asyncio.create_task(turns.take("b", ("r2",)))
    await settle()
    turns.give_back("a", "r1")
    await settle()
    assert not waiting.done()
    turns.give_back("a", "r2")
    assert await waiting == "r2"


async def test_a_tenant_that_waits_for_one_model_is_served_another():
    turns = FairQueue(places=1)
    await turns.take("a", ("r1",))
    waiting = asyncio.create_task(turns.take("a", ("r1",)))
    await settle()

    assert await asyncio.wait_for(turns.take("a", ("r2",)), 1) == "r2"
    waiting.cancel()


class _JumpingSelector(selectors.SelectSelector):
    """Lets no time pass: where the loop would sleep, its clock is put forward."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list:
        ready = super().select(0)
        if not ready and timeout:
            self.now += timeout
        return ready


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


SERVICE_SECONDS, PLACES, SECONDS = 0.1, 16, 10


async def _quiet_p95(*, with_burst: bool, chance: random.Random) -> float:
    """The 95th percentile of a tenant that asks 10 times a second, alone or beside one that asks for 1.6 times as much
    as there is."""
    turns, loop = FairQueue(places=PLACES), asyncio.get_running_loop()
    taken: list[float] = []

    async def ask(tenant: str) -> None:
        began = loop.time()
        replica = await turns.take(tenant, ("r",))
        await asyncio.sleep(SERVICE_SECONDS)
        turns.give_back(tenant, replica)
        if tenant == "quiet":
            taken.append(loop.time() - began)

    async def arrive(tenant: str, per_second: float) -> None:
        tasks = []
        while loop.time() < SECONDS:
            await asyncio.sleep(chance.expovariate(per_second))
            tasks.append(asyncio.create_task(ask(tenant)))
        await asyncio.gather(*tasks, return_exceptions=True)

    burst = arrive("burst", 1.6 * PLACES / SERVICE_SECONDS) if with_burst else asyncio.sleep(0)
    await asyncio.gather(arrive("quiet", 10), burst)
    return quantiles(taken, n=20)[18]


@pytest.mark.slow
def test_a_burst_hardly_delays_a_quiet_tenant():
    """Fixed service time and arrival rates, five runs each: the quiet tenant's median p95 rises by less than 20 %."""

    def p95(*, with_burst: bool, seed: int) -> float:
        with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
            return runner.run(_quiet_p95(with_burst=with_burst, chance=random.Random(seed)))

    alone = median(p95(with_burst=False, seed=seed) for seed in range(5))
    beside = median(p95(with_burst=True, seed=seed) for seed in range(5))

    assert alone == pytest.approx(SERVICE_SECONDS)
    assert beside < 1.2 * alone


# --- Large requests and long answers ----------------------------------------------------------------------------------

SMALL_REQUESTS = 96  # of one tenant at once, beside a request of 128


async def _count_small_answers(
    turns: FairQueue, *beside: Coroutine[None, None, None], seconds: int, answer_seconds: float = 1.0
) -> list[int]:
    """Let a tenant always ask for more single places than are free; return how many it got in each second."""
    loop, got = asyncio.get_running_loop(), Counter[int]()

    async def repeat() -> None:
        while loop.time() < seconds:
            with suppress(Unavailable):
                replica = await turns.take("small", ("r",))
                got[int(loop.time())] += 1
                await asyncio.sleep(answer_seconds)
                turns.give_back("small", replica)

    others = [asyncio.create_task(one) for one in beside]
    await asyncio.gather(*(repeat() for _ in range(2 * SMALL_REQUESTS)))
    for one in others:
        one.cancel()
    return [got[second] for second in range(seconds)]


async def _repeat_large(turns: FairQueue, tenant: str) -> None:
    while True:
        with suppress(Unavailable):
            await turns.take(tenant, ("r",), 128)


async def _of_others(large_tenant: str, *, seconds: int) -> list[int]:
    """Return the small answers beside a tenant's long answers and large requests that do not fit with them."""
    turns = FairQueue(places=256)
    await turns.take("long", ("r",), 128)
    return await _count_small_answers(turns, _repeat_large(turns, large_tenant), seconds=seconds)


def test_a_large_request_that_waits_for_its_own_tenants_answers_keeps_nothing_from_others():
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        got = runner.run(_of_others("long", seconds=200))

    assert min(got) == SMALL_REQUESTS


@pytest.mark.slow
def test_repeated_large_requests_beside_long_answers_slow_others_a_quarter_of_the_time_at_most():
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        got = runner.run(_of_others("large", seconds=400))

    slowed = [second for second, count in enumerate(got) if count < SMALL_REQUESTS]
    assert 0 < len(slowed) <= 0.27 * len(got)  # with the seconds in which each turn begins and ends


@pytest.mark.parametrize("answer_seconds", [1.0, 15.0])
def test_a_large_request_gets_its_places_if_other_answers_end_within_its_turn(answer_seconds):
    async def measure() -> float:
        turns, loop, waited = FairQueue(places=256), asyncio.get_running_loop(), list[float]()

        async def ask() -> None:
            await asyncio.sleep(30)
            await turns.take("large", ("r",), 128)
            waited.append(loop.time() - 30)

        await _count_small_answers(turns, ask(), seconds=100, answer_seconds=answer_seconds)
        return waited[0]

    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        assert runner.run(measure()) < 45


def test_a_large_request_may_be_passed_for_some_seconds_even_if_its_turn_comes_late():
    async def measure() -> str | None:
        turns = FairQueue(places=16)
        await turns.take("busy", ("r",), 13)
        large = asyncio.create_task(turns.take("large", ("r",), 8))
        await asyncio.sleep(50)
        turns.give_back("busy", "r", 1)  # its turn comes
        await asyncio.sleep(turning.MIN_PASSED_SECONDS - 1)
        passed = turns.take_free("busy", ("r",))
        large.cancel()
        return passed

    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        assert runner.run(measure()) == "r"


# --- Replicas that fail -----------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

    monkeypatch.setattr(turning.time, "monotonic", lambda: Clock.now)
    return Clock


def test_a_replica_that_fails_again_and_again_rests_and_is_tried_by_one(clock):
    breaker = Breaker()
    for tenant in ("a", "a", "a", "b"):
        breaker.record_failure("r1", tenant)
    assert breaker.allowed(["r1", "r2"]) == ["r1", "r2"]

    breaker.record_failure("r1", "a")
    assert breaker.allowed(["r1", "r2"]) == ["r2"]

    clock.now += 1.1
    assert breaker.allowed(["r1", "r2"]) == ["r1", "r2"]
    breaker.record_trial("r1")
    assert breaker.allowed(["r1", "r2"]) == ["r2"]  # one finds out for all

    breaker.record_success("r1")
    assert breaker.allowed(["r1", "r2"]) == ["r1", "r2"]


@pytest.mark.parametrize(("is_replicas", "rests"), [(False, False), (True, True)])
def test_the_failures_of_one_tenants_requests_rest_no_replica_and_those_of_its_own_do(clock, is_replicas, rests):
    breaker = Breaker()
    for _ in range(40):
        breaker.record_failure("r", "hostile")
    assert breaker.allowed(["r"]) == ["r"]

    breaker.record_failure("r", "hostile", is_replicas=is_replicas)
    assert (breaker.allowed(["r"]) == []) is rests


def test_its_rests_grow_to_a_bound(clock):
    breaker = Breaker()
    for n in range(40):
        breaker.record_failure("r", f"tenant-{n}")
    clock.now += turning._MAX_REST_SECONDS + 0.1

    assert breaker.allowed(["r"]) == ["r"]
