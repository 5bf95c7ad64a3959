"""Metered tokens against the engines' own counters: the sum over base and adapters, day by day, to 0.1 percent."""

import datetime
import logging

import pytest

from apps.billing.usage.metering import record_usage
from apps.contracts.serving import EngineCount, ObservedState
from apps.serving import reconciliation
from apps.serving.models import EngineTokens, MeteringCheck, Replica
from apps.serving.operations import record_observed
from apps.serving.reconciliation import list_checks, reconcile, record_count
from tests.factories.serving import make_served_model
from tests.factories.usage import make_record

DAY = datetime.date(2026, 11, 3)
MIDNIGHT = datetime.datetime(2026, 11, 3, tzinfo=datetime.UTC)
HOUR = datetime.timedelta(hours=1)
MORNING_AFTER = MIDNIGHT + 26 * HOUR


@pytest.fixture
def replica(db: None) -> Replica:
    return make_served_model("small", "unix:///nowhere", is_priced=False).replicas.get()


def count_at(replica: Replica, at: datetime.datetime, read: int, written: int, *, engine: str = "e1") -> None:
    counted = EngineCount(input_tokens=read, output_tokens=written)
    record_count(replica=replica, engine_generation=engine, counted=counted, now=at)


def meter(organization, replica: Replica, at: datetime.datetime, read: int, written: int, **fields) -> None:
    """Record a request that ended at `at`, after a second."""
    values = {
        "organization_id": organization.pk, "slice_id": "", "input_price_id": None, "output_price_id": None,
        "input_tokens": read, "output_tokens": written, "latency_ms": 1000, "occurred_at": at,
        "replica_id": replica.pk, "engine_input_tokens": read, "engine_output_tokens": written,
    }  # fmt: skip
    record_usage(records=[make_record(**values | fields)])


def check_of(replica: Replica) -> MeteringCheck:
    [check] = reconcile(now=MORNING_AFTER)
    assert (check.replica_id, check.day) == (replica.pk, DAY)
    return check


@pytest.mark.parametrize(
    ("counted", "is_within"), [(100_000, True), (100_100, True), (100_101, False), (99_899, False)]
)
def test_a_day_is_right_to_a_thousandth_and_a_difference_pages(organization, replica, caplog, counted, is_within):
    count_at(replica, MIDNIGHT + HOUR, 500, 70)
    meter(organization, replica, MIDNIGHT + 2 * HOUR, 60_000, 50, adapter_version_id="adpv_one")
    meter(organization, replica, MIDNIGHT + 3 * HOUR, 40_000, 950)
    count_at(replica, MIDNIGHT + 4 * HOUR, 500 + counted, 70 + 1000)

    with caplog.at_level(logging.CRITICAL):
        check = check_of(replica)

    assert check.is_within is is_within
    assert (check.counted_input_tokens, check.least_input_tokens, check.request_count) == (counted, 100_000, 2)
    assert bool(caplog.records) is not is_within


@pytest.mark.parametrize(("shown", "is_within"), [(5_000, True), (936, True), (930, False), (0, False), (None, True)])
def test_tokens_that_no_answer_shows_are_a_difference_though_the_replica_counts_them_twice(
    organization, replica, caplog, shown, is_within
):
    """Its counter and its answers' usage agree: only what the gateways saw of the answers says otherwise."""
    count_at(replica, MIDNIGHT + HOUR, 0, 0)
    meter(organization, replica, MIDNIGHT + 2 * HOUR, 100, 1000, output_bytes=shown)
    count_at(replica, MIDNIGHT + 4 * HOUR, 100, 1000)

    with caplog.at_level(logging.CRITICAL):
        check = check_of(replica)

    assert check.is_within is is_within
    assert bool(caplog.records) is not is_within


def test_tokens_that_nobody_pays_for_are_metered_all_the_same(organization, replica):
    count_at(replica, MIDNIGHT + HOUR, 0, 0)
    meter(
        organization, replica, MIDNIGHT + 2 * HOUR, 0, 0, finish="error", engine_input_tokens=30, engine_output_tokens=9
    )
    count_at(replica, MIDNIGHT + 3 * HOUR, 30, 9)

    assert check_of(replica).is_within


