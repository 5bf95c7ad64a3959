"""Credit lots: the order of spending, the lots a refund returns to, and opening a lot.

The order is lower priority first, then earlier expiry (none is last), then earlier creation. Callers hold the wallet's
lock, so no other process draws at the same time.
"""

import datetime
from collections import Counter
from collections.abc import Collection, Mapping

from django.db.models import F, QuerySet, Sum

from apps.accounts.shares import give_own_share
from apps.billing.models import CreditLot, LotKind, LotMovement, PostingKind

PROMOTIONAL_PRIORITY = 20
PAID_PRIORITY = 50
_MOVEMENTS_AT_ONCE = 500


class LotsExhausted(Exception):
    """The lots hold less than the balance: the books are broken."""


def spendable_lots(*, organization_id: str) -> QuerySet[CreditLot]:
    """Return the lots with credit left in spending order. `ledger_post` uses the same order."""
    lots = CreditLot.objects.filter(organization_id=organization_id, remaining_nano__gt=F("held_nano"))
    return lots.order_by("priority", F("expires_at").asc(nulls_last=True), "created_at", "pk")


def returns_for(
    *, organization_id: str, sources: Collection[str], amount_nano: int, now: datetime.datetime
) -> dict[str, int]:
    """Return how a refund of jobs and conversions is split over lots: the lots they were paid from, last first.

    The share of a lot that has expired since goes into a new lot of the same kind without expiry: our fault must not
    cost the customer the credit.
    """
    drawn = (
        LotMovement.objects.filter(organization_id=organization_id, transaction__source__in=sources)
        .exclude(transaction__kind=PostingKind.USAGE)  # as the index of sources does
        .values("lot")
        .annotate(nano=-Sum("amount_nano"))
        .filter(nano__gt=0)
    )
    given = {row["lot"]: row["nano"] for row in drawn}
    return _split(organization_id, given, amount_nano, now)


def returns_for_usage(
    *, organization_id: str, sources: Collection[str], amount_nano: int, now: datetime.datetime
) -> dict[str, int]:
    """Return `returns_for` of usage series: the lots that paid them last.

    Usage is charged every few seconds. So the movements are read from the newest back, and no further than the amount
    reaches. `sources` include earlier refunds of the same series.
    """
    moved = LotMovement.objects.filter(
        organization_id=organization_id,
        transaction__organization_id=organization_id,
        transaction__source__in=sources,
    )
    newest = moved.order_by("-transaction__created_at", "-transaction__pk").values_list("lot", "amount_nano")
    net = Counter[str]()
    for lot_id, nano in newest.iterator(chunk_size=_MOVEMENTS_AT_ONCE):
        net[lot_id] -= nano
        if sum(each for each in net.values() if each > 0) >= amount_nano:
            break
    return _split(organization_id, +net, amount_nano, now)


def _split(organization_id: str, given: Mapping[str, int], amount_nano: int, now: datetime.datetime) -> dict[str, int]:
    """Split a refund over the lots that gave credit, as `returns_for` says. What none gave is promotional."""
    back: dict[str, int] = {}
    for lot in CreditLot.objects.filter(pk__in=given).order_by("-priority", "-created_at", "-pk"):
        part = min(amount_nano - sum(back.values()), given[lot.pk])
        if part > 0:
            target = lot
            if lot.expires_at is not None and lot.expires_at <= now:
                target = open_lot(
                    organization_id=lot.organization_id, kind=LotKind(lot.kind), amount_nano=part, priority=lot.priority
                )
            back[target.pk] = back.get(target.pk, 0) + part
    rest = amount_nano - sum(back.values())
    if rest:
        fresh = open_lot(organization_id=organization_id, kind=LotKind.PROMOTIONAL, amount_nano=rest)
        back[fresh.pk] = rest
    return back


def has_paid_lot(*, organizations: Collection[str]) -> bool:
    """Return whether any of these organizations ever paid in credit."""
    return CreditLot.objects.filter(organization_id__in=organizations, kind=LotKind.PAID).exists()


def open_lot(
    *,
    organization_id: str,
    kind: LotKind,
    amount_nano: int,
    reference: str | None = None,
    priority: int | None = None,
    expires_at: datetime.datetime | None = None,
) -> CreditLot:
    """Create an empty lot; the posting that brings its credit fills it.

    A paid lot gives its organization its own share.
    """
    if kind == LotKind.PAID:
        give_own_share(organization=organization_id)
    usual = PAID_PRIORITY if kind == LotKind.PAID else PROMOTIONAL_PRIORITY
    return CreditLot.objects.create(
        organization_id=organization_id,
        kind=kind,
        reference=reference,
        amount_nano=amount_nano,
        priority=usual if priority is None else priority,
        expires_at=expires_at,
    )
