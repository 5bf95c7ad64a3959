"""Stripe's customer of an organization, and the card it may charge."""

from typing import Any

from django.db import transaction

from apps.accounts.models import Membership, Organization
from apps.core import audit
from apps.payments import stripe_gateway
from apps.payments.models import StripeCustomer
from apps.payments.stripe_objects import Card


def get_customer(*, organization: Any) -> StripeCustomer | None:
    return StripeCustomer.objects.for_organization(organization).first()


def ensure_customer(*, organization_id: str) -> StripeCustomer:
    """Return the organization's customer, creating it at Stripe the first time. Asks Stripe."""
    found = get_customer(organization=organization_id)
    if found is not None:
        return found
    organization = Organization.objects.get(pk=organization_id)
    owner = Membership.objects.filter(organization=organization, role="owner").select_related("user").earliest("pk")
    stripe_id = stripe_gateway.create_customer(
        organization_id=organization.pk, name=organization.name, email=owner.user.email
    )
    row = StripeCustomer(organization=organization, stripe_id=stripe_id)
    StripeCustomer.objects.bulk_create([row], ignore_conflicts=True)
    return StripeCustomer.objects.get(organization=organization)


def keep_card(*, customer: StripeCustomer, payment_method_id: str, cause: str) -> None:
    """Make a card that its owner just used the one that is charged later. Asks Stripe.

    `cause` is the page or top-up they used it at: a card taken up again after another one is asked for again, where a
    key of the card alone would have Stripe repeat its first answer and do nothing.
    """
    stripe_gateway.use_card(
        customer_id=customer.stripe_id,
        payment_method_id=payment_method_id,
        key=f"card:{cause}:{payment_method_id}",
    )
    sync_card(customer=customer)


def sync_card(*, customer: StripeCustomer) -> None:
    """Show the card that Stripe would charge now, or none. Asks Stripe."""
    card = stripe_gateway.get_card(customer_id=customer.stripe_id)
    with transaction.atomic():
        _set_card(StripeCustomer.objects.select_for_update().get(pk=customer.pk), card)


def _set_card(customer: StripeCustomer, card: Card | None) -> None:
    before = customer.payment_method_id
    customer.payment_method_id = card.payment_method_id if card else ""
    customer.card_brand = card.brand if card else ""
    customer.card_last4 = card.last4 if card else ""
    customer.card_exp_month = card.exp_month if card else None
    customer.card_exp_year = card.exp_year if card else None
    customer.save(update_fields=["payment_method_id", "card_brand", "card_last4", "card_exp_month", "card_exp_year"])
    if before != customer.payment_method_id:
        audit.record(
            organization=customer.organization_id, by="stripe", action="card.changed", target=customer.pk,
            last4=customer.card_last4,
        )  # fmt: skip
