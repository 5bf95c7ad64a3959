"""The entrances of the web process: while one tenant asks for the costly things at full rate, another works on."""

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from statistics import quantiles

import aiohttp

from tests.bench.neighbours.stage import Platform, Tenant

SECONDS = 6.0
_CONNECTIONS = 32
_PAUSE_SECONDS = 0.05  # of the tenant that works, between two requests
_ROWS = b"".join(
    b'{"messages":[{"role":"user","content":"Where is card %d?"},{"role":"assistant","content":"On its way."}]}\n' % n
    for n in range(10_000)
)

Ask = Callable[[aiohttp.ClientSession, int], Awaitable[int]]


async def measure(platform: Platform) -> dict[str, dict[str, float]]:
    """Return for each entrance the 95th percentile of the working tenant's requests, in ms, alone and under attack."""
    found = {}
    await _work(platform, SECONDS / 2)  # the first requests fill caches
    for name, ask in _attacks(platform).items():
        quiet = await _work(platform, SECONDS)
        async with _attacking(platform, ask) as answered:
            await asyncio.sleep(1)
            attacked = await _work(platform, SECONDS)
        found[name] = {"quiet_p95_ms": quiet, "attacked_p95_ms": attacked}
        sys.stdout.write(f"{name:18} the attack was answered with {dict(answered)}\n")
        await asyncio.sleep(2)
    return found


def _attacks(platform: Platform) -> dict[str, Ask]:
    hostile = platform.hostile
    job = {"model": platform.training_model, "training_file": hostile.file_id}
    as_json = {"Content-Type": "application/json"}

    def key(number: int) -> dict[str, str]:
        return {"Authorization": f"Bearer {hostile.keys[number % len(hostile.keys)]}"}

    def send(method: str, path: str, body: object = None, *, is_signed_in: bool = True) -> Ask:
        async def ask(session: aiohttp.ClientSession, number: int) -> int:
            headers = key(number) if is_signed_in else {}
            data = None if body is None else json.dumps(body)
            async with session.request(method, path, data=data, headers=headers | (as_json if body else {})) as answer:
                await answer.read()
                return answer.status

        return ask

    async def upload(session: aiohttp.ClientSession, number: int) -> int:
        form = aiohttp.FormData({"purpose": "fine-tune"})
        form.add_field("file", _ROWS, filename="rows.jsonl")
        async with session.post("/v1/files", data=form, headers=key(number)) as answer:
            return answer.status

    async def page(session: aiohttp.ClientSession, number: int) -> int:
        async with session.get("/jobs/new?step=compute", headers={"Cookie": hostile.cookie}) as answer:
            await answer.read()
            return answer.status

    async def stream(session: aiohttp.ClientSession, number: int) -> int:
        path = f"/jobs/{hostile.job_id}/stream"
        async with session.get(path, headers={"Cookie": hostile.cookie}) as answer:
            if answer.status == 200:
                await answer.content.read(64)
                await asyncio.sleep(60)
            return answer.status

    return {
        "estimates": send("POST", "/api/v1/estimates", job),
        "dry_runs": send("POST", "/v1/fine_tuning/jobs", job | {"dry_run": True}),
        "job_list": send("GET", "/v1/fine_tuning/jobs?limit=100"),
        "schema": send("GET", "/api/v1/schema", is_signed_in=False),
        "login_page": send("GET", "/accounts/login/", is_signed_in=False),
        "unknown_addresses": send("GET", "/no/such/page", is_signed_in=False),
        "wizard": page,
        "uploads": upload,
        "live_streams": stream,
    }


@asynccontextmanager
async def _attacking(platform: Platform, ask: Ask) -> AsyncIterator[Counter[str]]:
    """Ask on all connections, each time at once again, until the block ends."""
    answered: Counter[str] = Counter()

    async def hammer(session: aiohttp.ClientSession, number: int) -> None:
        while True:
            try:
                answered[str(await ask(session, number))] += 1
            except (aiohttp.ClientError, TimeoutError, OSError):
                answered["refused"] += 1
                await asyncio.sleep(0.01)

    async with _session(platform, platform.hostile) as session:
        tasks = [asyncio.create_task(hammer(session, number)) for number in range(_CONNECTIONS)]
        try:
            yield answered
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _work(platform: Platform, seconds: float) -> float:
    """Return the 95th percentile, in ms, of a person and a program at ordinary work. Every answer must be good."""
    tenant, times = platform.working, []
    asked = [
        ("GET", "/api/v1/me", {"Authorization": f"Bearer {tenant.keys[0]}"}),
        ("GET", "/jobs", {"Cookie": tenant.cookie}),
        ("GET", f"/v1/fine_tuning/jobs/{tenant.job_id}", {"Authorization": f"Bearer {tenant.keys[0]}"}),
    ]
    until = time.monotonic() + seconds
    async with _session(platform, tenant) as session:
        while time.monotonic() < until:
            method, path, headers = asked[len(times) % len(asked)]
            began = time.perf_counter()
            async with session.request(method, path, headers=headers) as answer:
                await answer.read()
                if answer.status != 200:
                    raise RuntimeError(f"{path} was answered with {answer.status}")
            times.append((time.perf_counter() - began) * 1000)
            await asyncio.sleep(_PAUSE_SECONDS)
    return round(quantiles(times, n=20)[-1], 1)


def _session(platform: Platform, tenant: Tenant) -> aiohttp.ClientSession:
    """Each tenant sends from an address of its own."""
    connector = aiohttp.TCPConnector(local_addr=(tenant.address, 0), limit=0)
    timeout, jar = aiohttp.ClientTimeout(total=90), aiohttp.DummyCookieJar()
    return aiohttp.ClientSession(platform.url, connector=connector, timeout=timeout, cookie_jar=jar)
