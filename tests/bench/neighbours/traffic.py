"""How tenants send: one at an ordinary pace, alone and beside another that sends all it can, in turns.

The attacker is a process of its own with the lowest priority. A real one has its own machine, so what its program costs
must not delay the platform.
"""

import asyncio
import json
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import quantiles
from typing import Any, cast

import aiohttp

from tests.bench.neighbours.processors import Processors, busy_seconds
from tests.bench.neighbours.stage import Platform, Tenant

ROUNDS = 3  # each is alone and then under attack, so that a change of the machine's speed hits both
CONNECTIONS = 32
_LOWEST_PRIORITY = 19
_FAILED_SECONDS = 90.0  # what a unit of work counts as that was not answered well
_HEAD_START_SECONDS = 0.5
_QUIET_CORES, _MAX_BUSY_SECONDS, _MAX_NOISY_SECONDS = 0.2, 90.0, 3.0

STRANGER = {"Cookie": f"csrftoken={'t' * 32}", "X-CSRFToken": "t" * 32}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}

Attack = Callable[[aiohttp.ClientSession, int], Awaitable[object]]  # the number of the connection; returns an outcome
Work = Callable[[aiohttp.ClientSession], Awaitable[None]]


class BadAnswer(Exception):
    """The platform did not answer the tenant that works as it should."""


class NotQuiet(Exception):
    """The platform still works on an attack that has ended, so nothing can be measured alone."""


@dataclass(frozen=True)
class Entrance:
    """A unit of work of one tenant, and what the other one does meanwhile. `forget` undoes what piled up."""

    work: Work
    attack: Attack
    attacker: Tenant
    seconds: float = 3.0
    pause_seconds: float = 0.05
    forget: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Comparison:
    """Seconds that each unit of work took; answers to the attack; cores that each program used during it."""

    alone: list[float]
    attacked: list[float]
    answers: Counter[str]
    cores: dict[str, float]

    def figures(self) -> dict[str, Any]:
        quiet, attacked, times = _p95_ms(self.alone), _p95_ms(self.attacked), self.alone + self.attacked
        return {
            "quiet_p95_ms": quiet,
            "attacked_p95_ms": attacked,
            "ratio": round(attacked / quiet, 2),
            "units": len(times),
            "failed": sum(took >= _FAILED_SECONDS for took in times),
            "answers": dict(self.answers),
            "cores": self.cores,
        }


async def compare(platform: Platform, entrance: Entrance) -> Comparison:
    """Measure units of work alone and beside the attack. Raises NotQuiet.

    Other programs of the machine slow down both; their cores are among the figures, as "others".
    """
    alone, attacked = [], []
    used, attack_seconds = Counter[str](), 0.0
    with closing(_Attacker(platform, entrance)) as attacker:
        async with session(platform, platform.working) as working:
            await _work(working, entrance, seconds=entrance.seconds / 3)  # fills caches
            for _ in range(ROUNDS):
                await _wait_until_quiet(platform, entrance, attacker.processors)
                alone += await _work(working, entrance, seconds=entrance.seconds)
                before, began = attacker.processors.read(), time.monotonic()
                busy_before = busy_seconds()
                with attacker.attacking():
                    await asyncio.sleep(_HEAD_START_SECONDS)
                    attacked += await _work(working, entrance, seconds=entrance.seconds)
                during = attacker.processors.read() - before
                during["others"] = busy_seconds() - busy_before - during.total()
                used += during
                attack_seconds += time.monotonic() - began
        answers = attacker.end()
        await asyncio.to_thread(entrance.forget)  # the next entrance has another attacker
    cores = {name: round(seconds / attack_seconds, 2) for name, seconds in used.most_common()}
    return Comparison(alone, attacked, answers, cores)


async def _wait_until_quiet(platform: Platform, entrance: Entrance, processors: Processors) -> None:
    """Wait until no work of an attack is left, running or queued, and a while for other programs. Raises NotQuiet."""
    began = time.monotonic()
    while True:
        await asyncio.to_thread(entrance.forget)
        ours, others = await asyncio.to_thread(processors.look)
        waited = time.monotonic() - began
        if ours < _QUIET_CORES and not await asyncio.to_thread(platform.has_queued_work):
            if others < _QUIET_CORES or waited > _MAX_NOISY_SECONDS:
                return
        elif waited > _MAX_BUSY_SECONDS:
            raise NotQuiet(f"the platform uses {ours:.2f} cores {waited:.0f} s after an attack")


async def send(
    client: aiohttp.ClientSession, method: str, path: str, headers: dict[str, str], body: Any = None
) -> tuple[int, bytes]:
    """Return the status and the body of an answer. Bytes are sent as they are, all else as JSON."""
    if body is not None and not isinstance(body, bytes | aiohttp.FormData):
        body, headers = json.dumps(body), headers | {"Content-Type": "application/json"}
    async with client.request(method, path, data=body, headers=headers, allow_redirects=False) as answer:
        return answer.status, await answer.read()


async def get(client: aiohttp.ClientSession, method: str, path: str, headers: dict[str, str], body: Any = None) -> Any:
    """Return what a good answer says, as JSON where it is. Raises BadAnswer."""
    status, content = await send(client, method, path, headers, body)
    if status >= 400:
        raise BadAnswer(f"{method} {path} was answered with {status}: {content[:200]!r}")
    return json.loads(content) if content[:1] in (b"{", b"[") else content


