"""Batches and pushes: from the order to its result, while another tenant orders what takes longest."""

import asyncio
import itertools
from collections.abc import Callable

import aiohttp

from tests.bench.neighbours.orders import MANY_LINES, batch_of, make_model, make_requests, push_to, pushes_of
from tests.bench.neighbours.stage import Platform, Tenant
from tests.bench.neighbours.traffic import BadAnswer, Entrance, Work, as_key, get, sending

_POLL_SECONDS = 0.05
_OPEN = ("validating", "in_progress", "finalizing", "waiting", "running")


def entrances(platform: Platform) -> dict[str, Entrance]:
    working, hostile = platform.working, platform.make_tenant()
    numbers, hostile_numbers = itertools.count(1), itertools.count(1)
    pushes, hostile_pushes = (pushes_of(make_model(platform, tenant)) for tenant in (working, hostile))
    file_id, large_file_id = make_requests(working, lines=1), make_requests(hostile, lines=MANY_LINES)

    async def order(client: aiohttp.ClientSession, path: str, body: dict[str, str]) -> None:
        """Order, wait for the good end, and let it count in no limit. Raises BadAnswer."""
        await get(client, "POST", path, as_key(working), body)
        await asyncio.to_thread(platform.work_on_batches)
        while (newest := (await get(client, "GET", path, as_key(working)))["data"][0])["status"] in _OPEN:
            await asyncio.sleep(_POLL_SECONDS)
        if newest["status"] not in ("completed", "succeeded"):
            raise BadAnswer(f"an order ended like this: {newest}")
        await asyncio.to_thread(platform.forget_work, working.organization_id)

    async def batch(client: aiohttp.ClientSession) -> None:
        await order(client, "/v1/batches", batch_of(file_id))

    async def push(client: aiohttp.ClientSession) -> None:
        await order(client, pushes, push_to("working", next(numbers)))

    return {
        "batches beside large ones": _beside(platform, batch, hostile, "/v1/batches", lambda: batch_of(large_file_id)),
        "pushes beside slow ones": _beside(
            platform, push, hostile, hostile_pushes, lambda: push_to("hostile", next(hostile_numbers))
        ),
    }


def _beside(platform: Platform, work: Work, hostile: Tenant, path: str, make: Callable[[], dict[str, str]]) -> Entrance:
    attack = sending(hostile, "POST", path, make)
    return Entrance(work, attack, hostile, seconds=6.0, forget=lambda: platform.forget_work(hostile.organization_id))
