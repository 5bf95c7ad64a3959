"""However Stripe's webhooks arrive, late, twice, in any order or not at all, the books end where Stripe's own do."""

import copy
import datetime
import random
from collections.abc import Callable
from typing import Any

import pytest
from django.db import transaction

from apps.accounts.models import Organization
from apps.billing.models import AccountKind
from apps.billing.queries import get_balance, get_ledger_sum_nano
from apps.core.database.clock import db_now
from apps.core.messages.outbox import deliver_due
from apps.core.models import OutboxMessage
from apps.core.money import NANO_PER_CENT
from apps.payments import refunds, topups, webhooks
from apps.payments.customers import ensure_customer
from apps.payments.models import CardDispute, HostedPage, StripeEvent, TopUp
from apps.payments.stripe.errors import BadSignature, StripeUnavailable
from tests.support.payments import deliver, open_topup, paid_topup, spend, total
from tests.twins.stripe import money
from tests.twins.stripe.twin import Fault, Twin, signed

pytestmark = pytest.mark.django_db


def books() -> dict[str, int]:
    kinds = ("wallet", "hold", "receivable", "cash_clearing", "tax_payable", "revenue")
    return {kind: total(AccountKind(kind)) for kind in kinds}


def intent_of(twin: Twin, topup: TopUp) -> str:
    return twin.get(topup.checkout_id or "")["payment_intent"]


def newest(twin: Twin, kind: str) -> str:
    return twin.of_kind(kind)[-1]["id"]


# --- Any order --------------------------------------------------------------------------------------------------------


def scenario(twin: Twin, organization: Organization) -> list[Callable[[], Any]]:
    """Prepare a customer who has paid and spent before, and return what happens at Stripe next, in order."""
    twin.tax_percent = 20
    spent = paid_topup(twin, organization, 5000)
    spend(organization, 4000)
    paid, settled, unsettled, left, refunded = (open_topup(organization, 1000 * n) for n in (2, 3, 4, 5, 6))
    asked = refunds.request_refund(topup=spent, credit_cents=600, by="user_2", reason="asked for")
    twin.events.clear()

    def refund_at_stripe(topup: TopUp, cents: int) -> None:
        money.create_refund(twin, payment_intent=intent_of(twin, topup), amount=str(cents))

    return [
        lambda: money.pay_checkout(twin, paid.checkout_id or ""),
        lambda: refunds.send_refund(refund_id=asked.pk),
        lambda: money.pay_checkout(twin, settled.checkout_id or "", is_paid_later=True),
        lambda: money.open_dispute(twin, intent_of(twin, spent), 4000),
        lambda: money.pay_checkout(twin, unsettled.checkout_id or "", is_paid_later=True),
        lambda: money.settle_checkout(twin, settled.checkout_id or "", is_paid=True),
        lambda: money.expire_checkout(twin, left.checkout_id or ""),
        lambda: money.settle_checkout(twin, unsettled.checkout_id or "", is_paid=False),
        lambda: money.open_dispute(twin, intent_of(twin, settled), 3000),
        lambda: money.close_dispute(twin, newest(twin, "dispute"), is_won=True),
        lambda: money.pay_checkout(twin, refunded.checkout_id or ""),
        lambda: refund_at_stripe(refunded, 1000),
        lambda: refund_at_stripe(refunded, 2000),
        lambda: money.open_dispute(twin, intent_of(twin, paid), 2000),
        lambda: money.fail_refund(twin, newest(twin, "refund")),
        lambda: money.close_dispute(twin, newest(twin, "dispute"), is_won=False),
    ]


def short_scenario(twin: Twin, organization: Organization) -> list[Callable[[], Any]]:
    """Prepare the same customer and return a story of half as much, for a thousand orders of it."""
    twin.tax_percent = 20
    spent = paid_topup(twin, organization, 5000)
    spend(organization, 4000)
    paid = open_topup(organization, 2000)
    asked = refunds.request_refund(topup=spent, credit_cents=600, by="user_2", reason="asked for")
    twin.events.clear()

    return [
        lambda: money.pay_checkout(twin, paid.checkout_id or ""),
        lambda: refunds.send_refund(refund_id=asked.pk),
        lambda: money.open_dispute(twin, intent_of(twin, spent), 4000),
        lambda: money.create_refund(twin, payment_intent=intent_of(twin, paid), amount="1000"),
        lambda: money.close_dispute(twin, newest(twin, "dispute"), is_won=True),
        lambda: money.fail_refund(twin, newest(twin, "refund")),
    ]


