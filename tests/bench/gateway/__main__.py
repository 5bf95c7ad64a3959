"""Requests per second, added latency, time to the first token and memory: our gateway beside four others.

    python -m tests.bench.gateway [--seconds 5] [--rounds 3] [--connections 16] [--streams 500]

Our gateway runs as it is deployed and does all it does in production: it checks keys and rights, limits, reserves,
meters, syncs each record to the disk before the answer ends, and ships to PostgreSQL. LiteLLM, on the same Python as
ours, checks its master key; Portkey, the Rust sglang-router and nginx check nothing. All stand before the same static
nginx, one process each; ours asks it for a stream, as it must to meter an answer that is cut off, the others for the
whole answer.
A rival that cannot be installed or does not start fails the benchmark. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench.gateway import installing, load, stage
from tests.bench.gateway.stage import Target

OPEN_LOOP_PER_SECOND = 200
_LATE_MS, _MAX_TRIES = 10.0, 3


def bench(given: argparse.Namespace) -> dict[str, Any]:
    installing.install()
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-gateway-")))
        home.chmod(0o755)  # PostgreSQL gives up root and must still reach its files
        engines = stack.enter_context(stage.running_engines(home))
        gateway, slow_gateway = stack.enter_context(stage.running_gateway(home, engines))
        rivals = stack.enter_context(stage.running_rivals(home, engines.whole_port))
        targets = {"gateway": gateway} | rivals
        engine = Target("engine", engines.whole_port, 0)
        closed = _closed_loop(targets, given)
        ours = closed["gateway"]["requests_per_second"]
        result: dict[str, Any] = {
            f"ratio_{rival}": round(ours / closed[rival]["requests_per_second"], 3) for rival in rivals
        }
        result |= {"versions": installing.versions(), "closed_loop": closed}
        result |= {"rss_mib": {name: target.rss_mib() for name, target in targets.items()}}
        stage.settle()
        result |= {"open_loop": asyncio.run(_open_loop(targets, engine, given))}
        if given.streams:
            slow_engine = Target("engine", engines.slow_port, 0, {"x-model": "slow"})
            result |= {"streams": asyncio.run(_streams(slow_gateway, slow_engine, given))}
            result["rss_mib"]["gateway_with_streams"] = gateway.rss_mib()
        result["requests_recorded"] = _recorded(sum(closed["gateway"]["requests"]))
        return result


def _closed_loop(targets: dict[str, Target], given: argparse.Namespace) -> dict[str, Any]:
    """Measure all in turns, so that what else the machine does meets them alike; of the rounds the median counts."""
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in targets}
    for target in targets.values():
        load.first_answer(target)
        load.wrk(target, seconds=3, connections=given.connections, is_warming=True)
    for _ in range(given.rounds):
        for name, target in targets.items():
            seen[name].append(load.wrk(target, seconds=given.seconds, connections=given.connections))
    return {name: _summary(name, rounds) for name, rounds in seen.items()}


def _summary(name: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    found = {key: round(median(one[key] for one in rounds), 2) for key in ("requests_per_second", "p50_ms", "p99_ms")}
    speed, p50, p99 = found.values()
    _say(f"{name:14} {speed:8.0f} req/s   p50 {p50:7.2f} ms   p99 {p99:7.2f} ms")
    return found | {"requests": [one["requests"] for one in rounds]}


async def _open_loop(targets: dict[str, Target], engine: Target, given: argparse.Namespace) -> dict[str, Any]:
    """Measure all in turns but litellm, which is below this rate already: its queue would only grow."""
    measured = {"direct": engine} | {name: target for name, target in targets.items() if name != "litellm"}
    seen: dict[str, list[load.Percentiles]] = {name: [] for name in measured}
    for _ in range(given.rounds):
        for name, target in measured.items():
            seen[name].append(await _open_round(target, given.seconds))
    direct = load.Percentiles.median(seen.pop("direct"))
    found: dict[str, Any] = {"per_second": OPEN_LOOP_PER_SECOND}
    for name, rounds in seen.items():
        found[name] = _added(load.Percentiles.median(rounds), direct)
        found[name] |= {"p99_ms_of_rounds": [round(one.p99_ms, 2) for one in rounds]}
        _say(f"{name:14} {found[name]['added_p50_ms']:6.2f} ms added at {OPEN_LOOP_PER_SECOND} req/s, "
             f"p99 {found[name]['added_p99_ms']:6.2f}")  # fmt: skip
    return found


async def _open_round(target: Target, seconds: float) -> load.Percentiles:
    """Measure once, and again where the generator itself stood still: what holds up both is the machine's doing."""
    for _ in range(_MAX_TRIES):
        found = await load.open_loop(target, per_second=OPEN_LOOP_PER_SECOND, seconds=seconds)
        if found.late_ms <= _LATE_MS:
            break
        _say(f"{target.name:14} measured again: requests were sent up to {found.late_ms:.0f} ms late")
    return found


async def _streams(gateway: Target, engine: Target, given: argparse.Namespace) -> dict[str, Any]:
    shape = {"concurrent": given.streams, "seconds": given.seconds * 2, "ramp_seconds": 6.0}
    direct = await load.streams(engine, **shape)
    through = await load.streams(gateway, **shape)
    found = {"concurrent": given.streams, "first_tokens": through.count} | _added(through, direct)
    _say(f"{'gateway':14} {found['added_p50_ms']:6.2f} ms added to the first token with {given.streams} streams")
    return found


def _added(through: load.Percentiles, direct: load.Percentiles) -> dict[str, float]:
    return {
        "added_p50_ms": round(through.p50_ms - direct.p50_ms, 3),
        "added_p99_ms": round(through.p99_ms - direct.p99_ms, 3),
        "p50_ms": round(through.p50_ms, 3),
        "p99_ms": round(through.p99_ms, 3),
    }


def _recorded(at_least: int) -> int:
    """Return how many requests reached the database, once all that were answered did."""
    deadline = time.monotonic() + 60
    while (found := stage.count_recorded()) < at_least and time.monotonic() < deadline:
        time.sleep(0.2)
    if found < at_least:
        raise load.Refused(f"{at_least} requests were answered and only {found} recorded")
    return found


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--streams", type=int, default=500)
    _say(json.dumps(bench(parser.parse_args())))


if __name__ == "__main__":
    main()
