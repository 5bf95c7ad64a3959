"""Stripe's gateway: every call to Stripe that we make. Typed values go in and come out.

Every POST carries an idempotency key, so a call that is repeated after a lost answer has one effect. Stripe keeps a key
for 24 hours. The package itself repeats a call under the same key after a lost connection, a 409 or a 5xx. It does not
repeat a 429; our tasks do, with backoff. Nothing here may run inside a database transaction.
"""

import datetime
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import stripe
from django.conf import settings

from apps.payments.stripe.client import keyed, services, translated
from apps.payments.stripe.errors import BadSignature, StripeRefused
from apps.payments.stripe.events import EVENTS
from apps.payments.stripe.objects import (
    CURRENCY,
    Card,
    CardLeft,
    CashMovement,
    Checkout,
    Dispute,
    Notice,
    Payment,
    Refund,
    StripeInvoice,
    StripeInvoiceLine,
)
from apps.payments.stripe.reading import (
    read_card,
    read_card_left,
    read_checkout,
    read_dispute,
    read_invoice,
    read_movement,
    read_notice,
    read_payment,
    read_refund,
)

if TYPE_CHECKING:
    from stripe.params import EventListParamsCreated, InvoiceAddLinesParamsLine, InvoiceCreateParams, RefundCreateParams
    from stripe.params.billing import MeterEventCreateParams
    from stripe.params.billing_portal import SessionCreateParams as PortalCreateParams
    from stripe.params.checkout import SessionCreateParams

_PAGE = 100
_OLDEST_SIGNATURE_SECONDS = 300


def is_configured() -> bool:
    """Return whether this installation takes payments; without keys the UI hides them."""
    return bool(settings.STRIPE_WEBHOOK_SECRET)  # the web process has this secret only: it never calls Stripe


# --- Customers and cards ----------------------------------------------------------------------------------------------


def create_customer(*, organization_id: str, name: str, email: str) -> str:
    """Create the customer of an organization; return its id."""
    with translated():
        made = services().customers.create(
            {"name": name, "email": email, "metadata": {"organization_id": organization_id}},
            keyed(f"customer:{organization_id}"),
        )
    return made.id


def get_card(*, customer_id: str) -> Card | None:
    """Return the card for charges while the customer is absent, None without one."""
    with translated():
        customer = services().customers.retrieve(customer_id, {"expand": ["invoice_settings.default_payment_method"]})
    if getattr(customer, "deleted", False) or customer.invoice_settings is None:
        return None
    method = customer.invoice_settings.default_payment_method
    return read_card(method) if isinstance(method, stripe.PaymentMethod) and method.type == "card" else None


def use_card(*, customer_id: str, payment_method_id: str, key: str) -> None:
    """Make this card the one to charge."""
    with translated():
        services().customers.update(
            customer_id, {"invoice_settings": {"default_payment_method": payment_method_id}}, keyed(key)
        )


def get_card_left(*, setup_intent_id: str) -> CardLeft:
    """Return the payment method that a setup page collected."""
    with translated():
        found = services().setup_intents.retrieve(setup_intent_id, {"expand": ["payment_method"]})
    return read_card_left(found.payment_method)


def get_card_paid_with(*, payment_intent_id: str) -> CardLeft:
    """Return the payment method of a payment."""
    with translated():
        found = services().payment_intents.retrieve(payment_intent_id, {"expand": ["payment_method"]})
    return read_card_left(found.payment_method)


# --- Hosted pages -----------------------------------------------------------------------------------------------------


def create_topup_page(
    *, customer_id: str, topup_id: str, amount_cents: int, success_url: str, cancel_url: str, key: str
) -> Checkout:
    """Create the page that sells credit. Stripe keeps the card for charges that the customer authorizes later."""
    metadata = {"topup_id": topup_id}
    params: SessionCreateParams = {
        "mode": "payment",
        "customer": customer_id,
        "client_reference_id": topup_id,
        "line_items": [
            {
                "quantity": 1,
                "price_data": {
                    "currency": CURRENCY,
                    "unit_amount": amount_cents,
                    "product_data": {"name": "Credit"},
                    "tax_behavior": "exclusive",
                },
            }
        ],
        "metadata": metadata,
        "payment_intent_data": {"setup_future_usage": "off_session", "metadata": metadata},
        "invoice_creation": {"enabled": True, "invoice_data": {"metadata": metadata}},
        "success_url": success_url,
        "cancel_url": cancel_url,
    }
    if settings.STRIPE_TAX:
        params["automatic_tax"] = {"enabled": True}
        params["customer_update"] = {"address": "auto", "name": "auto"}
    with translated():
        return read_checkout(services().checkout.sessions.create(params, keyed(key)))


