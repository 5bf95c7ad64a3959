"""Prices that give something away: one operator requests them, another decides.

A price for one customer is a gift, like credit. So is a price for everybody that is 0 or far below the usual one.
"""

import datetime
from collections.abc import Sequence

from django.db import transaction
from django.db.models import QuerySet
from django.utils.translation import gettext

from apps.accounts.models import Organization
from apps.catalog.models import PriceRequest, PriceRule
from apps.catalog.operations import check_price, set_price
from apps.catalog.pricing import Tier, tiers_of, unit_of
from apps.core import audit
from apps.core.errors import InvalidState, InvalidValue, PermissionDenied

_COMPARED = datetime.timedelta(days=30)  # so that several small decreases count together
_LEAST_PERCENT = 50  # of each price of this period
_LEAST_PERCENT_OF_OTHERS = 2  # of the cheapest SKU with this unit, for a SKU without a price in this period


def is_gift(
    *,
    organization: Organization | None,
    sku: str,
    price_nano: int,
    per: int,
    tiers: Sequence[Tier],
    effective_from: datetime.datetime | None,
    now: datetime.datetime,
) -> bool:
    """Return whether the price needs a second operator.

    A price for everybody needs one if, at any volume, it is 0 or less than half of a price of the last 30 days. Prices
    before the last one that two operators decided do not count.
    """
    steps = [Tier(0, price_nano), *tiers]
    if organization is not None or 0 in (step.price_nano for step in steps):
        return True
    general = PriceRule.objects.filter(organization=None).order_by("effective_from")
    before = list(
        general.filter(sku=sku, effective_from__lt=effective_from or now).exclude(effective_to__lte=now - _COMPARED)
    )
    of_two = [index for index, rule in enumerate(before) if rule.approved_by]
    percent, compared = _LEAST_PERCENT, before[of_two[-1] :] if of_two else before
    if not before:
        others = general.filter(unit=unit_of(sku), price_nano__gt=0, effective_from__lte=now - _COMPARED)
        in_force = others.exclude(effective_to__lte=now)
        cheapest = min(in_force, key=lambda rule: rule.price_nano / rule.per, default=None)
        percent, compared = _LEAST_PERCENT_OF_OTHERS, [cheapest] if cheapest else []
    return any(_is_below(steps, per, rule, percent) for rule in compared)


def _is_below(steps: Sequence[Tier], per: int, rule: PriceRule, percent: int) -> bool:
    """Return whether, at any volume, these tiers cost less than `percent` of the rule's price."""
    theirs = [Tier(0, rule.price_nano), *tiers_of(rule)]
    return any(
        _nano_at(steps, volume) * rule.per * 100 < _nano_at(theirs, volume) * per * percent
        for volume in {step.from_units for step in (*steps, *theirs)}
    )


def _nano_at(steps: Sequence[Tier], volume: int) -> int:
    return [step.price_nano for step in steps if step.from_units <= volume][-1]


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
    """Request a price for one organization or for all. It takes effect once another operator approves.

    Raises InvalidValue.
    """
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
    """Set a price that another operator requested, from its start time or, if that has passed, from now.

    Raises PermissionDenied for the operator's own request, InvalidState if it was already decided, InvalidValue if
    another price begins at the same time.
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
    """Reject a price. Its requester may withdraw it this way. Raises InvalidState if it was already decided."""
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
