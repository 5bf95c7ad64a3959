"""The part of an organization's money that this gateway may spend for each key, checked without a query.

The worst case of a request is reserved before it starts and settled at its actual cost. The money was first set aside
in the ledger (billing.slices), so no more can be spent than the wallet had.
"""

import asyncio
import logging
import math
import time
from dataclasses import dataclass, field

import msgspec

from apps.billing.operations import SpendingStopped
from apps.billing.usage.slices import SLICE_SECONDS, close_slice, lease_slice, renew_slices
from apps.core.errors import QuotaExceeded, Unavailable
from apps.interfaces.gateway.database import DATABASE_ERRORS, Database

logger = logging.getLogger(__name__)

RENEW_SECONDS = 15.0
# A slice not renewed for this long by our own clock is not spent from, well before the ledger takes it back.
FENCE_SECONDS = SLICE_SECONDS - 10.0
IDLE_SECONDS = 5.0
REFILL_SHARE = 0.3
_TEND_SECONDS = 1.0
_REFUSAL_SECONDS = 1.0
_NOTHING_NANO = 1_000  # less than the worst case of any request


_Owner = tuple[str, str]  # organization and key, because a budget may stop one key and not another


@dataclass
class _Slice:
    hold_id: str
    owner: "_Owner"
    amount_nano: int
    renewed_at: float
    last_grant_nano: int
    spent_nano: int = 0
    reserved_nano: int = 0
    unshipped: int = 0  # requests reserved here that the database does not have yet
    used_at: float = field(default_factory=time.monotonic)

    @property
    def free_nano(self) -> int:
        return self.amount_nano - self.spent_nano - self.reserved_nano

    def is_usable(self) -> bool:
        return time.monotonic() - self.renewed_at < FENCE_SECONDS

    def is_idle(self) -> bool:
        return not self.unshipped and time.monotonic() - self.used_at > IDLE_SECONDS


@dataclass
class _KeySlices:
    current: _Slice | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    refill: "asyncio.Task[None] | None" = None
    refusal: QuotaExceeded | None = None
    refused_nano: int = 0
    refused_at: float = 0.0


class SliceShare(msgspec.Struct, frozen=True):
    """The worst case of one request, set aside in a slice. There is no slice if the model costs nothing."""

    slice: _Slice | None
    amount_nano: int

    @property
    def slice_id(self) -> str:
        return self.slice.hold_id if self.slice else ""

    def settle(self, spent_nano: int) -> None:
        """Free the reserved amount and count the amount spent. Call once."""
        if self.slice is not None:
            self.slice.reserved_nano -= self.amount_nano
            self.slice.spent_nano += spent_nano


