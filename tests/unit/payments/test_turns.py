"""Calls to Stripe wait for the turn of the organization that they are for, and each has a limited number of them."""

import datetime

import pytest

from apps.accounts.models import Organization
from apps.core.database.clock import db_now
from apps.core.errors import RateLimited
from apps.core.models import OutboxMessage
from apps.payments import autorecharge, topups, webhooks
from apps.payments.customers import ensure_customer
from apps.payments.models import AutoRecharge, HostedPage, PageKind, StripeEvent
from tests.support.payments import open_topup
from tests.twins.stripe import money
from tests.twins.stripe.twin import Twin, signed

pytestmark = pytest.mark.django_db


def test_the_sweep_leaves_every_call_to_the_turn_of_its_organization(
    near_twin: Twin, organization: Organization
) -> None:
    topup = open_topup(organization, 2500)
    AutoRecharge.objects.create(organization=organization, is_enabled=True)
    begun = autorecharge.start_due(now=db_now())
    money.pay_checkout(near_twin, topup.checkout_id or "")
    body, signature = signed(near_twin.events[-1])
    webhooks.receive(body=body, signature=signature)
    StripeEvent.objects.update(attempts=1)
    before = len(near_twin.asked)

    moment = db_now()
    for _ in range(3):
        topups.sweep_topups(now=moment)
        webhooks.ring_unhandled(now=db_now() + datetime.timedelta(minutes=1))

    assert (begun, len(near_twin.asked)) == (1, before)
    waiting = OutboxMessage.objects.filter(lane="payments").exclude(topic="payments.page").order_by("id")
    customer = ensure_customer(organization_id=organization.pk)
    assert list(waiting.values_list("topic", "share")) == [
        ("payments.charge", organization.pk),
        ("payments.event", customer.stripe_id),
        ("payments.topup", organization.pk),
        ("payments.event", customer.stripe_id),
    ]


def test_the_reconciliation_handles_the_events_of_each_customer_in_turn(db: None) -> None:
    at = db_now() - datetime.timedelta(hours=1)
    names = [*(f"evt_many_{number:03}" for number in range(150)), "evt_one"]
    for number, name in enumerate(names):
        StripeEvent.objects.create(
            id=name, type="invoice.paid", object_id="in_1", object_type="invoice", created_at=at,
            received_at=at + datetime.timedelta(seconds=number), customer_id=name[:8],
        )  # fmt: skip

    assert webhooks.list_unhandled(now=db_now())[:3] == ["evt_many_000", "evt_one", "evt_many_001"]


def test_an_organization_opens_a_limited_number_of_payment_pages_an_hour(
    near_twin: Twin, organization: Organization, rival: Organization
) -> None:
    for _ in range(topups.MAX_PAGES_AN_HOUR):
        topups.request_topup(organization=organization, amount_cents=2500, by="user_1")

    with pytest.raises(RateLimited):
        topups.request_page(organization=organization, kind=PageKind.PORTAL, by="user_1")
    topups.request_topup(organization=rival, amount_cents=2500, by="user_2")
    HostedPage.objects.update(created_at=db_now() - datetime.timedelta(hours=2))
    topups.request_topup(organization=organization, amount_cents=2500, by="user_1")
