"""Usage is counted once, charged by its sum, from where it was reserved; slices never spend what is not there."""

import datetime
import random

import msgspec
import pytest
from django.db import IntegrityError, transaction
from hypothesis import given, settings
from hypothesis import strategies as st

from apps.billing.models import (
    Hold,
    UsageConflict,
    UsageEvent,
)
from apps.billing.operations import InsufficientBalance
from apps.billing.queries import get_balance, get_ledger_sum_nano, get_spending
from apps.billing.usage.metering import UsageRecord, price_ceiling, rate_usage, record_usage
from apps.billing.usage.slices import close_expired_holds, close_slice, renew_slices
from apps.core.database.clock import db_now
from apps.core.money import rated
from tests.factories.metering import INPUT_NANO, OUTPUT_NANO, PER, Customer, earned, make_customer, price_of
from tests.factories.money import USD, give_credit
from tests.support.database import at_once


@pytest.fixture
def customer(db) -> Customer:
    return make_customer()


def test_used_tokens_are_charged_once_and_the_books_balance(customer):
    records = [customer.record() for _ in range(3)]

    record_usage(records=records)
    assert get_spending(organization=customer.organization).unrated_requests == 3
    posted = rate_usage()
    assert rate_usage() == 0

    spending = get_spending(organization=customer.organization)
    assert posted == spending.inference_nano == price_of(records) == earned(customer.organization)
    assert (spending.tokens_billed, spending.unrated_requests) == (3 * 18, 0)
    assert get_balance(organization=customer.organization).available_nano == 10 * USD - posted
    assert get_ledger_sum_nano() == 0


def test_recording_the_same_request_again_adds_nothing(customer):
    record = customer.record()

    first = record_usage(records=[record, record])
    again = record_usage(records=[record])

    assert (first.new, again.new, again.known, again.conflicting) == (1, 0, 1, 0)
    assert UsageEvent.objects.filter(organization=customer.organization).count() == 1
    rate_usage()
    assert earned(customer.organization) == price_of([record])


def test_another_body_under_a_used_id_is_set_aside_and_charged_for_nothing(customer):
    record = customer.record()
    forged = msgspec.structs.replace(record, output_tokens=1_000_000)
    record_usage(records=[record])

    outcome = record_usage(records=[forged, customer.record()])
    record_usage(records=[forged])

    assert (outcome.new, outcome.conflicting) == (1, 1)
    conflict = UsageConflict.objects.get()
    assert (conflict.event_id, conflict.body["output_tokens"]) == (record.id, 1_000_000)
    assert UsageEvent.objects.get(pk=record.id).output_tokens == 7


@pytest.mark.parametrize("field", ["input_price_id", "output_price_id", "organization_id"])
def test_usage_of_what_does_not_exist_is_refused_with_its_whole_batch(customer, field):
    """No foreign key says so: it would be asked for every row."""
    stray = customer.record(**{field: "nothing"})

    with pytest.raises(IntegrityError, match="unknown"):
        record_usage(records=[customer.record(), stray])

    assert not UsageEvent.objects.exists()
    assert record_usage(records=[customer.record()]).new == 1


