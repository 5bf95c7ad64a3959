"""Spending line by line. Requests and storage count on the day of use, jobs on the day they were settled."""

import datetime
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from django.db.models import DecimalField, F, Func, OuterRef, QuerySet, TextField, Value
from django.db.models.functions import Cast, Coalesce, TruncDay

from apps.accounts.models import Organization, key_of
from apps.billing.models import Hold, HoldPurpose, HoldStatus, LineKind, UsageSeries, VolumeRebate
from apps.billing.usage.labels import with_keys
from apps.core.database.clock import begin_of_day, end_of_day
from apps.core.money import rated

WHOLE = DecimalField(max_digits=60, decimal_places=0)  # of a quantity times a price, beyond a bigint
# The cost of a series, as `apps.core.money.rated` rounds it.
RATED = Func(
    Cast("quantity", WHOLE) * 2 * F("price_rule__price_nano") + F("price_rule__per"),
    Cast("price_rule__per", WHOLE) * 2,
    function="div",
    output_field=WHOLE,
)


@dataclass(frozen=True)
class Spend:
    """One line of spending: quantity, price, key or member, and cost.

    The cost includes usage that is not charged yet because the wallet was short.
    """

    day: datetime.date
    kind: str  # a LineKind
    subject: str  # the job or conversion, the model, or the stored thing
    reference: str  # id of the hold, series or rebate, to look up details
    sku: str
    unit: str
    quantity: int
    requests: int
    price_rule_id: str
    key_id: str
    adapter_version_id: str
    member_id: str
    labels: dict[str, str] = field(hash=False)
    cost_nano: int = 0


def used_series(organization_id: str | OuterRef, first: datetime.date, last: datetime.date) -> QuerySet[UsageSeries]:
    """Return the requests, stored bytes and time kept warm of these UTC days, both included."""
    return UsageSeries.objects.filter(organization_id=organization_id, day__gte=first, day__lte=last)


def charged_holds(organization_id: str | OuterRef, first: datetime.date, last: datetime.date) -> QuerySet[Hold]:
    """Return the holds of jobs and conversions that were settled on these UTC days, less those given back."""
    return Hold.objects.filter(
        organization_id=organization_id,
        purpose=HoldPurpose.JOB,
        status=HoldStatus.CLOSED,
        closed_at__gte=begin_of_day(first),
        closed_at__lte=end_of_day(last),
        captured_nano__gt=F("refunded_nano"),
    )


def posted_rebates(organization_id: str, first: datetime.date, last: datetime.date) -> QuerySet[VolumeRebate]:
    """Return the rebates of the months from that of `first` to that of `last`."""
    rows = VolumeRebate.objects.filter(organization_id=organization_id, posted_nano__gt=0)
    return rows.filter(month__gte=first.replace(day=1), month__lte=last)


def stream_spending(*, organization: Organization | str, first: datetime.date, last: datetime.date) -> Iterator[Spend]:
    """Yield every line between these UTC days, both included, ordered by day, as they are read.

    A year may have more than fit into memory: `apps.billing.usage.sums` adds them up in the database.
    """
    days = key_of(organization), first, last
    sources = (_metered(*days), _trained(*days), _rebates(*days))
    return heapq.merge(*sources, key=lambda line: (line.day, line.kind, line.subject))


# Each source is in the order in which they are merged.


def _metered(organization_id: str, first: datetime.date, last: datetime.date) -> Iterator[Spend]:
    series = used_series(organization_id, first, last).select_related("price_rule")
    ordered = series.order_by("day", kind_of("sku"), "subject", "pk").iterator()
    for line, member_id, labels in with_keys(ordered, organization=organization_id, key_of_row=attrgetter("key_id")):
        price = line.price_rule
        yield Spend(
            day=line.day,
            kind=line.sku.partition(":")[0],
            subject=line.subject,
            reference=f"series-{line.pk}",
            sku=line.sku,
            unit=price.unit,
            quantity=line.quantity,
            requests=line.request_count if not line.sku.startswith("inference:output:") else 0,
            price_rule_id=price.pk,
            key_id=line.key_id,
            adapter_version_id=line.adapter_version_id,
            member_id=member_id,
            labels=labels,
            cost_nano=rated(quantity=line.quantity, price_nano=price.price_nano, per=price.per),
        )


def _trained(organization_id: str, first: datetime.date, last: datetime.date) -> Iterator[Spend]:
    kind = Coalesce(kind_of("price_rule__sku"), Value(LineKind.TRAINING), output_field=TextField())
    holds = charged_holds(organization_id, first, last).select_related("price_rule")
    for hold in holds.order_by(TruncDay("closed_at", tzinfo=datetime.UTC), kind, "source", "pk").iterator():
        cost = hold.captured_nano - hold.refunded_nano
        price = hold.price_rule
        assert hold.closed_at is not None
        yield Spend(
            day=hold.closed_at.astimezone(datetime.UTC).date(),
            kind=LineKind(price.sku.partition(":")[0]) if price else LineKind.TRAINING,
            subject=hold.source,
            reference=hold.pk,
            sku=price.sku if price else "",
            unit=price.unit if price else "gpu_ms",
            quantity=cost * price.per // price.price_nano if price and price.price_nano else 0,
            requests=0,
            price_rule_id=price.pk if price else "",
            key_id=hold.key_id,
            adapter_version_id="",
            member_id=hold.member_id,
            labels=dict(hold.labels),
            cost_nano=cost,
        )


def _rebates(organization_id: str, first: datetime.date, last: datetime.date) -> Iterator[Spend]:
    for row in posted_rebates(organization_id, first, last).select_related("price_rule").order_by("month", "pk"):
        yield Spend(
            day=row.month, kind=LineKind.REBATE, subject=f"Volume of {row.month:%B %Y}", reference=f"rebate-{row.pk}",
            sku=row.price_rule.sku, unit=row.price_rule.unit, quantity=row.quantity, requests=0,
            price_rule_id=row.price_rule_id, key_id="", adapter_version_id="", member_id="", labels={},
            cost_nano=-row.posted_nano,
        )  # fmt: skip


def kind_of(sku: str) -> Func:
    """Return the LineKind at the begin of a SKU, named as a field."""
    return Func(F(sku), Value(":"), Value(1), function="split_part", output_field=TextField())
