"""P15 under any sequence of payments, grants, spending and reversals: a debtor is stopped in time, a payer never."""

import datetime
from contextlib import suppress

import pytest
from django.db import transaction
from django.db.models import Sum
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from apps.billing.ledger import IdempotencyMismatch
from apps.billing.models import AccountKind, LedgerEntry
from apps.billing.operations import SpendingStopped, grant_paid_credit, reverse_paid_credit
from apps.billing.queries import get_balance
from apps.billing.usage.slices import lease_slice
from apps.core.database.clock import db_now
from apps.core.errors import DomainError
from apps.core.money import NANO_PER_CENT
from apps.payments import dunning
from apps.payments.lifecycle import StandingStatus
from apps.payments.models import Standing
from tests.factories import money
from tests.factories.accounts import make_organization, make_user
from tests.factories.money import give_credit, place_hold

CENTS = st.integers(500, 9_000)
STEPS = settings(
    max_examples=settings().max_examples // 6, stateful_step_count=25, suppress_health_check=list(HealthCheck)
)


class Owing(RuleBasedStateMachine):
    """One organization pays, spends, and has payments taken back, while days go by and its standing is reviewed."""

    def __init__(self) -> None:
        super().__init__()
        self.mark = transaction.savepoint()
        self.ours = make_organization("Ours", owner=make_user("ours"))
        self.number = 0
        self.now = db_now()
        self.payments: list[str] = []

    def teardown(self) -> None:
        transaction.savepoint_rollback(self.mark)

    def key(self) -> str:
        self.number += 1
        return f"step:{self.number}"

    def owed_nano(self) -> int:
        owed = LedgerEntry.objects.filter(organization=self.ours, account__kind=AccountKind.RECEIVABLE)
        return -(owed.aggregate(nano=Sum("amount_nano"))["nano"] or 0)

    def status(self) -> str:
        return (
            Standing.objects.filter(organization=self.ours).values_list("status", flat=True).first()
            or StandingStatus.ACTIVE
        )

    @rule(cents=CENTS)
    def pay(self, cents: int) -> None:
        self.payments.append(self.key())
        with transaction.atomic():
            grant_paid_credit(
                organization=self.ours, amount_nano=cents * NANO_PER_CENT, reference=self.payments[-1], by="stripe"
            )
            dunning.review(organization_id=self.ours.pk, now=self.now)  # as a paid top-up does

    @precondition(lambda self: self.owed_nano())
    @rule()
    def pay_what_is_owed(self) -> None:
        self.pay(-(-self.owed_nano() // NANO_PER_CENT))
        assert self.status() == StandingStatus.ACTIVE, "P15: paying leads back to active"

    @rule(cents=CENTS)
    def be_granted(self, cents: int) -> None:
        give_credit(self.ours, cents * NANO_PER_CENT, key=self.key())

    @rule(percent=st.integers(1, 100))
    def spend(self, percent: int) -> None:
        nano = get_balance(organization=self.ours).available_nano * percent // 100
        if nano and self.status() != StandingStatus.SUSPENDED:
            money.spend(self.ours, nano, self.key())

    @rule(pick=st.integers(0, 10**6), cents=CENTS)
    def take_back(self, pick: int, cents: int) -> None:
        if self.payments:
            with suppress(DomainError, IdempotencyMismatch):
                reverse_paid_credit(
                    organization=self.ours, reference=self.payments[pick % len(self.payments)],
                    amount_nano=cents * NANO_PER_CENT, by="stripe", reason="", idempotency_key=self.key(),
                )  # fmt: skip

    @rule(hours=st.integers(1, 100))
    def wait(self, hours: int) -> None:
        self.now += datetime.timedelta(hours=hours)
        dunning.review_standings(now=self.now)
        assert (self.status() == StandingStatus.ACTIVE) == (self.owed_nano() == 0)

    @invariant()
    def nothing_is_admitted_while_suspended(self) -> None:
        """P15: neither a job's hold nor a gateway's slice, however much is in the wallet."""
        is_stopped = []
        for start in (self.start_job, self.lease):
            mark = transaction.savepoint()
            try:
                start()
                is_stopped.append(False)
            except SpendingStopped:
                is_stopped.append(True)
            except DomainError:
                is_stopped.append(False)
            transaction.savepoint_rollback(mark)
        assert is_stopped == [self.status() == StandingStatus.SUSPENDED] * 2

    def start_job(self) -> None:
        place_hold(self.ours, 1, "probe")

    def lease(self) -> None:
        lease_slice(organization=self.ours, required_nano=1, by="gateway")


@pytest.mark.slow
@pytest.mark.hypothesis
def test_a_debtor_is_stopped_in_time_and_a_payer_never(db: None) -> None:
    run_state_machine_as_test(Owing, settings=STEPS)
