"""Whose credit is spent first, what a paid lot can give back, what expires, and that lots always are the balance."""

import datetime
from typing import Any

import pgtrigger
import pytest
from django.db import DatabaseError, IntegrityError, connection, transaction
from django.db.models import Sum

from apps.accounts.models import Organization
from apps.billing.books.seals import BrokenSeal, seal_days, verify_seals
from apps.billing.credits import end_set_aside, expire_lots, set_credit_aside
from apps.billing.ledger import IdempotencyMismatch, account
from apps.billing.models import AccountKind, CreditLot, LedgerEntry, LedgerTransaction, LotMovement
from apps.billing.operations import grant_paid_credit, refund_source, reverse_paid_credit, settle_hold
from apps.billing.queries import get_balance, get_ledger_sum_nano
from apps.core.database.clock import db_now
from apps.core.errors import InvalidValue
from tests.factories import money
from tests.factories.money import USD, give_credit, place_hold


@pytest.fixture
def organization(db: None) -> Organization:
    return Organization.objects.create(name="Northline", slug="northline")


def grant(organization: Organization, usd: int, **fields: Any) -> CreditLot:
    key = f"grant:{organization.pk}:{CreditLot.objects.count()}"
    posted = give_credit(organization, usd * USD, key=key, **fields)
    return posted.lot_movements.get().lot


def pay(organization: Organization, usd: int, reference: str = "stripe:pi:1") -> CreditLot:
    return grant_paid_credit(organization=organization, amount_nano=usd * USD, reference=reference, by="system")


def spend(organization: Organization, usd: int, source: str = "ftjob-1") -> None:
    money.spend(organization, usd * USD, source)


def left(lot: CreditLot) -> float:
    return CreditLot.objects.get(pk=lot.pk).remaining_nano / USD


def assert_lots_are_the_balance(organization: Organization) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
        cursor.execute("SET CONSTRAINTS ALL DEFERRED")
    balance = get_balance(organization=organization)
    remaining = CreditLot.objects.filter(organization=organization).aggregate(nano=Sum("remaining_nano"))["nano"]
    assert remaining == balance.available_nano + balance.held_nano
    assert get_ledger_sum_nano() == 0


def in_days(days: int) -> datetime.datetime:
    return db_now() + datetime.timedelta(days=days)


def test_promotional_credit_goes_first_and_what_expires_sooner_before_what_expires_later(organization):
    paid = pay(organization, 10)
    unlimited = grant(organization, 10)
    later, sooner = (grant(organization, 10, expires_at=in_days(days)) for days in (30, 3))

    spend(organization, 25)

    assert [left(lot) for lot in (sooner, later, unlimited, paid)] == [0, 0, 5, 10]
    assert_lots_are_the_balance(organization)


def test_a_payment_is_credited_once_whatever_the_number_of_calls(organization):
    first, again = pay(organization, 10), pay(organization, 10)

    assert first.pk == again.pk
    assert get_balance(organization=organization).available_nano == 10 * USD
    with pytest.raises(IdempotencyMismatch):
        pay(organization, 11)


def test_a_refund_returns_to_the_lots_it_was_charged_from(organization):
    promotional, paid = grant(organization, 10), pay(organization, 10)
    spend(organization, 15)

    refund_source(organization=organization, source="ftjob-1", by="system", reason="our fault")

    assert (left(promotional), left(paid)) == (10, 10)
    assert_lots_are_the_balance(organization)


def test_a_refund_does_not_return_to_a_lot_that_expired_meanwhile(organization):
    lot = grant(organization, 10, expires_at=in_days(1))
    spend(organization, 10)
    with pgtrigger.ignore("billing.CreditLot:lot_frozen"):
        CreditLot.objects.filter(pk=lot.pk).update(expires_at=in_days(-1))

    refund_source(organization=organization, source="ftjob-1", by="system", reason="our fault")
    expire_lots()

    assert left(lot) == 0
    assert get_balance(organization=organization).available_nano == 10 * USD
    assert_lots_are_the_balance(organization)


def test_a_reversed_payment_takes_what_is_unspent_and_the_rest_is_owed_until_the_next_payment(organization):
    paid = pay(organization, 10)
    spend(organization, 6)

    reversal = reverse_paid_credit(
        organization=organization, reference="stripe:pi:1", amount_nano=10 * USD, by="system", reason="dispute lost",
        idempotency_key="dispute:1",
    )  # fmt: skip
    pay(organization, 20, reference="stripe:pi:2")

    assert (reversal.taken_nano, reversal.owed_nano) == (4 * USD, 6 * USD)
    assert left(paid) == 0
    assert get_balance(organization=organization).available_nano == 14 * USD
    assert_lots_are_the_balance(organization)


