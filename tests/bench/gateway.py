"""Added latency and requests per second of the gateway, beside a bare aiohttp pass-through to the same engine.

    python -m tests.bench.gateway [--seconds 5] [--connections 16]

Everything listens on Unix sockets of this machine. The engine answers eight tokens at once, so that what is measured is
the way there and back. The gateway checks keys, reserves, meters, syncs to disk and records; the pass-through copies
bytes. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import aiohttp
from aiohttp import web

from apps.core.embedded import ensure_running

ROOT = Path(__file__).resolve().parents[2]
PATH = "/v1/chat/completions"
TOKENS = 8


# --- The two servers beside the gateway -------------------------------------------------------------------------------


def _chunk(choices: list[dict[str, Any]], count: int) -> bytes:
    usage = {"prompt_tokens": 20, "completion_tokens": count, "total_tokens": 20 + count}
    body = {"id": "chatcmpl-engine", "object": "chat.completion.chunk", "created": 1, "model": "b-x"}
    return b"data: " + json.dumps(body | {"choices": choices, "usage": usage}).encode() + b"\n\n"


def _answer() -> bytes:
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        *({"content": " word"} for _ in range(TOKENS)),
    ]
    parts = [_chunk([{"index": 0, "delta": delta, "finish_reason": None}], count) for count, delta in enumerate(deltas)]
    parts.append(_chunk([{"index": 0, "delta": {}, "finish_reason": "stop"}], TOKENS))
    return b"".join(parts) + _chunk([], TOKENS) + b"data: [DONE]\n\n"


async def serve_engine(socket_path: str) -> None:
    content = _answer()

    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(content)
        await response.write_eof()
        return response

    await _serve(answer, socket_path)


async def serve_bare(socket_path: str, engine_socket: str) -> None:
    session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(engine_socket, limit=0))

    async def pass_through(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        async with session.post(f"http://engine{PATH}", data=body) as upstream:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            async for chunk in upstream.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    await _serve(pass_through, socket_path)


async def _serve(handler: Any, socket_path: str) -> None:
    app = web.Application()
    app.router.add_post(PATH, handler)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.UnixSite(runner, socket_path).start()
    await asyncio.Event().wait()


# --- The load ---------------------------------------------------------------------------------------------------------


class Load:
    """Sends the same request over and over to one socket."""

    def __init__(self, socket_path: str, *, key: str, is_streamed: bool) -> None:
        self._socket_path = socket_path
        body = {"model": "bench", "messages": [{"role": "user", "content": "Say something."}], "max_tokens": 16}
        self._body = json.dumps(body | {"stream": is_streamed}).encode()
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self.sent = 0

    async def run(self, *, connections: int, seconds: float) -> list[float]:
        """Return the latency of each request in milliseconds."""
        latencies: list[float] = []
        connector = aiohttp.UnixConnector(self._socket_path, limit=connections)
        async with aiohttp.ClientSession(connector=connector, headers=self._headers) as session:
            until = time.perf_counter() + seconds
            await asyncio.gather(*(self._lane(session, until, latencies) for _ in range(connections)))
        return latencies

    async def _lane(self, session: aiohttp.ClientSession, until: float, latencies: list[float]) -> None:
        while (began := time.perf_counter()) < until:
            async with session.post(f"http://gateway{PATH}", data=self._body) as response:
                text = await response.read()
            if response.status != 200:
                raise RuntimeError(text.decode())
            self.sent += 1
            latencies.append((time.perf_counter() - began) * 1000)


class Figures:
    """What one server did in all rounds."""

    def __init__(self, load: Load, pid: int) -> None:
        self._load, self._pid = load, pid
        self._alone: list[float] = []
        self._together: list[float] = []
        self._seconds = self._cpu_seconds = 0.0
        self._requests = 0

    async def round(self, *, connections: int, seconds: float) -> None:
        self._alone += await self._load.run(connections=1, seconds=seconds / 2)
        cpu_before, sent_before = _cpu_seconds(self._pid), self._load.sent
        self._together += await self._load.run(connections=connections, seconds=seconds)
        self._seconds += seconds
        self._requests += self._load.sent - sent_before
        self._cpu_seconds += _cpu_seconds(self._pid) - cpu_before

    def as_dict(self) -> dict[str, float]:
        return {
            "p50_ms_alone": round(median(self._alone), 3),
            "p99_ms_alone": round(quantiles(self._alone, n=100)[98], 3),
            "p50_ms": round(median(self._together), 3),
            "p99_ms": round(quantiles(self._together, n=100)[98], 3),
            "requests_per_second": round(self._requests / self._seconds, 1),
            "cpu_ms_per_request": round(self._cpu_seconds * 1000 / self._requests, 3),
        }


def _cpu_seconds(pid: int) -> float:
    """Return the processor time a process has used: what neighbours on the machine do not change."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- The stage --------------------------------------------------------------------------------------------------------


@contextmanager
def _process(arguments: list[str], socket_path: Path, environ: dict[str, str]) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=os.environ | environ)
    try:
        deadline = time.monotonic() + 30
        while not socket_path.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{arguments} did not start")
            time.sleep(0.05)
        yield process.pid
    finally:
        process.terminate()
        process.wait(timeout=30)


