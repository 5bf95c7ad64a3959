"""What operators give and take has a reason, above a limit a second approver, and posts exactly once."""

import datetime

import pytest
from django.db import IntegrityError, transaction

from apps.accounts.models import Organization
from apps.billing.books.adjustments import (
    SECOND_APPROVER_ABOVE_NANO,
    approve_adjustment,
    reject_adjustment,
    request_adjustment,
)
from apps.billing.books.reconciliation import list_newest_checks, list_receivables, reconcile
from apps.billing.models import Adjustment, CreditLot, Hold, LedgerCheck
from apps.billing.operations import grant_paid_credit, reverse_paid_credit
from apps.billing.queries import get_balance, get_ledger_sum_nano
from apps.core.database.clock import db_now
from apps.core.errors import InvalidState, InvalidValue, PermissionDenied
from apps.core.ids import new_id
from tests.factories.money import spend

USD = 1_000_000_000


@pytest.fixture
def rich(organization: Organization) -> Organization:
    grant_paid_credit(organization=organization, amount_nano=500 * USD, reference="stripe:pi:1", by="system")
    return organization


def ask(organization: Organization, usd: float, *, by: str = "user_olga", **fields):
    return request_adjustment(
        organization=organization, amount_nano=int(usd * USD), reason="goodwill", by=by, now=db_now(), **fields
    )


def available(organization: Organization) -> float:
    assert get_ledger_sum_nano() == 0
    return get_balance(organization=organization).available_nano / USD


def test_up_to_the_limit_it_posts_at_once_both_ways(rich):
    assert ask(rich, 100).status == "posted"
    assert ask(rich, -50).status == "posted"

    assert available(rich) == 550


def test_above_the_limit_it_waits_for_somebody_else(rich):
    wanted = ask(rich, 101)
    assert (wanted.status, available(rich)) == ("requested", 500)

    with pytest.raises(PermissionDenied):
        approve_adjustment(adjustment_id=wanted.pk, by="user_olga", now=db_now())
    approve_adjustment(adjustment_id=wanted.pk, by="user_otto", now=db_now())
    with pytest.raises(InvalidState):
        approve_adjustment(adjustment_id=wanted.pk, by="user_otto", now=db_now())

    assert available(rich) == 601


def test_parts_of_a_day_add_up_for_an_operator_and_for_an_organization(rich, rival):
    assert ask(rich, 60).status == "posted"

    assert ask(rich, 41, by="user_otto").status == "requested"  # another operator, the same organization
    assert ask(rival, 41).status == "requested"  # the same operator, another organization
    assert ask(rival, 41, by="user_otto").status == "posted"
    assert ask(rich, -100).status == "posted"  # what is taken is counted apart
    assert ask(rich, -1).status == "requested"
    assert ask(rich, 40).status == "posted"

    tomorrow = db_now() + datetime.timedelta(hours=24, minutes=1)
    later = request_adjustment(organization=rich, amount_nano=100 * USD, reason="r", by="user_olga", now=tomorrow)
    assert later.status == "posted"


def test_what_two_people_gave_leaves_each_of_them_their_own_limit(rich):
    approve_adjustment(adjustment_id=ask(rich, 500).pk, by="user_otto", now=db_now())

    assert ask(rich, 100).status == "posted"


def test_one_form_sent_twice_is_one_adjustment(rich):
    once = new_id("adj")
    assert ask(rich, 5, id=once) == ask(rich, 5, id=once)

    assert available(rich) == 505
    with pytest.raises(InvalidState):
        ask(rich, 6, id=once)


def test_the_database_itself_wants_two_people(rich):
    wanted = ask(rich, 101)

    with pytest.raises(IntegrityError, match="adjustment_by_two"), transaction.atomic():
        Adjustment.objects.filter(pk=wanted.pk).update(
            status="posted", decided_by=wanted.requested_by, decided_at=db_now()
        )
    assert SECOND_APPROVER_ABOVE_NANO == 100 * USD


def test_a_rejected_one_posts_nothing_ever(rich):
    wanted = ask(rich, -200)

    reject_adjustment(adjustment_id=wanted.pk, by="user_olga", now=db_now())

    with pytest.raises(InvalidState):
        approve_adjustment(adjustment_id=wanted.pk, by="user_otto", now=db_now())
    assert available(rich) == 500


def test_no_more_is_taken_than_is_there_and_nothing_without_a_reason(rich):
    big = ask(rich, -501)

    with pytest.raises(InvalidValue, match="at most"):
        approve_adjustment(adjustment_id=big.pk, by="user_otto", now=db_now())
    with pytest.raises(InvalidValue):
        request_adjustment(organization=rich, amount_nano=USD, reason=" ", by="user_olga", now=db_now())


def test_refunds_of_a_job_never_pass_what_it_was_charged_and_return_to_its_lots(rich):
    spend(rich, 12 * USD, held_nano=20 * USD)

    ask(rich, 5, refund_of="ftjob-1")
    ask(rich, 7, refund_of="ftjob-1")

    with pytest.raises(InvalidValue, match="ftjob-1"):
        ask(rich, 0.01, refund_of="ftjob-1")
    assert available(rich) == 500
    assert Hold.objects.get().refunded_nano == 12 * USD
    assert CreditLot.objects.get().remaining_nano == 500 * USD


# --- what is owed, and whether the books hold -------------------------------------------------------------------------


def test_a_debt_shows_with_its_age_until_it_is_paid(rich):
    ask(rich, -100)
    reverse_paid_credit(
        organization=rich, reference="stripe:pi:1", amount_nano=500 * USD, by="system", reason="dispute",
        idempotency_key="d",
    )  # fmt: skip

    (owed,) = list_receivables(now=db_now())
    assert (owed.organization_id, owed.by_age_nano, owed.total_nano) == (rich.pk, (100 * USD, 0, 0, 0), 100 * USD)

    grant_paid_credit(organization=rich, amount_nano=100 * USD, reference="stripe:pi:2", by="system")
    assert list_receivables(now=db_now()) == []


def test_reconciliation_finds_nothing_in_whole_books_and_the_row_in_broken_ones(rich, caplog):
    ask(rich, 10)
    assert [outcome.differences for outcome in reconcile(now=db_now())] == [[]] * 7

    Hold.objects.create(organization=rich, purpose="job", source="ftjob-9", amount_nano=5)
    reconcile(now=db_now())

    broken = {check.name: check.differences for check in list_newest_checks() if check.difference_count}
    assert broken == {"the hold account is the open holds": [[rich.pk, "0", "5"]]} or broken == {
        "the hold account is the open holds": [[rich.pk, "None", "5"]]
    }
    assert "reconciliation" in caplog.text
    assert LedgerCheck.objects.count() == 14
