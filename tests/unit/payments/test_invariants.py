"""P13, P14, P15 and P18 under any sequence of what people, Stripe, its webhooks and our tasks do, and at once."""

import datetime
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from django.db import transaction
from django.db.models import Sum
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from apps.accounts.models import Organization
from apps.billing.ledger import IdempotencyMismatch
from apps.billing.models import AccountKind, LedgerEntry, LedgerTransaction
from apps.billing.operations import (
    SpendingStopped,
    grant_credit,
    grant_paid_credit,
    hold,
    reverse_paid_credit,
    settle_hold,
)
from apps.billing.queries import get_balance, get_ledger_sum_nano
from apps.billing.usage.slices import lease_slice
from apps.core.database.clock import db_now
from apps.core.errors import DomainError
from apps.core.money import NANO_PER_CENT
from apps.payments import autorecharge, dunning, topups, webhooks
from apps.payments.customers import ensure_customer, keep_card
from apps.payments.lifecycle import TOPUP_IN_FLIGHT
from apps.payments.models import AutoRecharge, Standing, StripeEvent, TopUp
from apps.payments.stripe import gateway
from apps.payments.stripe.errors import StripeUnavailable
from tests.factories.accounts import make_organization, make_user
from tests.twins.stripe import invoices, money
from tests.twins.stripe.server import KeyMissing
from tests.twins.stripe.twin import Fault, Twin, signed
from tests.unit.billing.books import assert_books_hold, at_once

PICKS = st.integers(0, 10**6)
CENTS = st.integers(500, 9_000)
CARDS = st.sampled_from(
    ["pm_card_visa", "pm_card_authenticationRequired", "pm_card_visa_chargeDeclinedInsufficientFunds",
     "pm_card_visa_chargeDeclinedStolenCard"]
)  # fmt: skip
STEPS = settings(
    max_examples=settings().max_examples // 6, stateful_step_count=25, suppress_health_check=list(HealthCheck)
)


