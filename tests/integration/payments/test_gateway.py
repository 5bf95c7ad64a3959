"""Everything we ask of Stripe, asked: of the twin, and of Stripe's test mode where a key is given."""

import datetime
from typing import Any

import pytest
import stripe
from django.db import transaction

from apps.core.ids import new_id
from apps.payments.stripe import gateway
from apps.payments.stripe.client import InsideTransaction
from apps.payments.stripe.errors import BadSignature, CardDeclined, StripeRefused, StripeUnavailable
from apps.payments.stripe.objects import StripeInvoiceLine
from tests.twins.stripe import money
from tests.twins.stripe.twin import Fault, Twin, signed

pytestmark = pytest.mark.django_db
LINES = [
    StripeInvoiceLine(description="Training, 2 jobs", amount_cents=1234, key="training"),
    StripeInvoiceLine(description="Inference", amount_cents=66, key="inference"),
]


def make_customer(client: stripe.StripeClient, card: str = "pm_card_visa") -> str:
    customer = gateway.create_customer(organization_id=new_id("org"), name="Acme", email="acme@example.com")
    method = client.v1.payment_methods.attach(card, {"customer": customer})
    gateway.use_card(customer_id=customer, payment_method_id=method.id, key=new_id("key"))
    return customer


def make_invoice(customer: str, key: str, days: int | None = None) -> str:
    made = gateway.create_invoice(
        customer_id=customer, metadata={"topup_id": key}, description="Credit", days_until_due=days, key=f"{key}:make"
    )
    gateway.add_invoice_lines(invoice_id=made.id, lines=LINES, key=f"{key}:lines")
    return made.id


def test_an_invoice_is_written_finalized_and_charged_while_nobody_is_there(any_stripe: Any) -> None:
    key = new_id("key")
    invoice_id = make_invoice(make_customer(any_stripe), key)

    finalized = gateway.finalize_invoice(invoice_id=invoice_id, key=f"{key}:finalize")
    paid = gateway.pay_invoice(invoice_id=invoice_id, key=f"{key}:pay")

    assert (finalized.status, finalized.subtotal_cents, finalized.total_cents) == ("open", 1300, 1300)
    assert (paid.status, paid.paid_cents, dict(paid.metadata)) == ("paid", 1300, {"topup_id": key})
    payment = gateway.get_payment(payment_intent_id=gateway.get_invoice(invoice_id=invoice_id).payment_intent_ids[0])
    assert (payment.status, payment.received_cents, payment.currency) == ("succeeded", 1300, "usd")


@pytest.mark.parametrize(
    ("card", "reason"),
    [("pm_card_chargeCustomerFail", "generic_decline"), ("pm_card_authenticationRequired", "authentication_required")],
)
def test_a_card_that_is_declined_says_why_and_the_invoice_stays_open(any_stripe: Any, card: str, reason: str) -> None:
    key = new_id("key")
    invoice_id = make_invoice(make_customer(any_stripe, card), key)
    gateway.finalize_invoice(invoice_id=invoice_id, key=f"{key}:finalize")

    with pytest.raises(CardDeclined) as declined:
        gateway.pay_invoice(invoice_id=invoice_id, key=f"{key}:pay")

    assert declined.value.reason == reason
    assert gateway.get_invoice(invoice_id=invoice_id).status == "open"
    assert gateway.void_invoice(invoice_id=invoice_id).status == "void"


def test_money_goes_back_to_the_card_once_and_no_more_than_came(any_stripe: Any) -> None:
    key = new_id("key")
    invoice_id = make_invoice(make_customer(any_stripe), key)
    gateway.finalize_invoice(invoice_id=invoice_id, key=f"{key}:finalize")
    intent = gateway.pay_invoice(invoice_id=invoice_id, key=f"{key}:pay").payment_intent_ids[0]

    refunds = [
        gateway.create_refund(payment_intent_id=intent, amount_cents=300, refund_id=key, key=f"{key}:refund")
        for _ in range(2)
    ]
    with pytest.raises(StripeRefused):
        gateway.create_refund(payment_intent_id=intent, amount_cents=1001, refund_id=key, key=f"{key}:more")

    assert refunds[0] == refunds[1]
    assert gateway.get_refund(refund_id=refunds[0].id).status in ("succeeded", "pending")
    now = datetime.datetime.now(datetime.UTC)
    since, until = now - datetime.timedelta(hours=1), now + datetime.timedelta(hours=1)
    moved = {each.source_id: each.amount_cents for each in gateway.list_cash_movements(since=since, until=until)}
    assert (moved[intent], moved[refunds[0].id]) == (1300, -300)


def test_the_same_key_makes_one_customer_and_another_request_under_it_is_refused(any_stripe: Any) -> None:
    organization_id = new_id("org")
    first = gateway.create_customer(organization_id=organization_id, name="Acme", email="a@example.com")
    again = gateway.create_customer(organization_id=organization_id, name="Acme", email="a@example.com")

    assert first == again
    with pytest.raises(StripeRefused):
        gateway.create_customer(organization_id=organization_id, name="Other", email="a@example.com")


