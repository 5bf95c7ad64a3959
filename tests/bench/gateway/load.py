"""The three loads: wrk's closed loop, an open loop at a fixed rate, and many slow streams at once."""

import asyncio
import json
import os
import subprocess
import time
import urllib.request
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import aiohttp

from tests.bench.gateway import installing
from tests.bench.gateway.stage import MODEL, PATH, Target

_TIMEOUT = aiohttp.ClientTimeout(total=60)


class Refused(Exception):
    """A server under test answered something other than 200."""


def body(model: str, *, is_streamed: bool) -> str:
    fields = {"model": model, "messages": [{"role": "user", "content": "Say something."}], "max_tokens": 16}
    return json.dumps(fields | {"stream": is_streamed})


def wrk(target: Target, *, seconds: int, connections: int, is_warming: bool = False) -> dict[str, Any]:
    """Ask as fast as the answers come. Raises Refused, also when there is no answer at all but while warming."""
    headers = [f"{name}: {value}" for name, value in (target.headers | {"Content-Type": "application/json"}).items()]
    command = [str(installing.debian_root() / "usr/bin/wrk"), "-t1", f"-c{connections}", f"-d{seconds}s",
               "--timeout", "30s", "-s", str(installing.CONFIGURATION / "load.lua"), target.url + PATH,
               "--", body(MODEL, is_streamed=False), *headers]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | installing.libraries())
    seen = json.loads(done.stdout.splitlines()[-1])
    if seen["refused"] or seen["broken"] or not (seen["requests"] or is_warming):
        raise Refused(f"{target.name}: {seen}")
    return seen | {"requests_per_second": round(seen["requests"] / seen["seconds"], 1)}


def first_answer(target: Target) -> None:
    """Wait for one answer: some load half of themselves at the first request. Raises Refused."""
    headers = target.headers | {"Content-Type": "application/json"}
    asked = urllib.request.Request(target.url + PATH, data=body(MODEL, is_streamed=False).encode(), headers=headers)
    try:
        with urllib.request.urlopen(asked, timeout=120) as answer:
            answer.read()
    except OSError as error:
        raise Refused(f"{target.name}: {error}") from error


@dataclass(frozen=True)
class Percentiles:
    p50_ms: float
    p99_ms: float
    count: int
    late_ms: float = 0.0  # how much later than planned the generator itself sent, p99

    @classmethod
    def of(cls, seconds: list[float], late: list[float] | None = None) -> "Percentiles":
        late_ms = _p99(late) * 1000 if late else 0.0
        return cls(median(seconds) * 1000, _p99(seconds) * 1000, len(seconds), late_ms)

    @classmethod
    def median(cls, rounds: "list[Percentiles]") -> "Percentiles":
        """Return what is in the middle of each; `count` is all of them."""
        p50_ms, p99_ms = (median(getattr(one, name) for one in rounds) for name in ("p50_ms", "p99_ms"))
        return cls(p50_ms, p99_ms, sum(one.count for one in rounds))


def _p99(values: list[float]) -> float:
    return quantiles(values, n=100)[98]


async def open_loop(target: Target, *, per_second: int, seconds: float) -> Percentiles:
    """Send requests at fixed moments, whether or not the last was answered; measured from the moment planned."""
    taken: list[float] = []
    late: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=_TIMEOUT) as session:
        start = time.perf_counter() + 0.1
        moments = [start + number / per_second for number in range(int(per_second * seconds))]
        await asyncio.gather(*(_ask(session, target, moment, taken, late) for moment in moments))
    return Percentiles.of(taken, late)


async def _ask(
    session: aiohttp.ClientSession, target: Target, moment: float, taken: list[float], late: list[float]
) -> None:
    await asyncio.sleep(moment - time.perf_counter())
    late.append(time.perf_counter() - moment)
    headers = target.headers | {"Content-Type": "application/json"}
    async with session.post(target.url + PATH, data=body(MODEL, is_streamed=False), headers=headers) as answer:
        content = await answer.read()
    if answer.status != 200:
        raise Refused(f"{target.name}: {answer.status} {content[:300]!r}")
    taken.append(time.perf_counter() - moment)


async def streams(target: Target, *, concurrent: int, seconds: float, ramp_seconds: float) -> Percentiles:
    """Keep so many streams open; return the time to the first token of those begun once all were."""
    model = target.headers.get("x-model", MODEL)
    headers = {k: v for k, v in target.headers.items() if k != "x-model"} | {"Content-Type": "application/json"}
    taken: list[float] = []
    began = time.perf_counter()

    async def lane(session: aiohttp.ClientSession, number: int) -> None:
        await asyncio.sleep(ramp_seconds * number / concurrent)
        while time.perf_counter() - began < ramp_seconds + seconds:
            asked_at = time.perf_counter()
            async with session.post(target.url + PATH, data=body(model, is_streamed=True), headers=headers) as answer:
                is_first = True
                async for content in answer.content.iter_any():
                    if is_first and b"word" in content:
                        is_first = False
                        if asked_at - began > ramp_seconds:
                            taken.append(time.perf_counter() - asked_at)
            if answer.status != 200 or is_first:
                raise Refused(f"{target.name}: {answer.status}")

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=_TIMEOUT) as session:
        await asyncio.gather(*(lane(session, number) for number in range(concurrent)))
    return Percentiles.of(taken)
