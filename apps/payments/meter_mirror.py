"""A mirror of token usage on a Stripe meter, off unless STRIPE_METER names one: for reports there, never for charging.

A meter adds up whole numbers and takes them up to 35 days late. What is sent is the difference to what was sent before,
under an identifier of the sum reached, so that a repetition is known and adds nothing.
"""

import datetime

from django.conf import settings
from django.db import transaction
from django.db.models import F, OuterRef, Q, Subquery

from apps.billing.models import UsageSeries
from apps.payments import stripe_gateway
from apps.payments.models import MeterMirror, StripeCustomer

_OLDEST = datetime.timedelta(days=34)


def mirror_usage(*, now: datetime.datetime, limit: int = 500) -> int:
    """Tell the meter what it was not told; return how many differences were sent. Asks Stripe."""
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
    rows = list(behind.order_by("pk")[:limit])
    for row in rows:
        _send(row, customers[row.organization_id], row.sent or 0, now)
    return len(rows)


def _send(row: UsageSeries, customer_id: str, sent: int, now: datetime.datetime) -> None:
    noon = datetime.datetime.combine(row.day, datetime.time(12), datetime.UTC)
    stripe_gateway.send_meter_event(
        name=settings.STRIPE_METER,
        customer_id=customer_id,
        quantity=row.quantity - sent,
        at=min(noon, now),
        identifier=f"series-{row.pk}-{row.quantity}",
    )
    with transaction.atomic():
        MeterMirror.objects.update_or_create(
            series=row, defaults={"sent_quantity": row.quantity, "organization_id": row.organization_id}
        )
