"""Invoice files: CSV for spreadsheets, PDF for people, in the language of who opens it."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from decimal import Decimal
from typing import TYPE_CHECKING

from django.db.models import Count, Sum
from django.utils.formats import date_format
from django.utils.translation import gettext

from apps.billing.invoices.statements import sum_by_label
from apps.billing.models import Invoice, LineKind
from apps.core.messages.translation import later
from apps.core.money import nano_to_usd

if TYPE_CHECKING:
    from fpdf import FPDF

CSV_HEADER = (
    "invoice", "position", "kind", "subject", "label", "sku", "unit", "quantity", "first_day", "last_day", "key",
    "adapter_version", "member", "price_version", "amount_usd", "exact_usd",
)  # fmt: skip
_KINDS = {
    LineKind.TRAINING: later("training"),
    LineKind.INFERENCE: later("inference"),
    LineKind.WARM: later("kept warm"),
    LineKind.STORAGE: later("storage"),
    LineKind.CONVERSION: later("conversion"),
    LineKind.REBATE: later("rebate"),
    LineKind.REFUND: later("refund"),
}
_FONT = "Helvetica"
_WIDTHS_MM = (18, 66, 26, 34, 22, 24)
_ROW_MM = 5.5
_MOST_LINES = 1_000  # of a PDF: about 20 pages, which are made in memory


def csv_rows(invoice: Invoice) -> Iterator[tuple[object, ...]]:
    """Yield a row for each line. The amounts in cents add up to the invoice's total."""
    for line in invoice.lines.order_by("position").iterator():
        yield (
            invoice.number, line.position, line.kind, line.subject, line.label, line.sku, line.unit, line.quantity,
            line.first_day.isoformat(), line.last_day.isoformat(), line.key_id, line.adapter_version_id, line.member_id,
            line.price_rule_id or "", Decimal(line.cents).scaleb(-2), csv_usd(line.nano),
        )  # fmt: skip


def csv_usd(nano: int) -> str | Decimal:
    """Return dollars, exact to the nano, in a type that spreadsheets read as a number.

    The CSV writer quotes a text that begins with "-", so a negative amount is a Decimal.
    """
    usd = nano_to_usd(nano)
    return f"{usd:f}" if nano >= 0 else usd


def usd_of_cents(cents: int) -> str:
    return f"{'-' if cents < 0 else ''}{abs(cents) // 100}.{abs(cents) % 100:02}"


def pdf_of(invoice: Invoice) -> bytes:
    """Return the invoice as a PDF with its first lines, its split by label and its total."""
    from fpdf import FPDF  # noqa: PLC0415 - with its font tools it is slow to import, and seldom used

    pdf = FPDF(format="A4")
    pdf.set_creation_date(invoice.issued_at)
    pdf.set_title(_title(invoice))
    pdf.set_margins(10, 12)
    pdf.add_page()
    _head(pdf, invoice)
    _table_head(pdf)
    for line in invoice.lines.order_by("position")[:_MOST_LINES]:
        if pdf.will_page_break(_ROW_MM):
            pdf.add_page()
            _table_head(pdf)
        days = date_format(line.first_day, gettext("j M"))
        if line.last_day > line.first_day:
            days = f"{days} - {date_format(line.last_day, gettext('j M'))}"
        direction = line.sku.split(":")[1] + " " if line.kind == LineKind.INFERENCE and line.sku.count(":") > 1 else ""
        kind, subject = str(_KINDS[LineKind(line.kind)]), direction + line.subject
        quantity = quantity_in_words(line.unit, line.quantity)
        _cells(pdf, (kind, subject, line.label, days, quantity, usd_of_cents(line.cents)))
    _foot(pdf, invoice)
    return bytes(pdf.output())


def _title(invoice: Invoice) -> str:
    return gettext("Invoice %(number)s") % {"number": invoice.number}


