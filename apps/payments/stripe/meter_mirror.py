"""A mirror of token usage on a Stripe meter, for reports there and never for charging. Off unless STRIPE_METER is set.

A meter adds up whole numbers and accepts them up to 35 days late. Each event carries the difference to the sum sent
before, under an identifier of the new sum. The sum is stored before it is sent: after a lost answer the same event goes
out again, which the meter recognizes, and only then newer usage.
"""

import datetime
import logging

from django.conf import settings
from django.db import transaction
from django.db.models import F, OuterRef, Q, Subquery

from apps.billing.models import UsageSeries
from apps.core.database.clock import begin_of_day
from apps.payments.models import MeterMirror, StripeCustomer
from apps.payments.stripe import gateway
from apps.payments.stripe.errors import StripeRefused

logger = logging.getLogger(__name__)

_OLDEST = datetime.timedelta(days=34)


def mirror_usage(*, now: datetime.datetime, limit: int = 500) -> int:
    """Send new usage to the meter; return how many series were mirrored. Calls Stripe. Raises StripeUnavailable."""
    if not settings.STRIPE_METER:
        return 0
    customers = dict(StripeCustomer.objects.values_list("organization_id", "stripe_id"))
    sent = MeterMirror.objects.filter(series=OuterRef("pk")).values("sent_quantity")
    behind = (
        UsageSeries.objects.filter(sku__startswith="inference:", organization_id__in=customers)
        .filter(day__gt=(now - _OLDEST).date(), quantity__gt=0)
        .annotate(sent=Subquery(sent))
        .filter(Q(sent=None) | Q(quantity__gt=F("sent")))
    )
    return sum(_mirror(row, customers[row.organization_id]) for row in list(behind.order_by("pk")[:limit]))


def _mirror(row: UsageSeries, customer_id: str) -> bool:
    try:
        while (step := _next_step(row)) is not None:
            _send(row, customer_id, *step)
    except StripeRefused as error:
        logger.error("usage series %s was not mirrored to Stripe: %s", row.pk, error)
        return False
    return True


@transaction.atomic
def _next_step(row: UsageSeries) -> tuple[int, int] | None:
    """Return the sums before and after the next event: the one already begun, else a new one. None when all is sent."""
    MeterMirror.objects.bulk_create(
        [MeterMirror(series=row, organization_id=row.organization_id)], ignore_conflicts=True
    )
    mirror = MeterMirror.objects.select_for_update().get(series=row)
    if mirror.sending_quantity == mirror.sent_quantity:
        mirror.sending_quantity = max(row.quantity, mirror.sent_quantity)
        mirror.save(update_fields=["sending_quantity"])
    begun = mirror.sending_quantity > mirror.sent_quantity
    return (mirror.sent_quantity, mirror.sending_quantity) if begun else None


def _send(row: UsageSeries, customer_id: str, sent: int, reached: int) -> None:
    gateway.send_meter_event(
        name=settings.STRIPE_METER,
        customer_id=customer_id,
        quantity=reached - sent,
        at=begin_of_day(row.day),  # the same in every repetition
        identifier=f"series-{row.pk}-{reached}",
    )
    with transaction.atomic():
        MeterMirror.objects.filter(series=row, sent_quantity=sent).update(sent_quantity=reached)