def test_what_goes_back_beyond_the_payment_is_owed(organization):
    lot = pay(organization, 10)
    for number in (1, 2):
        arguments = {
            "organization": organization, "reference": "stripe:pi:1", "amount_nano": 5 * USD, "by": "system",
            "reason": "", "idempotency_key": f"refund:{number}",
        }  # fmt: skip
        assert reverse_paid_credit(**arguments) == reverse_paid_credit(**arguments)

    with pytest.raises(InvalidValue):
        reverse_paid_credit(**(arguments | {"idempotency_key": "refund:3", "amount_nano": 0}))
    pay(organization, 20, reference="stripe:pi:2")
    reversal = reverse_paid_credit(**(arguments | {"idempotency_key": "refund:4", "amount_nano": 2 * USD}))

    assert (reversal.taken_nano, reversal.owed_nano) == (0, 2 * USD)
    lot.refresh_from_db()
    assert lot.reversed_nano == 10 * USD
    assert_lots_are_the_balance(organization)


@pytest.mark.parametrize(("is_paid_out", "available"), [(True, 3), (False, 10)])
def test_credit_set_aside_for_a_card_refund_is_spent_by_nobody_else(organization, is_paid_out, available):
    lot = pay(organization, 10)
    aside = {"organization": organization, "reference": "stripe:pi:1", "purpose": "card_refund", "by": "system"}

    held = set_credit_aside(**aside, amount_nano=7 * USD, idempotency_key="aside:1")
    with pytest.raises(InvalidValue):
        set_credit_aside(**aside, amount_nano=4 * USD, idempotency_key="aside:2")
    with pytest.raises(Exception, match="available"):
        spend(organization, 4)
    for _ in range(2):
        end_set_aside(hold_id=held.pk, is_paid_out=is_paid_out, by="system", reason="")

    assert left(lot) == available
    assert get_balance(organization=organization).available_nano == available * USD
    assert_lots_are_the_balance(organization)


def test_what_is_left_of_an_expired_lot_goes_and_what_was_held_in_time_stays(organization):
    lot = grant(organization, 10, expires_at=in_days(-1))
    pay(organization, 5)
    held = place_hold(organization, 4 * USD)

    assert (expire_lots(), expire_lots()) == (6 * USD, 0)
    settle_hold(hold_id=held.pk, capture_nano=1 * USD, by="system")
    assert expire_lots() == 3 * USD

    assert left(lot) == 0
    assert get_balance(organization=organization).available_nano == 5 * USD
    assert_lots_are_the_balance(organization)


def test_the_database_refuses_credit_without_a_lot_and_a_lot_without_credit(organization):
    lot = grant(organization, 10)
    wallet = account(organization=organization, kind=AccountKind.WALLET)
    promotional = account(organization=None, kind=AccountKind.PROMOTIONAL_CREDIT)

    for movements in ([], [LotMovement(organization=organization, lot=lot, amount_nano=-2)]):
        with pytest.raises(IntegrityError, match="of credit and"), transaction.atomic():
            posted = LedgerTransaction.objects.create(
                organization=organization, kind="x", idempotency_key="x", request_sha256="", source="", actor=""
            )
            for leg, amount in ((wallet, -1), (promotional, 1)):
                LedgerEntry.objects.create(
                    transaction=posted, organization=organization, account=leg, amount_nano=amount
                )
            for movement in movements:
                movement.transaction = posted
                movement.save()
            with connection.cursor() as cursor:
                cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")


def test_what_remains_of_a_lot_moves_only_through_postings(organization):
    lot = grant(organization, 10)

    with pytest.raises(DatabaseError), transaction.atomic():
        CreditLot.objects.filter(pk=lot.pk).update(remaining_nano=0)


# --- the chain --------------------------------------------------------------------------------------------------------


def test_the_chain_over_the_days_shows_a_changed_a_missing_and_a_late_entry(organization):
    grant(organization, 10)
    grant(organization, 5)
    assert seal_days(now=db_now()) == 0, "today is not over"

    assert seal_days(now=in_days(3)) >= 2
    assert verify_seals() == []

    entry = LedgerEntry.objects.order_by("id").first()
    with pgtrigger.ignore("billing.LedgerEntry:entry_append_only"):
        LedgerEntry.objects.filter(pk=entry.pk).update(amount_nano=entry.amount_nano + 1)
        assert [broken.day for broken in verify_seals()] == [entry.created_at.date()]
        LedgerEntry.objects.filter(pk=entry.pk).update(amount_nano=entry.amount_nano)
        assert verify_seals() == []
    grant(organization, 1)
    day = LedgerEntry.objects.latest("id").created_at.date()
    found = LedgerEntry.objects.filter(created_at__date=day).count()
    assert verify_seals() == [BrokenSeal(day, found - 2, found)]