def _environ(home: Path, services: Any, role: str) -> dict[str, str]:
    return {
        "ANNEAL_HOME": str(home),
        "ANNEAL_SECRET_KEY": "bench-secret-key-that-is-long-enough-for-django",
        "ANNEAL_KEY_PEPPER": "bench-pepper",
        "ANNEAL_SIGNING_KEY": "bench-signing-key",
        "DATABASE_URL": services.database_url(role),
        "REDIS_URL": services.redis_url,
        "DJANGO_SETTINGS_MODULE": "apps.config.settings.dev",
    }


def _make_world(engine_socket: Path) -> str:
    """Migrate an empty database and fill it; return a customer's key."""
    import django

    django.setup()
    from django.core.management import call_command
    from django.db import transaction

    from apps.core.clock import db_now
    from apps.finetuning.quotas import set_quota
    from tests.api.gateway.process import USD, give_credit, make_served_model
    from tests.api.gateway.scripted_engine import TOKEN  # noqa: F401 - what make_replica presents
    from tests.factories.accounts import make_key, make_organization, make_user

    call_command("migrate", verbosity=0)
    make_served_model("bench", f"unix://{engine_socket}")
    owner = make_user("bench")
    organization = make_organization("Bench", owner=owner)
    give_credit(organization, 1_000 * USD)
    with transaction.atomic():
        set_quota(organization=organization, by="system", now=db_now(), requests_per_minute=None)
    return make_key(organization, owner).secret


def _recorded(expected: int) -> int:
    from apps.billing.models import UsageEvent

    deadline = time.monotonic() + 20
    while (found := UsageEvent.objects.count()) < expected and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def bench(*, seconds: float, connections: int) -> dict[str, Any]:
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench")))
        services = stack.enter_context(ensure_running(home, durable=False))
        sockets = {name: home / f"{name}.sock" for name in ("engine", "bare", "gateway")}
        os.environ.update(_environ(home, services, "owner"))
        key = _make_world(sockets["engine"])
        me = ["-m", "tests.bench.gateway", "--serve"]
        gateway = ["-m", "uvicorn", "--factory", "apps.gateway.app:create_app", "--uds", str(sockets["gateway"])]
        gateway += ["--loop", "uvloop", "--http", "httptools", "--log-level", "warning", "--no-access-log"]
        stack.enter_context(_process([*me, "engine", str(sockets["engine"])], sockets["engine"], {}))
        bare = [*me, "bare", str(sockets["bare"]), str(sockets["engine"])]
        pids = {
            "bare": stack.enter_context(_process(bare, sockets["bare"], {})),
            "gateway": stack.enter_context(_process(gateway, sockets["gateway"], _environ(home, services, "gateway"))),
        }
        time.sleep(1)
        return asyncio.run(_compare(sockets, pids, key, seconds=seconds, connections=connections))


async def _compare(
    sockets: dict[str, Path], pids: dict[str, int], key: str, *, seconds: float, connections: int
) -> dict[str, Any]:
    """Measure both in turns of a second, so that what else the machine does meets both alike."""
    result: dict[str, Any] = {"connections": connections, "tokens_per_answer": TOKENS}
    loads = []
    for kind in ("whole", "streamed"):
        figures = {}
        for name in ("bare", "gateway"):
            loads.append(Load(str(sockets[name]), key=key, is_streamed=kind == "streamed"))
            await loads[-1].run(connections=connections, seconds=0.5)  # warm
            figures[name] = Figures(loads[-1], pids[name])
        for _ in range(max(1, round(seconds))):
            for one in figures.values():
                await one.round(connections=connections, seconds=1)
        result |= _line(kind, figures["bare"].as_dict(), figures["gateway"].as_dict())
    sent = sum(load.sent for load in loads[1::2])
    result["requests_sent"], result["requests_recorded"] = sent, await asyncio.to_thread(_recorded, sent)
    return result


def _line(kind: str, bare: dict[str, float], gateway: dict[str, float]) -> dict[str, Any]:
    ratio = round(gateway["requests_per_second"] / bare["requests_per_second"], 3)
    added = round(gateway["p50_ms_alone"] - bare["p50_ms_alone"], 3)
    for name, figures in (("bare", bare), ("gateway", gateway)):
        speed, cpu_ms = figures["requests_per_second"], figures["cpu_ms_per_request"]
        alone, together = figures["p50_ms_alone"], figures["p50_ms"]
        sys.stdout.write(
            f"{kind:9} {name:8} {speed:6.0f} req/s   p50 {alone:6.2f} ms alone   {together:6.2f} ms together   "
            f"{cpu_ms:.2f} ms of CPU each\n"
        )
    sys.stdout.write(f"{kind:9} ratio {ratio:.2f}, {added:.2f} ms added\n")
    return {f"bare_{kind}": bare, f"gateway_{kind}": gateway, f"ratio_{kind}": ratio, f"added_ms_{kind}": added}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--serve", nargs="+", help="for this program's own use")
    given = parser.parse_args()
    if given.serve:
        name, *sockets = given.serve
        asyncio.run(serve_engine(*sockets) if name == "engine" else serve_bare(*sockets))
        return
    figures = bench(seconds=given.seconds, connections=given.connections)
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
