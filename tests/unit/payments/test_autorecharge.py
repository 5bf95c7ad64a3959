"""The card is charged when credit runs low: once at a time, under the month's cap, and not after it was turned off."""

import datetime
from typing import Any

import pytest

from apps.accounts.models import Organization
from apps.core.database.clock import db_now
from apps.core.errors import InvalidState, InvalidValue, RateLimited
from apps.core.messages.outbox import deliver_due
from apps.core.models import OutboxMessage
from apps.core.money import NANO_PER_CENT
from apps.payments import autorecharge
from apps.payments.models import AutoRecharge, TopUp
from apps.payments.stripe.errors import StripeUnavailable
from tests.factories.money import give_credit
from tests.support.payments import available_cents, order_auto_recharge, recharge
from tests.twins.stripe import invoices
from tests.twins.stripe.twin import _HANDLERS, Fault, Twin

pytestmark = pytest.mark.django_db


def test_low_credit_is_recharged_once(near_twin: Twin, organization: Organization) -> None:
    order_auto_recharge(near_twin, organization)

    recharge(times=3)

    assert available_cents(organization) == 5000
    assert [charge["status"] for charge in near_twin.of_kind("invoice")] == ["paid"]


def test_enough_credit_is_left_alone(near_twin: Twin, organization: Organization) -> None:
    order_auto_recharge(near_twin, organization)
    give_credit(organization, 1000 * NANO_PER_CENT)

    recharge()

    assert not TopUp.objects.exists()


def test_no_more_than_the_cap_is_charged_in_a_month(near_twin: Twin, organization: Organization) -> None:
    order_auto_recharge(near_twin, organization, threshold_cents=900_000)
    now = db_now()

    recharge(times=5, now=now)

    assert available_cents(organization) == 10_000
    next_month = db_now() + datetime.timedelta(days=32)
    assert autorecharge.charged_this_month_cents(organization=organization, now=next_month) == 0


def test_one_charge_is_in_flight_at_a_time(near_twin: Twin, organization: Organization) -> None:
    order_auto_recharge(near_twin, organization, threshold_cents=900_000)

    begun = [autorecharge.start_due(now=db_now()) for _ in range(3)]

    assert begun == [1, 0, 0]


def test_nothing_is_charged_after_it_was_turned_off(near_twin: Twin, organization: Organization) -> None:
    order_auto_recharge(near_twin, organization)
    autorecharge.start_due(now=db_now())
    AutoRecharge.objects.update(is_enabled=False)

    autorecharge.charge(topup_id=TopUp.objects.get().pk)
    recharge()

    assert near_twin.of_kind("charge") == []
    assert [topup.status for topup in TopUp.objects.all()] == ["failed"]


@pytest.mark.parametrize("operation", ["/invoices", "/add_lines", "/finalize", "/pay"])
def test_a_charge_whose_answer_was_lost_is_made_once(
    near_twin: Twin, organization: Organization, operation: str
) -> None:
    order_auto_recharge(near_twin, organization)
    autorecharge.start_due(now=db_now())
    topup_id = TopUp.objects.get().pk
    near_twin.faults.append(Fault("after", f"{operation}", times=3))
    with pytest.raises(StripeUnavailable):
        autorecharge.charge(topup_id=topup_id)
    near_twin.faults.clear()

    autorecharge.charge(topup_id=topup_id)

    assert len(near_twin.of_kind("charge")) == 1
    assert available_cents(organization) == 5000


def test_a_charge_too_old_to_repeat_is_settled_by_what_became_of_it(
    near_twin: Twin, organization: Organization
) -> None:
    order_auto_recharge(near_twin, organization)
    autorecharge.start_due(now=db_now())
    near_twin.faults.append(Fault("after", "/pay", times=3))
    with pytest.raises(StripeUnavailable):
        autorecharge.charge(topup_id=TopUp.objects.get().pk)
    near_twin.faults.clear()
    near_twin._kept.clear()

    TopUp.objects.update(created_at=db_now() - datetime.timedelta(days=2))
    autorecharge.charge(topup_id=TopUp.objects.get().pk)

    assert len(near_twin.of_kind("charge")) == 1
    assert available_cents(organization) == 5000


def test_an_invoice_of_another_amount_is_not_finalized(
    near_twin: Twin, organization: Organization, monkeypatch: Any
) -> None:
    order_auto_recharge(near_twin, organization)
    autorecharge.start_due(now=db_now())
    written = invoices.add_lines

    def add_one_more(twin: Twin, invoice: str, *, lines: list[Any], **rest: Any) -> Any:
        return written(twin, invoice, lines=[*lines, {"amount": "1"}], **rest)

    monkeypatch.setitem(_HANDLERS, "POST /v1/invoices/{invoice}/add_lines", add_one_more)

    autorecharge.charge(topup_id=TopUp.objects.get().pk)

    assert TopUp.objects.get().status == "failed"
    assert [invoice["status"] for invoice in near_twin.of_kind("invoice")] == ["draft"]


def test_a_bank_that_wants_its_customer_gets_them_by_mail(near_twin: Twin, organization: Organization) -> None:
    order_auto_recharge(near_twin, organization, "pm_card_authenticationRequired")

    recharge(times=2)

    topup = TopUp.objects.get()
    mails = OutboxMessage.objects.filter(topic="mail")
    assert topup.status == "action_required"
    assert [topup.pay_url in mail.payload["body"] for mail in mails] == [True]
    invoices.pay_hosted_invoice(near_twin, topup.invoice_id or "")
    autorecharge.sync_topup(topup_id=topup.pk)
    assert available_cents(organization) == 5000


