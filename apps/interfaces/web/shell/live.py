"""Server-sent events of one job: the events a watcher missed, then new ones, each with its sequence as id.

Each process has one Redis subscriber. A watcher whose message is lost still sees the row later. The number of watchers
per person and organization is limited, and so are their database queries: those who watch one job share them. Every few
seconds, each watcher's access is checked again.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import redis.asyncio
from asgiref.sync import sync_to_async
from django.conf import settings
from django.utils.translation import gettext

from apps.accounts.login.sessions import find_session
from apps.accounts.login.viewing import find_viewing
from apps.accounts.members.visibility import seeing, sight_of_member
from apps.accounts.models import User
from apps.accounts.queries import find_membership, get_organization
from apps.accounts.roles import Permission
from apps.core.database.clock import db_now
from apps.core.database.tenancy import tenant
from apps.core.errors import DomainError, RateLimited
from apps.core.http.asgi import give_back_connection
from apps.core.http.fair_shares import OpenCounts
from apps.core.templatetags.ui import NONE, duration, number, usd
from apps.finetuning.jobs.progress import get_progress
from apps.finetuning.lifecycle import JOB_TERMINAL
from apps.finetuning.models import FineTuningJob, JobEvent
from apps.finetuning.queries import get_job, list_events_after
from apps.interfaces.web.shell.access import require, viewing_membership

logger = logging.getLogger(__name__)

LOOK_ANYWAY_SECONDS = 5.0  # how long a watcher waits for a message before it reads the table
MAX_LOOKS_PER_SECOND = 4.0  # for all watchers of this process that wait for a message
MIN_SECONDS = 0.25  # between two reads of one watcher, however many messages come
ASK_AGAIN_SECONDS = 5.0
MAX_OF_PERSON, MAX_OF_ORGANIZATION = 8, 40
_FULL_SECONDS = 30  # after which a refused page asks again
_PREFIX = "anneal:live:"
_RETRY_SECONDS = 1.0
Answer = TypeVar("Answer")


class Channel:
    """The part that the watchers of one job share: when to look, and calls made once for all of them."""

    def __init__(self) -> None:
        self.bells: set[asyncio.Event] = set()
        self.rings = 0
        self._calls: dict[tuple[object, ...], asyncio.Task[Any]] = {}

    def ring(self) -> None:
        self.rings += 1
        for bell in self.bells:
            bell.set()

    async def ask(self, function: Callable[..., Answer], *of: Hashable) -> Answer:
        """Return the result of the function, which runs in a thread.

        Callers that ask the same meanwhile share the call. A call that began before the bells rang does not answer
        callers that ask afterwards, because it may have missed the change.
        """
        key = (function, of, self.rings)
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = asyncio.create_task(sync_to_async(function)(*of))
            call.add_done_callback(lambda _: self._calls.pop(key))
        return cast(Answer, await asyncio.shield(call))


class Hub:
    """Rings the bells of a channel when Redis announces a change."""

    def __init__(self) -> None:
        self._channels: dict[str, Channel] = defaultdict(Channel)
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def listening(self, name: str) -> Iterator[tuple[Channel, asyncio.Event]]:
        """Yield the channel and a bell for one watcher.

        Clear the bell before you look, because it can ring while you do. A bell registered only after the look would
        miss changes made during it.
        """
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._listen())
        channel, bell = self._channels[name], asyncio.Event()
        channel.bells.add(bell)
        try:
            yield channel, bell
        finally:
            channel.bells.discard(bell)
            if not channel.bells:
                del self._channels[name]

    @property
    def watcher_count(self) -> int:
        return sum(len(channel.bells) for channel in self._channels.values())

    async def _listen(self) -> None:
        while True:
            try:
                await self._follow()
            except (redis.RedisError, OSError) as error:
                logger.warning("live updates interrupted: %s", error)
                await asyncio.sleep(_RETRY_SECONDS)

    async def _follow(self) -> None:
        client = redis.asyncio.Redis.from_url(settings.REDIS_URL)
        async with client, client.pubsub() as pubsub:
            await pubsub.psubscribe(f"{_PREFIX}*")
            async for message in pubsub.listen():
                if message["type"] == "psubscribe":  # what was announced before it is lost
                    for channel in self._channels.values():
                        channel.ring()
                elif message["type"] == "pmessage":
                    name = message["channel"].decode().removeprefix(_PREFIX)
                    if name in self._channels:
                        self._channels[name].ring()


hub = Hub()
_open = OpenCounts()


@dataclass(frozen=True)
class Watcher:
    """A person in a session who watches jobs of one organization."""

    person: User
    session_key: str
    organization_id: str

    @property
    def owners(self) -> tuple[str, str]:
        return f"person {self.person.pk}", f"organization {self.organization_id}"

    def require_room(self) -> None:
        """Raise RateLimited if the person or the organization has reached its limit of live pages."""
        limits = (MAX_OF_PERSON, MAX_OF_ORGANIZATION)
        texts = (
            gettext("You follow %(most)s live pages at once, the most allowed. Close one and reload this page."),
            gettext(
                "Your organization follows %(most)s live pages at once, the most allowed. Close one and reload this "
                "page."
            ),
        )
        for owner, most, text in zip(self.owners, limits, texts, strict=True):
            if _open[owner] >= most:
                raise RateLimited(text % {"most": most}, retry_after_seconds=_FULL_SECONDS)

    def may_watch(self, job_id: str) -> bool:
        """Return whether the session still belongs to a member who may see the job, or to an operator who views it."""
        try:
            found = find_session(self.session_key)
            if found is None or found[1] != self.person:
                return False
            viewing = find_viewing(session=found[0], user=found[1])
            if viewing and viewing.organization_id != self.organization_id:
                return False
            with tenant(organization=self.organization_id):
                organization = get_organization(id=self.organization_id)
                membership = (
                    viewing_membership(organization=organization, operator=self.person)
                    if viewing
                    else find_membership(organization=organization, user=self.person)
                )
                if membership is None:
                    return False
                require(membership, Permission.VIEW)
                with seeing(sight_of_member(membership)):
                    get_job(organization=organization, id=job_id, related=("project",))
                return True
        except DomainError:
            return False
        finally:
            give_back_connection()  # a waiting watcher holds no connection


async def follow_job(*, watcher: Watcher, job_id: str, after: int) -> AsyncIterator[bytes]:
    """Yield the job's events after `after` until the job is over, then the event `done`.

    Ends without `done` if the watcher's access ends.
    """
    for owner in watcher.owners:
        _open.add(owner)
    try:
        async for frame in _frames(watcher, job_id, after):
            yield frame
    finally:
        for owner in watcher.owners:
            _open.remove(owner)


async def _frames(watcher: Watcher, job_id: str, after: int) -> AsyncIterator[bytes]:
    asked_at, looked_at = time.monotonic(), 0.0
    with hub.listening(f"job:{job_id}") as (channel, bell):
        while True:
            await asyncio.sleep(max(0.0, looked_at + MIN_SECONDS - time.monotonic()))
            if time.monotonic() - asked_at > ASK_AGAIN_SECONDS:
                if not await channel.ask(Watcher.may_watch, watcher, job_id):
                    return
                asked_at = time.monotonic()
            looked_at = time.monotonic()
            bell.clear()
            events, status, figures = await channel.ask(_read, watcher.organization_id, job_id, after)
            for event in events:
                after = event.sequence
                yield _frame(event, figures)
            if status in JOB_TERMINAL and not events:
                yield b"event: done\ndata: " + json.dumps({"status": status}).encode() + b"\n\n"
                return
            if not events:  # time passes and money is spent between two steps as well
                yield f"event: metric\ndata: {json.dumps(figures)}\n\n".encode()
                with contextlib.suppress(TimeoutError):
                    seconds = max(LOOK_ANYWAY_SECONDS, hub.watcher_count / MAX_LOOKS_PER_SECOND)
                    await asyncio.wait_for(bell.wait(), seconds)


def _read(organization_id: str, job_id: str, after: int) -> tuple[list[JobEvent], str, dict[str, object]]:
    try:
        with tenant(organization=organization_id):
            job = get_job(organization=organization_id, id=job_id, related=("price_rule",))
            return list_events_after(job=job, sequence=after), job.status, _figures(job)
    finally:
        give_back_connection()  # a waiting watcher holds no connection


def _figures(job: FineTuningJob) -> dict[str, object]:
    """Return the figures of the job's page that change while it runs, formatted as the page formats them."""
    progress = get_progress(job=job, now=db_now())
    return {
        "percent": progress.percent,
        "spent": usd(progress.spent_nano),
        "time_left": duration(progress.seconds_left),
        "throughput": number(round(progress.tokens_per_second)) if progress.tokens_per_second else NONE,
    }


def with_units(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a step's metrics in the chart's units: memory in GiB and GPU load in percent."""
    memory, load = data.get("memory_bytes"), data.get("gpu_utilization")
    shown = {
        "memory_gib": None if memory is None else round(memory / 2**30, 3),
        "gpu_percent": None if load is None else round(100 * load, 1),
    }
    return {**data, **{name: value for name, value in shown.items() if value is not None}}


def _frame(event: JobEvent, figures: Mapping[str, object]) -> bytes:
    """Return an event of the stream, without sample answers: the page reads those when a tab shows them."""
    name = "metric" if event.type == "metrics" else "state" if event.type == "state" else "log"
    data = {
        "message": event.message,
        "level": event.level,
        "at": event.created_at.isoformat(),
        **with_units({key: value for key, value in event.data.items() if key != "samples"}),
        **(figures if name == "metric" else {}),
    }
    return f"id: {event.sequence}\nevent: {name}\ndata: {json.dumps(data)}\n\n".encode()
