"""The billing page asks Stripe nothing itself, and is not there where no payments are taken."""

import datetime
from typing import Any

import pytest

from apps.accounts.models import Organization
from apps.core.database.clock import db_now
from apps.core.database.transitions import advance
from apps.core.models import OutboxMessage
from apps.payments.autorecharge import MAX_DECLINED_A_DAY
from apps.payments.lifecycle import PAGE, TOPUP
from apps.payments.models import AutoRecharge, HostedPage, StripeCustomer, StripeEvent, TopUp
from tests.twins.stripe.twin import WEBHOOK_SECRET, Twin, signed

pytestmark = pytest.mark.django_db


@pytest.fixture
def _payments(settings: Any) -> None:
    settings.STRIPE_WEBHOOK_SECRET = WEBHOOK_SECRET  # the web process has no other key


@pytest.fixture
def browser(client_for: Any, alice: Any, organization: Organization) -> Any:
    return client_for(alice)


def test_without_payments_there_is_no_page_and_no_link(browser: Any) -> None:
    assert browser.get("/billing").status_code == 404
    assert browser.post("/billing/topups", {"amount_usd": "50"}).status_code == 404
    assert browser.post("/stripe/webhook", b"{}", content_type="application/json").status_code == 404
    assert 'href="/billing"' not in browser.get("/usage").content.decode()


@pytest.mark.usefixtures("_payments")
def test_a_top_up_is_asked_for_and_the_page_goes_to_stripe_when_it_is_ready(browser: Any) -> None:
    assert 'href="/billing"' in browser.get("/usage").content.decode()
    waiting = browser.post("/billing/topups", {"amount_usd": "50"})["Location"]
    page = HostedPage.objects.get()
    assert OutboxMessage.objects.filter(topic="payments.page").count() == 1
    assert "Preparing" in browser.get(waiting).content.decode()

    url = "https://checkout.stripe.com/c/pay/cs_1"
    advance(page, to="ready", transitions=PAGE, url=url, stripe_id="cs_1")
    advance(TopUp.objects.get(), to="open", transitions=TOPUP, checkout_id="cs_1")

    polled = browser.get(f"{waiting}?waiting=1", headers={"HX-Request": "true"})
    assert polled["HX-Redirect"] == url
    assert url in browser.get(waiting).content.decode()
    assert OutboxMessage.objects.filter(topic="payments.topup").exists()


@pytest.mark.usefixtures("_payments")
def test_an_amount_out_of_range_is_said_at_its_field(browser: Any) -> None:
    response = browser.post("/billing/topups", {"amount_usd": "4.99"})

    assert response.status_code == 422
    assert "between $5 and $10,000" in response.content.decode()
    assert not TopUp.objects.exists()


@pytest.mark.usefixtures("_payments")
def test_auto_recharge_needs_a_card_and_is_saved_with_one(browser: Any, organization: Organization) -> None:
    body = {"is_enabled": "on", "threshold_usd": "10", "amount_usd": "50", "monthly_cap_usd": "200"}
    assert "Add a card first" in browser.post("/billing/auto-recharge", body).content.decode()

    StripeCustomer.objects.create(
        organization=organization, stripe_id="cus_1", payment_method_id="pm_1", card_brand="visa", card_last4="4242"
    )
    assert browser.post("/billing/auto-recharge", body).status_code == 302

    assert AutoRecharge.objects.get().monthly_cap_cents == 20_000
    assert "4242" in browser.get("/billing").content.decode()


@pytest.mark.usefixtures("_payments")
def test_a_pause_is_shown_and_ended_by_its_button(browser: Any, organization: Organization) -> None:
    paused = {"is_enabled": True, "failures": 1, "paused_until": db_now() + datetime.timedelta(hours=1)}
    AutoRecharge.objects.create(organization=organization, **paused)
    assert "Try it again now" in browser.get("/billing").content.decode()

    browser.post("/billing/auto-recharge/resume")
    again = browser.post("/billing/auto-recharge/resume", follow=True)

    assert AutoRecharge.objects.get().paused_until is None
    assert "Auto-recharge is not paused." in again.content.decode()
    assert "Try it again now" not in browser.get("/billing").content.decode()


@pytest.mark.slow
@pytest.mark.usefixtures("_payments")
def test_five_declines_within_a_day_and_their_end_are_shown(browser: Any, organization: Organization) -> None:
    AutoRecharge.objects.create(organization=organization, is_enabled=True)
    for hours in range(MAX_DECLINED_A_DAY):
        assert "The bank declined 5 automatic charges" not in browser.get("/billing").content.decode()
        TopUp.objects.create(
            organization=organization, origin="auto", amount_cents=5000, requested_by="system", status="failed",
            declined_at=db_now() - datetime.timedelta(hours=hours),
        )  # fmt: skip

    page = browser.get("/billing").content.decode()

    end = TopUp.objects.earliest("declined_at").declined_at + datetime.timedelta(days=1)
    assert "The bank declined 5 automatic charges" in page and end.isoformat()[:16] in page
    assert "Try it again now" not in page


@pytest.mark.usefixtures("_payments")
def test_a_webhook_is_stored_when_it_is_signed_and_only_then(browser: Any) -> None:
    body, signature = signed(Twin().tell("refund.created", {"id": "re_1", "object": "refund"}))
    post = {"content_type": "application/json", "headers": {"Stripe-Signature": signature}}

    answers = [browser.post("/stripe/webhook", sent, **post).status_code for sent in (body, body, body + b" ")]

    assert answers == [200, 200, 400]
    assert StripeEvent.objects.count() == 1


@pytest.mark.usefixtures("_payments")
def test_operators_see_payments_and_refund_them(
    client_for: Any, olga: Any, organization: Organization, near_payment: TopUp
) -> None:
    console = client_for(olga)
    page = console.get("/staff/payments").content.decode()
    assert "Not yet verified against Stripe" in page and near_payment.payment_intent_id in page

    too_much = console.post(f"/staff/payments/{near_payment.pk}/refund", {"amount_usd": "51", "reason": "r"})
    console.post(f"/staff/payments/{near_payment.pk}/refund", {"amount_usd": "20", "reason": "Asked for"})

    assert too_much.status_code == 422
    assert [refund.credit_cents for refund in near_payment.refunds.all()] == [2000]


@pytest.fixture
def near_payment(organization: Organization) -> TopUp:
    from apps.billing.operations import grant_paid_credit
    from apps.core.database.clock import db_now
    from apps.core.money import NANO_PER_CENT

    topup = TopUp.objects.create(organization=organization, origin="user", amount_cents=5000, requested_by="user_1")
    advance(topup, to="paid", transitions=TOPUP, paid_at=db_now(), payment_intent_id="pi_1")
    grant_paid_credit(
        organization=organization, amount_nano=5000 * NANO_PER_CENT, reference=topup.reference, by="stripe"
    )
    return topup