def create_card_page(*, customer_id: str, reference: str, success_url: str, cancel_url: str, key: str) -> Checkout:
    """Create the page on which a customer leaves a card without paying."""
    params: SessionCreateParams = {
        "mode": "setup",
        "currency": CURRENCY,
        "customer": customer_id,
        "client_reference_id": reference,
        "success_url": success_url,
        "cancel_url": cancel_url,
    }
    with translated():
        return read_checkout(services().checkout.sessions.create(params, keyed(key)))


def get_checkout(*, checkout_id: str) -> Checkout:
    with translated():
        return read_checkout(services().checkout.sessions.retrieve(checkout_id))


def create_portal_page(*, customer_id: str, return_url: str, configuration_id: str, key: str) -> str:
    """Create a visit to Stripe's portal (cards, tax ids, invoices); return its address, valid for a few minutes."""
    params: PortalCreateParams = {"customer": customer_id, "return_url": return_url}
    if configuration_id:
        params["configuration"] = configuration_id
    with translated():
        return services().billing_portal.sessions.create(params, keyed(key)).url


# --- Payments ---------------------------------------------------------------------------------------------------------


def get_payment(*, payment_intent_id: str) -> Payment:
    with translated():
        return read_payment(services().payment_intents.retrieve(payment_intent_id))


# --- Invoices ---------------------------------------------------------------------------------------------------------


def create_invoice(
    *,
    customer_id: str,
    metadata: Mapping[str, str],
    description: str,
    days_until_due: int | None,
    key: str,
    is_taxed: bool = True,
) -> StripeInvoice:
    """Create an empty draft. With `days_until_due` Stripe mails it; without, `pay_invoice` charges it."""
    params: InvoiceCreateParams = {
        "customer": customer_id,
        "currency": CURRENCY,
        "auto_advance": False,
        "pending_invoice_items_behavior": "exclude",
        "automatic_tax": {"enabled": bool(settings.STRIPE_TAX and is_taxed)},
        "description": description,
        "metadata": dict(metadata),
        "collection_method": "charge_automatically" if days_until_due is None else "send_invoice",
    }
    if days_until_due is not None:
        params["days_until_due"] = days_until_due
    with translated():
        return read_invoice(services().invoices.create(params, keyed(key)))


def add_invoice_lines(*, invoice_id: str, lines: Sequence[StripeInvoiceLine], key: str) -> StripeInvoice:
    """Add our lines to a draft."""
    written: list[InvoiceAddLinesParamsLine] = [
        {"description": line.description, "amount": line.amount_cents, "metadata": {"key": line.key}} for line in lines
    ]
    with translated():
        return read_invoice(services().invoices.add_lines(invoice_id, {"lines": written}, keyed(key)))


def finalize_invoice(*, invoice_id: str, key: str) -> StripeInvoice:
    with translated():
        return read_invoice(
            services().invoices.finalize_invoice(
                invoice_id, {"auto_advance": False, "expand": ["payments"]}, keyed(key)
            )
        )


def pay_invoice(*, invoice_id: str, key: str) -> StripeInvoice:
    """Charge the customer's card while the customer is absent. Raises CardDeclined."""
    with translated():
        return read_invoice(
            services().invoices.pay(invoice_id, {"off_session": True, "expand": ["payments"]}, keyed(key))
        )


def void_invoice(*, invoice_id: str) -> StripeInvoice:
    """Void an open invoice. A second call is refused.

    Each call has another key, because Stripe repeats its answer to a key for a day, also a refusal.
    """
    with translated():
        return read_invoice(services().invoices.void_invoice(invoice_id, {}, keyed(f"void:{uuid.uuid4()}")))


def delete_draft(*, invoice_id: str) -> None:
    """Delete an invoice that was never finalized. Raises StripeRefused when it was."""
    with translated():
        services().invoices.delete(invoice_id)


