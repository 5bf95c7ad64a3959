"""Stripe's gateway: the only module that imports the stripe package. Typed values go in and come out.

Every POST carries an idempotency key, so a call repeated after a lost answer is the same call. Stripe keeps a key for
24 hours. The package itself repeats a call under the same key after a lost connection, a 409 or a 5xx. It does not
repeat a 429; our tasks do, with backoff. Nothing here may run inside a database transaction.
"""

import datetime
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import stripe
from django.conf import settings
from django.db import connection

from apps.payments.stripe.errors import BadSignature, CardDeclined, StripeRefused, StripeUnavailable
from apps.payments.stripe.events import EVENTS
from apps.payments.stripe.objects import (
    Card,
    CardLeft,
    CashMovement,
    Checkout,
    Dispute,
    Invoice,
    InvoiceLine,
    Notice,
    Payment,
    Refund,
    Webhook,
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

stripe.enable_telemetry = False  # it would write a file into the home directory

API_VERSION = "2026-10-28.endive"  # the package's own; a test compares them, so neither changes alone
CURRENCY = "usd"
_TIMEOUT_SECONDS = (3, 15)  # to connect, to answer; the package's default of 80 would block a worker that long
_RETRIES = 2
_PAGE = 100
_OLDEST_SIGNATURE_SECONDS = 300


class InsideTransaction(Exception):
    """A call to Stripe would have kept a database transaction and its locks waiting for the network."""


def is_configured() -> bool:
    """Return whether this installation takes payments; without keys the UI hides them."""
    return bool(settings.STRIPE_WEBHOOK_SECRET)  # the web process has this secret only: it never calls Stripe


@cache
def _client_for(secret_key: str, api_base: str) -> stripe.StripeClient:
    """Return the one client, with its connection pool, of this process."""
    return stripe.StripeClient(
        secret_key,
        stripe_version=API_VERSION,
        max_network_retries=_RETRIES,
        http_client=stripe.RequestsClient(timeout=_TIMEOUT_SECONDS),
        base_addresses={"api": api_base} if api_base else {},
    )


def _stripe() -> Any:
    """Return the v1 services. The contract tests check the parameters against the package's types."""
    # A test case's outer transaction does not count; Django marks it for `durable` too.
    blocks: list[Any] = cast(Any, connection).atomic_blocks
    if not all(block._from_testcase for block in blocks):
        raise InsideTransaction
    return _client_for(settings.STRIPE_SECRET_KEY, settings.STRIPE_API_BASE).v1


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except stripe.CardError as error:
        reason = getattr(error.error, "decline_code", None) or error.code or "card_declined"
        raise CardDeclined(error.user_message or "The card was declined.", reason=reason) from error
    except (stripe.RateLimitError, stripe.APIConnectionError) as error:
        raise StripeUnavailable("Stripe does not answer just now.") from error
    except stripe.StripeError as error:
        if error.http_status is None or error.http_status >= 500 or error.http_status in (409, 429):
            raise StripeUnavailable("Stripe does not answer just now.") from error
        raise StripeRefused(error.user_message or f"Stripe refused the request: {error.code}.") from error


def _keyed(key: str) -> dict[str, str]:
    return {"idempotency_key": key}


# --- Customers and cards ----------------------------------------------------------------------------------------------


def create_customer(*, organization_id: str, name: str, email: str) -> str:
    """Create the customer of an organization; return its id."""
    params = {"name": name, "email": email, "metadata": {"organization_id": organization_id}}
    with _translated():
        return _stripe().customers.create(params, _keyed(f"customer:{organization_id}")).id


def get_card(*, customer_id: str) -> Card | None:
    """Return the card for charges while the customer is absent, None without one."""
    with _translated():
        customer = _stripe().customers.retrieve(customer_id, {"expand": ["invoice_settings.default_payment_method"]})
    if getattr(customer, "deleted", False):
        return None
    method = customer.invoice_settings.default_payment_method
    return read_card(method) if method is not None and method.type == "card" else None


def use_card(*, customer_id: str, payment_method_id: str, key: str) -> None:
    """Make this card the one to charge."""
    params = {"invoice_settings": {"default_payment_method": payment_method_id}}
    with _translated():
        _stripe().customers.update(customer_id, params, _keyed(key))


def get_card_left(*, setup_intent_id: str) -> CardLeft:
    """Return the payment method that a setup page collected."""
    with _translated():
        return read_card_left(_stripe().setup_intents.retrieve(setup_intent_id, _METHOD).payment_method)


def get_card_paid_with(*, payment_intent_id: str) -> CardLeft:
    """Return the payment method of a payment."""
    with _translated():
        return read_card_left(_stripe().payment_intents.retrieve(payment_intent_id, _METHOD).payment_method)


_METHOD = {"expand": ["payment_method"]}


# --- Hosted pages -----------------------------------------------------------------------------------------------------


def create_topup_page(
    *, customer_id: str, topup_id: str, amount_cents: int, success_url: str, cancel_url: str, key: str
) -> Checkout:
    """Create the page that sells credit. Stripe keeps the card for charges that the customer authorizes later."""
    metadata = {"topup_id": topup_id}
    params = {
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
    } | _tax()
    with _translated():
        return read_checkout(_stripe().checkout.sessions.create(params, _keyed(key)))


def create_card_page(*, customer_id: str, reference: str, success_url: str, cancel_url: str, key: str) -> Checkout:
    """Create the page on which a customer leaves a card without paying."""
    params = {
        "mode": "setup",
        "currency": CURRENCY,
        "customer": customer_id,
        "client_reference_id": reference,
        "success_url": success_url,
        "cancel_url": cancel_url,
    }
    with _translated():
        return read_checkout(_stripe().checkout.sessions.create(params, _keyed(key)))


def get_checkout(*, checkout_id: str) -> Checkout:
    with _translated():
        return read_checkout(_stripe().checkout.sessions.retrieve(checkout_id))


def create_portal_page(*, customer_id: str, return_url: str, configuration_id: str, key: str) -> str:
    """Create a visit to Stripe's portal (cards, tax ids, invoices); return its address, valid for a few minutes."""
    params = {"customer": customer_id, "return_url": return_url}
    if configuration_id:
        params["configuration"] = configuration_id
    with _translated():
        return _stripe().billing_portal.sessions.create(params, _keyed(key)).url


def create_portal_configuration(*, return_url: str, key: str) -> str:
    """Create the portal's configuration: cards, addresses, tax ids and invoices; there are no plans."""
    params = {
        "default_return_url": return_url,
        "features": {
            "customer_update": {"enabled": True, "allowed_updates": ["email", "address", "tax_id", "name"]},
            "invoice_history": {"enabled": True},
            "payment_method_update": {"enabled": True},
        },
    }
    with _translated():
        return _stripe().billing_portal.configurations.create(params, _keyed(key)).id


def _tax() -> dict[str, Any]:
    if not settings.STRIPE_TAX:
        return {}
    return {"automatic_tax": {"enabled": True}, "customer_update": {"address": "auto", "name": "auto"}}


# --- Payments ---------------------------------------------------------------------------------------------------------


def get_payment(*, payment_intent_id: str) -> Payment:
    with _translated():
        return read_payment(_stripe().payment_intents.retrieve(payment_intent_id))


# --- Invoices ---------------------------------------------------------------------------------------------------------


def create_invoice(
    *,
    customer_id: str,
    metadata: Mapping[str, str],
    description: str,
    days_until_due: int | None,
    key: str,
    is_taxed: bool = True,
) -> Invoice:
    """Create an empty draft. With `days_until_due` Stripe mails it; without, `pay_invoice` charges it."""
    params: dict[str, Any] = {
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
    with _translated():
        return read_invoice(_stripe().invoices.create(params, _keyed(key)))


def add_invoice_lines(*, invoice_id: str, lines: Sequence[InvoiceLine], key: str) -> Invoice:
    """Add our lines to a draft."""
    written = [
        {"description": line.description, "amount": line.amount_cents, "metadata": {"key": line.key}} for line in lines
    ]
    with _translated():
        return read_invoice(_stripe().invoices.add_lines(invoice_id, {"lines": written}, _keyed(key)))


def finalize_invoice(*, invoice_id: str, key: str) -> Invoice:
    with _translated():
        return read_invoice(
            _stripe().invoices.finalize_invoice(invoice_id, {"auto_advance": False, **_PAYMENTS}, _keyed(key))
        )


def pay_invoice(*, invoice_id: str, key: str) -> Invoice:
    """Charge the customer's card while the customer is absent. Raises CardDeclined."""
    with _translated():
        return read_invoice(_stripe().invoices.pay(invoice_id, {"off_session": True, **_PAYMENTS}, _keyed(key)))


def void_invoice(*, invoice_id: str, key: str) -> Invoice:
    with _translated():
        return read_invoice(_stripe().invoices.void_invoice(invoice_id, {}, _keyed(key)))


def delete_draft(*, invoice_id: str) -> None:
    """Delete an invoice that was never finalized. Raises StripeRefused when it was."""
    with _translated():
        _stripe().invoices.delete(invoice_id)


def mark_uncollectible(*, invoice_id: str, key: str) -> Invoice:
    with _translated():
        return read_invoice(_stripe().invoices.mark_uncollectible(invoice_id, {}, _keyed(key)))


def get_invoice(*, invoice_id: str) -> Invoice:
    with _translated():
        return read_invoice(_stripe().invoices.retrieve(invoice_id, _PAYMENTS))


_PAYMENTS = {"expand": ["payments"]}


# --- Refunds and disputes ---------------------------------------------------------------------------------------------


def create_refund(*, payment_intent_id: str, amount_cents: int, refund_id: str, key: str) -> Refund:
    """Refund to the card that paid."""
    params = {
        "payment_intent": payment_intent_id,
        "amount": amount_cents,
        "reason": "requested_by_customer",
        "metadata": {"refund_id": refund_id},
    }
    with _translated():
        return read_refund(_stripe().refunds.create(params, _keyed(key)))


def get_refund(*, refund_id: str) -> Refund:
    with _translated():
        return read_refund(_stripe().refunds.retrieve(refund_id))


def get_dispute(*, dispute_id: str) -> Dispute:
    with _translated():
        return read_dispute(_stripe().disputes.retrieve(dispute_id))


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
    params = {"created": _period(since, until), "limit": _PAGE}
    with _translated():
        for event in _stripe().events.list(params).auto_paging_iter():
            if event.type in EVENTS:
                yield read_notice(event)


def list_cash_movements(*, since: datetime.datetime, until: datetime.datetime) -> Iterator[CashMovement]:
    """Yield the movements in Stripe's account in the half-open period, newest first."""
    params = {"created": _period(since, until), "limit": _PAGE, "expand": ["data.source"]}
    with _translated():
        for found in _stripe().balance_transactions.list(params).auto_paging_iter():
            yield read_movement(found)


def find_invoices(*, customer_id: str, since: datetime.datetime, metadata: Mapping[str, str]) -> list[Invoice]:
    """Return the customer's invoices created since then whose metadata includes all of `metadata`, newest first."""
    params = {"customer": customer_id, "created": {"gte": int(since.timestamp())}, "limit": _PAGE}
    with _translated():
        found = [read_invoice(each) for each in _stripe().invoices.list(params).auto_paging_iter()]
    return [each for each in found if metadata.items() <= each.metadata.items()]


def list_open_invoices(*, customer_id: str) -> list[Invoice]:
    with _translated():
        found = _stripe().invoices.list({"customer": customer_id, "status": "open", "limit": _PAGE})
        return [read_invoice(each) for each in found.auto_paging_iter()]


def create_webhook(*, url: str, key: str) -> Webhook:
    """Register a receiver for the events that we handle, in our API version."""
    params = {"url": url, "enabled_events": list(EVENTS), "api_version": API_VERSION}
    with _translated():
        made = _stripe().webhook_endpoints.create(params, _keyed(key))
    return Webhook(id=made.id, url=made.url, secret=made.secret or "")


def send_meter_event(*, name: str, customer_id: str, quantity: int, at: datetime.datetime, identifier: str) -> None:
    """Mirror a quantity to a Stripe meter.

    A meter remembers an identifier for a day: a known one was sent already.
    """
    params = {
        "event_name": name,
        "payload": {"stripe_customer_id": customer_id, "value": str(quantity)},
        "timestamp": int(at.timestamp()),
        "identifier": identifier,
    }
    try:
        with _translated():
            _stripe().billing.meter_events.create(params, _keyed(f"meter:{identifier}"))
    except StripeRefused as error:
        if "already exists with identifier" not in error.message:
            raise


def _period(since: datetime.datetime, until: datetime.datetime) -> dict[str, int]:
    return {"gte": int(since.timestamp()), "lt": int(until.timestamp())}