class SpendingSlices:
    def __init__(self, database: Database, *, name: str) -> None:
        self._database = database
        self._name = name
        self._spending_slices: dict[_Owner, _KeySlices] = {}
        self._slices: dict[str, _Slice] = {}  # every slice with requests to ship, current or not

    def require_credit(self, organization_id: str, key_id: str) -> None:
        """Refuse a key that had nothing left a moment ago, before its request is read. Raises QuotaExceeded."""
        key_slices = self._spending_slices.get((organization_id, key_id))
        if key_slices is None or key_slices.refusal is None:
            return
        if key_slices.refusal.data.get("balance_nano", math.inf) < _NOTHING_NANO or isinstance(
            key_slices.refusal, SpendingStopped
        ):
            _raise_recent_refusal(key_slices, key_slices.refused_nano)

    async def reserve(self, organization_id: str, key_id: str, amount_nano: int) -> SliceShare:
        """Set the amount aside. Raises InsufficientBalance, BudgetExceeded, Unavailable."""
        if not amount_nano:
            return SliceShare(None, 0)
        owner = (organization_id, key_id)
        key_slices = self._spending_slices.get(owner)
        if key_slices is None:
            key_slices = self._spending_slices[owner] = _KeySlices()
        # Check again after each lease: other requests take from the slice without the lock during the wait for the
        # ledger.
        while not _can_give(key_slices, amount_nano):
            # In a task of its own: a customer who leaves must not lose money that the ledger sets aside meanwhile.
            leasing = asyncio.ensure_future(self._lease_if_short(owner, key_slices, amount_nano))
            leasing.add_done_callback(_retrieve_error)
            await asyncio.shield(leasing)
        current = key_slices.current
        assert current is not None  # it can give, and nothing was awaited since
        current.reserved_nano += amount_nano
        current.unshipped += 1
        current.used_at = time.monotonic()
        if current.free_nano < REFILL_SHARE * current.last_grant_nano and key_slices.refill is None:
            key_slices.refill = asyncio.ensure_future(self._refill(owner, key_slices))
        return SliceShare(current, amount_nano)

    async def require_room(self, organization_id: str, key_id: str, amount_nano: int) -> None:
        """Check that the amount could be set aside now. Raises the errors of `reserve`."""
        share = await self.reserve(organization_id, key_id, amount_nano)
        share.settle(0)
        self.record_settled(share.slice_id, 1)

    async def _lease_if_short(self, owner: _Owner, key_slices: _KeySlices, amount_nano: int) -> None:
        async with key_slices.lock:
            if not _can_give(key_slices, amount_nano):
                await self._lease(owner, key_slices, amount_nano)

    async def _refill(self, owner: _Owner, key_slices: _KeySlices) -> None:
        """Lease more money before it is needed, so that no request waits for it."""
        try:
            async with key_slices.lock:
                current = key_slices.current
                if current is not None and current.free_nano < REFILL_SHARE * current.last_grant_nano:
                    await self._lease(owner, key_slices, max(current.free_nano, 0) + 1)
        except (QuotaExceeded, Unavailable):
            pass  # the request that needs more will report it
        finally:
            key_slices.refill = None

    async def _lease(self, owner: _Owner, key_slices: _KeySlices, amount_nano: int) -> None:
        """Make at least the amount free in the key's slice. The caller holds its lock."""
        current = key_slices.current if key_slices.current and key_slices.current.is_usable() else None
        short_nano = amount_nano - (current.free_nano if current else 0)
        _raise_recent_refusal(key_slices, short_nano)
        started_at = time.monotonic()
        try:
            leased = await self._database.call(
                lease_slice,
                organization=owner[0],
                key_id=owner[1],
                required_nano=short_nano,
                by=self._name,
                hold_id=current.hold_id if current else None,
            )
        except QuotaExceeded as refusal:
            key_slices.refusal, key_slices.refused_nano, key_slices.refused_at = refusal, short_nano, time.monotonic()
            raise
        except DATABASE_ERRORS as error:
            raise Unavailable("The balance cannot be checked at the moment. Try again shortly.") from error
        if current is None or leased.hold_id != current.hold_id:
            current = _Slice(leased.hold_id, owner, 0, started_at, 0)
            key_slices.current = self._slices[leased.hold_id] = current
        current.last_grant_nano = leased.amount_nano - current.amount_nano
        current.amount_nano, current.renewed_at = leased.amount_nano, started_at

    def record_settled(self, slice_id: str, count: int) -> None:
        """Record that `count` more requests of the slice are in the database or never will be."""
        if found := self._slices.get(slice_id):
            found.unshipped -= count

    async def maintain(self) -> None:
        """Renew slices in use and return idle ones, until cancelled."""
        while True:
            await asyncio.sleep(_TEND_SECONDS)
            try:
                await self._renew()
                await self.return_idle()
            except DATABASE_ERRORS as error:
                logger.warning("slices not renewed: %s", error)

    async def _renew(self) -> None:
        started_at = time.monotonic()
        due = [s.hold_id for s in self._slices.values() if started_at - s.renewed_at > RENEW_SECONDS]
        if not due:
            return
        kept = await self._database.call(renew_slices, hold_ids=due)
        for hold_id in due:
            if hold_id in kept:
                self._slices[hold_id].renewed_at = started_at
            else:
                logger.warning("slice %s was taken back", hold_id)
                dropped = self._slices.pop(hold_id)
                key_slices = self._spending_slices.get(dropped.owner)
                if key_slices is not None and key_slices.current is dropped:
                    key_slices.current = None

    async def return_idle(self, *, at_once: bool = False) -> None:
        """Close idle slices, or with `at_once` all slices with nothing left to ship.

        Raises one of DATABASE_ERRORS. A slice that cannot be closed is abandoned; the ledger closes it when it expires.
        """
        for one in list(self._slices.values()):
            if one.unshipped or not (at_once or one.is_idle()):
                continue
            try:
                await self._return(one)
            except DATABASE_ERRORS:
                raise
            except Exception:  # the fault of one organization's books must not end the requests of all others
                logger.exception("slice %s cannot be closed", one.hold_id)
                self._slices.pop(one.hold_id, None)

    async def _return(self, one: _Slice) -> None:
        key_slices = self._spending_slices.setdefault(one.owner, _KeySlices())
        async with key_slices.lock:  # a request that finds the wallet short waits until this money is back
            if one.unshipped:
                return
            if key_slices.current is one:
                key_slices.current = None
            await self._database.call(close_slice, hold_id=one.hold_id, by=self._name)
            self._slices.pop(one.hold_id, None)
        if key_slices.current is None and key_slices.refill is None and not key_slices.lock.locked():
            self._spending_slices.pop(one.owner, None)


def _retrieve_error(task: "asyncio.Task[None]") -> None:
    """Mark the error of a task as seen, because no request may be waiting for it any more."""
    if not task.cancelled():
        task.exception()


def _can_give(key_slices: _KeySlices, amount_nano: int) -> bool:
    current = key_slices.current
    return current is not None and current.is_usable() and current.free_nano >= amount_nano


def _raise_recent_refusal(key_slices: _KeySlices, short_nano: int) -> None:
    """Repeat the ledger's recent refusal, so that an organization without credit does not keep the ledger busy."""
    is_recent = time.monotonic() - key_slices.refused_at < _REFUSAL_SECONDS
    if key_slices.refusal is not None and is_recent and short_nano >= key_slices.refused_nano:
        raise type(key_slices.refusal)(key_slices.refusal.message, **key_slices.refusal.data)