class Payments(RuleBasedStateMachine):
    """One customer pays, is charged automatically and spends, while answers break off and webhooks come anyhow."""

    twin: Twin

    def __init__(self) -> None:
        super().__init__()
        self.mark = transaction.savepoint()
        for kept in (self.twin.objects, self.twin._kept):
            kept.clear()
        for listed in (self.twin.events, self.twin.cash, self.twin.faults, self.twin.complaints):
            listed.clear()
        self.ours = make_organization("Ours", owner=make_user("ours"))
        self.use_card("pm_card_visa")
        self.waiting: list[dict[str, Any]] = []
        self.seen = 0
        self.spent = 0

    def teardown(self) -> None:
        try:
            self.everything_arrives()
        finally:
            transaction.savepoint_rollback(self.mark)

    # --- people and Stripe ---

    def use_card(self, card: str) -> None:
        customer = ensure_customer(organization_id=self.ours.pk)
        keep_card(
            customer=customer,
            card=money.left(money.give_card(self.twin, customer.stripe_id, card)),
            cause="page_1",
        )

    def pick(self, found: list[Any], pick: int) -> Any:
        return found[pick % len(found)] if found else None

    def sessions(self, status: str) -> list[dict[str, Any]]:
        found = self.twin.of_kind("checkout.session")
        return [each for each in found if (each["status"], each["payment_status"]) == (status, "unpaid")]

    @rule(cents=CENTS)
    def ask(self, cents: int) -> None:
        page = topups.request_topup(organization=self.ours, amount_cents=cents, by="user_1")
        for _ in range(2):
            topups.make_page(page_id=page.pk)

    @rule(pick=PICKS, is_later=st.booleans())
    def pay(self, pick: int, is_later: bool) -> None:
        if session := self.pick(self.sessions("open"), pick):
            money.pay_checkout(self.twin, session["id"], is_paid_later=is_later)

    @rule(pick=PICKS, is_paid=st.booleans())
    def settle(self, pick: int, is_paid: bool) -> None:
        unsettled = [
            s for s in self.sessions("complete") if self.twin.get(s["payment_intent"])["status"] == "processing"
        ]
        if session := self.pick(unsettled, pick):
            money.settle_checkout(self.twin, session["id"], is_paid=is_paid)

    @rule(card=CARDS)
    def choose_card(self, card: str) -> None:
        self.use_card(card)

    @rule(threshold=st.integers(0, 20_000), cents=CENTS, charges=st.integers(1, 3))
    def order(self, threshold: int, cents: int, charges: int) -> None:
        autorecharge.set_auto_recharge(
            organization=self.ours, is_enabled=True, threshold_cents=threshold, amount_cents=cents,
            monthly_cap_cents=cents * charges, by="user_1",
        )  # fmt: skip

    @rule()
    def stop(self) -> None:
        AutoRecharge.objects.filter(organization=self.ours).update(is_enabled=False)

    @rule(pick=PICKS)
    def confirm(self, pick: int) -> None:
        waiting = TopUp.objects.filter(organization=self.ours, status="action_required").order_by("pk")
        if topup := self.pick(list(waiting), pick):
            with suppress(Exception):
                invoices.pay_hosted_invoice(self.twin, topup.invoice_id or "")

    @rule(percent=st.integers(1, 100))
    def spend(self, percent: int) -> None:
        nano = get_balance(organization=self.ours).available_nano * percent // 100
        if nano:
            self.spent += 1
            made = hold(
                organization=self.ours, purpose="job", source=f"ftjob-{self.spent}", amount_nano=nano, by="system",
                idempotency_key=f"spend:{self.spent}",
            )  # fmt: skip
            settle_hold(hold_id=made.pk, capture_nano=nano, by="system")

    # --- webhooks and tasks ---

    def collect(self) -> None:
        self.waiting += self.twin.events[self.seen :]
        self.seen = len(self.twin.events)

    @rule(pick=PICKS, times=st.integers(0, 2))
    def deliver(self, pick: int, times: int) -> None:
        """Deliver any waiting event, once, twice or never."""
        self.collect()
        if event := self.pick(self.waiting, pick):
            self.waiting.remove(event)
            for _ in range(times):
                body, signature = signed(event)
                webhooks.receive(body=body, signature=signature)
                webhooks.handle_or_note(event_id=event["id"])

    @rule(pick=PICKS)
    def come_back(self, pick: int) -> None:
        """Sync as the page people come back to does, and the sweep."""
        if topup := self.pick(list(TopUp.objects.filter(organization=self.ours).order_by("pk")), pick):
            topups.sync_topup(topup_id=topup.pk)

    @rule(broken=st.none() | st.sampled_from(["/invoices", "/add_lines", "/finalize", "/pay"]), times=st.integers(1, 3))
    def recharge(self, broken: str | None, times: int) -> None:
        """Begin what is due and carry it out, more than once; the answer to one call may be lost."""
        for _ in range(times):
            autorecharge.start_due(now=db_now())
        before, order = self.charged_cents(), autorecharge.get_auto_recharge(organization=self.ours)
        if broken:
            self.twin.faults.append(Fault("after", broken, times=3))
        for topup in TopUp.objects.filter(organization=self.ours, origin="auto", status="requested"):
            for _ in range(times):
                with suppress(StripeUnavailable):
                    autorecharge.charge(topup_id=topup.pk)
        self.twin.faults.clear()
        if (after := self.charged_cents()) > before:
            assert order.is_enabled, "P14: charged after it was turned off"
            assert after <= order.monthly_cap_cents, "P14: charged beyond the month's cap"

    def charged_cents(self) -> int:
        """Return what Stripe charged for automatic top-ups, by its own invoices, without tax."""
        ours = set(TopUp.objects.filter(organization=self.ours, origin="auto").values_list("pk", flat=True))
        paid = [each for each in self.twin.of_kind("invoice") if each["status"] == "paid"]
        return sum(each["subtotal"] for each in paid if each["metadata"].get("topup_id") in ours)

    # --- what always holds ---

    @invariant()
    def each_paid_object_is_one_posting(self) -> None:
        """P13: no payment is credited twice, and none that is not paid."""
        for topup in TopUp.objects.filter(organization=self.ours):
            posted = LedgerTransaction.objects.filter(idempotency_key=f"topup:{topup.reference}").count()
            assert posted == (topup.status == "paid"), (topup.status, posted)
        assert get_ledger_sum_nano() == 0

    @invariant()
    def one_charge_is_in_flight(self) -> None:
        """P14."""
        flying = TopUp.objects.filter(organization=self.ours, origin="auto", status__in=TOPUP_IN_FLIGHT)
        assert flying.count() <= 1

    @invariant()
    def the_contract_holds(self) -> None:
        """P18: nothing we send is refused by the package's own types. A POST without our key raises KeyMissing."""
        assert self.twin.complaints == []

    def everything_arrives(self) -> None:
        """P13: after the sweep, what is credited is what was paid at Stripe, each once."""
        self.twin.faults.clear()
        now = db_now()
        hour = datetime.timedelta(hours=1)
        webhooks.ingest_missed(since=now - hour, until=now + hour)
        for event_id in StripeEvent.objects.filter(status="received").values_list("pk", flat=True):
            webhooks.handle_or_note(event_id=event_id)
        ours = dict(TopUp.objects.filter(organization=self.ours).values_list("pk", "invoice_id"))
        intents = {
            each["id"] for each in self.twin.of_kind("payment_intent")
            if each["status"] == "succeeded"
        }  # fmt: skip
        credited = LedgerTransaction.objects.filter(organization=self.ours, kind="topup")
        keys = [key.removeprefix("topup:stripe:") for key in credited.values_list("idempotency_key", flat=True)]
        assert sorted(keys) == sorted(intents), (keys, intents, ours)
        assert_books_hold()