def play(twin: Twin, steps: list[Callable[[], Any]], chance: random.Random) -> None:
    """Let it happen, and deliver each event at a time of its own after it, some twice, some only from Stripe's list."""
    waiting: list[dict[str, Any]] = []
    seen = 0
    lost = 0.15
    for step in steps:
        step()
        fresh, seen = twin.events[seen:], len(twin.events)
        waiting += [event for event in fresh if chance.random() > lost]
        waiting += [event for event in fresh if chance.random() < 0.2]
        chance.shuffle(waiting)
        for _ in range(chance.randrange(4)):
            if waiting:
                try_to_deliver(waiting.pop())
    for event in waiting:
        try_to_deliver(event)
    now = db_now()
    webhooks.ingest_missed(since=now - datetime.timedelta(hours=1), until=now + datetime.timedelta(hours=1))
    for event_id in StripeEvent.objects.filter(status="received").order_by("?").values_list("pk", flat=True):
        webhooks.handle(event_id=event_id)


def try_to_deliver(event: dict[str, Any]) -> None:
    try:
        deliver(event)
    except webhooks.PaymentUnknown:
        pass  # stays in the inbox


# In: 50 + 20 + 30 + 60 of credit. Out: 40 spent; 6 + 1.20 and 10 refunded; 40 and 20 disputed and not won. Cash is
# gross; Stripe's fees are posted by the reconciliation.
CASH = (5000 + 2000 + 3000 + 6000) * 120 // 100 - 720 - 1000 - 4000 - 2000
SHORT_CASH = (5000 + 2000) * 120 // 100 - 720  # the dispute is won, and the bank returns the other refund


LONG = (scenario, range(5), CASH, 4, None)
LONGER = pytest.param(scenario, range(5, 20), CASH, 4, None, marks=pytest.mark.chaos)
SHORT = [  # a thousand orders, in four parts
    pytest.param(short_scenario, range(first, first + 250), SHORT_CASH, 2, 2400, marks=pytest.mark.chaos)
    for first in range(0, 1000, 250)
]


@pytest.mark.slow
@pytest.mark.parametrize(("story", "orders", "cash", "paid", "wallet"), [LONG, LONGER, *SHORT])
def test_every_order_of_webhooks_ends_in_one_balance(
    near_twin: Twin,
    organization: Organization,
    story: Callable[..., Any],
    orders: range,
    cash: int,
    paid: int,
    wallet: int | None,
) -> None:
    steps = story(near_twin, organization)
    start = copy.deepcopy((near_twin.objects, near_twin.events, near_twin.cash, near_twin._kept))
    ends = set()

    for seed in orders:
        near_twin.objects, near_twin.events, near_twin.cash, near_twin._kept = copy.deepcopy(start)
        mark = transaction.savepoint()
        play(near_twin, steps, random.Random(seed))
        end = books() | {"paid": TopUp.objects.filter(status="paid").count(), "sum": get_ledger_sum_nano()}
        ends.add(tuple(sorted(end.items())))
        transaction.savepoint_rollback(mark)

    assert sum(movement["amount"] for movement in near_twin.cash) == cash
    assert len(ends) == 1, ends
    found = dict(ends.pop())
    assert (found["paid"], found["sum"], found["hold"], found["revenue"]) == (paid, 0, 0, 4000)
    assert found["cash_clearing"] == -cash
    assert found["wallet"] + found["receivable"] + found["revenue"] + found["tax_payable"] == cash
    assert found["wallet"] == 0 or found["receivable"] == 0
    assert wallet is None or found["wallet"] == wallet


# --- One by one -------------------------------------------------------------------------------------------------------


