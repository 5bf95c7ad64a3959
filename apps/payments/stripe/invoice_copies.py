"""Copies at Stripe of each monthly invoice, for customers who keep their documents there: our lines, paid from credit.

Credit is prepaid with its tax, so nothing is due. Stripe must confirm the sum of our lines to the cent before anything
is finalized; a last line then subtracts the sum.
"""

import datetime
import logging

from django.db import transaction
from django.db.models import Exists, OuterRef, Sum

from apps.billing.models import Invoice, InvoiceLine
from apps.payments.customers import get_customer
from apps.payments.models import StripeCustomer
from apps.payments.stripe import gateway
from apps.payments.stripe.errors import StripeRefused
from apps.payments.stripe.objects import InvoiceStatus, StripeInvoiceLine
from apps.payments.topups import PaymentMismatch

logger = logging.getLogger(__name__)

_LINES_AT_ONCE = 100
_MAX_LINES = 240  # Stripe allows 250 per invoice; a longer copy has one line per kind
# Stripe forgets our keys after 24 hours. After this time a new attempt first looks for what exists.
_ATTEMPT = datetime.timedelta(hours=20)
_CLOCKS_DIFFER = datetime.timedelta(hours=1)


def list_uncopied(*, limit: int = 50) -> list[str]:
    """Return the invoices without a copy that were issued since their organization became a Stripe customer."""
    customers = StripeCustomer.objects.filter(
        organization_id=OuterRef("organization_id"), created_at__lte=OuterRef("issued_at")
    )
    uncopied = Invoice.objects.filter(Exists(customers), external_id=None, total_cents__gt=0)
    return list(uncopied.order_by("issued_at").values_list("pk", flat=True)[:limit])


def copy_invoice(*, invoice_id: str, now: datetime.datetime) -> None:
    """Write the copy, once. Calls Stripe. A copy that does not add up stays a draft and logs a critical line."""
    invoice = Invoice.objects.get(pk=invoice_id)
    customer = get_customer(organization=invoice.organization_id)
    if invoice.external_id or customer is None:
        return
    attempt = (now - invoice.issued_at) // _ATTEMPT
    try:
        stripe_id = _copied_before(invoice, customer.stripe_id, attempt) or _written(
            invoice, customer.stripe_id, attempt
        )
    except (PaymentMismatch, StripeRefused) as error:
        logger.critical("invoice %s was not copied to Stripe: %s", invoice.number, error)
        return
    with transaction.atomic():
        Invoice.objects.filter(pk=invoice.pk, external_id=None).update(external_id=stripe_id)


def _copied_before(invoice: Invoice, customer_id: str, attempt: int) -> str:
    """Return a finished copy whose answer was lost, "" without one; delete the drafts of other attempts.

    The first attempt need not look: Stripe still knows its keys. A draft of this attempt is continued.
    """
    if attempt < 1:
        return ""
    made = gateway.find_invoices(
        customer_id=customer_id, since=invoice.issued_at - _CLOCKS_DIFFER, metadata={"invoice_id": invoice.pk}
    )
    for found in made:
        if found.status != InvoiceStatus.DRAFT:
            return found.id
    for found in made:
        if found.metadata.get("attempt") != str(attempt):
            gateway.delete_draft(invoice_id=found.id)
    return ""


def _written(invoice: Invoice, customer_id: str, attempt: int) -> str:
    key = f"{invoice.pk}:{attempt}"
    made = gateway.create_invoice(
        customer_id=customer_id,
        metadata={"invoice_id": invoice.pk, "number": invoice.number, "attempt": str(attempt)},
        description=f"Usage in {invoice.month:%B %Y}, invoice {invoice.number}, paid from credit",
        days_until_due=None, is_taxed=False, key=f"{key}:make",
    )  # fmt: skip
    lines = _lines(invoice)
    subtotal_cents = 0
    for first in range(0, len(lines), _LINES_AT_ONCE):
        part = lines[first : first + _LINES_AT_ONCE]
        filled = gateway.add_invoice_lines(invoice_id=made.id, lines=part, key=f"{key}:lines:{first}")
        subtotal_cents = filled.subtotal_cents
    if subtotal_cents != invoice.total_cents:
        raise PaymentMismatch(f"Stripe adds up to {subtotal_cents} cents, the books to {invoice.total_cents}")
    from_credit = StripeInvoiceLine(description="Paid from credit", amount_cents=-invoice.total_cents, key="credit")
    gateway.add_invoice_lines(invoice_id=made.id, lines=[from_credit], key=f"{key}:credit")
    return gateway.finalize_invoice(invoice_id=made.id, key=f"{key}:finalize").id


def _lines(invoice: Invoice) -> list[StripeInvoiceLine]:
    ours = list(invoice.lines.order_by("position")[: _MAX_LINES + 1])
    if len(ours) <= _MAX_LINES:
        return [_line(line) for line in ours]
    cents = invoice.lines.values_list("kind").annotate(cents=Sum("cents")).order_by("kind")
    return [
        StripeInvoiceLine(
            description=f"{kind.capitalize()}: see invoice {invoice.number}", amount_cents=sum_cents, key=kind
        )
        for kind, sum_cents in cents
    ]


def _line(line: InvoiceLine) -> StripeInvoiceLine:
    days = f"{line.first_day:%-d %b}" + (f" to {line.last_day:%-d %b}" if line.last_day != line.first_day else "")
    text = f"{line.kind.capitalize()}: {line.subject}, {days}"
    return StripeInvoiceLine(description=text[:500], amount_cents=line.cents, key=line.pk)