def test_a_confirmation_that_never_comes_is_dropped(near_twin: Twin, organization: Organization) -> None:
    order_auto_recharge(near_twin, organization, "pm_card_authenticationRequired")
    recharge()

    autorecharge.sweep_charges(now=db_now() + datetime.timedelta(days=4))
    deliver_due(lane="payments")

    assert TopUp.objects.get().status == "failed"
    assert [invoice["status"] for invoice in near_twin.of_kind("invoice")] == ["void"]


def test_a_stolen_card_ends_the_order_and_says_so(near_twin: Twin, organization: Organization) -> None:
    order_auto_recharge(near_twin, organization, "pm_card_visa_chargeDeclinedStolenCard")

    recharge(times=3)

    assert not AutoRecharge.objects.get().is_enabled
    assert TopUp.objects.count() == 1
    assert OutboxMessage.objects.filter(topic="mail").count() == 1


def test_declines_pause_it_longer_each_and_are_told_after_three(near_twin: Twin, organization: Organization) -> None:
    order_auto_recharge(near_twin, organization, "pm_card_visa_chargeDeclinedInsufficientFunds")

    for _ in range(3):
        recharge(times=2)
        AutoRecharge.objects.update(paused_until=None)

    assert TopUp.objects.filter(status="failed").count() == 3
    assert AutoRecharge.objects.get().is_enabled
    assert OutboxMessage.objects.filter(topic="mail").count() == 1


def test_saving_the_settings_keeps_the_pause_and_a_resume_ends_it(near_twin: Twin, organization: Organization) -> None:
    before = order_auto_recharge(near_twin, organization, "pm_card_visa_chargeDeclinedInsufficientFunds")
    recharge()
    for is_enabled in (True, False, True):
        autorecharge.set_auto_recharge(
            organization=organization, is_enabled=is_enabled, by="user_1", threshold_cents=before.threshold_cents,
            amount_cents=before.amount_cents, monthly_cap_cents=before.monthly_cap_cents,
        )  # fmt: skip
        recharge()
    assert TopUp.objects.count() == 1

    resume(organization)
    recharge()

    assert TopUp.objects.count() == 2
    assert AutoRecharge.objects.get().failures == 2


def resume(organization: Organization) -> None:
    autorecharge.resume_auto_recharge(organization=organization, by="user_1", now=db_now())


def test_no_resume_and_no_other_card_leads_to_more_than_five_declined_charges_a_day(
    near_twin: Twin, organization: Organization
) -> None:
    for number in range(1, autorecharge.MAX_DECLINED_A_DAY + 1):
        order_auto_recharge(near_twin, organization, "pm_card_visa_chargeDeclinedInsufficientFunds")
        recharge()
        assert TopUp.objects.count() == number

    with pytest.raises(RateLimited):
        resume(organization)
    order_auto_recharge(near_twin, organization)
    recharge()
    assert TopUp.objects.count() == autorecharge.MAX_DECLINED_A_DAY
    assert autorecharge.start_due(now=db_now() + datetime.timedelta(days=1, hours=1)) == 1


def test_charges_that_the_bank_did_not_decline_block_nothing(near_twin: Twin, organization: Organization) -> None:
    order_auto_recharge(near_twin, organization)
    for _ in range(autorecharge.MAX_DECLINED_A_DAY):
        autorecharge.start_due(now=db_now())
        AutoRecharge.objects.update(is_enabled=False)
        autorecharge.charge(topup_id=TopUp.objects.get(status="requested").pk)
        AutoRecharge.objects.update(is_enabled=True)

    recharge()

    assert available_cents(organization) == 5000


def test_a_stolen_card_is_not_charged_again_because_the_order_is_turned_on(
    near_twin: Twin, organization: Organization
) -> None:
    order_auto_recharge(near_twin, organization, "pm_card_visa_chargeDeclinedStolenCard")
    recharge()

    autorecharge.set_auto_recharge(
        organization=organization, is_enabled=True, by="user_1", threshold_cents=1000, amount_cents=5000,
        monthly_cap_cents=12000,
    )  # fmt: skip
    recharge()

    assert TopUp.objects.count() == 1


@pytest.mark.parametrize(
    ("amounts", "field"),
    [
        ({"amount_cents": 499}, "amount_usd"),
        ({"threshold_cents": -1}, "threshold_usd"),
        ({"monthly_cap_cents": 4999}, "monthly_cap_usd"),
    ],
)
def test_amounts_that_make_no_sense_are_refused_by_name(
    near_twin: Twin, organization: Organization, amounts: dict[str, int], field: str
) -> None:
    with pytest.raises(InvalidValue) as refused:
        order_auto_recharge(near_twin, organization, **amounts)

    assert refused.value.param == field


def test_without_a_card_there_is_nothing_to_charge(near_twin: Twin, organization: Organization) -> None:
    with pytest.raises(InvalidState):
        autorecharge.set_auto_recharge(
            organization=organization, is_enabled=True, threshold_cents=0, amount_cents=500, monthly_cap_cents=500,
            by="user_1",
        )  # fmt: skip
