"""Any sequence of movements keeps the books; many at once do what one after another would; history never changes."""

import datetime
from contextlib import suppress
from typing import Any

import pytest
from django.db import transaction
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from apps.accounts.models import Organization
from apps.billing.books.adjustments import request_adjustment
from apps.billing.budget_settings import set_budget
from apps.billing.credits import end_set_aside, expire_lots, set_credit_aside
from apps.billing.ledger import IdempotencyMismatch
from apps.billing.models import Hold
from apps.billing.operations import (
    InsufficientBalance,
    grant_credit,
    grant_paid_credit,
    refund_source,
    reverse_paid_credit,
    settle_hold,
)
from apps.billing.queries import get_balance
from apps.billing.usage.metering import rate_usage, record_usage
from apps.billing.usage.slices import close_slice, lease_slice
from apps.catalog.operations import set_price
from apps.core.database.clock import db_now
from apps.core.errors import DomainError
from tests.factories.money import give_credit, place_hold
from tests.support.database import at_once
from tests.unit.billing.books import assert_books_hold, assert_budgets_hold, funded, history, usage_record

CENT = 10_000_000
AMOUNTS = st.integers(1, 300 * CENT)
PICKS = st.integers(0, 10**6)


class Books(RuleBasedStateMachine):
    """One organization whose money moves in every way there is; a second one whose books nothing may touch."""

    def __init__(self) -> None:
        super().__init__()
        self._atomic = transaction.atomic()
        self._atomic.__enter__()
        self.ours, self.other = (Organization.objects.create(name=name, slug=name) for name in ("ours", "other"))
        self.number = 0
        self.payments: list[str] = []
        self.before: list[Any] = []
        give_credit(self.other, 7 * CENT)
        self.price = set_price(
            sku="inference:input:m", unit="tokens", price_nano=333_333, per=1000, by="system", now=db_now()
        )

    def teardown(self) -> None:
        transaction.set_rollback(True)
        self._atomic.__exit__(None, None, None)

    def key(self) -> str:
        self.number += 1
        return f"step:{self.number}"

    @rule(nano=AMOUNTS, days=st.none() | st.integers(-2, 2))
    def grant(self, nano: int, days: int | None) -> None:
        expires_at = None if days is None else db_now() + datetime.timedelta(days=days)
        arguments = {"organization": self.ours, "by": "system", "reason": "", "idempotency_key": self.key()}
        first = grant_credit(amount_nano=nano, expires_at=expires_at, **arguments)
        assert grant_credit(amount_nano=nano, expires_at=expires_at, **arguments) == first
        with pytest.raises(IdempotencyMismatch):
            grant_credit(amount_nano=nano + 1, expires_at=expires_at, **arguments)

    @rule(nano=AMOUNTS)
    def pay(self, nano: int) -> None:
        self.payments.append(self.key())
        for _ in range(2):
            grant_paid_credit(organization=self.ours, amount_nano=nano, reference=self.payments[-1], by="system")

    @rule(pick=PICKS, nano=AMOUNTS)
    def take_payment_back(self, pick: int, nano: int) -> None:
        if self.payments:
            with suppress(DomainError):
                reverse_paid_credit(
                    organization=self.ours, reference=self.payments[pick % len(self.payments)], amount_nano=nano,
                    by="system", reason="", idempotency_key=self.key(),
                )  # fmt: skip

    @rule(pick=PICKS, nano=AMOUNTS)
    def set_aside(self, pick: int, nano: int) -> None:
        if self.payments:
            with suppress(DomainError):
                set_credit_aside(
                    organization=self.ours, reference=self.payments[pick % len(self.payments)], amount_nano=nano,
                    purpose="card_refund", by="system", idempotency_key=self.key(), is_partial_allowed=bool(pick % 2),
                )  # fmt: skip

    @rule(nano=AMOUNTS)
    def place(self, nano: int) -> None:
        source = self.key()
        with suppress(DomainError):
            place_hold(self.ours, nano, source)

    @rule(pick=PICKS, percent=st.integers(0, 100))
    def end_a_hold(self, pick: int, percent: int) -> None:
        found = list(Hold.objects.filter(organization=self.ours, status="open").order_by("pk"))
        if not found:
            return
        one = found[pick % len(found)]
        if one.purpose == "job":
            captured = one.amount_nano * percent // 100
            assert settle_hold(hold_id=one.pk, capture_nano=captured, by="system").captured_nano == captured
        elif one.purpose == "inference":
            close_slice(hold_id=one.pk, by="system")
        else:
            end_set_aside(hold_id=one.pk, is_paid_out=percent < 50, by="system", reason="")

    @rule(pick=PICKS)
    def refund(self, pick: int) -> None:
        closed = list(Hold.objects.filter(organization=self.ours, status="closed", purpose="job").order_by("pk"))
        if closed:
            source = closed[pick % len(closed)].source
            refund_source(organization=self.ours, source=source, by="system", reason="")
            assert refund_source(organization=self.ours, source=source, by="system", reason="") == 0

    @rule(nano=st.integers(-200 * CENT, 200 * CENT).filter(bool))
    def adjust(self, nano: int) -> None:
        with suppress(DomainError):
            request_adjustment(organization=self.ours, amount_nano=nano, reason="r", by="user_1", now=db_now())

    @rule(nano=AMOUNTS, tokens=st.integers(0, 10**6))
    def use(self, nano: int, tokens: int) -> None:
        """A request with a slice, whose record may come twice."""
        try:
            slice_id = lease_slice(organization=self.ours, required_nano=nano, by="gateway").hold_id
        except DomainError:
            slice_id = ""
        for _ in range(2):
            record_usage(records=[usage_record(self.ours, self.price.pk, tokens, slice_id, f"use_{self.number}")])
        self.number += 1

    @rule()
    def rate(self) -> None:
        rate_usage()
        assert rate_usage() == 0

    @rule()
    def expire(self) -> None:
        expire_lots()
        assert expire_lots() == 0

    @rule(nano=st.integers(100 * CENT, 10_000 * CENT))
    def limit(self, nano: int) -> None:
        if not self.number % 7:
            set_budget(
                organization=self.ours, scope="organization", target="", limit_nano=nano, mode="alert", by="u",
                now=db_now(),
            )  # fmt: skip

    @invariant()
    def the_books_hold(self) -> None:
        assert_books_hold()
        now = history()
        assert now[: len(self.before)] == self.before or set(self.before) <= set(now), "history changed"
        self.before = now
        assert get_balance(organization=self.other).available_nano == 7 * CENT