@pytest.mark.slow
@settings(max_examples=settings().max_examples // 4)
@given(
    tokens=st.lists(st.tuples(st.integers(0, 100_000), st.integers(0, 100_000)), min_size=1, max_size=12),
    seed=st.integers(0, 2**16),
)
def test_order_duplicates_and_batches_of_records_change_no_charge(django_db_setup, django_db_blocker, tokens, seed):
    with django_db_blocker.unblock(), transaction.atomic():
        customer = make_customer()
        records = [customer.record(input_tokens=i, output_tokens=o) for i, o in tokens]
        chance = random.Random(seed)
        sent = records + chance.choices(records, k=4)
        chance.shuffle(sent)
        while sent:
            batch, sent = sent[:3], sent[3:]
            record_usage(records=batch)
            if chance.random() < 0.5:
                rate_usage()
        rate_usage()

        assert earned(customer.organization) == price_of(records)
        assert get_ledger_sum_nano() == 0
        transaction.set_rollback(True)


@given(parts=st.lists(st.integers(0, 10**7), max_size=20), price=st.integers(0, 10**10), per=st.integers(1, 10**6))
def test_what_is_reserved_for_each_request_covers_what_is_charged_for_all(parts, price, per):
    reserved = sum(price_ceiling(quantity=part, price_nano=price, per=per) for part in parts)

    assert reserved >= rated(quantity=sum(parts), price_nano=price, per=per)


def test_usage_is_charged_to_the_slice_it_was_reserved_from(customer):
    idle, busy = customer.lease(1_000_000), customer.lease(1_000_000)
    record = customer.record(slice_id=busy.hold_id)

    record_usage(records=[record])
    rate_usage()

    assert Hold.objects.get(pk=busy.hold_id).captured_nano == price_of([record])
    assert Hold.objects.get(pk=idle.hold_id).captured_nano == 0


def test_a_closed_slice_is_charged_for_what_it_used_and_returns_the_rest(customer):
    leased = customer.lease(1_000_000)
    record = customer.record(slice_id=leased.hold_id)
    record_usage(records=[record])

    close_slice(hold_id=leased.hold_id, by="gateway:test")
    close_slice(hold_id=leased.hold_id, by="gateway:test")

    balance = get_balance(organization=customer.organization)
    assert (balance.available_nano, balance.held_nano) == (10 * USD - price_of([record]), 0)


def test_a_slice_grows_in_place_and_says_what_it_holds_in_all(customer):
    leased = customer.lease(1_000)

    grown = customer.lease(2 * USD, hold_id=leased.hold_id)

    assert leased.amount_nano == 10 * USD // 20
    assert (grown.hold_id, grown.amount_nano) == (leased.hold_id, leased.amount_nano + 2 * USD)
    assert get_balance(organization=customer.organization).held_nano == grown.amount_nano


def test_a_slice_that_was_closed_is_replaced_and_not_grown(customer):
    leased = customer.lease(1_000)
    close_slice(hold_id=leased.hold_id, by="gateway:test")

    assert customer.lease(1_000, hold_id=leased.hold_id).hold_id != leased.hold_id
    assert renew_slices(hold_ids=[leased.hold_id]) == frozenset()


def test_only_slices_nobody_renews_are_taken_back(customer):
    leased, renewed = customer.lease(1_000), customer.lease(1_000)
    past = db_now() - datetime.timedelta(seconds=1)
    Hold.objects.filter(pk__in=[leased.hold_id, renewed.hold_id]).update(expires_at=past)

    kept = renew_slices(hold_ids=[renewed.hold_id])
    closed = close_expired_holds()

    assert (kept, closed) == ({renewed.hold_id}, 1)
    assert Hold.objects.get(pk=leased.hold_id).status == "closed"
    assert get_balance(organization=customer.organization).held_nano == renewed.amount_nano


def test_a_slice_larger_than_the_wallet_is_refused_and_says_what_is_missing(customer):
    with pytest.raises(InsufficientBalance) as refused:
        customer.lease(11 * USD)

    assert refused.value.data == {"balance_nano": 10 * USD, "required_nano": 11 * USD}


def test_usage_that_cannot_be_paid_waits_for_credit(db):
    poor = make_customer(credit_nano=0)
    record = poor.record(input_tokens=PER, output_tokens=0)
    record_usage(records=[record])

    assert rate_usage() == 0
    assert get_spending(organization=poor.organization).unrated_requests == 1
    for number in (1, 2):
        give_credit(poor.organization, INPUT_NANO // 2 + 1, key=f"late:{number}")
        rate_usage()

    assert earned(poor.organization) == INPUT_NANO
    assert get_spending(organization=poor.organization).unrated_requests == 0


@pytest.mark.parametrize("is_open", [True, False])
def test_usage_beyond_what_was_reserved_for_it_is_charged_for_nothing_and_pages(customer, caplog, is_open):
    leased = customer.lease(1_000_000)
    reserved = price_ceiling(quantity=11, price_nano=INPUT_NANO, per=PER)
    reserved += price_ceiling(quantity=7, price_nano=OUTPUT_NANO, per=PER)
    honest = customer.record(slice_id=leased.hold_id, reserved_nano=reserved)
    forged = customer.record(slice_id=leased.hold_id, reserved_nano=reserved, output_tokens=8)
    if not is_open:
        close_slice(hold_id=leased.hold_id, by="system")

    outcome = record_usage(records=[honest, forged])
    again = record_usage(records=[forged])
    rate_usage()
    give_credit(customer.organization, USD, key="later")
    rate_usage()

    assert (outcome.new, outcome.beyond_reservation, again.known) == (2, 1, 1)
    assert earned(customer.organization) == price_of([honest])
    assert get_spending(organization=customer.organization).unrated_requests == 0  # nothing left for later credit
    assert UsageEvent.objects.get(pk=forged.id).output_tokens == 0
    assert UsageConflict.objects.get().body["output_tokens"] == 8
    assert [entry.levelname for entry in caplog.records if forged.id in entry.getMessage()] == ["CRITICAL"]


@pytest.mark.parametrize("slice_of", ["own", "another", "none"])
def test_a_record_cannot_say_that_more_was_reserved_than_its_slice_holds(customer, slice_of):
    other = make_customer()
    slices = {"own": customer.lease(1_000).hold_id, "another": other.lease(9 * USD).hold_id, "none": "hold_none"}
    forged = customer.record(slice_id=slices[slice_of], reserved_nano=2**62, output_tokens=10**12)

    record_usage(records=[forged])
    rate_usage()

    assert earned(customer.organization) == 0
    assert get_balance(organization=other.organization).held_nano == 9 * USD


@pytest.mark.django_db(transaction=True)
def test_many_gateways_at_once_never_lease_more_than_the_wallet_holds():
    customer = make_customer(credit_nano=1_000)

    results = at_once(lambda _: customer.lease(70).amount_nano, 24)

    leased = [result for result in results if not isinstance(result, InsufficientBalance)]
    assert len(leased) == 1_000 // 70
    balance = get_balance(organization=customer.organization)
    assert balance.available_nano + sum(leased) == 1_000
    assert balance.held_nano == sum(leased)


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_recording_rating_leasing_and_closing_at_once_lose_and_invent_nothing():
    customer = make_customer(credit_nano=USD)
    records: list[UsageRecord] = []

    def serve(seed: int) -> None:
        chance = random.Random(seed)
        leased = customer.lease(100_000)
        for _ in range(6):
            record = customer.record(slice_id=leased.hold_id, input_tokens=chance.randint(0, 200))
            records.append(record)
            record_usage(records=[record])
            rate_usage()
            leased = customer.lease(50_000, hold_id=leased.hold_id)
            renew_slices(hold_ids=[leased.hold_id])
        close_slice(hold_id=leased.hold_id, by="gateway:test")

    assert at_once(serve, 4) == [None] * 4
    rate_usage()

    balance = get_balance(organization=customer.organization)
    assert earned(customer.organization) == price_of(records)
    assert (balance.available_nano, balance.held_nano) == (USD - price_of(records), 0)
    assert get_ledger_sum_nano() == 0
