"""Conversion of the stripe package's objects into ours. It makes no calls."""

import datetime
from typing import Protocol

import stripe

from apps.payments.lifecycle import RefundStatus
from apps.payments.stripe.objects import (
    Card,
    CardLeft,
    CashMovement,
    Checkout,
    CheckoutStatus,
    Dispute,
    InvoiceStatus,
    Notice,
    Payment,
    Refund,
    StripeInvoice,
)


class HasId(Protocol):
    id: str


Expandable = str | HasId | None

# https://docs.stripe.com/api/refunds/object
_REFUND_STATUSES = {
    "pending": RefundStatus.PENDING,
    "requires_action": RefundStatus.PENDING,
    "succeeded": RefundStatus.SUCCEEDED,
    "failed": RefundStatus.FAILED,
    "canceled": RefundStatus.FAILED,
}


def read_card(method: stripe.PaymentMethod) -> Card:
    card = method.card
    assert card is not None  # the method is of type "card"
    return Card(
        payment_method_id=method.id,
        left_at=_at(method.created),
        brand=card.brand,
        last4=card.last4,
        exp_month=card.exp_month,
        exp_year=card.exp_year,
    )


def read_card_left(method: str | stripe.PaymentMethod | None) -> CardLeft:
    assert isinstance(method, stripe.PaymentMethod)  # its id was expanded
    return CardLeft(payment_method_id=method.id, left_at=_at(method.created))


def read_checkout(found: stripe.checkout.Session) -> Checkout:
    return Checkout(
        id=found.id,
        takes_payment=found.mode == "payment",
        status=CheckoutStatus(found.status or CheckoutStatus.OPEN),
        is_paid=found.payment_status == "paid",
        url=found.url or "",
        reference=found.client_reference_id or "",
        payment_intent_id=read_id(found.payment_intent),
        setup_intent_id=read_id(found.setup_intent),
        subtotal_cents=found.amount_subtotal or 0,
        tax_cents=found.total_details.amount_tax if found.total_details else 0,
        total_cents=found.amount_total or 0,
        currency=found.currency or "",
    )


def read_payment(found: stripe.PaymentIntent) -> Payment:
    error = found.last_payment_error
    return Payment(
        id=found.id,
        status=found.status,
        amount_cents=found.amount,
        received_cents=found.amount_received,
        currency=found.currency,
        metadata=_plain(found.metadata),
        failure=(getattr(error, "decline_code", None) or error.code or "") if error else "",
    )


def read_invoice(found: stripe.Invoice) -> StripeInvoice:
    listed = getattr(found, "payments", None)  # only where it was expanded
    payments = listed.data if listed else []
    intents = (read_id(getattr(each.payment, "payment_intent", None)) for each in payments)
    return StripeInvoice(
        id=found.id,
        status=InvoiceStatus(found.status or InvoiceStatus.DRAFT),
        subtotal_cents=found.subtotal,
        tax_cents=sum(tax.amount for tax in found.total_taxes or []),
        total_cents=found.total,
        paid_cents=found.amount_paid,
        currency=found.currency,
        hosted_url=found.hosted_invoice_url or "",
        payment_intent_ids=tuple(intent for intent in intents if intent),
        metadata=_plain(found.metadata),
    )


def read_refund(found: stripe.Refund) -> Refund:
    status = _REFUND_STATUSES.get(found.status or "", RefundStatus.PENDING)
    return Refund(
        id=found.id,
        status=status,
        amount_cents=found.amount,
        currency=found.currency,
        payment_intent_id=read_id(found.payment_intent),
        failure=getattr(found, "failure_reason", None) or (str(found.status) if status == RefundStatus.FAILED else ""),
        metadata=_plain(found.metadata),
    )


def read_dispute(found: stripe.Dispute) -> Dispute:
    return Dispute(
        id=found.id,
        status=found.status,
        reason=found.reason,
        amount_cents=found.amount,
        currency=found.currency,
        payment_intent_id=read_id(found.payment_intent),
        movements=tuple(read_movement(each) for each in found.balance_transactions),
    )


def read_notice(event: stripe.Event) -> Notice:
    about = event.data.object
    customer = about["id"] if about["object"] == "customer" else getattr(about, "customer", None)
    return Notice(
        id=event.id,
        type=event.type,
        api_version=event.api_version or "",
        object_id=about["id"],
        object_type=about["object"],
        customer_id=customer if isinstance(customer, str) else "",
        created_at=_at(event.created),
    )


def read_movement(found: stripe.BalanceTransaction) -> CashMovement:
    return CashMovement(
        id=found.id,
        kind=found.type,
        source_id=_source(found.source),
        amount_cents=found.amount,
        fee_cents=found.fee,
        currency=found.currency,
        created_at=_at(found.created),
    )


def _source(source: Expandable) -> str:
    """Return its id in our books: a charge by its payment intent, other objects by their own id."""
    return read_id(source.payment_intent if isinstance(source, stripe.Charge) else source)


def _at(seconds: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


def read_id(value: Expandable) -> str:
    """Return the id of an object that Stripe gives as an id or in full."""
    return "" if value is None else value if isinstance(value, str) else value.id


def _plain(metadata: stripe.StripeObject | None) -> dict[str, str]:
    return metadata.to_dict() if metadata else {}