@pytest.mark.slow
@pytest.mark.hypothesis
def test_any_sequence_of_movements_keeps_the_books(db: None) -> None:
    examples = settings().max_examples // 6
    steps = settings(max_examples=examples, stateful_step_count=16, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Books, settings=steps)


# --- many at once -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_640_holds_from_64_connections_get_exactly_what_the_wallet_covers(transactional_db: None) -> None:
    organization = funded(1000)

    def ten(number: int) -> int:
        granted = 0
        for part in range(10):
            with suppress(InsufficientBalance):
                place_hold(organization, 7, f"ftjob-{number}-{part}")
                granted += 1
        return granted

    results = at_once(ten)

    assert sum(results) == 1000 // 7 == 142
    assert get_balance(organization=organization).available_nano == 1000 - 142 * 7
    assert_books_hold()


def test_one_key_used_by_many_at_once_is_one_effect(transactional_db: None) -> None:
    organization = funded(1000)

    held = at_once(lambda _: place_hold(organization, 7, "ftjob-1").pk, 24)
    settled = at_once(lambda _: settle_hold(hold_id=held[0], capture_nano=5, by="system").captured_nano, 24)
    paid = at_once(
        lambda _: grant_paid_credit(organization=organization, amount_nano=50, reference="pi:1", by="system").pk, 24
    )

    assert len(set(held)) == len(set(paid)) == 1
    assert set(settled) == {5}
    assert get_balance(organization=organization).available_nano == 1000 - 5 + 50
    assert_books_hold()


@pytest.mark.slow
def test_gateways_jobs_and_a_budget_at_once_never_pass_wallet_or_limit(transactional_db: None) -> None:
    organization = funded(1000 * CENT)
    set_budget(
        organization=organization, scope="organization", target="", limit_nano=600 * CENT, mode="block", by="u",
        now=db_now(),
    )  # fmt: skip
    price = set_price(sku="inference:input:m", unit="tokens", price_nano=CENT, per=10, by="system", now=db_now())

    def work(number: int) -> None:
        with suppress(DomainError):
            if number % 2:
                held = place_hold(organization, 30 * CENT, f"ftjob-{number}")
                settle_hold(hold_id=held.pk, capture_nano=20 * CENT, by="system")
            else:
                leased = lease_slice(organization=organization, required_nano=10 * CENT, by=f"gateway:{number}")
                record = usage_record(organization, price.pk, 100, leased.hold_id, f"use_{number}")
                record_usage(records=[record])
                rate_usage()
                close_slice(hold_id=leased.hold_id, by="system")

    results = at_once(work)

    assert [result for result in results if result is not None] == []
    assert_books_hold()
    assert_budgets_hold(organization)