def test_a_paid_checkout_is_credited_once_by_webhook_landing_page_and_sweep(
    near_twin: Twin, organization: Organization
) -> None:
    topup = open_topup(organization, 2500)
    money.pay_checkout(near_twin, topup.checkout_id or "")

    for event in near_twin.events:
        deliver(event)
    topups.sync_topup(topup_id=topup.pk)
    topups.sweep_topups(now=db_now())
    deliver_due(lane="payments")

    topup.refresh_from_db()
    assert topup.status == "paid"
    assert get_balance(organization=organization).available_nano == 2500 * NANO_PER_CENT
    assert ensure_customer(organization_id=organization.pk).card_last4 == "4242"


def test_a_page_that_is_complete_and_not_paid_credits_nothing_yet(near_twin: Twin, organization: Organization) -> None:
    topup = open_topup(organization, 2500)
    money.pay_checkout(near_twin, topup.checkout_id or "", is_paid_later=True)

    deliver(near_twin.events[-1])

    assert get_balance(organization=organization).available_nano == 0
    assert TopUp.objects.get(pk=topup.pk).status == "open"


def test_another_amount_than_asked_credits_nobody_and_is_kept_for_operators(
    near_twin: Twin, organization: Organization
) -> None:
    topup = open_topup(organization, 2500)
    money.pay_checkout(near_twin, topup.checkout_id or "")
    near_twin.get(topup.checkout_id or "")["amount_subtotal"] = 2600

    with pytest.raises(topups.PaymentMismatch):
        topups.sync_topup(topup_id=topup.pk)

    assert get_balance(organization=organization).available_nano == 0


def test_a_page_whose_answer_was_lost_is_made_once(near_twin: Twin, organization: Organization) -> None:
    near_twin.faults.append(Fault("after", "POST /v1/checkout/sessions", times=9))
    page = topups.request_topup(organization=organization, amount_cents=2500, by="user_1")
    with pytest.raises(StripeUnavailable):
        topups.make_page(page_id=page.pk)

    near_twin.faults.clear()
    topups.make_page(page_id=page.pk)

    assert HostedPage.objects.get(pk=page.pk).status == "ready"
    assert len(near_twin.of_kind("checkout.session")) == 1


def test_after_stripe_has_forgotten_our_key_no_page_is_made_blindly(
    near_twin: Twin, organization: Organization
) -> None:
    page = topups.request_topup(organization=organization, amount_cents=2500, by="user_1")

    topups.sweep_topups(now=db_now() + topups.GIVEN_UP_AFTER)

    assert HostedPage.objects.get(pk=page.pk).status == "failed"
    assert near_twin.of_kind("checkout.session") == []


@pytest.mark.parametrize("first", ["stripe", "console", "dispute"])
def test_a_payment_that_goes_back_in_parts_takes_its_credit_and_its_whole_tax(
    near_twin: Twin, organization: Organization, first: str
) -> None:
    near_twin.tax_percent = 19
    topup = paid_topup(near_twin, organization, 1000)
    intent = intent_of(near_twin, topup)
    gone = 100
    if first == "console":
        asked = refunds.request_refund(topup=topup, credit_cents=85, by="user_2", reason="asked for")
        refunds.send_refund(refund_id=asked.pk)
        gone = asked.credit_cents + asked.tax_cents
    elif first == "dispute":
        money.open_dispute(near_twin, intent, gone)
        deliver(near_twin.events[-1])
    else:
        money.create_refund(near_twin, payment_intent=intent, amount=str(gone))
        deliver(near_twin.events[-1])
    assert 0 < total(AccountKind("tax_payable")) < 190 * NANO_PER_CENT

    money.create_refund(near_twin, payment_intent=intent, amount=str(1190 - gone))
    deliver(near_twin.events[-1])

    assert books() == dict.fromkeys(books(), 0)
    assert not webhooks.list_stuck() and get_ledger_sum_nano() == 0


def test_the_last_cent_of_a_payment_is_booked_too(near_twin: Twin, organization: Organization) -> None:
    near_twin.tax_percent = 19
    intent = intent_of(near_twin, paid_topup(near_twin, organization, 1000))

    for cents in (1189, 1):
        money.create_refund(near_twin, payment_intent=intent, amount=str(cents))
        deliver(near_twin.events[-1])

    assert books()["cash_clearing"] == 0 == get_ledger_sum_nano() and not webhooks.list_stuck()