def test_a_request_under_way_at_a_reading_may_be_on_either_side_of_it(organization, replica):
    meter(organization, replica, MIDNIGHT + HOUR, 100, 50, latency_ms=60_000)
    count_at(replica, MIDNIGHT + HOUR - datetime.timedelta(seconds=30), 1100, 20)  # its prompt was read before
    meter(organization, replica, MIDNIGHT + 2 * HOUR, 1000, 1000)
    count_at(replica, MIDNIGHT + 3 * HOUR, 2100, 1050)

    check = check_of(replica)

    assert check.is_within
    assert (check.least_input_tokens, check.most_input_tokens, check.counted_output_tokens) == (1000, 1100, 1030)


def test_engine_starts_add_up_and_what_was_never_read_of_a_dead_one_counts_for_nobody(organization, replica):
    count_at(replica, MIDNIGHT + HOUR, 0, 0, engine="e1")
    meter(organization, replica, MIDNIGHT + 2 * HOUR, 10, 10)
    count_at(replica, MIDNIGHT + 3 * HOUR, 10, 10, engine="e1")
    meter(organization, replica, MIDNIGHT + 4 * HOUR, 7000, 7000)  # the engine died before it was read again
    count_at(replica, MIDNIGHT + 5 * HOUR, 0, 0, engine="e2")
    meter(organization, replica, MIDNIGHT + 6 * HOUR, 5, 5)
    count_at(replica, MIDNIGHT + 7 * HOUR, 5, 5, engine="e2")

    check = check_of(replica)

    assert check.is_within
    assert (check.counted_input_tokens, check.most_input_tokens) == (15, 15)


def test_the_first_reading_of_a_day_ends_the_day_before(organization, replica):
    count_at(replica, MIDNIGHT + 23 * HOUR, 100, 0)
    meter(organization, replica, MIDNIGHT + 24 * HOUR - datetime.timedelta(seconds=10), 40, 0)
    count_at(replica, MIDNIGHT + 24 * HOUR + datetime.timedelta(seconds=5), 140, 0)
    count_at(replica, MIDNIGHT + 25 * HOUR, 140, 0)

    assert check_of(replica).is_within
    assert EngineTokens.objects.get(day=DAY).last_input_tokens == 140


def test_late_usage_settles_a_difference_and_what_is_right_is_not_checked_again(organization, replica):
    count_at(replica, MIDNIGHT + HOUR, 0, 0)
    count_at(replica, MIDNIGHT + 3 * HOUR, 30, 9)
    assert not check_of(replica).is_within

    meter(organization, replica, MIDNIGHT + 2 * HOUR, 30, 9)

    assert check_of(replica).is_within
    assert reconcile(now=MORNING_AFTER) == []
    assert [check.is_within for check in list_checks(replica=replica)] == [True]


def test_a_day_is_checked_when_its_usage_has_arrived(organization, replica):
    count_at(replica, MIDNIGHT + HOUR, 0, 0)

    assert reconcile(now=MIDNIGHT + 23 * HOUR) == reconcile(now=MIDNIGHT + 24.5 * HOUR) == []
    assert len(reconcile(now=MIDNIGHT + 25 * HOUR)) == 1


def test_a_replicas_report_brings_its_counts(organization, replica):
    said = ObservedState(
        replica_id=replica.pk, generation=1, engine_generation="e1", is_ready=True, adapters=(),
        counted=EngineCount(input_tokens=12, output_tokens=3, age_seconds=2.0),
    )  # fmt: skip

    record_observed(replica=replica, observed=said)

    kept = EngineTokens.objects.get(replica=replica)
    assert (kept.last_input_tokens, kept.last_output_tokens, kept.engine_generation) == (12, 3, "e1")


def test_a_replica_that_claims_many_starts_or_old_readings_keeps_few_rows(replica, monkeypatch, caplog):
    monkeypatch.setattr(reconciliation, "MAX_STARTS_A_DAY", 3)
    for number in range(5):
        count_at(replica, MIDNIGHT + 12 * HOUR, number, number, engine=f"e{number}")
    old = EngineCount(input_tokens=9, output_tokens=9, age_seconds=9e8)
    record_count(replica=replica, engine_generation="e0", counted=old, now=MIDNIGHT + 12 * HOUR)

    assert [row.day for row in EngineTokens.objects.all()] == [DAY] * 3
    assert "more than 3 times" in caplog.text
