"""A refund is sent once and takes no spent credit; above the limit a second operator approves it."""

import datetime

import pytest
from django.db import IntegrityError, transaction

from apps.accounts.models import Organization
from apps.billing.models import AccountKind
from apps.billing.queries import get_balance
from apps.core.database.clock import db_now
from apps.core.errors import InvalidState, PermissionDenied
from apps.core.models import OutboxMessage
from apps.core.money import NANO_PER_CENT
from apps.payments.models import CardRefund, TopUp
from apps.payments.refunds import approve_refund, reject_refund, request_refund, send_refund
from apps.payments.stripe.errors import StripeUnavailable
from tests.support.payments import paid_topup, spend, total
from tests.twins.stripe import money
from tests.twins.stripe.twin import Fault, Twin

pytestmark = pytest.mark.django_db


@pytest.fixture
def topup(near_twin: Twin, organization: Organization) -> TopUp:
    return paid_topup(near_twin, organization, 50_000)


def ask(topup: TopUp, cents: int, by: str = "user_olga") -> CardRefund:
    return request_refund(topup=topup, credit_cents=cents, by=by, reason="asked for")


def sent(refund: CardRefund) -> bool:
    send_refund(refund_id=refund.pk)
    return CardRefund.objects.get(pk=refund.pk).stripe_id is not None


@pytest.mark.parametrize("days", [0, 2])
def test_a_refund_whose_answer_was_lost_is_sent_once(near_twin, topup, organization, days) -> None:
    refund = ask(topup, 1000)
    near_twin.faults.append(Fault("after", "POST /v1/refunds", times=9))
    with pytest.raises(StripeUnavailable):
        send_refund(refund_id=refund.pk)
    near_twin.faults.clear()
    if days:
        near_twin._kept.clear()  # keys are forgotten after a day
        CardRefund.objects.update(created_at=db_now() - datetime.timedelta(days=days))

    send_refund(refund_id=refund.pk)

    balance = get_balance(organization=organization)
    assert len(near_twin.of_kind("refund")) == 1
    assert (balance.available_nano, balance.held_nano) == (49_000 * NANO_PER_CENT, 0)
    assert total(AccountKind.CASH_CLEARING) == -49_000


def test_a_refund_that_was_approved_late_is_sent(near_twin, topup) -> None:
    first, late = ask(topup, 1000), ask(topup, 700)
    send_refund(refund_id=first.pk)
    CardRefund.objects.filter(pk=late.pk).update(created_at=db_now() - datetime.timedelta(days=2))

    send_refund(refund_id=late.pk)

    assert [each["amount"] for each in near_twin.of_kind("refund")] == [1000, 700]


def test_a_refund_that_stripe_refuses_returns_the_credit(near_twin, topup, organization) -> None:
    refund = ask(topup, 1000)
    money.create_refund(near_twin, payment_intent=topup.payment_intent_id or "", amount="50000")

    send_refund(refund_id=refund.pk)

    assert CardRefund.objects.get(pk=refund.pk).status == "failed"
    assert get_balance(organization=organization).available_nano == 50_000 * NANO_PER_CENT


def test_no_more_than_what_is_unspent_goes_back(topup, organization) -> None:
    spend(organization, 49_500)

    with pytest.raises(Exception, match="still unspent"):
        ask(topup, 501)

    assert not OutboxMessage.objects.filter(topic="payments.refund").exists()


def test_up_to_the_limit_of_a_day_it_is_sent_and_beyond_it_waits(topup) -> None:
    assert sent(ask(topup, 10_000))

    for by in ("user_olga", "user_otto"):  # the organization's sum counts, not the operator's alone
        more = ask(topup, 1, by)
        assert not sent(more) and not OutboxMessage.objects.filter(payload__refund_id=more.pk).exists()


def test_another_operator_approves(topup) -> None:
    large = ask(topup, 10_001)

    with pytest.raises(PermissionDenied):
        approve_refund(refund=large, by="user_olga")
    assert not sent(large)
    approve_refund(refund=large, by="user_otto")
    with pytest.raises(InvalidState):
        reject_refund(refund=large, by="user_otto")

    assert OutboxMessage.objects.filter(payload__refund_id=large.pk).exists()
    assert sent(large)


def test_a_rejected_refund_gives_its_credit_back(topup, organization) -> None:
    large = ask(topup, 20_000)
    held = get_balance(organization=organization).held_nano

    reject_refund(refund=large, by="user_olga")

    with pytest.raises(InvalidState):
        approve_refund(refund=large, by="user_otto")
    balance = get_balance(organization=organization)
    assert (held, balance.held_nano) == (20_000 * NANO_PER_CENT, 0)
    assert not sent(large)


@pytest.mark.parametrize("approved_by", [None, "user_olga"])
def test_the_database_itself_wants_two_people(topup, approved_by) -> None:
    large = ask(topup, 20_000)

    with pytest.raises(IntegrityError, match="card_refund_by_two"), transaction.atomic():
        CardRefund.objects.filter(pk=large.pk).update(status="requested", approved_by=approved_by)