def test_cash_that_comes_back_is_credit_to_its_last_cent(near_twin: Twin, organization: Organization) -> None:
    intent = intent_of(near_twin, paid_topup(near_twin, organization, 1001))
    money.open_dispute(near_twin, intent, 501)
    money.close_dispute(near_twin, newest(near_twin, "dispute"), is_won=True)
    deliver(near_twin.events[-1])

    assert get_balance(organization=organization).available_nano == 1001 * NANO_PER_CENT
    assert books()["tax_payable"] == 0


def test_a_refund_after_a_won_dispute_takes_the_credit_that_came_back(
    near_twin: Twin, organization: Organization
) -> None:
    topup = paid_topup(near_twin, organization, 5000)
    intent = intent_of(near_twin, topup)
    money.open_dispute(near_twin, intent, 5000)
    money.close_dispute(near_twin, newest(near_twin, "dispute"), is_won=True)
    deliver(near_twin.events[-1])
    assert get_balance(organization=organization).available_nano == 5000 * NANO_PER_CENT

    money.create_refund(near_twin, payment_intent=intent, amount="5000")
    deliver(near_twin.events[-1])

    assert get_balance(organization=organization).available_nano == 0
    assert books()["receivable"] == 0 and not webhooks.list_stuck()


def test_an_event_with_an_unforeseen_error_is_kept_and_stops_no_other(
    near_twin: Twin, organization: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    topup = paid_topup(near_twin, organization, 1000)
    intent = intent_of(near_twin, topup)
    refund = money.create_refund(near_twin, payment_intent=intent, amount="100")
    body, signature = signed(near_twin.events[-1])
    webhooks.receive(body=body, signature=signature)
    monkeypatch.setattr(webhooks, "sync_refund", lambda **_: {}["unforeseen"])

    webhooks.handle_or_record(event_id=near_twin.events[-1]["id"])

    [stuck] = webhooks.list_stuck()
    assert (stuck.attempts, stuck.object_id) == (1, refund["id"]) and "unforeseen" in stuck.last_error


def test_a_lost_dispute_of_spent_credit_is_owed_and_the_next_payment_pays_it(
    near_twin: Twin, organization: Organization
) -> None:
    topup = paid_topup(near_twin, organization, 2500)
    spend(organization, 2000)
    opened = money.open_dispute(near_twin, topup.payment_intent_id or "")
    money.close_dispute(near_twin, opened["id"], is_won=False)
    for event in near_twin.events[::-1]:
        deliver(event)

    assert books() | {"hold": 0} == books()
    assert (total(AccountKind.WALLET), total(AccountKind.RECEIVABLE)) == (0, -2000)
    paid_topup(near_twin, organization, 3000)

    assert (total(AccountKind.WALLET), total(AccountKind.RECEIVABLE)) == (1000, 0)
    assert CardDispute.objects.get().is_closed


def test_a_webhook_is_stored_once_and_a_forged_one_never(near_twin: Twin, organization: Organization) -> None:
    topup = open_topup(organization, 2500)
    event = near_twin.tell("checkout.session.expired", near_twin.get(topup.checkout_id or ""))
    body, signature = signed(event)

    for _ in range(3):
        webhooks.receive(body=body, signature=signature)
    with pytest.raises(BadSignature):
        webhooks.receive(body=body + b" ", signature=signature)

    assert StripeEvent.objects.count() == 1
    assert OutboxMessage.objects.filter(topic="payments.event").count() == 1


def test_an_event_of_somebody_else_in_the_account_is_ignored(near_twin: Twin) -> None:
    stranger = near_twin.add("cus", "customer", invoice_settings={"default_payment_method": None}, deleted=False)
    payment = money.make_payment(near_twin, stranger["id"], 900, {})

    deliver(near_twin.tell("payment_intent.succeeded", payment))

    assert StripeEvent.objects.get().status == "ignored"
