"""Monthly invoices with every charge once, in whole cents within half a cent of the ledger.

A line bills what is posted and not invoiced yet, so late usage is on the next invoice under its own days. Cents are
rounded on the cumulative sum of all invoices, as rating does with nano; the previous sum is then subtracted.
"""

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import chain, islice
from operator import itemgetter, or_

from django.db import transaction
from django.db.models import (
    Case,
    DecimalField,
    Exists,
    F,
    Func,
    Max,
    Min,
    OuterRef,
    QuerySet,
    Sum,
    Value,
    When,
)
from django.db.models.expressions import CombinedExpression
from django.db.models.functions import Cast, TruncMonth
from django.utils.formats import date_format
from django.utils.translation import gettext

from apps.accounts.models import Organization
from apps.accounts.notices.events import announce
from apps.accounts.notices.notifications import PAYERS
from apps.billing.ledger import lock_wallet
from apps.billing.models import (
    BillingProfile,
    Hold,
    HoldPurpose,
    HoldStatus,
    Invoice,
    InvoiceLine,
    LineKind,
    UsageSeries,
    VolumeRebate,
)
from apps.billing.tenant_batches import for_each
from apps.billing.usage.labels import with_keys
from apps.core import audit
from apps.core.database.clock import begin_of_day, db_now
from apps.core.database.locks import lock
from apps.core.money import NANO_PER_CENT

GRACE = datetime.timedelta(hours=48)  # after the month, for records still on a gateway's disk
DEFAULT_LABEL = "team"
_LINES_AT_ONCE = 1000

_WHOLE = DecimalField(max_digits=60, decimal_places=0)  # of a cost times a unit, beyond a bigint
_KEPT_NANO = F("captured_nano") - F("refunded_nano")
_UNINVOICED_NANO = F("posted_nano") - F("invoiced_nano")
# The quantity that this invoice's share of a series pays for; all of it on the first invoice.
_UNINVOICED_QUANTITY = Case(
    When(invoiced_nano=0, then=Cast("rated_quantity", _WHOLE)),
    When(price_rule__price_nano=0, then=Value(0, output_field=_WHOLE)),
    default=Func(
        Cast(_UNINVOICED_NANO, _WHOLE) * F("price_rule__per"),
        Cast("price_rule__price_nano", _WHOLE),
        function="div",
        output_field=_WHOLE,
    ),
    output_field=_WHOLE,
)


@dataclass(frozen=True)
class _Line:
    kind: str
    subject: str
    reference: str
    sku: str
    price_rule_id: str | None
    unit: str
    quantity: int
    first_day: datetime.date
    last_day: datetime.date
    key_id: str
    adapter_version_id: str
    member_id: str
    label: str
    nano: int


def cents_of(cumulative_nano: int) -> int:
    """Return whole cents, rounded half up. The sum is negative when refunds exceed a month's charges."""
    return (2 * cumulative_nano + NANO_PER_CENT) // (2 * NANO_PER_CENT)


def close_months(*, now: datetime.datetime) -> int:
    """Write the missing invoices of the last month that ended at least `GRACE` ago; return how many. Safe to repeat."""
    ended = (now - GRACE).astimezone(datetime.UTC).date().replace(day=1)
    month = (ended - datetime.timedelta(days=1)).replace(day=1)
    done = Invoice.objects.filter(month=month).values("organization_id")
    after = (month + datetime.timedelta(days=32)).replace(day=1)
    charged = [
        Exists(rows.filter(organization=OuterRef("pk"))) for rows in (_holds(after), _series(after), _rebates(after))
    ]
    waiting = Organization.objects.exclude(pk__in=done).filter(reduce(or_, charged)).order_by("pk")

    def close(organization: Organization) -> bool:
        return close_month(organization=organization, month=month) is not None

    return for_each(waiting, close, name="ended months are invoiced", now=now)


