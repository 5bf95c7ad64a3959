"""Automatic payments charge the card that was saved last, in any order of Stripe's events."""

import copy
import datetime
import itertools
from typing import Any

import pytest
from django.db import transaction

from apps.accounts.models import Organization
from apps.core.models import AuditEntry
from apps.payments import topups
from apps.payments.customers import ensure_customer, keep_card
from apps.payments.models import HostedPage, StripeCustomer
from apps.payments.stripe import gateway
from apps.payments.stripe.objects import CardLeft
from tests.support.payments import deliver, open_topup
from tests.twins.stripe import money
from tests.twins.stripe.twin import Twin

pytestmark = pytest.mark.django_db


def test_a_card_taken_up_again_after_another_is_charged_again(near_twin: Twin, organization: Organization) -> None:
    customer = ensure_customer(organization_id=organization.pk)
    first, second = (money.left(money.give_card(near_twin, customer.stripe_id, each)) for each in ("pm_card_visa",) * 2)
    again = CardLeft(payment_method_id=first.payment_method_id, left_at=second.left_at + datetime.timedelta(seconds=1))

    for cause, card in (("page_1", first), ("page_2", second), ("page_3", again), ("page_3", again)):
        keep_card(customer=customer, card=card, cause=cause)

    customer.refresh_from_db()
    assert customer.payment_method_id == first.payment_method_id


def charged(twin: Twin, organization: Organization) -> tuple[str, str]:
    """Return the last digits of the card Stripe would charge, and of the one we show."""
    customer = StripeCustomer.objects.get(organization=organization)
    method = twin.get(customer.stripe_id)["invoice_settings"]["default_payment_method"]
    return (twin.get(method)["card"]["last4"] if method else ""), customer.card_last4


def leave_cards(twin: Twin, organization: Organization, *steps: tuple[str, str]) -> list[dict[str, Any]]:
    """Save or pay with each card, a minute after the one before; return Stripe's event about each."""
    told = []
    begun = int(twin.now())
    for number, (kind, card) in enumerate(steps):
        twin.now = lambda at=begun + 60 * number: at
        if kind == "card":
            page = topups.request_page(organization=organization, kind="card", by="user_1")
            topups.make_page(page_id=page.pk)
            session = HostedPage.objects.get(pk=page.pk).stripe_id
        else:
            session = open_topup(organization, 1000).checkout_id or ""
        twin.events.clear()
        money.pay_checkout(twin, session, card)
        told.append(copy.deepcopy(twin.events[-1]))
    return told


@pytest.mark.parametrize("kind", ["card", "portal"])
def test_a_page_of_stripe_is_in_the_audit_log_whose_entries_are_limited(
    near_twin: Twin, organization: Organization, kind: str
) -> None:
    page = topups.request_page(organization=organization, kind=kind, by="user_1")

    entry = AuditEntry.objects.get(action="payment.page_requested")
    assert (entry.actor, entry.target, entry.details) == ("user_1", page.pk, {"kind": kind})


VISA, MASTERCARD = "pm_card_visa", "pm_card_mastercard"
LEFT = [("card", VISA), ("card", MASTERCARD)]
PAID_BETWEEN = [("topup", "pm_card_refundFail"), ("card", MASTERCARD), ("topup", VISA)]


@pytest.mark.parametrize("steps", [LEFT, PAID_BETWEEN], ids=["two pages", "a page between top-ups"])
def test_the_card_left_last_is_charged_in_whatever_order_webhooks_come(
    near_twin: Twin, organization: Organization, steps: list[tuple[str, str]]
) -> None:
    told = leave_cards(near_twin, organization, *steps)
    customer = near_twin.get(StripeCustomer.objects.get(organization=organization).stripe_id)

    for order in itertools.permutations(told):
        mark = transaction.savepoint()
        for event in order:
            deliver(event)
        for event in copy.deepcopy([each for each in near_twin.events if each["type"] == "customer.updated"]):
            deliver(event)
        assert charged(near_twin, organization) == ("4444", "4444"), [each["id"] for each in order]
        customer["invoice_settings"]["default_payment_method"] = None
        near_twin._kept.clear()
        transaction.savepoint_rollback(mark)


def test_two_pages_handled_at_the_same_time_leave_the_card_of_the_later(
    near_twin: Twin, organization: Organization, monkeypatch: Any
) -> None:
    first, second = leave_cards(near_twin, organization, *LEFT)
    use, waiting = gateway.use_card, [second]

    def use_late(**call: Any) -> None:
        while waiting:  # the second page is handled whole while the first one's call is on its way
            deliver(waiting.pop())
        use(**call)

    monkeypatch.setattr(gateway, "use_card", use_late)
    deliver(first)

    assert charged(near_twin, organization) == ("4444", "4444")


def test_a_card_chosen_in_the_portal_is_not_replaced_by_one_left_before(
    near_twin: Twin, organization: Organization
) -> None:
    (late,) = leave_cards(near_twin, organization, ("card", VISA))
    later = near_twin.now() + 60
    near_twin.now = lambda: later
    customer = near_twin.get(StripeCustomer.objects.get(organization=organization).stripe_id)
    chosen = money.give_card(near_twin, customer["id"], MASTERCARD)
    customer["invoice_settings"]["default_payment_method"] = chosen["id"]
    deliver(near_twin.tell("customer.updated", customer))

    deliver(late)

    assert charged(near_twin, organization) == ("4444", "4444")
