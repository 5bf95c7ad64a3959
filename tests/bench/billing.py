"""How fast the books are: `make bench-billing`, or `python -m tests.bench.billing [--events N] [--seconds S]`.

hold_capture_per_s      holds placed and settled on ONE wallet, from eight connections
metered_requests_per_s  requests reserved in slices, spooled with fdatasync and recorded, without HTTP, on one wallet
events_rated_per_s      events from spool segments on disk to recorded, rated and invoiced lines, by two shippers

PostgreSQL is the embedded one, durable, on this machine's disk. Each part ends with the books checked. The last line is
one JSON object.
"""

import argparse
import asyncio
import datetime
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from scripts.embedded import ensure_running
from tests.services.environment import bench_environment

USD = 1_000_000_000
KEYS, MODELS = 20, 10
SEGMENT_EVENTS, BATCH, SHIPPERS = 50_000, 5_000, 2
LANES, CONNECTIONS = 64, 8


class World:
    """One organization with credit enough, and the prices of one model."""

    def __init__(self) -> None:
        from django.core.management import call_command

        from apps.catalog.operations import set_price
        from tests.factories.accounts import make_organization, make_user
        from tests.factories.money import give_credit

        call_command("migrate", verbosity=0)
        self.organization = make_organization("Bench", owner=make_user("bench"))
        give_credit(self.organization, 1_000_000 * USD)
        long_ago = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
        self.prices = [
            set_price(
                sku=f"inference:{way}:bench", unit="tokens", price_nano=nano, per=1_000_000, by="system", now=long_ago
            )
            for way, nano in (("input", 50_000_000), ("output", 200_000_000))
        ]

    def assert_books_hold(self) -> None:
        from apps.billing.books.reconciliation import reconcile

        differences = [
            (row.name, row.differences[:3])
            for row in reconcile(now=datetime.datetime.now(datetime.UTC))
            if row.differences
        ]
        if differences:
            raise AssertionError(differences)