def as_key(tenant: Tenant, number: int = 0) -> dict[str, str]:
    return {"Authorization": f"Bearer {tenant.keys[number % len(tenant.keys)]}"}


def as_person(tenant: Tenant) -> dict[str, str]:
    """Headers of a browser; the token is of its own choice, as Django compares the form's with the cookie's."""
    token = "t" * 32
    return {"Cookie": f"{tenant.cookie}; csrftoken={token}", "X-CSRFToken": token}


def sending(tenant: Tenant, method: str, path: str, make: Callable[[], Any] = lambda: None) -> Attack:
    """Send a new body each time, with the tenant's keys in turn."""

    async def attack(client: aiohttp.ClientSession, number: int) -> int:
        return (await send(client, method, path, as_key(tenant, number), make()))[0]

    return attack


def trickling(tenant: Tenant, path: str, *, part_bytes: int, seconds_apart: float) -> Attack:
    """Send a body in a hundred small parts."""

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * part_bytes
            await asyncio.sleep(seconds_apart)

    async def attack(client: aiohttp.ClientSession, number: int) -> int:
        async with client.post(path, data=parts(), headers=as_key(tenant, number)) as answer:
            return answer.status

    return attack


def leaving(tenant: Tenant, platform: Platform, make: Callable[[int], bytes], *, after_seconds: float) -> Attack:
    """Send bytes and read nothing, then break the connection off."""
    host, port = platform.url.removeprefix("http://").split(":")

    async def attack(client: aiohttp.ClientSession, number: int) -> str:
        _, writer = await asyncio.open_connection(host, int(port), local_addr=(tenant.address, 0), limit=1024)
        try:
            writer.write(make(number))
            await asyncio.sleep(after_seconds)
        finally:
            writer.transport.abort()
        return "left"

    return attack


def session(platform: Platform, tenant: Tenant) -> aiohttp.ClientSession:
    """Each tenant sends from an address of its own."""
    connector = aiohttp.TCPConnector(local_addr=(tenant.address, 0), limit=0)
    timeout, jar = aiohttp.ClientTimeout(total=_FAILED_SECONDS), aiohttp.DummyCookieJar()
    return aiohttp.ClientSession(platform.url, connector=connector, timeout=timeout, cookie_jar=jar)


async def _work(client: aiohttp.ClientSession, entrance: Entrance, *, seconds: float) -> list[float]:
    """Return how long each unit took, in seconds."""
    times: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.perf_counter()
        try:
            await entrance.work(client)
            times.append(time.perf_counter() - began)
        except (BadAnswer, aiohttp.ClientError, TimeoutError):
            times.append(_FAILED_SECONDS)
        await asyncio.sleep(entrance.pause_seconds)
    return times


class _Attacker:
    """A process that attacks while a block runs. It is forked, because attacks are closures over their tenant."""

    def __init__(self, platform: Platform, entrance: Entrance) -> None:
        processes = multiprocessing.get_context("fork")
        self._ours, theirs = processes.Pipe()
        self._process = processes.Process(target=_attack, args=(platform, entrance, theirs), daemon=True)
        self._process.start()
        self.processors = Processors()
        self.processors.name(cast(int, self._process.pid), "attacker")
        theirs.close()  # so that the end of the process ends the pipe

    @contextmanager
    def attacking(self) -> Iterator[None]:
        self._ours.send("attack")
        try:
            yield
        finally:
            self._ours.send("rest")
            self._ours.recv()  # it rests

    def end(self) -> Counter[str]:
        """End the process; return its answers by outcome. Raises EOFError if the attack itself failed."""
        self._ours.send("end")
        answered: Counter[str] = self._ours.recv()
        self._process.join()
        return answered

    def close(self) -> None:
        """Kill the process if it still runs: it keeps the database and Redis from ending."""
        self._process.kill()
        self._process.join()


def _attack(platform: Platform, entrance: Entrance, commands: Connection) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # it waits in a thread, which would outlive an exception
    os.nice(_LOWEST_PRIORITY)
    asyncio.run(_obey(platform, entrance, commands))


async def _obey(platform: Platform, entrance: Entrance, commands: Connection) -> None:
    """Attack on all connections from each "attack" to the next "rest"; send the answers on "end"."""
    answered = Counter[str]()
    while await asyncio.to_thread(commands.recv) == "attack":
        async with session(platform, entrance.attacker) as client:
            tasks = [asyncio.create_task(_hammer(client, entrance, n, answered)) for n in range(CONNECTIONS)]
            await asyncio.to_thread(commands.recv)
            for task in tasks:
                task.cancel()
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(ended, Exception):  # a bug of the attack; the others were cancelled
                    raise ended
        commands.send("at rest")
    commands.send(answered)


async def _hammer(client: aiohttp.ClientSession, entrance: Entrance, number: int, answered: Counter[str]) -> None:
    """Attack on one connection, each time at once again, until cancelled."""
    while True:
        try:
            answered[str(await entrance.attack(client, number))] += 1
        except (aiohttp.ClientError, TimeoutError, OSError):
            answered["refused"] += 1
            await asyncio.sleep(0.01)


def _p95_ms(seconds: list[float]) -> float:
    return round(quantiles(seconds, n=20, method="inclusive")[-1] * 1000, 1)
