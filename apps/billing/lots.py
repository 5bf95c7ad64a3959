"""Which lot is spent next, what returns to which, and what expires.

Order: lower priority first, then what expires first, then what came first; a lot without expiry comes after those with
one. Callers hold the wallet's lock, so that nobody else draws meanwhile.
"""

import datetime
from collections.abc import Collection
from typing import Any

from django.db.models import F, QuerySet, Sum

from apps.accounts.shares import give_own_share
from apps.billing.models import CreditLot, LotKind, LotMovement

PROMOTIONAL_PRIORITY = 20
PAID_PRIORITY = 50


class LotsExhausted(Exception):
    """The lots hold less than the balance says: the books are broken."""


def spendable_lots(*, organization_id: Any) -> QuerySet[CreditLot]:
    """Return the lots with something left, in the order in which they are spent; `ledger_post` draws in the same."""
    lots = CreditLot.objects.filter(organization_id=organization_id, remaining_nano__gt=F("held_nano"))
    return lots.order_by("priority", F("expires_at").asc(nulls_last=True), "created_at", "pk")


def returns_for(
    *, organization_id: Any, sources: Collection[str], amount_nano: int, now: datetime.datetime
) -> dict[str, int]:
    """Return into which lots a refund of what was charged for `sources` goes: those it was drawn from, last first.

    What came from a lot that has expired since goes into a new one of its kind, without expiry: a fault of ours must
    not cost the customer the credit.
    """
    drawn = (
        LotMovement.objects.filter(organization_id=organization_id, transaction__source__in=sources)
        .values("lot")
        .annotate(nano=-Sum("amount_nano"))
        .filter(nano__gt=0)
    )
    given = {row["lot"]: row["nano"] for row in drawn}
    back: dict[str, int] = {}
    for lot in CreditLot.objects.filter(pk__in=given).order_by("-priority", "-created_at", "-pk"):
        part = min(amount_nano - sum(back.values()), given[lot.pk])
        if part > 0:
            is_over = lot.expires_at is not None and lot.expires_at <= now
            target = _new_lot(lot, part) if is_over else lot
            back[target.pk] = back.get(target.pk, 0) + part
    rest = amount_nano - sum(back.values())
    if rest:
        fresh = open_lot(organization_id=organization_id, kind=LotKind.PROMOTIONAL, amount_nano=rest)
        back[fresh.pk] = rest
    return back


def _new_lot(lot: CreditLot, amount_nano: int) -> CreditLot:
    return open_lot(
        organization_id=lot.organization_id, kind=LotKind(lot.kind), amount_nano=amount_nano, priority=lot.priority
    )


def has_paid_lot(*, organizations: Collection[str]) -> bool:
    """Tell whether anything was ever paid into one of these organizations."""
    return CreditLot.objects.filter(organization_id__in=organizations, kind=LotKind.PAID).exists()


def open_lot(
    *,
    organization_id: Any,
    kind: LotKind,
    amount_nano: int,
    reference: str | None = None,
    priority: int | None = None,
    expires_at: datetime.datetime | None = None,
) -> CreditLot:
    """Create an empty lot; the posting that brings its credit fills it. A paid one brings a share of one's own."""
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
