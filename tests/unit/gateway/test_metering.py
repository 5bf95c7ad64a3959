"""What was used is charged even when the customer leaves while it is being written."""

import asyncio
import os
import threading
from contextlib import suppress
from types import SimpleNamespace

from apps.billing.usage import UsageRecord
from apps.gateway import spool as spool_module
from apps.gateway.chunks import Meter
from apps.gateway.inference import _written
from apps.gateway.metering import Metering, Ticket
from apps.gateway.purses import Reservation
from apps.gateway.spool import Spool


def _ticket(metering: Metering) -> Ticket:
    price = SimpleNamespace(id=None, price_nano=1, per=1)
    caller = SimpleNamespace(organization_id="org_1", key_id="key_1")
    route = SimpleNamespace(model_name="anneal-demo", adapter_version_id="")
    prices = SimpleNamespace(input=price, output=price)
    meter = Meter(1)
    return Ticket(metering, "use_1", caller, route, prices, Reservation(None, 0), meter)


def test_usage_is_shipped_when_the_customer_leaves_while_it_is_written(tmp_path, monkeypatch):
    shipped: list[UsageRecord] = []
    may_sync = threading.Event()
    sync = os.fdatasync
    monkeypatch.setattr(spool_module.os, "fdatasync", lambda descriptor: may_sync.wait(5) and sync(descriptor))

    async def scenario() -> None:
        spool = Spool(tmp_path, name="gateway_1")
        spool.open()
        purses = SimpleNamespace(note_shipped=lambda slice_id: None)
        metering = Metering(SimpleNamespace(now=lambda: 0.0), purses, spool, SimpleNamespace(add=shipped.append))
        waiting = asyncio.ensure_future(_written(_ticket(metering)))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        may_sync.set()
        for _ in range(100):
            await asyncio.sleep(0.02)
            if shipped:
                break
        await asyncio.to_thread(spool.close)

    asyncio.run(scenario())

    assert [record.id for record in shipped] == ["use_1"]
