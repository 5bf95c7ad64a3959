"""Who owes is reminded three times, suspended after a week, and active again as soon as it has paid."""

import datetime

import pytest

from apps.accounts.models import Organization
from apps.billing.operations import SpendingStopped, set_spending
from apps.billing.usage.slices import lease_slice, renew_slices
from apps.core.database.clock import db_now
from apps.core.models import OutboxMessage
from apps.core.money import NANO_PER_CENT
from apps.payments import dunning
from apps.payments.models import Standing
from tests.factories.money import place_hold
from tests.support.payments import deliver, paid_topup, spend
from tests.twins.stripe import money
from tests.twins.stripe.twin import Twin

pytestmark = pytest.mark.django_db


@pytest.fixture
def owing(near_twin: Twin, organization: Organization) -> Organization:
    """Spent $20 of a payment of $25 that was then disputed."""
    topup = paid_topup(near_twin, organization, 2500)
    spend(organization, 2000)
    money.open_dispute(near_twin, topup.payment_intent_id or "")
    deliver(near_twin.events[-1])
    return organization


def status_after(owing: Organization, **days: int) -> str:
    dunning.review_standings(now=db_now() + datetime.timedelta(**days))
    return Standing.objects.get(organization=owing).status


def test_a_debt_leads_from_grace_to_suspension_with_three_reminders(owing: Organization) -> None:
    seen = [status_after(owing, days=day) for day in range(7)]

    assert set(seen) == {"grace"}
    assert OutboxMessage.objects.filter(topic="mail").count() == 3
    assert status_after(owing, days=8) == "suspended"
    assert OutboxMessage.objects.filter(topic="payments.suspended").count() == 1


def test_suspended_nothing_is_held_and_the_refusal_says_why(near_twin: Twin, owing: Organization) -> None:
    status_after(owing, days=0)
    status_after(owing, days=8)

    with pytest.raises(SpendingStopped, match=r"You owe \$20\.00"):
        place_hold(owing, 1)
    with pytest.raises(SpendingStopped):
        lease_slice(organization=owing, required_nano=1, by="gateway")


def test_suspended_a_gateways_slice_is_not_kept(near_twin: Twin, organization: Organization) -> None:
    paid_topup(near_twin, organization, 2500)
    leased = lease_slice(organization=organization, required_nano=1, by="gateway").hold_id
    assert renew_slices(hold_ids=[leased]) == {leased}

    set_spending(organization=organization, stopped_because="You owe $5.00.")

    assert renew_slices(hold_ids=[leased]) == frozenset()


def test_paying_leads_back_to_active_at_once(near_twin: Twin, owing: Organization) -> None:
    status_after(owing, days=0)
    status_after(owing, days=8)

    paid_topup(near_twin, owing, 3000)
    dunning.review(organization_id=owing.pk, now=db_now())

    assert Standing.objects.get().status == "active"
    place_hold(owing, 10 * NANO_PER_CENT)


def test_after_a_part_is_paid_the_refusal_names_the_rest(near_twin: Twin, owing: Organization) -> None:
    status_after(owing, days=0)
    status_after(owing, days=8)

    paid_topup(near_twin, owing, 500)
    dunning.review(organization_id=owing.pk, now=db_now())

    assert Standing.objects.get().status == "suspended"
    with pytest.raises(SpendingStopped, match=r"You owe \$15\.00"):
        place_hold(owing, 1)


def test_a_won_dispute_leads_back_too(near_twin: Twin, owing: Organization) -> None:
    status_after(owing, days=0)
    money.close_dispute(near_twin, near_twin.of_kind("dispute")[-1]["id"], is_won=True)
    deliver(near_twin.events[-1])

    assert status_after(owing, days=1) == "active"


def test_who_owes_nothing_has_no_standing(near_twin: Twin, organization: Organization) -> None:
    paid_topup(near_twin, organization, 2500)

    dunning.review_standings(now=db_now())

    assert not Standing.objects.exists()
