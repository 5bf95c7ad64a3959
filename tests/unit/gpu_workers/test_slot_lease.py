"""Slots are shared fairly: the longest waiting adapter is next, and none keeps its slot for ever."""

import asyncio

import pytest

from gpu_workers.serving.traffic.slot_lease import SlotLease, SlotsBusy
from tests.support.waiting import settle


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Request:
    """One request that holds its adapter until it is finished."""

    def __init__(self, lease: SlotLease, lora_name: str) -> None:
        self.is_admitted = False
        self._finish = asyncio.Event()
        self.task = asyncio.create_task(self._run(lease, lora_name))

    async def _run(self, lease: SlotLease, lora_name: str) -> None:
        async with lease.hold(lora_name):
            self.is_admitted = True
            await self._finish.wait()

    async def finish(self) -> None:
        self._finish.set()
        await self.task
        await settle()


async def begin(lease: SlotLease, *names: str) -> list[Request]:
    requests = []
    for name in names:
        requests.append(Request(lease, name))
        await settle()
    return requests


def make_lease(*, slots: int = 2, max_waiting: int = 100) -> tuple[SlotLease, Clock]:
    clock = Clock()
    return SlotLease(slots, quantum_seconds=1.5, patience_seconds=30, max_waiting=max_waiting, clock=clock), clock


async def test_any_number_of_requests_of_as_many_adapters_as_slots_are_admitted() -> None:
    lease, _ = make_lease()
    requests = await begin(lease, "a", "b", "a", "a", "b")

    assert all(request.is_admitted for request in requests)
    for request in requests:
        await request.finish()
    assert lease.count_in_flight() == 0


async def test_one_more_adapter_waits_until_a_slot_is_empty() -> None:
    lease, _ = make_lease()
    a, b, c = await begin(lease, "a", "b", "c")
    assert not c.is_admitted

    await b.finish()

    assert c.is_admitted
    await a.finish()
    await c.finish()


async def test_holder_beyond_its_quantum_admits_nobody_new_while_another_waits() -> None:
    lease, clock = make_lease(slots=1)
    hot, cold = await begin(lease, "a", "b")
    clock.now = 1.0
    (within,) = await begin(lease, "a")
    clock.now = 2.0
    (beyond,) = await begin(lease, "a")
    assert within.is_admitted and not beyond.is_admitted

    await hot.finish()
    await within.finish()

    assert cold.is_admitted and not beyond.is_admitted
    await cold.finish()
    assert beyond.is_admitted
    await beyond.finish()


async def test_a_fifth_adapter_is_answered_within_5_seconds_under_four_hot_ones() -> None:
    """Each hot one has always two answers of 2 s under way, so that without a quantum its slot would never be free."""

    lease, clock = make_lease(slots=4)
    hot = ["a", "b", "c", "d"]
    under_way = [(clock.now + 2 + n % 2, name, *await begin(lease, name)) for n, name in enumerate(hot * 2)]
    waiting: list[Request] = []
    while clock.now < 15:
        clock.now += 0.5
        if clock.now == 10:
            waiting = await begin(lease, "cold")
        for entry in [entry for entry in under_way if entry[0] <= clock.now and entry[2].is_admitted]:
            under_way.remove(entry)
            await entry[2].finish()
            under_way.append((clock.now + 2, entry[1], *await begin(lease, entry[1])))
        if waiting and waiting[0].is_admitted:
            break

    assert waiting[0].is_admitted and clock.now < 15
    for request in [*waiting, *(entry[2] for entry in under_way)]:
        request.task.cancel()


async def test_longest_waiting_adapter_is_next() -> None:
    lease, _ = make_lease(slots=1)
    a, first, second = await begin(lease, "a", "b", "c")

    await a.finish()

    assert first.is_admitted and not second.is_admitted
    await first.finish()
    assert second.is_admitted
    await second.finish()


async def test_request_that_gives_up_makes_room_for_the_next() -> None:
    lease, _ = make_lease(slots=1)
    a, gone, waiting = await begin(lease, "a", "b", "c")
    gone.task.cancel()
    await settle()
    assert lease.count_waiting() == 1

    await a.finish()

    assert waiting.is_admitted
    await waiting.finish()
    assert lease.count_in_flight() == 0


async def test_queue_has_an_end() -> None:
    lease, _ = make_lease(slots=1, max_waiting=1)
    a, waiting, refused = await begin(lease, "a", "b", "c")

    with pytest.raises(SlotsBusy):
        await refused.task
    await a.finish()
    await waiting.finish()


async def test_patience_has_an_end() -> None:
    lease = SlotLease(1, patience_seconds=0)
    a, refused = await begin(lease, "a", "b")

    with pytest.raises(SlotsBusy):
        await refused.task
    await a.finish()
    assert lease.count_waiting() == lease.count_in_flight() == 0
