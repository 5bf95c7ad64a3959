"""The books and Stripe's own list agree, and a difference of one cent is a page."""

import datetime
import logging

import pytest

from apps.accounts.models import Organization
from apps.billing.models import AccountKind
from apps.billing.operations import grant_paid_credit
from apps.core.database.clock import db_now
from apps.core.errors import NotFound
from apps.core.money import NANO_PER_CENT
from apps.payments import reconciliation, refunds, webhooks
from apps.payments.models import ReconciliationDifference, TopUp
from tests.support.payments import open_topup, paid_topup, total
from tests.twins.stripe import money
from tests.twins.stripe.twin import DISPUTE_FEE_CENTS, Twin

pytestmark = pytest.mark.django_db
LATER = datetime.timedelta(minutes=20)


def reconcile(kind: str = "hourly") -> reconciliation.Reconciliation:
    return reconciliation.reconcile(kind=kind, now=db_now() + LATER)


def pages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.CRITICAL]


def test_payments_refunds_and_disputes_agree_and_fees_are_posted_once(
    near_twin: Twin, organization: Organization
) -> None:
    near_twin.tax_percent = 20
    first, second = paid_topup(near_twin, organization, 5000), paid_topup(near_twin, organization, 3000)
    refund = refunds.request_refund(topup=first, credit_cents=600, by="user_2", reason="asked for")
    refunds.send_refund(refund_id=refund.pk)
    returned = money.create_refund(near_twin, payment_intent=first.payment_intent_id or "", amount="1000")
    money.fail_refund(near_twin, returned["id"])
    opened = money.open_dispute(near_twin, second.payment_intent_id or "")
    money.close_dispute(near_twin, opened["id"], is_won=True)
    near_twin.events.reverse()

    runs = [reconcile(), reconcile("daily")]

    assert reconciliation.list_differences() == []
    assert {(run.ours_cents, run.theirs_cents) for run in runs} == {(9600 - 720, 9600 - 720)}
    assert [run.missed_events > 0 for run in runs] == [True, False]
    fees = sum(movement["fee"] for movement in near_twin.cash)
    assert -total(AccountKind.STRIPE_FEES) == fees > DISPUTE_FEE_CENTS
    assert -total(AccountKind.CASH_CLEARING) == sum(movement["net"] for movement in near_twin.cash)


def test_a_payment_whose_webhook_was_lost_is_credited_and_is_no_difference(
    near_twin: Twin, organization: Organization
) -> None:
    topup = open_topup(organization, 2500)
    money.pay_checkout(near_twin, topup.checkout_id or "")

    reconcile()

    assert TopUp.objects.get(pk=topup.pk).status == "paid"
    assert reconciliation.list_differences() == []


def test_cash_that_nobody_was_credited_for_pages_once_and_until_it_is_resolved(
    near_twin: Twin, organization: Organization, caplog: pytest.LogCaptureFixture
) -> None:
    customer = near_twin.add("cus", "customer", invoice_settings={"default_payment_method": None}, deleted=False)
    payment = money.make_payment(near_twin, customer["id"], 777, {})
    money.charge(near_twin, payment, money.give_card(near_twin, customer["id"], "pm_card_visa"), off_session=False)

    for _ in range(2):
        reconcile()

    assert len(pages(caplog)) == 1
    found = ReconciliationDifference.objects.get()
    assert (found.source_id, found.ours_cents, found.theirs_cents) == (payment["id"], 0, 777)
    reconciliation.resolve_difference(difference_id=found.pk, by="user_9", note="Another shop's", now=db_now())
    reconcile()
    assert reconciliation.list_differences() == []
    with pytest.raises(NotFound):
        reconciliation.resolve_difference(difference_id=found.pk, by="user_9", note="again", now=db_now())


def test_one_cent_less_than_stripe_took_pages(
    near_twin: Twin, organization: Organization, caplog: pytest.LogCaptureFixture
) -> None:
    topup = paid_topup(near_twin, organization, 2500)
    near_twin.cash[0]["amount"] += 1

    reconcile()

    assert [(row.source_id, row.theirs_cents - row.ours_cents) for row in reconciliation.list_differences()] == [
        (topup.payment_intent_id, 1)
    ]
    assert len(pages(caplog)) == 1


def test_credit_for_a_payment_that_stripe_never_took_pages(near_twin: Twin, organization: Organization) -> None:
    topup = paid_topup(near_twin, organization, 2500)
    near_twin.cash.clear()
    near_twin.get(topup.payment_intent_id or "")["amount_received"] = 0

    reconcile()

    assert [(row.ours_cents, row.theirs_cents) for row in reconciliation.list_differences()] == [(2500, 0)]


def test_a_movement_in_another_currency_is_not_booked_and_operators_see_why(
    near_twin: Twin, organization: Organization
) -> None:
    topup = paid_topup(near_twin, organization, 2500)
    money.open_dispute(near_twin, topup.payment_intent_id or "")
    for movement in near_twin.cash:
        movement |= {"currency": "eur", "amount": movement["amount"] * 9 // 10}

    for _ in range(2):
        reconcile()

    booked = {AccountKind.WALLET: 2500, AccountKind.CASH_CLEARING: -2500, AccountKind.STRIPE_FEES: 0}
    assert {kind: total(kind) for kind in booked} == booked
    why = "Stripe settled it in EUR, but the books are in USD. Add a bank account in USD at Stripe."
    payment, dispute = sorted(reconciliation.list_differences(), key=lambda row: -row.ours_cents)
    assert (payment.source_id, payment.ours_cents, payment.theirs_cents) == (topup.payment_intent_id, 2500, 0)
    assert (dispute.ours_cents, payment.note, dispute.note) == (0, why, why)
    assert {why in event.last_error for event in webhooks.list_stuck()} == {True}


def test_a_payment_credited_twice_shows(near_twin: Twin, organization: Organization) -> None:
    topup = paid_topup(near_twin, organization, 2500)
    grant_paid_credit(
        organization=organization,
        amount_nano=2500 * NANO_PER_CENT,
        reference=f"{topup.reference}:returned",
        by="system",
        reason="by mistake",
    )

    reconcile()

    assert [(row.ours_cents, row.theirs_cents) for row in reconciliation.list_differences()] == [(5000, 2500)]
