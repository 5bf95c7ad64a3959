"""P13, P14 and P18 under any sequence of what people, Stripe, its webhooks and our tasks do, and at once."""

import datetime
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from django.db import transaction
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from apps.accounts.models import Organization
from apps.billing.models import LedgerTransaction
from apps.billing.queries import get_balance, get_ledger_sum_nano
from apps.core.database.clock import db_now
from apps.core.money import NANO_PER_CENT
from apps.payments import autorecharge, topups, webhooks
from apps.payments.customers import ensure_customer, keep_card
from apps.payments.lifecycle import TOPUP_IN_FLIGHT
from apps.payments.models import AutoRecharge, StripeEvent, TopUp
from apps.payments.stripe import gateway
from apps.payments.stripe.errors import StripeUnavailable
from tests.factories.accounts import make_organization, make_user
from tests.factories.money import spend
from tests.support.database import at_once
from tests.twins.stripe import invoices, money
from tests.twins.stripe.server import KeyMissing
from tests.twins.stripe.twin import Fault, Twin, signed
from tests.unit.billing.books import assert_books_hold

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
            spend(self.ours, nano, f"ftjob-{self.spent}")

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
                webhooks.handle_or_record(event_id=event["id"])

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
            webhooks.handle_or_record(event_id=event_id)
        ours = dict(TopUp.objects.filter(organization=self.ours).values_list("pk", "invoice_id"))
        intents = {
            each["id"] for each in self.twin.of_kind("payment_intent")
            if each["status"] == "succeeded"
        }  # fmt: skip
        credited = LedgerTransaction.objects.filter(organization=self.ours, kind="topup")
        keys = [key.removeprefix("topup:stripe:") for key in credited.values_list("idempotency_key", flat=True)]
        assert sorted(keys) == sorted(intents), (keys, intents, ours)
        assert_books_hold()


@pytest.mark.slow
@pytest.mark.hypothesis
def test_payments_and_automatic_charges_keep_their_promises(near_twin: Twin, db: None) -> None:
    Payments.twin = near_twin
    run_state_machine_as_test(Payments, settings=STEPS)


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


@pytest.mark.slow
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
    monkeypatch.setattr(gateway, "keyed", lambda key: {})

    with pytest.raises(KeyMissing):
        ask()