def _head(pdf: FPDF, invoice: Invoice) -> None:
    _line(pdf, _title(invoice), size=16, style="B", height=9)
    dates = {
        "month": date_format(invoice.month, "F Y"),
        "day": date_format(invoice.issued_at.astimezone(datetime.UTC).date(), gettext("j F Y")),
    }
    _line(pdf, gettext("%(month)s, issued %(day)s (UTC)") % dates, size=10)
    _line(pdf, "", size=6)
    for text in [invoice.organization.name, *invoice.billed_to.splitlines()]:
        _line(pdf, text, size=10)
    _line(pdf, "", size=6)


def _table_head(pdf: FPDF) -> None:
    heads = (gettext("Kind"), gettext("For"), gettext("Label"), gettext("Days (UTC)"), gettext("Quantity"), "USD")
    _cells(pdf, heads, style="B")


def quantity_in_words(unit: str, quantity: int) -> str:
    """Return a quantity in the unit it is sold in: GPU seconds, tokens, GB-hours, GB, hours kept warm."""
    if not quantity:
        return ""
    match unit:
        case "gpu_ms":
            return f"{quantity / 1000:,.1f} s"
        case "byte_hours":
            return f"{quantity / 1e9:,.1f} GBh"
        case "bytes":
            return f"{quantity / 1e9:,.2f} GB"
        case "warm_ms":
            return f"{quantity / 3_600_000:,.2f} h"
        case _:
            return f"{quantity:,}"


def _foot(pdf: FPDF, invoice: Invoice) -> None:
    _line(pdf, "", size=6)
    left_out = invoice.lines.filter(position__gt=_MOST_LINES).aggregate(
        lines=Count("pk"), cents=Sum("cents", default=0)
    )
    if left_out["lines"]:
        amount = usd_of_cents(left_out["cents"])
        text = gettext("%(lines)s more lines, $%(amount)s together: the CSV has all lines.")
        _line(pdf, text % {"lines": f"{left_out['lines']:,}", "amount": amount}, size=9)
    labels, others_cents = sum_by_label(invoice)
    if set(labels) != {""}:
        for label, cents in labels.items():
            _line(pdf, f"{label or gettext('without label')}: ${usd_of_cents(cents)}", size=9)
        if others_cents is not None:
            _line(pdf, f"{gettext('everything else')}: ${usd_of_cents(others_cents)}", size=9)
    _line(pdf, f"{gettext('Total')} ${usd_of_cents(invoice.total_cents)}", size=12, style="B", height=8)
    paid = gettext("Charged to the balance when it was used; nothing is due with this statement.")
    _line(pdf, paid, size=8)
    rounded = gettext(
        "Cents are rounded on the running total, so single lines may differ from their exact value by one."
    )
    _line(pdf, rounded, size=8)


def _line(pdf: FPDF, text: str, *, size: int, style: str = "", height: float = 5) -> None:
    pdf.set_font(_FONT, style, size)
    pdf.cell(0, height, _printable(text), new_x="LMARGIN", new_y="NEXT")


def _cells(pdf: FPDF, texts: tuple[str, ...], *, style: str = "") -> None:
    pdf.set_font(_FONT, style, 8)
    for width, text in zip(_WIDTHS_MM, texts, strict=True):
        align = "R" if width in _WIDTHS_MM[-2:] else "L"
        pdf.cell(width, _ROW_MM, _cut(pdf, _printable(text), width), border="B", align=align)
    pdf.ln(_ROW_MM)


def _cut(pdf: FPDF, text: str, width: float) -> str:
    while text and pdf.get_string_width(text) > width - 2:
        text = text[: -4 if text.endswith("...") else -3] + "..." if len(text) > 6 else ""
    return text


def _printable(text: str) -> str:
    """Return the text with "?" for characters that the PDF's built-in fonts lack; the CSV has every character."""
    return text.encode("latin-1", "replace").decode("latin-1")