@transaction.atomic
def close_month(*, organization: Organization | str, month: datetime.date) -> Invoice | None:
    """Write the organization's invoice of a month, once. Return None when there is nothing new to charge."""
    wallet = lock_wallet(organization=organization)
    organization_id = wallet.owner_id
    if found := Invoice.objects.filter(organization_id=organization_id, month=month).first():
        return found
    profile = BillingProfile.objects.filter(organization_id=organization_id).first()
    label = profile.chargeback_label if profile else DEFAULT_LABEL
    after = (month + datetime.timedelta(days=32)).replace(day=1)
    holds = _holds(after).filter(organization_id=organization_id)
    series = _series(after).filter(organization_id=organization_id)
    rebates = _rebates(after).filter(organization_id=organization_id)
    if not (holds.exists() or series.exists() or rebates.exists()):
        return None
    total_nano = _sum(holds, _KEPT_NANO - F("invoiced_nano")) + _sum(series, _UNINVOICED_NANO)
    invoice = _issue(organization_id, month, total_nano - _sum(rebates, _UNINVOICED_NANO), profile)
    _write_lines(
        invoice,
        chain(_training_lines(holds, label), _metered_lines(organization_id, series, label), _rebate_lines(rebates)),
    )
    holds.update(invoiced_nano=_KEPT_NANO)
    series.update(invoiced_nano=F("posted_nano"))
    rebates.update(invoiced_nano=F("posted_nano"))
    return invoice


def _sum(rows: "QuerySet[Hold] | QuerySet[UsageSeries] | QuerySet[VolumeRebate]", nano: CombinedExpression) -> int:
    return int(rows.aggregate(nano=Sum(nano, default=0))["nano"])


def _issue(organization_id: str, month: datetime.date, total: int, profile: BillingProfile | None) -> Invoice:
    last = Invoice.objects.filter(organization_id=organization_id).order_by("-month").first()
    before = last.cumulative_nano if last else 0
    lock("billing.invoice_number")
    number = f"{month:%Y-%m}-{Invoice.objects.filter(month=month).count() + 1:05}"
    invoice = Invoice.objects.create(
        organization_id=organization_id,
        number=number,
        month=month,
        issued_at=db_now(),
        billed_to="\n".join(part for part in (profile.legal_name, profile.address) if part) if profile else "",
        total_nano=total,
        total_cents=cents_of(before + total) - cents_of(before),
        cumulative_nano=before + total,
    )
    audit.record(
        organization=organization_id, by="system", action="invoice.issued", target=invoice.pk, number=number,
        total_nano=total,
    )  # fmt: skip
    announce(
        organization=organization_id,
        type="invoice.issued",
        subject=invoice.pk,
        title=lambda: (
            gettext("Invoice %(number)s for %(month)s") % {"number": number, "month": date_format(month, "F Y")}
        ),
        path=f"/invoices/{invoice.pk}",
        key=f"invoice:{invoice.pk}",
        roles=PAYERS,
        mail=("billing.invoice", {"invoice_id": invoice.pk}),
    )
    return invoice


def _write_lines(invoice: Invoice, lines: Iterator[_Line]) -> None:
    """Write the lines, a thousand at a time."""
    sum_nano, position = invoice.cumulative_nano - invoice.total_nano, 0
    while part := list(islice(lines, _LINES_AT_ONCE)):
        rows = []
        for line in part:
            position += 1
            cents = cents_of(sum_nano + line.nano) - cents_of(sum_nano)
            sum_nano += line.nano
            rows.append(
                InvoiceLine(
                    organization_id=invoice.organization_id,
                    invoice=invoice,
                    position=position,
                    cents=cents,
                    **{name: getattr(line, name) for name in line.__dataclass_fields__},
                )
            )
        InvoiceLine.objects.bulk_create(rows)
    if sum_nano != invoice.cumulative_nano:
        raise RuntimeError(f"the lines of invoice {invoice.pk} sum to {sum_nano}, not {invoice.cumulative_nano}")


# What is charged for the days before `after`, and not invoiced yet.


def _holds(after: datetime.date) -> QuerySet[Hold]:
    ended = Hold.objects.filter(purpose=HoldPurpose.JOB, status=HoldStatus.CLOSED, closed_at__lt=begin_of_day(after))
    return ended.exclude(invoiced_nano=_KEPT_NANO)


def _series(after: datetime.date) -> QuerySet[UsageSeries]:
    return UsageSeries.objects.filter(day__lt=after).exclude(posted_nano=F("invoiced_nano"))


