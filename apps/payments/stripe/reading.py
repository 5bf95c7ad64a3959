"""Conversion of the stripe package's objects into ours. It makes no calls and does not import the package."""

import datetime
from typing import Any

from apps.payments.stripe.objects import (
    Card,
    CardLeft,
    CashMovement,
    Checkout,
    Dispute,
    Invoice,
    Notice,
    Payment,
    Refund,
)


def read_card(method: Any) -> Card:
    card = method.card
    return Card(
        payment_method_id=method.id,
        left_at=_at(method.created),
        brand=card.brand,
        last4=card.last4,
        exp_month=card.exp_month,
        exp_year=card.exp_year,
    )


def read_card_left(method: Any) -> CardLeft:
    return CardLeft(payment_method_id=method.id, left_at=_at(method.created))


def read_checkout(found: Any) -> Checkout:
    return Checkout(
        id=found.id,
        mode=found.mode,
        status=found.status or "",
        payment_status=found.payment_status,
        url=found.url or "",
        reference=found.client_reference_id or "",
        customer_id=read_id(found.customer),
        payment_intent_id=read_id(found.payment_intent),
        setup_intent_id=read_id(found.setup_intent),
        subtotal_cents=found.amount_subtotal or 0,
        tax_cents=found.total_details.amount_tax if found.total_details else 0,
        total_cents=found.amount_total or 0,
        currency=found.currency or "",
    )


def read_payment(found: Any) -> Payment:
    error = found.last_payment_error
    return Payment(
        id=found.id,
        status=found.status,
        amount_cents=found.amount,
        received_cents=found.amount_received,
        currency=found.currency,
        customer_id=read_id(found.customer),
        metadata=_plain(found.metadata),
        failure=(getattr(error, "decline_code", None) or error.code or "") if error else "",
    )


def read_invoice(found: Any) -> Invoice:
    payments = found.payments.data if getattr(found, "payments", None) else []
    intents = (read_id(getattr(each.payment, "payment_intent", None)) for each in payments)
    return Invoice(
        id=found.id,
        number=found.number or "",
        status=found.status or "",
        subtotal_cents=found.subtotal,
        tax_cents=sum(tax.amount for tax in found.total_taxes or []),
        total_cents=found.total,
        paid_cents=found.amount_paid,
        currency=found.currency,
        customer_id=read_id(found.customer),
        hosted_url=found.hosted_invoice_url or "",
        pdf_url=found.invoice_pdf or "",
        payment_intent_ids=tuple(intent for intent in intents if intent),
        attempt_count=found.attempt_count,
        metadata=_plain(found.metadata),
    )


def read_refund(found: Any) -> Refund:
    return Refund(
        id=found.id,
        status=found.status or "",
        amount_cents=found.amount,
        currency=found.currency,
        payment_intent_id=read_id(found.payment_intent),
        failure=getattr(found, "failure_reason", None) or "",
        metadata=_plain(found.metadata),
    )


def read_dispute(found: Any) -> Dispute:
    return Dispute(
        id=found.id,
        status=found.status,
        reason=found.reason,
        amount_cents=found.amount,
        currency=found.currency,
        payment_intent_id=read_id(found.payment_intent),
        movements=tuple(read_movement(each) for each in found.balance_transactions),
    )


def read_notice(event: Any) -> Notice:
    about = event.data.object
    return Notice(
        id=event.id,
        type=event.type,
        api_version=event.api_version or "",
        object_id=about["id"],
        object_type=about["object"],
        created_at=_at(event.created),
    )


def read_movement(found: Any) -> CashMovement:
    return CashMovement(
        id=found.id,
        kind=found.type,
        source_id=_source(found.source),
        amount_cents=found.amount,
        fee_cents=found.fee,
        currency=found.currency,
        created_at=_at(found.created),
    )


def _source(source: Any) -> str:
    """Return its id in our books: a charge by its payment intent, other objects by their own id."""
    is_charge = getattr(source, "object", "") == "charge"
    return read_id(getattr(source, "payment_intent", None) if is_charge else source)


def _at(seconds: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


def read_id(value: Any) -> str:
    """Return the id of an object that Stripe gives as an id or in full."""
    return "" if value is None else value if isinstance(value, str) else value.id


def _plain(metadata: Any) -> dict[str, str]:
    return metadata.to_dict() if metadata else {}