def get_invoice(*, invoice_id: str) -> StripeInvoice:
    with translated():
        return read_invoice(services().invoices.retrieve(invoice_id, {"expand": ["payments"]}))


# --- Refunds and disputes ---------------------------------------------------------------------------------------------


def create_refund(*, payment_intent_id: str, amount_cents: int, refund_id: str, key: str) -> Refund:
    """Refund to the card that paid."""
    params: RefundCreateParams = {
        "payment_intent": payment_intent_id,
        "amount": amount_cents,
        "reason": "requested_by_customer",
        "metadata": {"refund_id": refund_id},
    }
    with translated():
        return read_refund(services().refunds.create(params, keyed(key)))


def find_refund(*, payment_intent_id: str, refund_id: str) -> Refund | None:
    """Return the payment's refund that `create_refund` made for this id, None if there is none."""
    with translated():
        listed = services().refunds.list({"payment_intent": payment_intent_id, "limit": _PAGE})
        found = [read_refund(each) for each in listed.auto_paging_iter()]
    return next((each for each in found if each.metadata.get("refund_id") == refund_id), None)


def get_refund(*, refund_id: str) -> Refund:
    with translated():
        return read_refund(services().refunds.retrieve(refund_id))


def get_dispute(*, dispute_id: str) -> Dispute:
    with translated():
        return read_dispute(services().disputes.retrieve(dispute_id))


# --- Events, movements and meters -------------------------------------------------------------------------------------


def read_webhook(*, body: bytes, signature: str) -> Notice:
    """Return the event of a webhook. Raises BadSignature. Does not call Stripe: it may run anywhere."""
    try:
        stripe.WebhookSignature.verify_header(
            body, signature, settings.STRIPE_WEBHOOK_SECRET, _OLDEST_SIGNATURE_SECONDS
        )
        event = stripe.Webhook.construct_event_without_verification(body)
        return read_notice(event)
    except (stripe.SignatureVerificationError, ValueError, AttributeError, KeyError) as error:
        raise BadSignature("This is not a webhook that Stripe signed for this installation.") from error


def list_events(*, since: datetime.datetime, until: datetime.datetime) -> Iterator[Notice]:
    """Yield the events that we handle in the half-open period, newest first."""
    with translated():
        listed = services().events.list({"created": _period(since, until), "limit": _PAGE})
        for event in listed.auto_paging_iter():
            if event.type in EVENTS:
                yield read_notice(event)


def list_cash_movements(*, since: datetime.datetime, until: datetime.datetime) -> Iterator[CashMovement]:
    """Yield the movements in Stripe's account in the half-open period, newest first."""
    with translated():
        listed = services().balance_transactions.list(
            {"created": _period(since, until), "limit": _PAGE, "expand": ["data.source"]}
        )
        for found in listed.auto_paging_iter():
            yield read_movement(found)


def find_invoices(*, customer_id: str, since: datetime.datetime, metadata: Mapping[str, str]) -> list[StripeInvoice]:
    """Return the customer's invoices created since then whose metadata includes all of `metadata`, newest first."""
    with translated():
        listed = services().invoices.list(
            {"customer": customer_id, "created": {"gte": int(since.timestamp())}, "limit": _PAGE}
        )
        found = [read_invoice(each) for each in listed.auto_paging_iter()]
    return [each for each in found if metadata.items() <= each.metadata.items()]


def send_meter_event(*, name: str, customer_id: str, quantity: int, at: datetime.datetime, identifier: str) -> None:
    """Mirror a quantity to a Stripe meter.

    A meter remembers an identifier for a day: a known one was sent already.
    """
    params: MeterEventCreateParams = {
        "event_name": name,
        "payload": {"stripe_customer_id": customer_id, "value": str(quantity)},
        "timestamp": int(at.timestamp()),
        "identifier": identifier,
    }
    try:
        with translated():
            services().billing.meter_events.create(params, keyed(f"meter:{identifier}"))
    except StripeRefused as error:
        if "already exists with identifier" not in error.message:
            raise


def _period(since: datetime.datetime, until: datetime.datetime) -> "EventListParamsCreated":
    return {"gte": int(since.timestamp()), "lt": int(until.timestamp())}
