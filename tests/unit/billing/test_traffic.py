"""Traffic is counted by the hour with the batch that records it, once, and percentiles come from sums of counts."""

import datetime
import random
from itertools import count

import pytest

from apps.accounts.models import Organization
from apps.billing.models import TrafficHour
from apps.billing.usage.metering import UsageRecord, record_usage
from apps.billing.usage.traffic import (
    BOUNDS_MS,
    KEPT_DAYS,
    TrafficSum,
    list_hours_of_all,
    list_traffic,
    list_traffic_of_models,
    percentile_ms,
    prune_traffic,
    sum_traffic,
    total_of,
)
from apps.catalog.operations import set_price
from apps.core.database.clock import db_now
from tests.factories.accounts import make_organization
from tests.factories.usage import make_record

MODEL = "ft:anneal-demo:acme:bot:01"
HOUR = datetime.timedelta(hours=1)
NOON = datetime.datetime(2026, 11, 3, 12, tzinfo=datetime.UTC)
MIDNIGHT = NOON - 12 * HOUR
_numbers = count(1)


@pytest.fixture
def record(organization):
    """Return a function that makes a record of one request of the organization."""
    prices = [
        set_price(sku=f"inference:{way}:demo", unit="tokens", price_nano=nano, per=1_000_000, by="system", now=db_now())
        for way, nano in (("input", 100_000_000), ("output", 200_000_000))
    ]

    def make(**fields) -> UsageRecord:
        values = {
            "id": f"use_t{next(_numbers)}", "organization_id": organization.pk, "model_name": MODEL, "slice_id": "",
            "adapter_version_id": "adpv_1", "input_price_id": prices[0].pk, "output_price_id": prices[1].pk,
            "occurred_at": NOON,
        }  # fmt: skip
        if "request_count" in fields:  # refused: it names no price
            values |= {"input_price_id": None, "output_price_id": None, "input_tokens": 0, "output_tokens": 0}
        return make_record(**values | fields)

    return make


def traffic_of(organization: Organization, *, hours: int = 24, step="hour", **fields) -> list[TrafficSum]:
    return list_traffic(organization=organization, since=MIDNIGHT, until=MIDNIGHT + hours * HOUR, step=step, **fields)


def test_a_batch_that_arrives_twice_counts_once(organization, record):
    batch = [
        record(input_tokens=1_000, cached_input_tokens=400, output_tokens=500, latency_ms=900, first_token_ms=80),
        record(finish="aborted", latency_ms=60_000, first_token_ms=90),
        record(finish="lost"),
        record(finish="error"),
        *(record(finish=name, request_count=10 + place) for place, name in enumerate(["rate_limit", "quota"])),
        *(record(finish=name, request_count=20 + place) for place, name in enumerate(["not_found", "invalid"])),
    ]

    record_usage(records=batch)
    record_usage(records=batch)

    found = total_of(traffic_of(organization))
    assert (found.requests, found.aborted, found.failed) == (4 + 10 + 11 + 20 + 21, 1, 2)
    assert (found.rate_limited, found.over_quota, found.not_found, found.invalid) == (10, 11, 20, 21)
    assert found.refused == 62
    assert (found.input_tokens, found.cached_input_tokens, found.output_tokens) == (1_000 + 3 * 3, 400, 500 + 3 * 4)
    assert found.cost_nano == (1_000 + 3 * 3) * 100 + (500 + 3 * 4) * 200
    assert sum(found.first_token_counts) == 2
    assert 794 <= found.latency_ms[0] <= 1_000  # of the whole answer, not of the one that the client left


def test_batches_add_up_to_the_percentiles_of_all_requests(organization, record):
    chance = random.Random(7)
    latencies = [round(chance.lognormvariate(6, 1.5)) for _ in range(600)]
    for start in range(0, 600, 150):
        part = latencies[start : start + 150]
        record_usage(records=[record(latency_ms=each, occurred_at=NOON + chance.randrange(3) * HOUR) for each in part])

    found = total_of(traffic_of(organization))

    for estimate, place in zip(found.latency_ms, (300, 570), strict=True):
        true = sorted(latencies)[place - 1]
        assert abs(estimate / true - 1) < 0.26
    by_day = traffic_of(organization, step="day")
    assert [each.latency_ms for each in by_day] == [found.latency_ms]
    assert TrafficHour.objects.count() == 3


def test_hours_and_days_without_requests_are_there_and_others_traffic_is_not(organization, record, db):
    other = make_organization("Rival")
    record_usage(records=[
        record(), record(occurred_at=NOON + 13 * HOUR, key_id="key_2"), record(model_name="anneal-demo"),
        record(organization_id=other.pk),
    ])  # fmt: skip

    hours = traffic_of(organization, hours=48)
    days = traffic_of(organization, hours=72, step="day")
    of_model = traffic_of(organization, model_name=MODEL)

    assert [(each.at.hour, each.requests) for each in hours if each.requests] == [(12, 2), (1, 1)]
    assert len(hours) == 48
    assert [each.requests for each in days] == [2, 1, 0]
    assert total_of(of_model).requests == 1
    both = sum_traffic(since=MIDNIGHT, until=MIDNIGHT + 24 * HOUR)
    assert both.requests == 3
    of_all = list_hours_of_all(since=MIDNIGHT, until=MIDNIGHT + 24 * HOUR)
    assert [(each.at.hour, each.requests) for each in of_all if each.requests] == [(12, 3)]
    assert len(of_all) == 24
    assert sum(both.first_token_counts) == sum(
        sum(hour.first_token_counts) for owner in Organization.objects.all() for hour in traffic_of(owner)
    )
    assert sum_traffic(since=MIDNIGHT - HOUR, until=MIDNIGHT).requests == 0
    models = list_traffic_of_models(organization=organization, since=MIDNIGHT, until=MIDNIGHT + 48 * HOUR)
    assert [(each.model_name, each.requests) for each in models] == [(MODEL, 2), ("anneal-demo", 1)]


def test_hours_older_than_ninety_days_are_deleted(organization, record):
    record_usage(records=[record(), record(occurred_at=NOON + 5 * HOUR)])

    pruned = prune_traffic(now=NOON + datetime.timedelta(days=KEPT_DAYS) + HOUR)

    assert pruned == 1
    assert TrafficHour.objects.get().hour_at == NOON + 5 * HOUR


@pytest.mark.parametrize("milliseconds", [0, 9, 10, 11, 99, 100, 1_000, 630_957, 10**7])
def test_a_latency_lies_in_its_bucket(organization, record, milliseconds):
    record_usage(records=[record(latency_ms=milliseconds)])

    counts = total_of(traffic_of(organization)).latency_counts

    estimate = percentile_ms(counts, 1)
    assert min(milliseconds, BOUNDS_MS[-1]) <= estimate <= max(10, min(1.31 * milliseconds, BOUNDS_MS[-1]))


def test_nothing_counted_has_no_percentile():
    assert percentile_ms((0,) * 50, 0.5) is None
    assert total_of([]).latency_ms == (None, None)
