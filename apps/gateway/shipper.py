"""Brings what is on the spool into the database, and only then lets the spool forget it."""

import asyncio
import datetime
import logging
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from django.db import DataError, IntegrityError

from apps.billing.models import Hold
from apps.billing.queries import list_recorded_ids
from apps.billing.slices import close_slice
from apps.billing.usage import UsageRecord, record_usage
from apps.gateway.database import DATABASE_ERRORS, Database
from apps.gateway.spool import Orphan, Spool, Start, adopt_orphans

logger = logging.getLogger(__name__)

# A transaction costs as much as a hundred records, so few and large ones: what ends meanwhile waits for the next.
BATCH = 1000
GATHER_SECONDS = 0.25
ADOPT_SECONDS = 10.0
MOST_WAITING = 100_000  # with the database away for long, nobody is served on credit that cannot be written down
_LONGEST_PAUSE_SECONDS = 5.0


class Shipper:
    """`add` what is durable; `run` sends it until cancelled."""

    def __init__(self, database: Database, spool: Spool, shipped: Callable[[Sequence[UsageRecord]], None]) -> None:
        self._database = database
        self._spool = spool
        self._shipped = shipped
        self._waiting: deque[UsageRecord] = deque()
        self._has_work = asyncio.Event()

    def add(self, record: UsageRecord) -> None:
        self._waiting.append(record)
        self._has_work.set()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def run(self) -> None:
        pause = GATHER_SECONDS
        while True:
            await self._has_work.wait()
            await asyncio.sleep(pause)
            try:
                await self._ship(self.waiting)
                pause = GATHER_SECONDS
            except DATABASE_ERRORS as error:
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                logger.warning("usage not recorded yet, %d requests wait on disk: %s", self.waiting, error)

    async def flush(self) -> None:
        """Send everything that waits. Raises one of DATABASE_ERRORS; what was not sent still waits."""
        while self._waiting:
            await self._ship(self.waiting)

    async def _ship(self, count: int) -> None:
        """Send the `count` that wait longest, and not what comes meanwhile: under load that would never end."""
        for place in range(0, count, BATCH):
            batch = list(islice(self._waiting, min(BATCH, count - place)))
            recorded = await _record(self._database, batch)
            for _ in batch:
                self._waiting.popleft()
            self._spool.forget([record.id for record in recorded])
            self._shipped(batch)
        if not self._waiting:
            self._has_work.clear()


async def _record(database: Database, batch: Sequence[UsageRecord]) -> list[UsageRecord]:
    """Record the batch and return it; without those the database refuses for good, which stay on disk."""
    try:
        await database.call(record_usage, records=batch)
    except (IntegrityError, DataError) as error:
        if len(batch) == 1:
            logger.error("usage %s cannot be recorded and stays in the spool: %s", batch[0].id, error)
            return []
        middle = len(batch) // 2
        return [*await _record(database, batch[:middle]), *await _record(database, batch[middle:])]
    return list(batch)


# --- What dead gateways left ------------------------------------------------------------------------------------------


async def keep_adopting(database: Database, root: Path) -> None:
    """Ship what dead gateways left, now and from time to time, until cancelled."""
    while True:
        try:
            await adopt(database, root)
        except DATABASE_ERRORS as error:
            logger.warning("a dead gateway's usage is not recorded yet: %s", error)
        await asyncio.sleep(ADOPT_SECONDS)


async def adopt(database: Database, root: Path) -> None:
    """Record everything that dead gateways metered and count what they could not. Safe to be killed and repeated."""
    for orphan in await database.call(lambda: list(adopt_orphans(root))):
        try:
            is_done = await _ship_orphan(database, orphan)
        except BaseException:
            orphan.leave()
            raise
        if is_done:
            orphan.remove()
        else:
            orphan.leave()


async def _ship_orphan(database: Database, orphan: Orphan) -> bool:
    recorded = 0
    for place in range(0, len(orphan.ends), BATCH):
        recorded += len(await _record(database, orphan.ends[place : place + BATCH]))
    lost = await database.call(_lost_records, orphan.starts)
    await _record(database, lost)
    for slice_id in {start.slice_id for start in orphan.starts} | {record.slice_id for record in orphan.ends}:
        await database.call(_close_slice, slice_id)
    logger.warning(
        "%s died: %d requests recorded, %d were in progress and cost nothing", orphan.folder.name, recorded, len(lost)
    )
    return recorded == len(orphan.ends)


def _lost_records(starts: Sequence[Start]) -> list[UsageRecord]:
    known = list_recorded_ids(ids=[start.id for start in starts])
    return [_lost(start) for start in starts if start.id not in known]


def _lost(start: Start) -> UsageRecord:
    """Return the record of a request whose gateway died before it was metered: the platform pays for it."""
    return UsageRecord(
        id=start.id,
        organization_id=start.organization_id,
        key_id=start.key_id,
        model_name=start.model_name,
        adapter_version_id="",
        slice_id=start.slice_id,
        input_price_id=None,
        output_price_id=None,
        input_tokens=0,
        cached_input_tokens=0,
        output_tokens=0,
        finish="lost",
        latency_ms=0,
        first_token_ms=None,
        occurred_at=datetime.datetime.fromtimestamp(start.at, datetime.UTC),
    )


def _close_slice(slice_id: str) -> None:
    if Hold.objects.filter(pk=slice_id, status="open").exists():
        close_slice(hold_id=slice_id, by="system")
