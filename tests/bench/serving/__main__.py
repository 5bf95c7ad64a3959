"""What real vLLM answers through the gateway, beside the same vLLM asked directly: `make bench-serving`.

    python -m tests.bench.serving [--seconds 20] [--rounds 5] [--adapters 16] [--cold 20] [--connections 16]

One replica of the demo model on a CPU, its agent, the gateway with keys, limits, metering and sync, PostgreSQL and
Redis, each a process of its own as deployed. In each round the same mixed traffic (every connection asks the adapters
in turn, for a stream of `--tokens` tokens) goes to the engine's own socket, through the gateway, and to the base model
directly. The order turns with each round; of the rounds' ratios the median counts. Speed is tokens a second by the
usage each answer ends with. Last, `--cold` adapters that no replica holds are asked for one by one through the gateway.
The last line is one JSON object.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import aiohttp

from tests.bench.serving.stage import Stage, replica_facts, running_stage

_PATH = "/v1/chat/completions"
_MAX_REFUSALS = 20
_TIMEOUT = aiohttp.ClientTimeout(total=300)
_QUESTIONS = ("My card was taken twice", "How do I change my PIN?", "Where is my refund?", "The app does not open.")


class Refused(Exception):
    """An answer was not 200, or ended without its usage."""


@dataclass(frozen=True)
class Way:
    """One way to the models: through the gateway, or straight to the engine."""

    socket: Path
    models: list[str]
    key: str = ""

    def open(self) -> aiohttp.ClientSession:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        connector = aiohttp.UnixConnector(path=str(self.socket), limit=0)
        return aiohttp.ClientSession("http://x", connector=connector, timeout=_TIMEOUT, headers=headers)

    async def ask(self, session: aiohttp.ClientSession, number: int, *, tokens: int) -> int:
        """Return how many tokens were written. Raises Refused."""
        body = {
            "model": self.models[number % len(self.models)],
            "messages": [{"role": "user", "content": f"{_QUESTIONS[number % len(_QUESTIONS)]} ({number})"}],
            "max_tokens": tokens,
            "temperature": 0,
            "logit_bias": {"1": -100},  # the demo model's end of text: every answer is as long
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        last = b""
        async with session.post(_PATH, json=body) as answer:
            if answer.status != 200:
                raise Refused(f"{answer.status}: {(await answer.text())[:300]}")
            async for line in answer.content:
                last = line if line.startswith(b"data: {") else last
        usage = json.loads(last.removeprefix(b"data: ") or b"{}").get("usage")
        if not usage:
            raise Refused(f"the answer broke off: {last[:300]!r}")
        return int(usage["completion_tokens"])


async def tokens_per_second(way: Way, *, seconds: float, connections: int, tokens: int) -> float:
    """Keep so many requests under way; return the tokens a second of those that ended in time and after."""
    began, counted, asked = time.perf_counter(), 0, 0

    async def lane(session: aiohttp.ClientSession, number: int) -> None:
        nonlocal counted, asked
        while time.perf_counter() - began < seconds:
            counted += await way.ask(session, number + connections * asked, tokens=tokens)
            asked += 1

    async with way.open() as session:
        await asyncio.gather(*(lane(session, number) for number in range(connections)))
    return counted / (time.perf_counter() - began)


async def measure(stage: Stage, given: argparse.Namespace) -> dict[str, list[float]]:
    """Return tokens a second by way, one figure a round."""
    ways = {
        "direct": Way(stage.engine, [engine for _, engine in stage.warm]),
        "gateway": Way(stage.gateway, [public for public, _ in stage.warm], key=stage.key),
        "base": Way(stage.engine, [stage.base[1]]),
    }
    shape = {"connections": given.connections, "tokens": given.tokens}
    for way in ways.values():
        await tokens_per_second(way, seconds=given.seconds / 4, **shape)
    seen: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(given.rounds):
        order = list(ways) if number % 2 == 0 else list(reversed(ways))
        for name in order:
            seen[name].append(await tokens_per_second(ways[name], seconds=given.seconds, **shape))
        _say("  ".join(f"{name} {found[-1]:7.1f} tokens/s" for name, found in seen.items()))
    return seen


async def load_cold(stage: Stage) -> tuple[list[float], int]:
    """Return the seconds from asking for each cold adapter to its first token, and how often one was told to retry."""
    taken, refusals = [], 0
    for public, _ in stage.cold:
        way = Way(stage.gateway, [public], key=stage.key)
        async with way.open() as session:
            began = time.perf_counter()
            while True:
                try:
                    await way.ask(session, 0, tokens=1)
                    break
                except Refused as refusal:
                    refusals += 1
                    if refusals > _MAX_REFUSALS:
                        raise
                    _say(f"cold: {refusal}")
            taken.append(time.perf_counter() - began)
    return taken, refusals


def report(seen: dict[str, list[float]], cold: list[float], refusals: int) -> dict[str, Any]:
    def ratio(one: str, other: str) -> float:
        return round(median(mine / theirs for mine, theirs in zip(seen[one], seen[other], strict=True)), 3)

    return {
        "ratio_gateway_to_direct": ratio("gateway", "direct"),
        "ratio_adapters_to_base": ratio("gateway", "base"),
        "ratio_direct_adapters_to_base": ratio("direct", "base"),
        "cold_load_p95_seconds": round(quantiles(cold, n=20, method="inclusive")[18], 3),
        "cold_load_median_seconds": round(median(cold), 3),
        "cold_refusals": refusals,
        "tokens_per_second": {name: [round(value, 1) for value in values] for name, values in seen.items()},
    }


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--cold", type=int, default=20)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-serving-") as folder:
        home = Path(folder)
        home.chmod(0o755)  # PostgreSQL gives up root and must still reach its files
        with running_stage(home, warm=given.adapters, cold=given.cold) as stage:
            seen = asyncio.run(measure(stage, given))
            cold, refusals = asyncio.run(load_cold(stage))
            conditions = vars(given) | {"cores": os.cpu_count(), "machine": platform.processor() or platform.machine()}
            found = report(seen, cold, refusals) | {"replica": replica_facts(), "conditions": conditions}
    _say(json.dumps(found))


if __name__ == "__main__":
    main()
