"""Room for completions to store: in their organization's storage, and in memory until the database has them."""

import asyncio
import time
from collections import OrderedDict, defaultdict
from dataclasses import dataclass

from apps.batches.completions.records import CompletionAllowance, CompletionRecord, get_allowance
from apps.core.errors import QuotaExceeded, Unavailable
from apps.core.http.asgi import MIB
from apps.interfaces.gateway.database import DATABASE_ERRORS, Database

FRESH_SECONDS = 10.0  # an allowance is looked up again after that
MAX_WAITING, MAX_WAITING_OF_ONE = 64 * MIB, 16 * MIB  # of all organizations, of one
_MAX_ALLOWANCES = 10_000
_BUSY = "Completions cannot be stored at the moment. Try again shortly, or send `store: false`."


@dataclass(frozen=True)
class _KnownAllowance:
    allowance: CompletionAllowance
    looked_up_at: float


class CompletionRoom:
    """Use inside one event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._entries: OrderedDict[str, _KnownAllowance] = OrderedDict()
        self._lookups: dict[str, asyncio.Task[_KnownAllowance]] = {}
        self._waiting: defaultdict[str, int] = defaultdict(int)  # bytes by organization
        self._total = 0

    async def require(self, organization_id: str) -> None:
        """Raise QuotaExceeded if the organization's storage is full, Unavailable if too many bytes wait already."""
        if self._total >= MAX_WAITING or self._waiting.get(organization_id, 0) >= MAX_WAITING_OF_ONE:
            raise Unavailable(_BUSY, param="store")
        entry = self._entries.get(organization_id)
        if entry is None or time.monotonic() - entry.looked_up_at > FRESH_SECONDS:
            try:
                entry = await asyncio.shield(self._begin_lookup(organization_id))
            except DATABASE_ERRORS as error:
                raise Unavailable(_BUSY, param="store") from error
        if entry.allowance.is_used_up:
            raise QuotaExceeded(
                "Your organization can store no more completions: delete some, or files you no longer need, "
                "ask the operator for more storage, or send `store: false`.",
                param="store",
            )

    def take(self, record: CompletionRecord) -> None:
        """Count a completion that is about to be written."""
        self._waiting[record.organization_id] += record.bytes
        self._total += record.bytes
        if entry := self._entries.get(record.organization_id):
            entry.allowance.use(record.bytes)

    def record_stored(self, organization_id: str, byte_count: int) -> None:
        """Stop counting completions that the database has, or that could not be written."""
        self._waiting[organization_id] -= byte_count
        self._total -= byte_count
        if not self._waiting[organization_id]:
            del self._waiting[organization_id]

    def _begin_lookup(self, organization_id: str) -> "asyncio.Task[_KnownAllowance]":
        if organization_id not in self._lookups:
            task = asyncio.ensure_future(self._look_up(organization_id))
            self._lookups[organization_id] = task
            task.add_done_callback(lambda done: self._finish_lookup(organization_id, done))
        return self._lookups[organization_id]

    def _finish_lookup(self, organization_id: str, task: "asyncio.Task[_KnownAllowance]") -> None:
        del self._lookups[organization_id]
        if not task.cancelled():
            task.exception()  # retrieved here because the customers that wait for it may have left

    async def _look_up(self, organization_id: str) -> _KnownAllowance:
        allowance = await self._database.call(lambda: get_allowance(organization=organization_id))
        # What waits is not in the database yet.
        if allowance.bytes is not None:
            allowance.bytes -= self._waiting.get(organization_id, 0)
        self._entries[organization_id] = entry = _KnownAllowance(allowance, time.monotonic())
        self._entries.move_to_end(organization_id)
        while len(self._entries) > _MAX_ALLOWANCES:
            self._entries.popitem(last=False)
        return entry
