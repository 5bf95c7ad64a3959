"""A daily hash chain over the ledger: each day's entries are hashed with the previous day's hash."""

import datetime
import hashlib
from dataclasses import dataclass

from django.db import transaction
from django.db.models import Min

from apps.billing.models import LedgerEntry, LedgerSeal
from apps.core.database.clock import begin_of_day
from apps.core.database.locks import lock

# An entry carries the start time of its transaction. No transaction runs for an hour, so a day is complete by then.
GRACE = datetime.timedelta(hours=1)
_FIELDS = (
    "id",
    "transaction_id",
    "transaction__organization_id",
    "transaction__kind",
    "transaction__idempotency_key",
    "transaction__request_sha256",
    "account_id",
    "amount_nano",
)


@dataclass(frozen=True)
class BrokenSeal:
    """A day whose entries differ from those that were sealed."""

    day: datetime.date
    sealed_count: int
    found_count: int


def seal_days(*, now: datetime.datetime) -> int:
    """Seal every finished UTC day that is not sealed; return how many were sealed. Safe to repeat."""
    with transaction.atomic():
        lock("billing.seals")
        last = LedgerSeal.objects.order_by("-day").first()
        day = last.day + datetime.timedelta(days=1) if last else _first_day()
        count = 0
        while day is not None and begin_of_day(day + datetime.timedelta(days=1)) + GRACE <= now:
            entries, sha256 = _hash(day, last.sha256 if last else "")
            last = LedgerSeal.objects.create(
                day=day, entry_count=entries, previous_sha256=last.sha256 if last else "", sha256=sha256
            )
            day += datetime.timedelta(days=1)
            count += 1
        return count


def verify_seals(*, since: datetime.date | None = None) -> list[BrokenSeal]:
    """Return the sealed days whose hash or link to the day before does not match."""
    broken = []
    previous = ""
    for seal in LedgerSeal.objects.order_by("day"):
        is_linked = seal.previous_sha256 == previous
        previous = seal.sha256
        if since is not None and seal.day < since:
            continue
        entries, sha256 = _hash(seal.day, seal.previous_sha256)
        if not is_linked or sha256 != seal.sha256:
            broken.append(BrokenSeal(seal.day, seal.entry_count, entries))
    return broken


def _hash(day: datetime.date, previous_sha256: str) -> tuple[int, str]:
    digest = hashlib.sha256(f"{day}\n{previous_sha256}\n".encode())
    begin, end = begin_of_day(day), begin_of_day(day + datetime.timedelta(days=1))
    rows = LedgerEntry.objects.filter(created_at__gte=begin, created_at__lt=end).order_by("id")
    count = 0
    for row in rows.values_list(*_FIELDS, "created_at").iterator(chunk_size=5000):
        digest.update(("\x1f".join(map(str, row[:-1])) + f"\x1f{row[-1].isoformat()}\n").encode())
        count += 1
    return count, digest.hexdigest()


def _first_day() -> datetime.date | None:
    first = LedgerEntry.objects.aggregate(first=Min("created_at"))["first"]
    return first.astimezone(datetime.UTC).date() if first else None
