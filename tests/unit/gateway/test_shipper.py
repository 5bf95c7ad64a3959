"""Usage travels in few large transactions, however fast it comes."""

import asyncio
from contextlib import suppress
from types import SimpleNamespace

from apps.gateway import shipper as shipping
from apps.gateway.shipper import Shipper

_ROUNDS = 3


def test_what_ends_while_usage_is_recorded_waits_for_the_next_gathering(monkeypatch):
    events: list[str | int] = []
    turn = asyncio.sleep

    async def pause(seconds: float) -> None:
        events.append("gather")
        await turn(0)

    class Database:
        async def call(self, function, *, records) -> None:
            events.append(len(records))
            if events.count("gather") == _ROUNDS:
                raise asyncio.CancelledError
            shipper.add(SimpleNamespace(id="use_late"))

    monkeypatch.setattr(shipping.asyncio, "sleep", pause)
    shipper = Shipper(Database(), SimpleNamespace(forget=lambda ids: None), lambda records: None)
    for number in range(3):
        shipper.add(SimpleNamespace(id=f"use_{number}"))
    with suppress(asyncio.CancelledError):
        asyncio.run(shipper.run())

    assert events == ["gather", 3, "gather", 1, "gather", 1]
