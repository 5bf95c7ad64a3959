"""Live pages: how soon the watchers of running jobs see an event, when one web process has all of their streams.

    python -m tests.bench.pages.streams URL STREAMS SECONDS

Runs under the role of the owner of the tables, because it makes people and appends events. Each organization has the
most watchers that it may have, of one job, from an address of its own. Each job then gets an event every few seconds,
as from a trainer. A time begins before the event is written and ends when a watcher has read all of it; what does not
arrive counts as the time until it was given up. Prints one JSON object.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple
from urllib.request import urlopen

import aiohttp
import django

from scripts.processes import PROGRAMS
from tests.services.ports import free_port

ROOT = Path(__file__).resolve().parents[3]
_START_SECONDS, _OPEN_SECONDS, _LATE_SECONDS = 120, 600, 30.0
_EVERY_SECONDS = 10.0  # between two events of one job
_OPENING = 8  # streams that are opened at once
_BEYOND = 1_000_000  # a sequence after those of all events that there are


class Watched(NamedTuple):
    """A job, its last event so far, the address that its watchers come from, and the cookie of each."""

    job_id: str
    after: int
    address: str
    cookies: list[str]


@dataclass
class Seen:
    """How many streams stayed open, how many watch each event, and the seconds until each watcher saw it."""

    opened: int = 0
    sent: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def missing(self) -> int:
        return sum(self.sent) - len(self.seconds)


@contextmanager
def running_web(home: Path, environ: Mapping[str, str]) -> Iterator[str]:
    """Start the web process as it is deployed, and yield its address.

    Callers may use any processor time, so that it passes none of them to its second process.
    """
    port = free_port()
    command = next(program for program in PROGRAMS if program.name == "web").command
    words = command.replace("${web_listen}", f"--host 127.0.0.1 --port {port}").split()
    limits = {"ANNEAL_WEB_SECONDS_PER_MINUTE": "100000", "ANNEAL_WEB_REQUESTS_PER_MINUTE": "100000"}
    with (home / "web.log").open("wb") as log:
        web = subprocess.Popen(
            [sys.executable, "-m", *words], cwd=ROOT, env={**environ, **limits}, stdout=log, stderr=log
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_up(f"{url}/accounts/login/", web)
        yield url
    finally:
        web.terminate()
        try:
            web.wait(timeout=30)
        except subprocess.TimeoutExpired:
            web.kill()
            web.wait()


def _wait_until_up(url: str, web: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and web.poll() is None:
        with contextlib.suppress(OSError):
            urlopen(url, timeout=5).close()
            return
        time.sleep(0.2)
    raise RuntimeError("the web process did not start: its log is web.log in the folder of the benchmark")


def _watched(streams: int) -> list[Watched]:
    """Sign in the watchers of one running job of each organization, as many as `streams` needs."""
    from apps.accounts.models import Membership
    from apps.finetuning.models import FineTuningJob
    from apps.interfaces.web.shell.live import MAX_OF_ORGANIZATION, MAX_OF_PERSON

    running = FineTuningJob.objects.filter(status="running").order_by("organization_id", "pk")
    running.filter(last_event_sequence__lt=_BEYOND).update(last_event_sequence=_BEYOND)
    jobs = list(running.distinct("organization_id").values_list("pk", "last_event_sequence", "organization_id"))
    needed = -(-streams // MAX_OF_ORGANIZATION)
    if needed > len(jobs):
        raise SystemExit(f"{streams} streams need {needed} organizations with a running job, and {len(jobs)} have one")
    found = []
    for number, (job_id, after, organization_id) in enumerate(jobs[:needed]):
        cookies: list[str] = []
        for person in range(MAX_OF_ORGANIZATION // MAX_OF_PERSON):
            user = _person(f"watcher-{number}-{person}@example.com")
            Membership.objects.get_or_create(organization_id=organization_id, user=user, defaults={"role": "viewer"})
            cookies += [_sign_in(user)] * MAX_OF_PERSON
        left = streams - number * MAX_OF_ORGANIZATION
        found.append(Watched(job_id, after, f"127.1.{number // 200}.{1 + number % 200}", cookies[:left]))
    return found


def _person(email: str) -> Any:
    from apps.accounts.login.addresses import mark_verified
    from apps.accounts.models import User

    if known := User.objects.filter(email=email).first():
        return known
    user = User.objects.create_user(email, name="Watcher")
    mark_verified(user=user)
    return user


def _sign_in(user: Any) -> str:
    from django.conf import settings
    from django.test import Client

    client = Client()
    client.force_login(user, backend=settings.AUTHENTICATION_BACKENDS[0])
    return f"{settings.SESSION_COOKIE_NAME}={client.cookies[settings.SESSION_COOKIE_NAME].value}"


async def _measure(url: str, watched: Sequence[Watched], seconds: float) -> Seen:
    seen, turns = Seen(), asyncio.Semaphore(_OPENING)
    async with contextlib.AsyncExitStack() as stack:
        openings = []
        for one in watched:
            client = await stack.enter_async_context(
                aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0, local_addr=(one.address, 0)),
                    cookie_jar=aiohttp.DummyCookieJar(),
                    timeout=aiohttp.ClientTimeout(total=None),
                )
            )
            address = f"{url}/jobs/{one.job_id}/stream?after={one.after}"
            openings += [_open(client, address, cookie, turns) for cookie in one.cookies]
        answers = await asyncio.wait_for(asyncio.gather(*openings), _OPEN_SECONDS)
        following = [asyncio.create_task(_follow(answer, seen)) for answer in answers]
        await asyncio.to_thread(_send_events, watched, seconds, seen)
        given_up = time.monotonic() + _LATE_SECONDS
        while seen.missing > 0 and time.monotonic() < given_up:
            await asyncio.sleep(0.1)
        seen.opened = sum(not task.done() for task in following)
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
    return seen


async def _open(
    client: aiohttp.ClientSession, address: str, cookie: str, turns: asyncio.Semaphore
) -> aiohttp.ClientResponse:
    """Open one stream: its first figures say that it is open."""
    async with turns:
        answer = await client.get(address, headers={"Cookie": cookie})
        if answer.status != 200:
            raise RuntimeError(f"a stream was answered with {answer.status}")
        await answer.content.readuntil(b"\n\n")
        return answer


async def _follow(answer: aiohttp.ClientResponse, seen: Seen) -> None:
    async for line in answer.content:
        if line.startswith(b"data: ") and b'"sent_at"' in line:
            seen.seconds.append(time.time() - json.loads(line.removeprefix(b"data: "))["sent_at"])


def _send_events(watched: Sequence[Watched], seconds: float, seen: Seen) -> None:
    """Append an event to one job after the other, each `_EVERY_SECONDS`."""
    from django.db import connection, transaction

    from apps.finetuning import events
    from apps.finetuning.models import FineTuningJob

    jobs = FineTuningJob.objects.in_bulk([one.job_id for one in watched])
    began, pause = time.monotonic(), _EVERY_SECONDS / len(watched)
    for number in range(int(seconds / pause)):
        time.sleep(max(0.0, began + number * pause - time.monotonic()))
        one, at = watched[number % len(watched)], time.time()
        seen.sent.append(len(one.cookies))
        with transaction.atomic():
            events.append(
                jobs[one.job_id], message="Step", type="metrics", step=number, attempt=1, train_loss=1.5,
                tokens_per_second=900.0, training_seconds=float(number), sent_at=at,
            )  # fmt: skip
    connection.close()


def main() -> None:
    django.setup()
    url, streams, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    seen = asyncio.run(_measure(url, _watched(streams), seconds))
    # One that never came took at least as long as it was waited for.
    late = [_LATE_SECONDS] * seen.missing
    p99 = round(quantiles([*seen.seconds, *late], n=100, method="inclusive")[98], 3)
    found = {"streams": seen.opened, "stream_p99_s": p99, "stream_events": len(seen.sent), "missing": seen.missing}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
