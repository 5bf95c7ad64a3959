"""The entrance of inference: while one tenant sends what costs the gateway most, another's chats go on."""

import asyncio
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from statistics import quantiles
from typing import Any, Protocol

import aiohttp

SECONDS = 8.0
_CONNECTIONS = 32
_PAUSE_SECONDS = 0.02  # of the tenant that works, between two chats
_PATH = "/v1/chat/completions"
_HI = [{"role": "user", "content": "Hi"}]
_SLOW_BYTES, _SLOW_PARTS = 200_000, 100

Ask = Callable[[aiohttp.ClientSession, int], Awaitable[int]]


class _Tenant(Protocol):
    keys: list[str]
    address: str


class _Platform(Protocol):
    url: str
    model: str
    working: Any
    hostile: Any


async def measure(platform: _Platform) -> dict[str, dict[str, float]]:
    """Return for each attack the 95th percentile of the working tenant's chats, in ms, alone and beside it."""
    found = {}
    await _work(platform, SECONDS / 4)  # the first requests fill caches
    for name, ask in _attacks(platform).items():
        quiet = await _work(platform, SECONDS)
        async with _attacking(platform, ask) as answered:
            await asyncio.sleep(1)
            attacked = await _work(platform, SECONDS)
        found[f"inference_{name}"] = {"quiet_p95_ms": quiet, "attacked_p95_ms": attacked}
        sys.stdout.write(f"inference_{name:18} the attack was answered with {dict(answered)}\n")
        await asyncio.sleep(1)
    return found


def _attacks(platform: _Platform) -> dict[str, Ask]:
    numbers = itertools.count()
    deep = "[" * 1500 + "]" * 1500
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": deep}}

    def sending(make: Callable[[], dict[str, Any]]) -> Ask:
        async def ask(session: aiohttp.ClientSession, number: int) -> int:
            body = json.dumps({"model": platform.model, "messages": _HI, "max_tokens": 8} | make())
            headers = _headers(platform.hostile, number)
            async with session.post(_PATH, data=body, headers=headers) as answer:
                await answer.read()
                return answer.status

        return ask

    def schema(**fields: Any) -> dict[str, Any]:
        named = {"name": "s", "schema": fields | {"title": str(next(numbers))}}  # each is new to every cache
        return {"response_format": {"type": "json_schema", "json_schema": named}}

    async def slow(session: aiohttp.ClientSession, number: int) -> int:
        async def parts() -> AsyncIterator[bytes]:
            for _ in range(_SLOW_PARTS):
                yield b" " * (_SLOW_BYTES // _SLOW_PARTS)
                await asyncio.sleep(0.5)

        async with session.post(_PATH, data=parts(), headers=_headers(platform.hostile, number)) as answer:
            return answer.status

    counted = [{"type": "integer", "minimum": -(10**17) + n, "maximum": 10**18 - 7} for n in range(90)]
    whole_messages = json.dumps(_HI * 100_000)[:-1]

    async def messages(session: aiohttp.ClientSession, number: int) -> int:
        body = f'{{"model":"{platform.model}","messages":{whole_messages}]}}'
        async with session.post(_PATH, data=body, headers=_headers(platform.hostile, number)) as answer:
            return answer.status

    return {
        "chats": sending(dict),
        "regex": sending(lambda: schema(type="string", pattern="(a|b|c){1,2000}")),
        "schemas": sending(lambda: schema(type="object", properties={f"p{n}": one for n, one in enumerate(counted)})),
        "arguments": sending(lambda: {"messages": [*_HI, {"role": "assistant", "tool_calls": [call]}, *_HI]}),
        "messages": messages,
        "slow_bodies": slow,
    }


def _headers(tenant: _Tenant, number: int) -> dict[str, str]:
    key = tenant.keys[number % len(tenant.keys)]
    return {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}


@asynccontextmanager
async def _attacking(platform: _Platform, ask: Ask) -> AsyncIterator[Counter[str]]:
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


async def _work(platform: _Platform, seconds: float) -> float:
    """Return the 95th percentile, in ms, of chats one after the other. Every answer must be good."""
    times: list[float] = []
    body = json.dumps({"model": platform.model, "messages": _HI, "max_tokens": 8})
    until = time.monotonic() + seconds
    async with _session(platform, platform.working) as session:
        while time.monotonic() < until:
            began = time.perf_counter()
            async with session.post(_PATH, data=body, headers=_headers(platform.working, 0)) as answer:
                content = await answer.read()
                if answer.status != 200:
                    raise RuntimeError(f"a chat was answered with {answer.status}: {content[:300]!r}")
            times.append((time.perf_counter() - began) * 1000)
            await asyncio.sleep(_PAUSE_SECONDS)
    return round(quantiles(times, n=20)[-1], 1)


def _session(platform: _Platform, tenant: _Tenant) -> aiohttp.ClientSession:
    """Each tenant sends from an address of its own."""
    connector = aiohttp.TCPConnector(local_addr=(tenant.address, 0), limit=0)
    return aiohttp.ClientSession(platform.url, connector=connector, timeout=aiohttp.ClientTimeout(total=90))
