"""Prices that give something away: one operator asks, another decides.

A price for one customer, or of 0 for everybody, is a gift like any other credit.
"""

import datetime
from collections.abc import Sequence

from django.db import transaction
from django.db.models import QuerySet
from django.utils.translation import gettext

from apps.accounts.models import Organization
from apps.catalog.models import PriceRequest
from apps.catalog.operations import check_price, set_price
from apps.catalog.pricing import Tier, unit_of
from apps.core import audit
from apps.core.errors import InvalidState, InvalidValue, PermissionDenied


def is_gift(*, organization: Organization | None, price_nano: int, tiers: Sequence[Tier]) -> bool:
    """Return whether the price needs a second operator."""
    return organization is not None or 0 in (price_nano, *(tier.price_nano for tier in tiers))


@transaction.atomic
def request_price(
    *,
    organization: Organization | None,
    sku: str,
    price_nano: int,
    per: int,
    tiers: Sequence[Tier],
    effective_from: datetime.datetime | None,
    by: str,
    now: datetime.datetime,
) -> PriceRequest:
    """Ask for a price of one organization or of all; it counts once another operator approves. Raises InvalidValue."""
    check_price(sku=sku, unit=unit_of(sku), price_nano=price_nano, per=per, tiers=tiers)
    if effective_from and effective_from < now:
        raise InvalidValue(gettext("A price can't start in the past."), param="effective_from")
    wanted = PriceRequest.objects.create(
        organization=organization,
        sku=sku,
        price_nano=price_nano,
        per=per,
        tiers=[{"from_units": tier.from_units, "price_nano": tier.price_nano} for tier in tiers],
        effective_from=effective_from,
        requested_by=by,
    )
    audit.record(
        organization=wanted.organization_id, by=by, action="price.requested", target=wanted.pk, sku=sku,
        price_nano=price_nano, per=per,
    )  # fmt: skip
    return wanted


@transaction.atomic
def approve_price(*, request_id: str, by: str, now: datetime.datetime) -> PriceRequest:
    """Set a price that another operator asked for, from its moment or, if that has passed, from now.

    Raises PermissionDenied for the operator's own request, InvalidState when it was decided before, InvalidValue when
    another price begins at its moment.
    """
    wanted = _locked(request_id)
    if wanted.requested_by == by:
        raise PermissionDenied(gettext("Another operator must approve this."))
    begin = wanted.effective_from
    wanted.rule = set_price(
        sku=wanted.sku,
        unit=unit_of(wanted.sku),
        price_nano=wanted.price_nano,
        per=wanted.per,
        organization=wanted.organization_id,
        tiers=[Tier(tier["from_units"], tier["price_nano"]) for tier in wanted.tiers],
        effective_from=begin if begin and begin > now else None,
        by=wanted.requested_by,
        approved_by=by,
        now=now,
    )
    return _decide(wanted, by, now)


@transaction.atomic
def reject_price(*, request_id: str, by: str, now: datetime.datetime) -> PriceRequest:
    """Reject a price; its requester may withdraw it this way. Raises InvalidState when it was decided before."""
    wanted = _locked(request_id)
    audit.record(organization=wanted.organization_id, by=by, action="price.rejected", target=wanted.pk)
    return _decide(wanted, by, now)


def list_waiting_prices() -> QuerySet[PriceRequest]:
    """Return the prices that wait for a second operator, oldest first."""
    return PriceRequest.objects.filter(decided_at=None).select_related("organization").order_by("requested_at", "pk")


def _locked(request_id: str) -> PriceRequest:
    wanted = PriceRequest.objects.select_for_update().get(pk=request_id)
    if wanted.decided_at is not None:
        raise InvalidState(gettext("This was already decided."), param="status")
    return wanted


def _decide(wanted: PriceRequest, by: str, now: datetime.datetime) -> PriceRequest:
    wanted.decided_by, wanted.decided_at = by, now
    wanted.save(update_fields=["decided_by", "decided_at", "rule"])
    return wanted
