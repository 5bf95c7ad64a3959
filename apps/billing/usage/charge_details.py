"""Details of a charge: the hours behind a line of requests or storage, the postings behind a job's hold."""

import datetime
from dataclasses import dataclass

from django.db.models import Count, Q, QuerySet, Sum
from django.db.models.functions import TruncHour

from apps.accounts.models import Organization, key_of
from apps.billing.models import (
    Hold,
    HoldPurpose,
    InvoiceLine,
    LedgerTransaction,
    LineKind,
    PostingKind,
    StorageSample,
    UsageEvent,
    UsageSeries,
)
from apps.catalog.models import PriceRule
from apps.core.database.clock import begin_of_day


@dataclass(frozen=True)
class Charge:
    """A charge to explain: one invoice line, one job's hold, or one usage series of a day."""

    kind: str
    subject: str
    price_rule: PriceRule | None
    unit: str
    quantity: int
    nano: int
    first_day: datetime.date
    last_day: datetime.date
    key_id: str
    adapter_version_id: str
    hold: Hold | None


@dataclass(frozen=True)
class Hour:
    at: datetime.datetime
    requests: int
    quantity: int


def find_charge(*, organization: Organization | str, reference: str) -> Charge | None:
    """Return the charge behind an invoice line, a hold or a `series-<id>`; None for an unknown or foreign one."""
    organization_id = key_of(organization)
    if reference.startswith("line_"):
        line = InvoiceLine.objects.filter(organization_id=organization_id, pk=reference)
        return next(map(_of_line, line.select_related("price_rule")), None)
    if reference.startswith("hold_"):
        hold = Hold.objects.filter(organization_id=organization_id, pk=reference, purpose=HoldPurpose.JOB)
        return next(map(_of_hold, hold.select_related("price_rule")), None)
    number = reference.removeprefix("series-")
    if not number.isdecimal() or len(number) > 18:
        return None
    series = UsageSeries.objects.filter(organization_id=organization_id, pk=int(number))
    return next(map(_of_series, series.select_related("price_rule")), None)


def _of_line(line: InvoiceLine) -> Charge:
    hold = Hold.objects.filter(organization_id=line.organization_id, pk=line.reference or None).first()
    return Charge(
        line.kind, line.subject, line.price_rule, line.unit, line.quantity, line.nano, line.first_day, line.last_day,
        line.key_id, line.adapter_version_id, hold,
    )  # fmt: skip


def _of_hold(hold: Hold) -> Charge:
    day = (hold.closed_at or hold.created_at).astimezone(datetime.UTC).date()
    price, nano = hold.price_rule, hold.captured_nano - hold.refunded_nano
    kind = LineKind(price.sku.partition(":")[0]) if price else LineKind.TRAINING
    unit = price.unit if price else "gpu_ms"
    return Charge(kind, hold.source, price, unit, 0, nano, day, day, hold.key_id, "", hold)


def _of_series(row: UsageSeries) -> Charge:
    return Charge(
        row.sku.partition(":")[0], row.subject, row.price_rule, row.price_rule.unit, row.quantity, row.posted_nano,
        row.day, row.day, row.key_id, row.adapter_version_id, None,
    )  # fmt: skip


def list_hours(*, organization: Organization | str, charge: Charge) -> list[Hour]:
    """Return the charge's requests and tokens, or stored bytes, for each hour."""
    organization_id = key_of(organization)
    begin = begin_of_day(charge.first_day)
    end = begin_of_day(charge.last_day + datetime.timedelta(days=1))
    if charge.kind == LineKind.STORAGE:
        samples = StorageSample.objects.filter(organization_id=organization_id, hour_at__gte=begin, hour_at__lt=end)
        return [Hour(sample.hour_at, 1, sample.bytes) for sample in samples.order_by("hour_at")]
    events = UsageEvent.objects.filter(
        Q(input_price=charge.price_rule) | Q(output_price=charge.price_rule),
        organization_id=organization_id,
        model_name=charge.subject,
        occurred_at__gte=begin,
        occurred_at__lt=end,
    )
    if charge.key_id:  # series from before they were split by key add up all keys
        events = events.filter(key_id=charge.key_id, adapter_version_id=charge.adapter_version_id)
    is_input = charge.price_rule is not None and ":input:" in charge.price_rule.sku
    hours = events.annotate(hour=TruncHour("occurred_at", tzinfo=datetime.UTC)).values("hour")
    sums = hours.annotate(requests=Count("pk"), tokens=Sum("input_tokens" if is_input else "output_tokens"))
    return [Hour(row["hour"], row["requests"], row["tokens"]) for row in sums.order_by("hour")]


def list_postings(*, organization: Organization | str, hold: Hold) -> QuerySet[LedgerTransaction]:
    """Return the postings of a hold and of its source, oldest first."""
    rows = LedgerTransaction.objects.filter(organization_id=key_of(organization)).exclude(kind=PostingKind.USAGE)
    return rows.filter(Q(source=hold.pk) | Q(source=hold.source)).order_by("created_at", "pk")
