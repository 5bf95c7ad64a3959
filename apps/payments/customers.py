"""The Stripe customer of an organization, and the card that may be charged."""

from django.db import transaction

from apps.accounts.models import Membership, Organization
from apps.core import audit
from apps.payments.models import AutoRecharge, StripeCustomer
from apps.payments.stripe import gateway
from apps.payments.stripe.objects import Card, CardLeft

_SHOWN = ["payment_method_id", "card_brand", "card_last4", "card_exp_month", "card_exp_year"]
_NEWEST = ["is_newest_chosen", "newest_left_at", "newest_method_id"]


def get_customer(*, organization: Organization | str) -> StripeCustomer | None:
    return StripeCustomer.objects.for_organization(organization).first()


def ensure_customer(*, organization_id: str) -> StripeCustomer:
    """Return the organization's customer, creating it at Stripe the first time. Calls Stripe."""
    found = get_customer(organization=organization_id)
    if found is not None:
        return found
    organization = Organization.objects.get(pk=organization_id)
    owners = Membership.objects.people().filter(organization=organization, role="owner")
    owner = owners.select_related("user").earliest("pk")
    stripe_id = gateway.create_customer(organization_id=organization.pk, name=organization.name, email=owner.user.email)
    row = StripeCustomer(organization=organization, stripe_id=stripe_id)
    StripeCustomer.objects.bulk_create([row], ignore_conflicts=True)
    return StripeCustomer.objects.get(organization=organization)


def keep_card(*, customer: StripeCustomer, card: CardLeft, cause: str, is_chosen: bool = True) -> None:
    """Make this card the one charged in future, unless its owner left another one later. Calls Stripe.

    Pages may be reported in any order and at once: the card left last, by Stripe's clock, wins. A card merely paid with
    (`is_chosen` false) never replaces one that was left to be charged.

    `cause` is the page or top-up where the card was used. It is part of the key: with the card alone, setting an
    earlier card again would make Stripe repeat its first answer and do nothing.
    """
    if not _record_newest(customer, card, is_chosen) and not _is_charged(customer, card):
        return
    used = ""
    while used != (newest := StripeCustomer.objects.get(pk=customer.pk).newest_method_id):
        gateway.use_card(customer_id=customer.stripe_id, payment_method_id=newest, key=f"card:{cause}:{newest}")
        used = newest  # a concurrent call may have set a newer card before this one: the loop sets it again
    sync_card(customer=customer)


@transaction.atomic
def _record_newest(customer: StripeCustomer, card: CardLeft, is_chosen: bool) -> bool:
    """Store the card if it is the customer's newest; return whether it is."""
    known = StripeCustomer.objects.select_for_update().get(pk=customer.pk)
    if not is_chosen and known.has_card and not known.newest_method_id:
        return False  # kept before the newest was recorded: counts as chosen
    is_newest = _set_newest(known, card, is_chosen)
    known.save(update_fields=_NEWEST)
    return is_newest


def _set_newest(customer: StripeCustomer, card: CardLeft, is_chosen: bool) -> bool:
    known = (customer.is_newest_chosen, customer.newest_left_at, customer.newest_method_id)
    ours = (is_chosen, card.left_at, card.payment_method_id)
    if customer.newest_left_at is not None and ours < known:
        return False
    customer.is_newest_chosen, customer.newest_left_at, customer.newest_method_id = ours
    return True


def _is_charged(customer: StripeCustomer, card: CardLeft) -> bool:
    """Return whether Stripe would charge this card. A card that is not the newest got there by an interrupted race."""
    charged = gateway.get_card(customer_id=customer.stripe_id)
    return charged is not None and charged.payment_method_id == card.payment_method_id


def sync_card(*, customer: StripeCustomer) -> None:
    """Store the card that Stripe would charge now, or none. Calls Stripe."""
    card = gateway.get_card(customer_id=customer.stripe_id)
    with transaction.atomic():
        _set_card(StripeCustomer.objects.select_for_update().get(pk=customer.pk), card)


def _set_card(customer: StripeCustomer, card: Card | None) -> None:
    before = customer.payment_method_id
    if card is None and before and before == customer.newest_method_id:
        customer.is_newest_chosen = False  # it was removed: the next card paid with may replace it
    if card is not None and card.payment_method_id not in (before, customer.newest_method_id):
        _set_newest(customer, card, True)  # chosen at Stripe, in its portal
    customer.payment_method_id = card.payment_method_id if card else ""
    customer.card_brand = card.brand if card else ""
    customer.card_last4 = card.last4 if card else ""
    customer.card_exp_month = card.exp_month if card else None
    customer.card_exp_year = card.exp_year if card else None
    customer.save(update_fields=_SHOWN + _NEWEST)
    if before != customer.payment_method_id:
        orders = AutoRecharge.objects.filter(organization_id=customer.organization_id)
        orders.update(failures=0, paused_until=None)  # the declined card is charged no more
        audit.record(
            organization=customer.organization_id, by="stripe", action="card.changed", target=customer.pk,
            last4=customer.card_last4,
        )  # fmt: skip