@pytest.mark.hypothesis
def test_payments_and_automatic_charges_keep_their_promises(near_twin: Twin, db: None) -> None:
    Payments.twin = near_twin
    run_state_machine_as_test(Payments, settings=STEPS)


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
        return Standing.objects.filter(organization=self.ours).values_list("status", flat=True).first() or "active"

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
        assert self.status() == "active", "P15: paying leads back to active"

    @rule(cents=CENTS)
    def be_granted(self, cents: int) -> None:
        grant_credit(
            organization=self.ours,
            amount_nano=cents * NANO_PER_CENT,
            by="system",
            reason="",
            idempotency_key=self.key(),
        )

    @rule(percent=st.integers(1, 100))
    def spend(self, percent: int) -> None:
        nano = get_balance(organization=self.ours).available_nano * percent // 100
        if nano and self.status() != "suspended":
            source = self.key()
            made = hold(
                organization=self.ours, purpose="job", source=source, amount_nano=nano, by="system",
                idempotency_key=source,
            )  # fmt: skip
            settle_hold(hold_id=made.pk, capture_nano=nano, by="system")

    @rule(pick=PICKS, cents=CENTS)
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
        assert (self.status() == "active") == (self.owed_nano() == 0)

    @invariant()
    def nothing_is_admitted_while_suspended(self) -> None:
        """P15: neither a job's hold nor a gateway's slice, whatever is in the wallet."""
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
        assert is_stopped == [self.status() == "suspended"] * 2

    def start_job(self) -> None:
        hold(organization=self.ours, purpose="job", source="probe", amount_nano=1, by="system", idempotency_key="probe")

    def lease(self) -> None:
        lease_slice(organization=self.ours, required_nano=1, by="gateway")


@pytest.mark.hypothesis
def test_whoever_owes_is_stopped_in_time_and_whoever_paid_never(db: None) -> None:
    run_state_machine_as_test(Owing, settings=STEPS)


# --- at once ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def crowd(transactional_db: None, near_twin: Twin) -> Organization:
    return make_organization("Crowd", owner=make_user("crowd"))


def test_one_payment_synced_by_many_at_once_is_one_posting(near_twin: Twin, crowd: Organization) -> None:
    page = topups.request_topup(organization=crowd, amount_cents=2500, by="user_1")
    topups.make_page(page_id=page.pk)
    topup = TopUp.objects.get(page=page)
    money.pay_checkout(near_twin, topup.checkout_id or "")

    results = at_once(lambda _: topups.sync_topup(topup_id=topup.pk), 24)

    assert [result for result in results if result is not None] == []
    assert LedgerTransaction.objects.filter(kind="topup").count() == 1
    assert get_balance(organization=crowd).available_nano == 2500 * NANO_PER_CENT


def test_a_charge_begun_and_carried_out_by_many_at_once_is_one_charge(near_twin: Twin, crowd: Organization) -> None:
    customer = ensure_customer(organization_id=crowd.pk)
    keep_card(
        customer=customer,
        card=money.left(money.give_card(near_twin, customer.stripe_id, "pm_card_visa")),
        cause="page_1",
    )
    autorecharge.set_auto_recharge(
        organization=crowd, is_enabled=True, threshold_cents=1000, amount_cents=5000, monthly_cap_cents=5000, by="u"
    )

    begun = at_once(lambda _: autorecharge.start_due(now=db_now()), 24)
    topup = TopUp.objects.get()
    charged = at_once(lambda _: autorecharge.charge(topup_id=topup.pk), 24)

    assert sum(begun) == 1
    assert [result for result in charged if result is not None] == []
    assert len(near_twin.of_kind("charge")) == 1
    assert get_balance(organization=crowd).available_nano == 5000 * NANO_PER_CENT


# --- P18 --------------------------------------------------------------------------------------------------------------

ASKED: list[Callable[[], Any]] = [
    lambda: gateway.create_customer(organization_id="org_1", name="A", email="a@example.com"),
    lambda: gateway.finalize_invoice(invoice_id="in_1", key="k"),
    lambda: gateway.create_refund(payment_intent_id="pi_1", amount_cents=1, refund_id="r", key="k"),
]


@pytest.mark.parametrize("ask", ASKED)
def test_a_post_without_our_key_never_leaves(
    near_twin: Twin, db: None, monkeypatch: pytest.MonkeyPatch, ask: Callable[[], Any]
) -> None:
    monkeypatch.setattr(gateway, "_keyed", lambda key: {})

    with pytest.raises(KeyMissing):
        ask()