def test_pages_for_paying_for_leaving_a_card_and_for_invoices_have_addresses(any_stripe: Any) -> None:
    customer, key = make_customer(any_stripe), new_id("key")
    urls = {"success_url": "https://example.com/ok", "cancel_url": "https://example.com/no"}

    paying = gateway.create_topup_page(customer_id=customer, topup_id=key, amount_cents=2500, key=f"{key}:pay", **urls)
    leaving = gateway.create_card_page(customer_id=customer, reference=key, key=f"{key}:card", **urls)
    portal = any_stripe.v1.billing_portal.configurations.create({"features": {"invoice_history": {"enabled": True}}})
    visit = gateway.create_portal_page(
        customer_id=customer, return_url="https://example.com", configuration_id=portal.id, key=f"{key}:visit"
    )

    found = gateway.get_checkout(checkout_id=paying.id)
    assert (found.status, found.is_paid, found.total_cents, found.reference) == ("open", False, 2500, key)
    assert all(url.startswith("https://") for url in (paying.url, leaving.url, visit))


def test_the_card_that_is_charged_is_shown(any_stripe: Any) -> None:
    card = gateway.get_card(customer_id=make_customer(any_stripe, "pm_card_mastercard"))

    assert card is not None
    assert (card.brand, card.last4) == ("mastercard", "4444")


def test_a_meter_event_sent_again_is_sent_already(served_twin: Twin) -> None:
    at = datetime.datetime(2026, 11, 21, tzinfo=datetime.UTC)
    for _ in range(2):
        gateway.send_meter_event(name="tokens", customer_id="cus_1", quantity=7, at=at, identifier="series-1:7")
        served_twin._kept.clear()  # a day later Stripe has forgotten our key, and still knows the identifier

    assert len(served_twin.of_kind("billing.meter_event")) == 1


# --- What the wire does -----------------------------------------------------------------------------------------------


@pytest.fixture
def _no_pauses(monkeypatch: Any) -> None:
    monkeypatch.setattr(stripe.HTTPClient, "_sleep_time_seconds", lambda *_: 0.0)


@pytest.mark.usefixtures("_no_pauses")
@pytest.mark.parametrize("fault", ["before", "after", 500, 409], ids=str)
def test_a_call_that_failed_on_the_way_is_repeated_and_done_once(served_twin: Twin, fault: str | int) -> None:
    served_twin.faults.append(Fault(fault, "POST /v1/customers"))

    made = gateway.create_customer(organization_id="org_1", name="Acme", email="a@example.com")

    assert [each["id"] for each in served_twin.of_kind("customer")] == [made]


@pytest.mark.usefixtures("_no_pauses")
@pytest.mark.parametrize(("fault", "times"), [(429, 1), (500, 9), ("before", 9)], ids=str)
def test_a_call_without_an_answer_says_to_repeat_it(served_twin: Twin, fault: str | int, times: int) -> None:
    served_twin.faults.append(Fault(fault, "POST /v1/customers", times))

    with pytest.raises(StripeUnavailable):
        gateway.create_customer(organization_id="org_1", name="Acme", email="a@example.com")


def test_every_post_carries_a_key_of_ours(served_twin: Twin, monkeypatch: Any) -> None:
    keys: list[str | None] = []
    handle = served_twin.handle

    def note(method: str, url: str, headers: Any, body: str = "") -> Any:
        if method == "POST":
            keys.append({name.lower(): value for name, value in headers.items()}.get("idempotency-key"))
        return handle(method, url, headers, body)

    monkeypatch.setattr(served_twin, "handle", note)
    customer = gateway.create_customer(organization_id="org_1", name="Acme", email="a@example.com")
    method = money.give_card(served_twin, customer, "pm_card_visa")
    gateway.use_card(customer_id=customer, payment_method_id=method["id"], key="use")
    invoice_id = make_invoice(customer, "k")
    gateway.finalize_invoice(invoice_id=invoice_id, key="k:finalize")
    gateway.pay_invoice(invoice_id=invoice_id, key="k:pay")

    assert keys == ["customer:org_1", "use", "k:make", "k:lines", "k:finalize", "k:pay"]


def test_nothing_is_asked_inside_a_transaction(served_twin: Twin) -> None:
    with pytest.raises(InsideTransaction), transaction.atomic():
        gateway.create_customer(organization_id="org_1", name="Acme", email="a@example.com")

    assert served_twin.asked == []


# --- Signatures -------------------------------------------------------------------------------------------------------


def test_a_signed_webhook_names_its_object(served_twin: Twin) -> None:
    body, signature = signed(served_twin.tell("refund.created", {"id": "re_1", "object": "refund"}))

    notice = gateway.read_webhook(body=body, signature=signature)

    assert (notice.type, notice.object_type, notice.object_id) == ("refund.created", "refund", "re_1")


@pytest.mark.parametrize("what", ["tampered", "other secret", "too old", "none", "no event"])
def test_a_webhook_that_stripe_did_not_sign_just_now_is_refused(served_twin: Twin, what: str) -> None:
    event = served_twin.tell("refund.created", {"id": "re_1", "object": "refund"})
    body, signature = signed(event, secret="whsec_other" if what == "other secret" else "whsec_twin")
    if what == "tampered":
        body = body.replace(b"re_1", b"re_2")
    if what == "too old":
        body, signature = signed(event, at=int(datetime.datetime.now().timestamp()) - 301)
    if what == "none":
        signature = ""
    if what == "no event":
        body, signature = signed({"id": "x"})

    with pytest.raises(BadSignature):
        gateway.read_webhook(body=body, signature=signature)
