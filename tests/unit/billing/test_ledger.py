"""The ledger balances, never overdraws, never posts twice, and cannot be edited."""

from collections import Counter

import pytest
from django.db import DatabaseError, IntegrityError, connection, transaction
from hypothesis import given, settings
from hypothesis import strategies as st

from apps.accounts.models import Organization
from apps.billing.ledger import IdempotencyMismatch, account, lock_wallet, post
from apps.billing.models import AccountKind, Hold, LedgerEntry
from apps.billing.operations import CaptureAboveHold, InsufficientBalance, settle_hold
from apps.billing.queries import get_balance, get_ledger_sum_nano
from tests.factories.money import USD, give_credit, place_hold
from tests.support.database import at_once


@pytest.fixture
def organization(db) -> Organization:
    return Organization.objects.create(name="Northline", slug="northline")


def grant(organization: Organization, amount_nano: int = 10 * USD, key: str = "grant:1") -> None:
    give_credit(organization, amount_nano, key=key)


def test_a_hold_moves_money_aside_and_settling_returns_the_rest(organization):
    grant(organization)

    held = place_hold(organization, 4 * USD)
    settle_hold(hold_id=held.pk, capture_nano=1 * USD, by="system")

    balance = get_balance(organization=organization)
    assert (balance.available_nano, balance.held_nano) == (9 * USD, 0)
    assert get_ledger_sum_nano() == 0


def test_a_hold_above_the_balance_is_refused_and_says_what_is_missing(organization):
    grant(organization, 1 * USD)

    with pytest.raises(InsufficientBalance) as refused:
        place_hold(organization, 3 * USD)

    assert refused.value.data == {"balance_nano": 1 * USD, "required_nano": 3 * USD}
    assert get_balance(organization=organization).available_nano == 1 * USD


def test_a_key_of_another_organization_gives_back_none_of_its_postings(organization):
    other = Organization.objects.create(name="Southline", slug="southline")
    grant(organization)
    grant(other, key="grant:2")
    held = place_hold(organization, 4 * USD)

    with pytest.raises(IdempotencyMismatch):
        place_hold(other, 4 * USD)

    assert place_hold(organization, 4 * USD).pk == held.pk
    assert get_balance(organization=other).held_nano == 0


def test_the_same_key_posts_once_and_another_request_under_it_is_refused(organization):
    grant(organization)
    grant(organization)

    with pytest.raises(IdempotencyMismatch):
        grant(organization, 11 * USD)

    assert get_balance(organization=organization).available_nano == 10 * USD


def test_settling_twice_charges_once(organization):
    grant(organization)
    held = place_hold(organization, 4 * USD)

    settle_hold(hold_id=held.pk, capture_nano=3 * USD, by="system")
    settle_hold(hold_id=held.pk, capture_nano=3 * USD, by="system")

    assert get_balance(organization=organization).available_nano == 7 * USD


def test_no_more_than_the_hold_is_ever_captured(organization):
    grant(organization)
    held = place_hold(organization, 4 * USD)

    with pytest.raises(CaptureAboveHold):
        settle_hold(hold_id=held.pk, capture_nano=4 * USD + 1, by="system")


def test_an_unbalanced_transaction_is_refused_by_the_database(organization):
    grant(organization)

    with pytest.raises(IntegrityError, match="does not balance"), transaction.atomic():
        wallet = lock_wallet(organization=organization)
        revenue = account(organization=None, kind=AccountKind.REVENUE)
        post(
            organization=organization,
            kind="test",
            legs={wallet: -2, revenue: 1},
            by="system",
            source="test",
            idempotency_key="unbalanced",
            request={},
        )
        with connection.cursor() as cursor:
            cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")


@pytest.mark.parametrize(
    "statement", ["UPDATE billing_ledgerentry SET amount_nano=1", "DELETE FROM billing_ledgerentry"]
)
def test_entries_can_be_neither_changed_nor_deleted(organization, statement):
    grant(organization)

    with pytest.raises(DatabaseError), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(statement)


def test_a_balance_moves_only_through_entries(organization):
    grant(organization)

    with pytest.raises(DatabaseError), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("UPDATE billing_ledgeraccount SET balance_nano = 99")


@settings(max_examples=settings().max_examples // 3)
@given(steps=st.lists(st.tuples(st.integers(1, 5 * USD), st.integers(0, 100)), max_size=8))
def test_any_sequence_of_holds_and_captures_keeps_the_books(django_db_setup, django_db_blocker, steps):
    with django_db_blocker.unblock(), transaction.atomic():
        organization = Organization.objects.create(name="Books", slug="books")
        grant(organization, key="books")
        spent = 0
        for number, (amount, percent) in enumerate(steps):
            try:
                held = place_hold(organization, amount, source=f"ftjob-{number}")
            except InsufficientBalance:
                continue
            captured = amount * percent // 100
            settle_hold(hold_id=held.pk, capture_nano=captured, by="system")
            spent += captured

        balance = get_balance(organization=organization)
        revenue = account(organization=None, kind=AccountKind.REVENUE)
        earned = sum(LedgerEntry.objects.filter(account=revenue).values_list("amount_nano", flat=True))
        assert (balance.available_nano, balance.held_nano, earned) == (10 * USD - spent, 0, spent)
        assert get_ledger_sum_nano() == 0
        transaction.set_rollback(True)


@pytest.mark.django_db(transaction=True)
def test_of_many_at_once_exactly_those_that_fit_get_a_hold():
    organization = Organization.objects.create(name="Crowd", slug="crowd")
    grant(organization)

    results = at_once(lambda number: place_hold(organization, 3 * USD, f"ftjob-{number}"), 12)

    assert Counter(map(type, results)) == {Hold: 3, InsufficientBalance: 9}
    assert get_balance(organization=organization).available_nano == 1 * USD