def _rebates(after: datetime.date) -> QuerySet[VolumeRebate]:
    return VolumeRebate.objects.filter(month__lt=after).exclude(posted_nano=F("invoiced_nano"))


def _training_lines(holds: "QuerySet[Hold]", label: str) -> Iterator[_Line]:
    """Yield a line for each hold of a job or a conversion that was settled or refunded since it was last invoiced."""
    for hold in holds.select_related("price_rule").order_by("closed_at", "pk").iterator(chunk_size=_LINES_AT_ONCE):
        nano = hold.captured_nano - hold.refunded_nano - hold.invoiced_nano
        price, closed_at = hold.price_rule, hold.closed_at
        kind = LineKind(price.sku.partition(":")[0]) if price else LineKind.TRAINING
        assert closed_at is not None
        day = closed_at.astimezone(datetime.UTC).date()
        yield _Line(
            kind=kind if nano > 0 else LineKind.REFUND, subject=hold.source, reference=hold.pk,
            sku=price.sku if price else "", price_rule_id=price.pk if price else None,
            unit=price.unit if price else "gpu_ms",
            quantity=nano * price.per // price.price_nano if price and price.price_nano and nano > 0 else 0,
            first_day=day, last_day=day, key_id=hold.key_id, adapter_version_id="", member_id=hold.member_id,
            label=hold.labels.get(label, ""), nano=nano,
        )  # fmt: skip


def _metered_lines(organization_id: str, series: "QuerySet[UsageSeries]", label: str) -> Iterator[_Line]:
    """Yield a line for each price, model, key, adapter version and month with charges that are not invoiced yet."""
    months = series.values(
        "sku", "subject", "key_id", "adapter_version_id", "price_rule_id", "price_rule__unit", month=TruncMonth("day")
    )
    sums = months.annotate(
        first=Min("day"), last=Max("day"), quantity=Sum(_UNINVOICED_QUANTITY), nano=Sum(_UNINVOICED_NANO)
    )
    ordered = sums.order_by("sku", "subject", "key_id", "first", "price_rule_id", "adapter_version_id")
    rows = ordered.iterator(chunk_size=_LINES_AT_ONCE)
    for row, member_id, labels in with_keys(rows, organization=organization_id, key_of_row=itemgetter("key_id")):
        yield _Line(
            kind=row["sku"].partition(":")[0], subject=row["subject"], reference="", sku=row["sku"],
            price_rule_id=row["price_rule_id"], unit=row["price_rule__unit"], quantity=int(row["quantity"]),
            first_day=row["first"], last_day=row["last"], key_id=row["key_id"],
            adapter_version_id=row["adapter_version_id"], member_id=member_id, label=labels.get(label, ""),
            nano=int(row["nano"]),
        )  # fmt: skip


def _rebate_lines(rebates: "QuerySet[VolumeRebate]") -> Iterator[_Line]:
    for row in rebates.select_related("price_rule").order_by("month", "pk"):
        last = (row.month + datetime.timedelta(days=32)).replace(day=1) - datetime.timedelta(days=1)
        yield _Line(
            kind=LineKind.REBATE, subject=f"Volume of {row.month:%B %Y}", reference="", sku=row.price_rule.sku,
            price_rule_id=row.price_rule_id, unit=row.price_rule.unit, quantity=row.quantity, first_day=row.month,
            last_day=last, key_id="", adapter_version_id="", member_id="", label="",
            nano=row.invoiced_nano - row.posted_nano,
        )  # fmt: skip


def sum_by_label(invoice: Invoice, *, most: int = 100) -> tuple[dict[str, int], int | None]:
    """Return the invoice's cents for the `most` largest values of the charge-back label, and for all others together.

    "" is no label; None: there are no others. The cents add up to the invoice's total.
    """
    sums = invoice.lines.values_list("label").annotate(sum=Sum("cents")).order_by("-sum", "label")
    first = list(sums[: most + 1])
    largest = {value: int(cents) for value, cents in first[:most]}
    return largest, invoice.total_cents - sum(largest.values()) if len(first) > most else None
