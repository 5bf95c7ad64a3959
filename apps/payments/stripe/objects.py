"""The parts of Stripe's objects that we use: frozen, in integer cents."""

import datetime
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from apps.payments.lifecycle import RefundStatus

CURRENCY = "usd"  # of all amounts that we ask for, and of the books


class CheckoutStatus(StrEnum):
    """A complete page may still wait for its payment: a bank transfer takes days."""

    OPEN = "open"
    COMPLETE = "complete"
    EXPIRED = "expired"


class InvoiceStatus(StrEnum):
    """Where an invoice at Stripe is."""

    DRAFT = "draft"
    OPEN = "open"
    PAID = "paid"
    VOID = "void"
    UNCOLLECTIBLE = "uncollectible"


class CardLeft(msgspec.Struct, frozen=True, kw_only=True):
    """A card that a customer entered, and when by Stripe's clock, in whole seconds."""

    payment_method_id: str
    left_at: datetime.datetime


class Card(CardLeft, frozen=True, kw_only=True):
    """A card as shown on pages."""

    brand: str
    last4: str
    exp_month: int
    exp_year: int


class Checkout(msgspec.Struct, frozen=True, kw_only=True):
    """A hosted page on which a customer pays or leaves a card."""

    id: str
    takes_payment: bool
    status: CheckoutStatus
    is_paid: bool
    url: str
    reference: str
    payment_intent_id: str
    setup_intent_id: str
    subtotal_cents: int
    tax_cents: int
    total_cents: int
    currency: str


class Payment(msgspec.Struct, frozen=True, kw_only=True):
    """A payment intent and the failure it ended in, if any."""

    id: str
    status: str
    amount_cents: int
    received_cents: int
    currency: str
    metadata: Mapping[str, str]
    failure: str


class StripeInvoice(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    status: InvoiceStatus
    subtotal_cents: int
    tax_cents: int
    total_cents: int
    paid_cents: int
    currency: str
    hosted_url: str
    payment_intent_ids: tuple[str, ...]
    metadata: Mapping[str, str]


class StripeInvoiceLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line to print on an invoice at Stripe."""

    description: str
    amount_cents: int
    key: str


class Refund(msgspec.Struct, frozen=True, kw_only=True):
    """A refund in our own words: Stripe's "requires_action" is pending, its "canceled" is failed."""

    id: str
    status: RefundStatus
    amount_cents: int
    currency: str
    payment_intent_id: str
    failure: str
    metadata: Mapping[str, str]


class CashMovement(msgspec.Struct, frozen=True, kw_only=True):
    """A balance transaction: the amount moved in Stripe's account, and Stripe's fee."""

    id: str
    kind: str
    source_id: str
    amount_cents: int
    fee_cents: int
    currency: str  # in which Stripe's account settles it
    created_at: datetime.datetime

    @property
    def obstacle(self) -> str:
        """Return why the books cannot take the amount; "" if they can."""
        if self.currency == CURRENCY:
            return ""
        own, ours = self.currency.upper(), CURRENCY.upper()
        return f"Stripe settled it in {own}, but the books are in {ours}. Add a bank account in {ours} at Stripe."


class Dispute(msgspec.Struct, frozen=True, kw_only=True):
    """A cardholder's claim. `movements` lists what Stripe has withdrawn for it and given back so far."""

    id: str
    status: str
    reason: str
    amount_cents: int
    currency: str
    payment_intent_id: str
    movements: tuple[CashMovement, ...]


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """An event about an object. Its present state is fetched from Stripe, never read from the event."""

    id: str
    type: str
    api_version: str
    object_id: str
    object_type: str
    customer_id: str = ""  # "" where the object names none
    created_at: datetime.datetime
