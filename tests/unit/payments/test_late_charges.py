"""A charge that the bank decides after the call has returned, and an invoice that Stripe does not void at once."""

import datetime
from typing import Any

import pytest

from apps.accounts.models import Organization
from apps.core.database.clock import db_now
from apps.core.messages.outbox import deliver_due
from apps.payments import autorecharge, reconciliation, tasks, topups, webhooks
from apps.payments.models import AutoRecharge, ReconciliationKind, TopUp
from apps.payments.stripe.errors import StripeUnavailable
from tests.support.payments import available_cents, order_auto_recharge, recharge
from tests.twins.stripe import invoices
from tests.twins.stripe.twin import _HANDLERS, Fault, Refusal, Twin, signed

pytestmark = pytest.mark.django_db


@pytest.fixture
def undecided(near_twin: Twin, organization: Organization, monkeypatch: pytest.MonkeyPatch) -> TopUp:
    """A charge whose call to Stripe returned while the bank still decides."""
    monkeypatch.setitem(_HANDLERS, "POST /v1/invoices/{invoice}/pay", invoices.get_invoice)
    order_auto_recharge(near_twin, organization)
    autorecharge.start_due(now=db_now())
    deliver_due(lane="payments")
    topup = TopUp.objects.get()
    assert (topup.status, near_twin.objects[topup.invoice_id or ""]["status"]) == ("requested", "open")
    return topup


def test_a_charge_that_the_bank_decides_later_is_paid_by_the_sweep(
    near_twin: Twin, organization: Organization, undecided: TopUp
) -> None:
    invoices.pay_hosted_invoice(near_twin, undecided.invoice_id or "")

    tasks.sweep()
    deliver_due(lane="payments")

    assert available_cents(organization) == 5000


def refuse_once(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    """Refuse the next call of an operation. The twin, as Stripe, repeats a refusal to each call with the same key."""
    handler = _HANDLERS[operation]

    def refuse(*_args: Any, **_params: Any) -> Any:
        monkeypatch.setitem(_HANDLERS, operation, handler)
        raise Refusal(400, message="not now")

    monkeypatch.setitem(_HANDLERS, operation, refuse)


def decline(twin: Twin, topup: TopUp, reason: str) -> None:
    intent = twin.get(topup.payment_intent_id or "")
    intent["last_payment_error"] = {"type": "card_error", "code": "card_declined", "decline_code": reason}
    twin.tell("payment_intent.payment_failed", intent)
    twin.tell("invoice.payment_failed", twin.get(topup.invoice_id or ""))


@pytest.mark.parametrize("finds", ["webhook", "reconciliation"])
def test_a_late_decline_ends_the_charge_when_it_is_reported(
    near_twin: Twin, organization: Organization, undecided: TopUp, finds: str
) -> None:
    decline(near_twin, undecided, "insufficient_funds")
    if finds == "webhook":
        for event in near_twin.events[-2:]:
            body, signature = signed(event)
            webhooks.receive(body=body, signature=signature)
    else:
        TopUp.objects.update(created_at=db_now() - datetime.timedelta(hours=2))  # no longer synced by the sweep
        reconciliation.reconcile(kind=ReconciliationKind.HOURLY, now=db_now() + datetime.timedelta(minutes=20))
    for _ in range(2):
        deliver_due(lane="payments")

    undecided.refresh_from_db()
    assert (undecided.status, undecided.failure) == ("failed", "insufficient_funds")
    assert near_twin.objects[undecided.invoice_id or ""]["status"] == "void" and undecided.declined_at
    order = AutoRecharge.objects.get()
    assert (order.failures, order.paused_until is not None) == (1, True)


def test_a_stolen_card_whose_charge_stripe_does_not_void_at_once_leaves_nothing_to_pay(
    near_twin: Twin, organization: Organization
) -> None:
    order_auto_recharge(near_twin, organization, "pm_card_visa_chargeDeclinedStolenCard")
    autorecharge.start_due(now=db_now())
    topup = TopUp.objects.get()
    near_twin.faults.append(Fault(503, "/void", times=9))
    with pytest.raises(StripeUnavailable):
        autorecharge.charge(topup_id=topup.pk)
    assert not AutoRecharge.objects.get().is_enabled
    near_twin.faults.clear()

    autorecharge.charge(topup_id=topup.pk)

    topup.refresh_from_db()
    assert (topup.status, topup.failure) == ("failed", "stolen_card")
    assert near_twin.objects[topup.invoice_id or ""]["status"] == "void"


def test_three_late_declines_pause_it_for_a_day(near_twin: Twin, organization: Organization, undecided: TopUp) -> None:
    for number in (1, 2, 3):
        autorecharge.settle_decline(topup_id=TopUp.objects.get(status="requested").pk, reason="insufficient_funds")
        assert AutoRecharge.objects.get().failures == number
        if number < autorecharge.SOFT_FAILURES:
            AutoRecharge.objects.update(paused_until=None)
            recharge()

    paused_until = AutoRecharge.objects.get().paused_until
    assert paused_until is not None and paused_until > db_now() + datetime.timedelta(hours=23)


def test_a_late_decline_whose_charge_stripe_does_not_void_counts_once_and_ends_with_the_next_report(
    near_twin: Twin, undecided: TopUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    decline(near_twin, undecided, "insufficient_funds")
    refuse_once(monkeypatch, "POST /v1/invoices/{invoice}/void")

    autorecharge.settle_decline(topup_id=undecided.pk, reason="insufficient_funds")
    undecided.refresh_from_db()
    assert (undecided.status, AutoRecharge.objects.get().failures) == ("requested", 1)
    deliver_due(lane="payments")

    undecided.refresh_from_db()
    assert (undecided.status, AutoRecharge.objects.get().failures) == ("failed", 1)


def test_a_charge_that_the_bank_never_decides_ends_and_makes_room_for_another(
    near_twin: Twin, organization: Organization, undecided: TopUp
) -> None:
    TopUp.objects.update(created_at=db_now() - topups.GIVEN_UP_AFTER)

    tasks.sweep()
    deliver_due(lane="payments")

    undecided.refresh_from_db()
    assert (undecided.status, near_twin.objects[undecided.invoice_id or ""]["status"]) == ("failed", "void")
    assert autorecharge.start_due(now=db_now()) == 1


@pytest.mark.usefixtures("undecided")
def test_a_late_charge_that_stripe_does_not_void_is_ended_the_next_day(monkeypatch: pytest.MonkeyPatch) -> None:
    TopUp.objects.update(created_at=db_now() - topups.GIVEN_UP_AFTER)
    refuse_once(monkeypatch, "POST /v1/invoices/{invoice}/void")
    autorecharge.sweep_charges(now=db_now())
    deliver_due(lane="payments")
    assert TopUp.objects.get().status == "requested"

    autorecharge.sweep_charges(now=db_now() + datetime.timedelta(days=1))
    deliver_due(lane="payments")

    assert TopUp.objects.get().status == "failed"
