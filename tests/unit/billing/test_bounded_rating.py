"""Rating is bounded: small transactions, a few seconds for each tenant, and none that holds up the others."""

import datetime

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.db.models import F

from apps.accounts.models import Organization
from apps.billing.books.reconciliation import list_newest_checks
from apps.billing.budget_settings import set_budget
from apps.billing.models import (
    Hold,
    LedgerAccount,
    LedgerCheck,
    UsageSeries,
)
from apps.billing.queries import get_balance, get_spending
from apps.billing.usage import metering
from apps.billing.usage.metering import rate_usage, record_usage
from apps.billing.usage.slices import close_expired_holds
from apps.core.database.clock import db_now
from tests.factories.metering import Customer, earned, make_customer


@pytest.fixture
def customer(db) -> Customer:
    return make_customer()


def test_a_tenant_with_very_many_series_is_charged_in_small_transactions(customer, monkeypatch):
    """Its wallet is locked for a moment at a time, and the other tenants wait for none of it."""
    monkeypatch.setattr(metering, "_LINES_AT_ONCE", 3)
    rate, sizes = metering.rate_organization, []
    monkeypatch.setattr(metering, "rate_organization", lambda **of: sizes.append(len(of["series"])) or rate(**of))
    record_usage(records=[customer.record(key_id=f"key_{number}") for number in range(4)])

    rate_usage()

    assert sizes == [3, 3, 2]
    assert not UsageSeries.objects.filter(request_count__gt=F("rated_request_count")).exists()

    monkeypatch.setattr(metering, "_SECONDS_OF_ONE", 0.0)
    record_usage(records=[customer.record(key_id=f"key_late_{number}") for number in range(4)])
    rate_usage()
    assert sizes == [3, 3, 2, 3], "the next run does the rest"


def test_a_slice_with_very_many_series_is_closed_after_small_transactions(customer, monkeypatch):
    leased = customer.lease(1_000_000)
    monkeypatch.setattr(metering, "_LINES_AT_ONCE", 3)
    rate, sizes = metering.rate_organization, []
    monkeypatch.setattr(metering, "rate_organization", lambda **of: sizes.append(len(of["series"])) or rate(**of))
    records = [customer.record(slice_id=leased.hold_id, key_id=f"key_{number}") for number in range(4)]
    record_usage(records=records)
    Hold.objects.filter(pk=leased.hold_id).update(expires_at=db_now())

    with monkeypatch.context() as patch:
        patch.setattr(metering, "_SECONDS_OF_ONE", 0.0)
        assert close_expired_holds() == 0, "the next run does it"
    assert close_expired_holds() == 1

    assert sizes == [3, 3, 2]
    assert get_spending(organization=customer.organization).unrated_requests == 0


def test_lines_that_wait_for_credit_keep_no_slice_open(customer, monkeypatch):
    monkeypatch.setattr(metering, "_LINES_AT_ONCE", 3)
    monkeypatch.setattr(metering, "_SECONDS_OF_ONE", 0.0)
    leased = customer.lease(get_balance(organization=customer.organization).available_nano)
    record_usage(records=[customer.record(key_id="", model_name=f"model-{number}") for number in range(7)])
    Hold.objects.filter(pk=leased.hold_id).update(expires_at=db_now())

    assert close_expired_holds() == 1
    for _ in range(5):
        rate_usage()
    assert get_spending(organization=customer.organization).unrated_requests == 0


def test_organizations_take_turns_with_their_expired_slices(db):
    many, one = make_customer(), make_customer()
    slices = [many.lease(1_000, hold_id=None) for _ in range(3)] + [one.lease(1_000)]
    for number, leased in enumerate(slices):
        at = db_now() - datetime.timedelta(minutes=9 - number)
        Hold.objects.filter(pk=leased.hold_id).update(expires_at=at)

    assert close_expired_holds(limit=2) == 2

    assert [Hold.objects.get(pk=leased.hold_id).status for leased in slices] == ["closed", "open", "open", "closed"]


def test_a_task_that_reached_its_soft_limit_leaves_the_other_organizations_to_the_next_run(db, monkeypatch):
    customers = [make_customer() for _ in range(3)]
    record_usage(records=[customer.record() for customer in customers])
    rate, rated = metering.rate_organization, []

    def rate_slowly(*, wallet: LedgerAccount, series: list[int]) -> int:
        if rated:
            raise SoftTimeLimitExceeded
        rated.append(wallet.owner_id)
        return rate(wallet=wallet, series=series)

    monkeypatch.setattr(metering, "rate_organization", rate_slowly)

    with pytest.raises(SoftTimeLimitExceeded):
        rate_usage()

    assert [earned(each.organization) > 0 for each in customers].count(True) == 1


@pytest.mark.slow
def test_a_budget_is_counted_once_for_all_series(customer, django_assert_max_num_queries):
    owner = customer.organization
    set_budget(
        organization=owner, scope="organization", target="", limit_nano=1_000, mode="alert", by="user_1", now=db_now(),
        thresholds=tuple(range(1, 11)),
    )  # fmt: skip
    record_usage(records=[customer.record()])
    rate_usage()  # every alert is sent
    record_usage(records=[customer.record(key_id=f"key_{number}") for number in range(20)])

    with django_assert_max_num_queries(180):  # 40 series, each with one posting
        rate_usage()


def test_one_organization_that_cannot_be_charged_holds_up_no_other(db, monkeypatch, caplog):
    customers = [make_customer() for _ in range(3)]
    broken = sorted(each.organization.pk for each in customers)[0]
    records = [each.record() for each in customers]
    record_usage(records=records)
    rate = metering.rate_organization

    def rate_or_fail(*, wallet: LedgerAccount, series: list[int]) -> int:
        posted = rate(wallet=wallet, series=series)
        if wallet.organization_id == broken:
            raise ZeroDivisionError("a bug")
        return posted

    monkeypatch.setattr(metering, "rate_organization", rate_or_fail)
    for _ in range(2):
        rate_usage()

    charged = {each.organization.pk: get_spending(organization=each.organization).inference_nano for each in customers}
    assert [pk for pk, nano in charged.items() if not nano] == [broken]
    (check,) = [each for each in list_newest_checks() if each.difference_count]
    assert (check.name, check.differences) == ("what was used is charged", [[broken, "ZeroDivisionError", "a bug"]])
    assert LedgerCheck.objects.count() == 1  # said once, not at each run
    assert {each.levelname for each in caplog.records if broken in each.getMessage()} == {"CRITICAL"}

    monkeypatch.setattr(metering, "rate_organization", rate)
    rate_usage()
    assert get_spending(organization=Organization.objects.get(pk=broken)).inference_nano > 0
    assert [each.difference_count for each in list_newest_checks()] == [0]
