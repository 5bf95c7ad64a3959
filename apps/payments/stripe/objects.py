"""What we read of Stripe's objects: frozen, in integer cents, with only the fields something here depends on."""

import datetime
from collections.abc import Mapping

import msgspec


class CardLeft(msgspec.Struct, frozen=True, kw_only=True):
    """A card that somebody entered, and when, by Stripe's clock, in whole seconds."""

    payment_method_id: str
    left_at: datetime.datetime


class Card(CardLeft, frozen=True, kw_only=True):
    """A card as it is shown."""

    brand: str
    last4: str
    exp_month: int
    exp_year: int


class Checkout(msgspec.Struct, frozen=True, kw_only=True):
    """A hosted page on which a person pays or leaves a card."""

    id: str
    mode: str
    status: str
    payment_status: str
    url: str
    reference: str
    customer_id: str
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
    customer_id: str
    metadata: Mapping[str, str]
    failure: str


class Invoice(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    number: str
    status: str
    subtotal_cents: int
    tax_cents: int
    total_cents: int
    paid_cents: int
    currency: str
    customer_id: str
    hosted_url: str
    pdf_url: str
    payment_intent_ids: tuple[str, ...]
    attempt_count: int
    metadata: Mapping[str, str]


class InvoiceLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line as we ask Stripe to print it."""

    description: str
    amount_cents: int
    key: str


class Refund(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    status: str
    amount_cents: int
    currency: str
    payment_intent_id: str
    failure: str
    metadata: Mapping[str, str]


class CashMovement(msgspec.Struct, frozen=True, kw_only=True):
    """A balance transaction: what moved in Stripe's account, and what Stripe kept for it."""

    id: str
    kind: str
    source_id: str
    amount_cents: int
    fee_cents: int
    currency: str
    created_at: datetime.datetime


class Dispute(msgspec.Struct, frozen=True, kw_only=True):
    """A cardholder's claim. `movements` says what Stripe has withdrawn for it and given back so far."""

    id: str
    status: str
    reason: str
    amount_cents: int
    currency: str
    payment_intent_id: str
    movements: tuple[CashMovement, ...]


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """An event: something happened to an object. What the object is now is asked of Stripe, never read from here."""

    id: str
    type: str
    api_version: str
    object_id: str
    object_type: str
    created_at: datetime.datetime


class Webhook(msgspec.Struct, frozen=True, kw_only=True):
    """A registered receiver; `secret` is told once, when it is created."""

    id: str
    url: str
    secret: str
