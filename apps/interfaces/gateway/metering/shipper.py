"""Shipping of the spool to the database. The spool forgets only entries that the database has."""

import asyncio
import datetime
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from django.db import DataError, IntegrityError

from apps.batches.completions.records import CompletionRecord, record_completions
from apps.billing.models import Hold, HoldStatus
from apps.billing.queries import list_recorded_ids
from apps.billing.usage.metering import UsageRecord, record_usage
from apps.billing.usage.slices import close_slice
from apps.interfaces.gateway.database import DATABASE_ERRORS, Database, call_again
from apps.interfaces.gateway.metering.spool import Orphan, Start, adopt_orphans

logger = logging.getLogger(__name__)

# A transaction costs as much as a hundred records, so few and large ones are used.
BATCH = 1000
COMPLETIONS_BATCH = 50  # each may have megabytes
GATHER_SECONDS = 0.25
ADOPT_SECONDS = 10.0
_MAX_PAUSE_SECONDS = 5.0


class _Record(Protocol):
    @property
    def id(self) -> str: ...


Record = TypeVar("Record", bound=_Record)
Shipped = Callable[[Sequence[Record], Sequence[str]], None]


class Shipper:
    """Ships records and completions: `add` durable ones, and `run` sends them in a separate thread."""

    def __init__(
        self,
        shipped: Shipped[UsageRecord],
        stored: Shipped[CompletionRecord] = lambda batch, ids: None,
    ) -> None:
        """`shipped` and `stored` are called with each batch in the database and the ids that the spool may forget."""
        self._shipped, self._stored = shipped, stored
        self._waiting: deque[UsageRecord] = deque()
        self._completions: deque[CompletionRecord] = deque()
        self._has_work = threading.Event()
        self._hurries = threading.Event()

    def add(self, records: Iterable[UsageRecord]) -> None:
        self._waiting.extend(records)
        self._has_work.set()

    def add_completions(self, records: Iterable[CompletionRecord]) -> None:
        self._completions.extend(records)
        self._has_work.set()

    def flush_now(self) -> None:
        """Send batches without gathering more, because the gateway stops."""
        self._hurries.set()

    def run(self) -> None:
        """Send forever. Retry records that the database does not accept now."""
        pause = GATHER_SECONDS
        while True:
            self._has_work.wait()
            self._hurries.wait(pause)
            try:
                self.ship()
                pause = GATHER_SECONDS
            except DATABASE_ERRORS as error:
                pause = min(2 * pause, _MAX_PAUSE_SECONDS)
                self._hurries.clear()
                logger.warning("usage not recorded yet, %d requests wait on disk: %s", len(self._waiting), error)

    def ship(self) -> None:
        """Send all records that wait now. Later ones are left out; otherwise this would never end under load.

        Raises one of DATABASE_ERRORS; unsent records then still wait.
        """
        self._has_work.clear()
        try:
            _send_all(self._waiting, BATCH, record, self._shipped)
            _send_all(self._completions, COMPLETIONS_BATCH, store, self._stored)
        finally:
            if self._waiting or self._completions:
                self._has_work.set()


def _send_all(
    waiting: deque[Record], most: int, send: Callable[[Sequence[Record]], list[str]], sent: Shipped[Record]
) -> None:
    count = len(waiting)
    for place in range(0, count, most):
        batch = [waiting.popleft() for _ in range(min(most, count - place))]
        try:
            ids = send(batch)
        except DATABASE_ERRORS:
            waiting.extendleft(reversed(batch))
            raise
        sent(batch, ids)


def record(batch: Sequence[UsageRecord]) -> list[str]:
    """Record the batch; return the recorded ids. Records that the database refuses for good stay on disk.

    Raises one of DATABASE_ERRORS.
    """
    return _write(batch, lambda part: record_usage(records=part))


def store(batch: Sequence[CompletionRecord]) -> list[str]:
    """Store the completions, as `record` does with usage."""
    return _write(batch, lambda part: record_completions(records=part))


def _write(batch: Sequence[Record], write: Callable[[Sequence[Record]], object]) -> list[str]:
    try:
        call_again(lambda: write(batch))
    except (IntegrityError, DataError) as error:
        if len(batch) == 1:
            logger.error("%s cannot be recorded and stays in the spool: %s", batch[0].id, error)
            return []
        middle = len(batch) // 2
        return [*_write(batch[:middle], write), *_write(batch[middle:], write)]
    return [each.id for each in batch]


# --- Leftovers of dead gateways ---------------------------------------------------------------------------------------


async def keep_adopting(database: Database, root: Path) -> None:
    """Ship the records that dead gateways left, now and every ADOPT_SECONDS, until cancelled."""
    while True:
        try:
            await recover_orphans(database, root)
        except DATABASE_ERRORS as error:
            logger.warning("a dead gateway's usage is not recorded yet: %s", error)
        await asyncio.sleep(ADOPT_SECONDS)


async def recover_orphans(database: Database, root: Path) -> None:
    """Record all usage that dead gateways metered, and count the requests they did not meter.

    Safe to kill and repeat.
    """
    orphans = await database.call(lambda: list(adopt_orphans(root)))
    try:
        while orphans:
            orphan, is_done = orphans[0], False
            try:
                is_done = await _ship_orphan(database, orphan)
            except (asyncio.CancelledError, *DATABASE_ERRORS):
                raise
            except Exception:  # the usage of one dead gateway must not end a running one
                logger.exception("usage of the dead gateway %s stays on disk", orphan.folder.name)
            del orphans[0]
            if is_done:
                orphan.remove()
            else:
                orphan.leave()
    finally:
        for orphan in orphans:  # else no gateway could adopt them until this one ends
            orphan.leave()


async def _ship_orphan(database: Database, orphan: Orphan) -> bool:
    recorded = 0
    for place in range(0, len(orphan.ends), BATCH):
        recorded += len(await database.call(record, orphan.ends[place : place + BATCH]))
    stored = 0
    for place in range(0, len(orphan.completions), COMPLETIONS_BATCH):
        stored += len(await database.call(store, orphan.completions[place : place + COMPLETIONS_BATCH]))
    lost = await database.call(_lost_records, orphan.starts)
    await database.call(record, lost)
    for slice_id in {start.slice_id for start in orphan.starts} | {end.slice_id for end in orphan.ends}:
        await database.call(_close_slice, slice_id)
    logger.warning(
        "%s died: %d requests recorded, %d were in progress and cost nothing", orphan.folder.name, recorded, len(lost)
    )
    return (recorded, stored) == (len(orphan.ends), len(orphan.completions))


def _lost_records(starts: Sequence[Start]) -> list[UsageRecord]:
    """Return records of requests whose gateway died before they were metered. The platform pays for them."""
    known = list_recorded_ids(ids=[each for start in starts for each in (start.id, start.charged_id) if each])
    return [
        UsageRecord(
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
        for start in starts
        if not known & {start.id, start.charged_id}
    ]


def _close_slice(slice_id: str) -> None:
    if Hold.objects.filter(pk=slice_id, status=HoldStatus.OPEN).exists():
        close_slice(hold_id=slice_id, by="system")
