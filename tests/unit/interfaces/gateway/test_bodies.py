"""What a body may take before it is parsed: bytes of one organization and of all, time, and room for the others."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from apps.core.errors import RateLimited, Unavailable
from apps.core.http.asgi import DEFAULT_BODY_BYTES, MIB, TooLarge
from apps.interfaces.gateway.engines.chunks import EngineChunk
from apps.interfaces.gateway.engines.meter import Meter
from apps.interfaces.gateway.errors import AnswerTooLarge
from apps.interfaces.gateway.http import client as reading
from apps.interfaces.gateway.http.bodies import MAX_OF_ONE, Bodies, BodyTooSlow, largest_body, tokens_unread
from apps.interfaces.gateway.http.client import Client
from apps.interfaces.gateway.http.connections import EXCHANGE
from apps.interfaces.gateway.http.held_bytes import HeldBytes
from apps.interfaces.gateway.requests.schema import parse_chat
from apps.interfaces.gateway.surfaces.inference import _held


class Incoming:
    """A body of which a part comes each time that it is waited for; then none."""

    def __init__(self, *parts: bytes, headers: dict[bytes, bytes] | None = None) -> None:
        self._parts, self._here = list(parts), b""
        self.headers = headers or {}
        self.is_gone, self.keeps_alive = False, True

    @property
    def size_bytes(self) -> int:
        return len(self._here)

    @property
    def is_whole(self) -> bool:
        return self._parts == [b""]

    async def news(self) -> None:
        if not self._parts:
            await asyncio.Event().wait()
        self._here += self._parts.pop(0)

    def take_body(self) -> bytes:
        return self._here


def read(incoming: Incoming, *, most_bytes: int = 100, count=lambda size: None) -> bytes:
    return asyncio.run(Client({EXCHANGE: incoming}).read_body(most_bytes=most_bytes, count=count))


def test_a_body_is_counted_as_it_comes():
    sizes: list[int] = []

    assert read(Incoming(b"one ", b"two", b""), count=sizes.append) == b"one two"
    assert sizes == [4, 7]


@pytest.mark.parametrize(
    "incoming", [Incoming(b"x" * 60, b"x" * 60, b""), Incoming(headers={b"content-length": b"101"})]
)
def test_a_body_that_no_model_can_use_is_refused_before_it_is_whole(incoming):
    with pytest.raises(TooLarge):
        read(incoming)


def test_a_body_that_does_not_come_to_its_end_is_given_up_with_its_connection(monkeypatch):
    monkeypatch.setattr(reading, "BODY_SECONDS", 0)
    incoming = Incoming(b"a")

    with pytest.raises(BodyTooSlow):
        read(incoming)
    assert not incoming.keeps_alive


def test_one_organizations_bodies_leave_room_for_the_others():
    bodies = Bodies()
    with bodies.holding("hostile") as first, bodies.holding("hostile") as second, bodies.holding("other") as theirs:
        first.count(MAX_OF_ONE - 1)
        with pytest.raises(RateLimited):
            second.count(2)
        theirs.count(MAX_OF_ONE)
    with bodies.holding("hostile") as again:
        again.count(MAX_OF_ONE)


def test_all_bodies_together_are_bounded_and_there_is_always_room_for_another_organization():
    bodies = Bodies()
    for number in range(30):
        one = bodies.holding(f"hostile_{number}")
        with suppress(RateLimited, Unavailable):
            for size in range(MIB, 2 * MAX_OF_ONE, MIB):
                one.count(size)
    with pytest.raises(Unavailable):
        bodies.holding("another").count(MAX_OF_ONE)

    bodies.holding("another").count(128 * 1024)


async def test_large_bodies_are_parsed_one_at_a_time_and_tenants_take_turns():
    order: list[bytes] = []
    running = threading.Semaphore()

    def parse(raw: bytes) -> None:
        assert running.acquire(blocking=False)
        order.append(raw)
        running.release()

    bodies = Bodies()
    hostile = [asyncio.create_task(bodies.parse_aside("hostile", parse, b"theirs")) for _ in range(20)]
    await asyncio.sleep(0)
    await bodies.parse_aside("other", parse, b"other")
    await asyncio.gather(*hostile)
    left = asyncio.create_task(bodies.parse_aside("other", parse, b"left"))
    await asyncio.sleep(0)
    left.cancel()
    await bodies.parse_aside("other", parse, b"next")
    assert b"other" in order[:4]
    assert order[-2:] == [b"left", b"next"]


def test_a_body_may_be_as_large_as_a_model_can_use():
    assert largest_body(512, takes_media=False) < MIB
    assert largest_body(131_072, takes_media=False) > 2 * MIB
    assert largest_body(10**9, takes_media=False) == largest_body(1, takes_media=True) == DEFAULT_BODY_BYTES
    assert 0 < tokens_unread(4 * MIB) < 100_000


@pytest.mark.parametrize(("content_bytes", "allowed"), [(0, 3), (600, 1)])
def test_an_answer_ends_where_its_organization_has_no_room_for_more(content_bytes: int, allowed: int):
    request, meter = (
        parse_chat(b'{"model": "m", "messages": [{"role": "user", "content": "Hi"}], "logprobs": true}'),
        Meter(1),
    )
    room = HeldBytes("answers", most_of_one=1_000, most_of_all=10_000, advice="Ask for less.")

    async def answer() -> AsyncIterator[list[EngineChunk]]:
        for _ in range(20):
            meter.outputs[0] = meter.outputs.get(0, 0) + 1
            meter.content_bytes += content_bytes
            yield []

    async def read() -> int:
        with room.holding("org") as held:
            return len([chunks async for chunks in _held(answer(), request, meter, held)])

    with pytest.raises(AnswerTooLarge, match="Ask for less"):
        asyncio.run(read())
    assert 1_000 // request.held_bytes_per_token == 3
    assert meter.output_tokens == allowed + 1
    room.add("org", 1_000)  # the answer's were returned
