"""Live pages: how soon a watcher sees the first event while another tenant opens all the streams it can."""

import asyncio

import aiohttp

from tests.bench.neighbours.stage import Platform, Tenant
from tests.bench.neighbours.traffic import Attack, BadAnswer, Entrance, as_person


def entrances(platform: Platform) -> dict[str, Entrance]:
    async def watch(client: aiohttp.ClientSession) -> None:
        if (status := await _open(client, platform.working, seconds=0)) != 200:
            raise BadAnswer(f"a live page was answered with {status}")

    def against(seconds: float) -> Entrance:
        attacker = platform.make_tenant()
        return Entrance(watch, _opening(attacker, seconds), attacker, pause_seconds=0.1)

    return {"live pages beside open ones": against(60), "live pages beside reopened ones": against(0)}


def _opening(attacker: Tenant, seconds: float) -> Attack:
    async def open_one(client: aiohttp.ClientSession, number: int) -> int:
        try:
            return await _open(client, attacker, seconds=seconds)
        except BadAnswer:
            return 0

    return open_one


async def _open(client: aiohttp.ClientSession, tenant: Tenant, *, seconds: float) -> int:
    """Follow a job's stream to its first event and for so long after it; then leave."""
    async with client.get(f"/jobs/{tenant.job_id}/stream", headers=as_person(tenant)) as answer:
        if answer.status == 200:
            if not (await answer.content.readuntil(b"\n\n")).endswith(b"\n\n"):
                raise BadAnswer("a live page ended before its first event")
            await asyncio.sleep(seconds)
        answer.close()
        return answer.status
