"""Time to the first token, predicted by a replay and measured on real vLLM: `make bench-serving.replay`.

    python -m tests.bench.serving.replay [--seconds 90] [--quiet 0.35] [--busy 0.6]

One replica of the demo model on a CPU behind the gateway, each a process of its own as deployed. First the most
requests a second that it answers are measured. Then two days are recorded by the platform's own metering: a quiet one
at the share `quiet` of that rate, and a busy one at the share `busy`. Requests arrive at random, and their prompts and
answers have many lengths. The engine's speeds are fitted to the quiet day alone. The replay of the busy day uses its
arrivals and lengths, and no time that was measured on it. The last line is one JSON object; `error` is that of the busy
day's p95.
"""

import argparse
import asyncio
import datetime
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from tests.bench.serving.stage import Stage, running_stage

_PATH = "/v1/chat/completions"
_TIMEOUT = aiohttp.ClientTimeout(total=300)
_WORDS = ("card", "transfer", "refund", "balance", "limit", "statement", "payment", "account", "top", "up", "declined")
_PROMPT_WORDS, _OUTPUT_TOKENS = (3, 80), (4, 48)
_CONNECTIONS = 16
_SETTLE_SECONDS = 120


class NotRecorded(Exception):
    """The platform did not record as many requests as were answered."""


async def _ask(session: aiohttp.ClientSession, model: str, chance: random.Random) -> None:
    words = " ".join(chance.choice(_WORDS) for _ in range(chance.randint(*_PROMPT_WORDS)))
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"{chance.randrange(10**6)} {words}"}],
        "max_tokens": chance.randint(*_OUTPUT_TOKENS),
        "temperature": 0,
        "logit_bias": {"1": -100},  # the demo model's end of text: every answer is as long as it may be
        "stream": True,
    }
    async with session.post(_PATH, json=body) as answer:
        await answer.read()
        answer.raise_for_status()


def _open(stage: Stage) -> aiohttp.ClientSession:
    headers = {"Authorization": f"Bearer {stage.key}"}
    connector = aiohttp.UnixConnector(path=str(stage.gateway), limit=0)
    return aiohttp.ClientSession("http://x", connector=connector, timeout=_TIMEOUT, headers=headers)


async def most_per_second(stage: Stage, *, seconds: float) -> float:
    """Return the requests a second with as many connections as keep the replica busy."""
    began, done, chance = time.monotonic(), 0, random.Random(0)

    async def lane(session: aiohttp.ClientSession, number: int) -> None:
        nonlocal done
        while time.monotonic() - began < seconds:
            await _ask(session, stage.warm[number % len(stage.warm)][0], chance)
            done += 1

    async with _open(stage) as session:
        await asyncio.gather(*(lane(session, number) for number in range(_CONNECTIONS)))
    return done / (time.monotonic() - began)


async def live_through(stage: Stage, *, rate: float, seconds: float, seed: int) -> int:
    """Send requests at random moments, `rate` a second on average; return how many were answered."""
    chance, tasks, due = random.Random(seed), [], time.monotonic()
    async with _open(stage) as session:
        end = due + seconds
        while (due := due + chance.expovariate(rate)) < end:
            await asyncio.sleep(max(due - time.monotonic(), 0))
            model = chance.choice(stage.warm)[0]
            tasks.append(asyncio.create_task(_ask(session, model, random.Random(chance.random()))))
        await asyncio.gather(*tasks)
    return len(tasks)


def record_day(stage: Stage, *, rate: float, seconds: float, seed: int) -> list[Any]:
    """Live through a day and return it as the platform recorded it. Raises NotRecorded."""
    from apps.catalog.models import BaseModel
    from apps.core.database.clock import db_now
    from apps.interfaces.staff.management.replica_sizing import recorded_requests

    base_model = BaseModel.objects.get(name=stage.base[0])
    since = db_now()
    count = asyncio.run(live_through(stage, rate=rate, seconds=seconds, seed=seed))
    for _ in range(_SETTLE_SECONDS):
        until = db_now() + datetime.timedelta(seconds=1)
        found = [
            each for day in recorded_requests(base_model=base_model, since=since, until=until).values() for each in day
        ]
        if len(found) == count:
            return found
        time.sleep(1)
    raise NotRecorded(f"{count} requests were answered and {len(found)} recorded")


def measure(stage: Stage, given: argparse.Namespace) -> dict[str, Any]:
    import msgspec

    from apps.estimates.physics.engine_replay import percentile, predict, recommend
    from apps.estimates.physics.engine_speeds import fit_speeds

    asyncio.run(most_per_second(stage, seconds=5))
    most = asyncio.run(most_per_second(stage, seconds=15))
    quiet = record_day(stage, rate=given.quiet * most, seconds=given.seconds, seed=1)
    busy = record_day(stage, rate=given.busy * most, seconds=given.seconds, seed=2)
    speeds = fit_speeds(quiet)
    predicted = predict(busy, speeds, replicas=1)
    recorded = percentile((each.first_token_seconds for each in busy), 0.95)
    target = recorded / 1.5
    return {
        "p95_recorded_ms": round(recorded * 1000, 1),
        "p95_predicted_ms": round(predicted.first_token_p95 * 1000, 1),
        "error": round(predicted.first_token_p95 / recorded - 1, 3),
        "p50_recorded_ms": round(percentile((each.first_token_seconds for each in busy), 0.5) * 1000, 1),
        "p50_predicted_ms": round(predicted.first_token_p50 * 1000, 1),
        "p95_quiet_ms": round(percentile((each.first_token_seconds for each in quiet), 0.95) * 1000, 1),
        "requests": {"quiet": len(quiet), "busy": len(busy)},
        "most_per_second": round(most, 2),
        "busy_share": round(predicted.busy_share, 3),
        "speeds": {name: round(value, 6) for name, value in msgspec.structs.asdict(speeds).items()},
        "replicas_for_two_thirds_of_the_p95": recommend(busy, speeds, first_token_p95=target, most=8)[-1].replicas,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90, help="of each day")
    parser.add_argument("--quiet", type=float, default=0.35, help="share of the highest rate")
    parser.add_argument("--busy", type=float, default=0.6, help="share of the highest rate")
    parser.add_argument("--adapters", type=int, default=4)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-replay-") as folder:
        home = Path(folder)
        home.chmod(0o755)  # PostgreSQL gives up root and must still reach its files
        with running_stage(home, warm=given.adapters, cold=0) as stage:
            found = measure(stage, given) | {"conditions": vars(given)}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