def _batched(rows: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for place in range(0, len(rows), size):
        yield rows[place : place + size]


# --- Holds ------------------------------------------------------------------------------------------------------------


def bench_holds(world: World, *, seconds: float) -> dict[str, Any]:
    from django.db import connection

    from apps.billing.operations import hold, settle_hold

    until = time.perf_counter() + seconds
    counts = [0] * CONNECTIONS

    def work(number: int) -> None:
        while time.perf_counter() < until:
            source = f"ftjob-{number}-{counts[number]}"
            held = hold(
                organization=world.organization,
                purpose="job",
                source=source,
                amount_nano=1000,
                by="system",
                idempotency_key=f"hold:{source}",
            )
            settle_hold(hold_id=held.pk, capture_nano=700, by="system")
            counts[number] += 1
        connection.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(CONNECTIONS)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - began
    world.assert_books_hold()
    return {"hold_capture_per_s": round(sum(counts) / took, 1), "holds": sum(counts)}


# --- Requests ---------------------------------------------------------------------------------------------------------


async def _meter(world: World, home: Path, seconds: float) -> tuple[int, float]:
    """Admit and finish requests as the gateway does, with nothing between; return how many, and the seconds."""
    from apps.core.errors import Unavailable
    from apps.core.ids import new_id
    from apps.interfaces.gateway.database import Database
    from apps.interfaces.gateway.engines.meter import Meter
    from apps.interfaces.gateway.engines.routes import Price, Prices
    from apps.interfaces.gateway.metering.recorder import Recorder
    from apps.interfaces.gateway.metering.spending_slices import SpendingSlices
    from apps.interfaces.gateway.metering.tickets import Metering

    database = Database()
    name = new_id("gateway")
    spending_slices = SpendingSlices(database, name=name)
    recorder = Recorder(home / "spool", name=name, settled=spending_slices.record_settled)
    prices = Prices(*(Price(rule.pk, rule.price_nano, rule.per) for rule in world.prices))
    routes: Any = SimpleNamespace(prices_of=lambda route, organization_id: prices, now=time.time)
    faults: Any = None  # none is accused
    metering = Metering(routes, spending_slices, recorder, faults)
    caller: Any = SimpleNamespace(organization_id=world.organization.pk, key_id="key_bench")
    route: Any = SimpleNamespace(model_name="bench", adapter_version_id="", context_length=4096)
    request: Any = SimpleNamespace(
        choice_count=1, prompt_count=1, input_tokens_bound=lambda context: 200, output_tokens_bound=lambda context: 100
    )
    await recorder.open()
    maintaining = asyncio.create_task(spending_slices.maintain())
    counts = [0] * LANES

    async def lane(number: int, until: float) -> None:
        while time.perf_counter() < until:
            meter = Meter(choice_count=1, prompts={0: 120}, outputs={0: 40})
            try:
                ticket = await metering.admit(caller, route, request, meter, usage_id=new_id("use"))
            except Unavailable:  # more waits for the database than may: a client would come again
                await asyncio.sleep(0.05)
                continue
            await ticket.finish("stop")
            counts[number] += 1

    began = time.perf_counter()
    await asyncio.gather(*(lane(number, began + seconds) for number in range(LANES)))
    took = time.perf_counter() - began
    maintaining.cancel()
    await asyncio.gather(maintaining, return_exceptions=True)
    await recorder.flush()
    await spending_slices.return_idle(at_once=True)
    await recorder.close()
    database.close()
    return sum(counts), took


def bench_requests(world: World, home: Path, *, seconds: float) -> dict[str, Any]:
    from apps.billing.models import UsageEvent
    from apps.billing.usage.metering import rate_usage

    sent, took = asyncio.run(_meter(world, home, seconds))
    recorded = UsageEvent.objects.filter(key_id="key_bench").count()
    rate_usage()
    world.assert_books_hold()
    if recorded != sent:
        raise AssertionError(f"{sent} requests were confirmed and {recorded} recorded")
    return {"metered_requests_per_s": round(sent / took, 1), "requests": sent, "recorded": recorded}


# --- Events -----------------------------------------------------------------------------------------------------------


def _write_segments(world: World, folder: Path, count: int) -> int:
    """Write `count` ends as gateways leave them on their disks; return the sum of their tokens."""
    from apps.billing.usage.metering import UsageRecord
    from apps.core.ids import new_ulid
    from apps.interfaces.gateway.metering.spool import End, encode

    folder.mkdir()
    tokens = 0
    month = datetime.datetime(2026, 10, 1, tzinfo=datetime.UTC)
    for segment, numbers in enumerate(_batched(range(count), SEGMENT_EVENTS)):
        with (folder / f"{segment:08}.seg").open("wb") as file:
            for number in numbers:
                record = UsageRecord(
                    id=f"use_{new_ulid()}",
                    organization_id=world.organization.pk,
                    key_id=f"key_{number % KEYS}",
                    model_name=f"ft:bench:bench:{number % MODELS}",
                    adapter_version_id=f"adpv_{number % MODELS}",
                    slice_id="",
                    input_price_id=world.prices[0].pk,
                    output_price_id=world.prices[1].pk,
                    input_tokens=100 + number % 57,
                    cached_input_tokens=0,
                    output_tokens=20 + number % 31,
                    finish="stop",
                    latency_ms=120,
                    first_token_ms=30,
                    occurred_at=month + datetime.timedelta(seconds=number % (28 * 86_400)),
                )
                tokens += record.input_tokens + record.output_tokens
                file.write(encode(End(record)))
    return tokens


def _ship(path: Path) -> int:
    from django.db import connection

    from apps.billing.usage.metering import record_usage
    from apps.interfaces.gateway.metering.spool import End, read_entries

    ends = [entry.record for entry in read_entries(path) if isinstance(entry, End)]
    for batch in _batched(ends, BATCH):
        record_usage(records=batch)
    connection.close()
    path.unlink()
    return len(ends)


def bench_events(world: World, home: Path, *, events: int) -> dict[str, Any]:
    from apps.billing.invoices.statements import close_month
    from apps.billing.usage.metering import rate_usage

    tokens = _write_segments(world, home / "segments", events)
    began = time.perf_counter()
    with ThreadPoolExecutor(SHIPPERS) as shippers:
        shipped = sum(shippers.map(_ship, sorted((home / "segments").glob("*.seg"))))
    recorded_after = time.perf_counter() - began
    rate_usage()
    invoice = close_month(organization=world.organization, month=datetime.date(2026, 10, 1))
    took = time.perf_counter() - began
    assert invoice is not None and shipped == events
    billed = sum(invoice.lines.filter(kind="inference").values_list("quantity", flat=True))
    if billed != tokens:
        raise AssertionError(f"{tokens} tokens were on disk and {billed} are on the invoice")
    world.assert_books_hold()
    return {
        "events_rated_per_s": round(events / took, 1),
        "events": events,
        "seconds_to_recorded": round(recorded_after, 2),
        "seconds_to_invoice": round(took, 2),
        "invoice_lines": invoice.lines.count(),
        "seconds_for_a_million": round(took * 1_000_000 / events, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=10)
    given = parser.parse_args()
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench")))
        services = stack.enter_context(ensure_running(home, durable=True))
        os.environ.update(bench_environment(home, services, "owner"))
        import django

        django.setup()
        world = World()
        result: dict[str, Any] = {"durable": True, "cpus": os.cpu_count()}
        result |= bench_holds(world, seconds=given.seconds)
        result |= bench_requests(world, home, seconds=given.seconds)
        result |= bench_events(world, home, events=given.events)
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
