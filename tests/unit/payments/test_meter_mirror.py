"""A Stripe meter is told each token once, and nothing where no meter is named."""

import datetime
from typing import Any

import pytest

from apps.accounts.models import Organization
from apps.billing.models import UsageSeries
from apps.catalog.operations import set_price
from apps.core.database.clock import db_now
from apps.payments.customers import ensure_customer
from apps.payments.stripe.errors import StripeUnavailable
from apps.payments.stripe.meter_mirror import mirror_usage
from tests.twins.stripe.twin import Fault, Twin

pytestmark = pytest.mark.django_db


@pytest.fixture
def series(near_twin: Twin, organization: Organization) -> UsageSeries:
    ensure_customer(organization_id=organization.pk)
    price = set_price(
        sku="inference:input:m", unit="tokens", price_nano=1, per=1, by="user_1", now=db_now()
    )  # fmt: skip
    return UsageSeries.objects.create(
        organization=organization, sku=price.sku, price_rule=price, subject="m", day=db_now().date(), quantity=100,
        request_count=1,
    )  # fmt: skip


def told(twin: Twin) -> list[str]:
    return [event["payload"]["value"] for event in twin.of_kind("billing.meter_event")]


def test_nothing_is_mirrored_unless_a_meter_is_named(near_twin: Twin, series: UsageSeries) -> None:
    assert mirror_usage(now=db_now()) == 0
    assert told(near_twin) == []


def test_only_differences_are_sent_and_a_lost_answer_adds_nothing(
    near_twin: Twin, series: UsageSeries, settings: Any
) -> None:
    settings.STRIPE_METER = "tokens"
    near_twin.faults.append(Fault("after", "meter_events", times=3))
    with pytest.raises(StripeUnavailable):
        mirror_usage(now=db_now())
    near_twin.faults.clear()

    for quantity in (130, 130, 145):  # more was used before the lost answer was asked for again
        UsageSeries.objects.filter(pk=series.pk).update(quantity=quantity)
        mirror_usage(now=db_now() + datetime.timedelta(minutes=1))

    assert told(near_twin) == ["100", "30", "15"]


def test_a_customer_whom_stripe_does_not_know_keeps_nobody_else_waiting(
    near_twin: Twin, series: UsageSeries, organization: Organization, settings: Any
) -> None:
    settings.STRIPE_METER = "tokens"
    near_twin.faults.append(Fault(404, "meter_events"))

    assert mirror_usage(now=db_now()) == 0
    assert mirror_usage(now=db_now()) == 1
    assert told(near_twin) == ["100"]
