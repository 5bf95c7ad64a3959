"""Server-sent events of one job: what a watcher missed from the table, then what comes, each with its sequence as id.

One Redis subscriber a process; a watcher whose message is lost still sees the row within seconds.
"""

import asyncio
import json
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from typing import Any

import redis.asyncio
from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import connection

from apps.core.clock import db_now
from apps.core.templatetags.ui import NONE, duration, number, usd
from apps.core.tenancy import tenant
from apps.finetuning.lifecycle import JOB_TERMINAL
from apps.finetuning.models import FineTuningJob, JobEvent
from apps.finetuning.progress import get_progress
from apps.finetuning.queries import get_job, list_events_after

logger = logging.getLogger(__name__)

LOOK_ANYWAY_SECONDS = 5.0  # how long a watcher waits for a message before it looks at the table
_PREFIX = "anneal:live:"
_RETRY_SECONDS = 1.0


class Hub:
    """Wakes the watchers of a channel when Redis says that something changed."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Event]] = defaultdict(set)
        self._task: asyncio.Task[None] | None = None

    async def wait(self, channel: str, seconds: float) -> None:
        """Return when the channel changed, or after so many seconds."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._listen())
        bell = asyncio.Event()
        self._waiting[channel].add(bell)
        try:
            await asyncio.wait_for(bell.wait(), seconds)
        except TimeoutError:
            pass
        finally:
            self._waiting[channel].discard(bell)
            if not self._waiting[channel]:
                del self._waiting[channel]

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
                if message["type"] == "pmessage":
                    for bell in self._waiting.get(message["channel"].decode().removeprefix(_PREFIX), ()):
                        bell.set()


hub = Hub()


async def follow_job(*, organization_id: str, job_id: str, after: int) -> AsyncIterator[bytes]:
    """Yield the job's events after `after` until the job is over; ends with the event `done`."""
    while True:
        events, status, figures = await sync_to_async(_read)(organization_id, job_id, after)
        for event in events:
            after = event.sequence
            yield _frame(event, figures)
        if status in JOB_TERMINAL and not events:
            yield b"event: done\ndata: " + json.dumps({"status": status}).encode() + b"\n\n"
            return
        if not events:  # time passes and money is spent between two steps as well
            yield f"event: metric\ndata: {json.dumps(figures)}\n\n".encode()
            await hub.wait(f"job:{job_id}", LOOK_ANYWAY_SECONDS)


def _read(organization_id: str, job_id: str, after: int) -> tuple[list[JobEvent], str, dict[str, Any]]:
    try:
        with tenant(organization=organization_id):
            job = get_job(organization=organization_id, id=job_id)
            return list_events_after(job=job, sequence=after), job.status, _figures(job)
    finally:
        if not connection.in_atomic_block:
            connection.close()  # nothing is held while the watcher waits


def _figures(job: FineTuningJob) -> dict[str, Any]:
    """Return the figures of the job's page that change while it runs, as the page itself writes them."""
    progress = get_progress(job=job, now=db_now())
    return {
        "percent": progress.percent,
        "spent": usd(progress.spent_nano),
        "time_left": duration(progress.seconds_left),
        "throughput": number(round(progress.tokens_per_second)) if progress.tokens_per_second else NONE,
    }


def with_units(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a step's metrics with memory in GiB and the GPU's load in percent, as a chart's axis has them."""
    memory, load = data.get("memory_bytes"), data.get("gpu_utilization")
    shown = {
        "memory_gib": None if memory is None else round(memory / 2**30, 3),
        "gpu_percent": None if load is None else round(100 * load, 1),
    }
    return {**data, **{name: value for name, value in shown.items() if value is not None}}


def _frame(event: JobEvent, figures: Mapping[str, Any]) -> bytes:
    name = "metric" if event.type == "metrics" else "state" if event.type == "state" else "log"
    data = {
        "message": event.message,
        "level": event.level,
        "at": event.created_at.isoformat(),
        **with_units(event.data),
        **(figures if name == "metric" else {}),
    }
    return f"id: {event.sequence}\nevent: {name}\ndata: {json.dumps(data)}\n\n".encode()
