"""What is kept warm has its place, and pays by the millisecond while it is loaded."""

import datetime
from typing import Any

import pytest

from apps.adapters.models import AdapterVersion
from apps.billing.models import LedgerCheck, UsageSeries
from apps.billing.queries import get_balance
from apps.billing.usage.metering import rate_usage, record_quantity
from apps.catalog.models import PriceRule
from apps.catalog.operations import set_price
from apps.core.database.clock import db_now
from apps.core.errors import InvalidState, QuotaExceeded
from apps.serving.keep_warm import charge_warm, keep_warm, let_cool, paying_deployments
from apps.serving.models import Deployment, LoadedAdapter
from apps.serving.placements import replan
from tests.factories.accounts import make_organization, make_user
from tests.factories.serving import USD, give_credit, make_adapter, make_replica, make_served_model

HOUR_MS = 3_600_000
HOUR = datetime.timedelta(hours=1)


@pytest.fixture
def version(db: None, organization) -> AdapterVersion:
    base_model = make_served_model("small", "unix:///nowhere", is_priced=False)
    give_credit(organization, USD)
    return make_adapter(organization, base_model)


def price(version: AdapterVersion, price_nano: int = USD // 10, **fields: Any) -> PriceRule:
    sku = f"warm:{version.adapter.base_model.name}"
    return set_price(sku=sku, unit="warm_ms", price_nano=price_nano, per=HOUR_MS, by="system", now=db_now(), **fields)


def test_an_hour_loaded_costs_an_hours_price_and_an_hour_unloaded_nothing(organization, version) -> None:
    price(version)
    now = db_now()
    keep_warm(version=version, by="user_1", now=now)
    charge_warm(now=now + HOUR)
    LoadedAdapter.objects.update(state="loading")
    charge_warm(now=now + 2 * HOUR)
    LoadedAdapter.objects.update(state="loaded")
    let_cool(version=version, by="user_1", now=now + 2 * HOUR)
    rate_usage()

    assert sum(UsageSeries.objects.values_list("quantity", flat=True)) == HOUR_MS
    assert get_balance(organization=organization).available_nano == USD - USD // 10
    assert charge_warm(now=now + 9 * HOUR) == 0


def test_time_before_its_replica_was_ready_costs_nothing(version) -> None:
    price(version)
    now = db_now()
    keep_warm(version=version, by="user_1", now=now - 8 * HOUR)
    version.adapter.base_model.replicas.update(readiness_changed_at=now - HOUR / 60)

    charge_warm(now=now)

    assert sum(UsageSeries.objects.values_list("quantity", flat=True)) == HOUR_MS / 60
    assert charge_warm(now=now) == 1 and UsageSeries.objects.count() == 1


@pytest.mark.parametrize("has_general_price", [True, False])
def test_a_customer_pays_its_own_price(organization, rival, version, has_general_price: bool) -> None:
    if has_general_price:
        price(version, 3 * USD)
    base_model = version.adapter.base_model
    own = price(version, USD, organization=organization, approved_by="user_2")
    base_model.replicas.update(capacity=8)
    now = db_now()
    keep_warm(version=version, by="user_1", now=now)
    give_credit(rival, USD)
    theirs = make_adapter(rival, base_model)
    Deployment.objects.filter(adapter_version=theirs).update(pinned_at=now)

    charge_warm(now=now + HOUR / 2)

    assert UsageSeries.objects.get(organization=organization).price_rule == own
    paying = set(paying_deployments(base_model=base_model).values_list("adapter_version", flat=True))
    assert paying == {version.pk, *([theirs.pk] if has_general_price else [])}


def test_one_that_cannot_be_charged_does_not_hold_up_the_others(organization, rival, version, monkeypatch) -> None:
    price(version)
    base_model = version.adapter.base_model
    base_model.replicas.update(capacity=8)
    give_credit(rival, USD)
    others = [version, make_adapter(rival, base_model), make_adapter(organization, base_model)]
    now = db_now()
    for kept in others:
        keep_warm(version=kept, by="user_1", now=now)
    LoadedAdapter.objects.update(state="loaded")
    broken = next(iter(Deployment.objects.exclude(pinned_at=None))).organization_id

    def record(**fields: Any) -> None:
        assert fields["organization_id"] != broken, "a bug"
        record_quantity(**fields)

    monkeypatch.setattr("apps.serving.keep_warm.record_quantity", record)
    charged = charge_warm(now=now + HOUR)

    assert charged == sum(each.organization_id != broken for each in others)
    assert UsageSeries.objects.exclude(organization=broken).count() == charged
    failed = LedgerCheck.objects.get(name="adapters kept warm are charged")
    assert {row[0] for row in failed.differences} == {broken}


def test_it_is_placed_however_long_ago_it_was_asked_for(version) -> None:
    price(version)
    Deployment.objects.update(created_at="2000-01-01T00:00Z")
    replan(base_model_id=version.adapter.base_model_id, now=db_now())
    assert version.placements.count() == 0

    keep_warm(version=version, by="user_1", now=db_now())

    assert version.placements.count() == 1


def test_it_ends_when_the_credit_does(organization, version) -> None:
    price(version)
    now = db_now()
    keep_warm(version=version, by="user_1", now=now)
    charge_warm(now=now + 20 * HOUR)
    rate_usage()

    charge_warm(now=now + 21 * HOUR)

    assert get_balance(organization=organization).available_nano == 0
    assert Deployment.objects.get(adapter_version=version).pinned_at is None


def test_without_a_price_or_a_place_it_is_refused(version) -> None:
    with pytest.raises(InvalidState, match="price"):
        keep_warm(version=version, by="user_1", now=db_now())
    price(version)
    version.adapter.base_model.replicas.update(capacity=1)
    with pytest.raises(QuotaExceeded, match="keep more adapters warm"):
        keep_warm(version=version, by="user_1", now=db_now())
    AdapterVersion.objects.filter(pk=version.pk).update(status="refused")
    version.refresh_from_db()
    with pytest.raises(InvalidState, match="refused this adapter"):
        keep_warm(version=version, by="user_1", now=db_now())


@pytest.mark.parametrize("is_draining", [False, True])
def test_only_places_that_exist_are_sold(organization, rival, version, is_draining: bool) -> None:
    price(version)
    base_model = version.adapter.base_model
    base_model.replicas.update(capacity=56, reported_room={"capacity": 8, "slots": 8, "max_rank": 16})
    if is_draining:
        make_replica(base_model, "unix:///elsewhere")
        base_model.replicas.filter(url="unix:///elsewhere").update(draining_at=db_now())
    give_credit(rival, USD)
    others = [make_adapter(owner, base_model) for owner in (organization, rival, rival)]
    for kept in (version, *others):
        keep_warm(version=kept, by="user_1", now=db_now())

    third = make_organization("Third", owner=make_user("third"))
    give_credit(third, USD)
    with pytest.raises(QuotaExceeded, match="can't keep more adapters warm"):
        keep_warm(version=make_adapter(third, base_model), by="user_1", now=db_now())


def test_one_organization_leaves_places_for_others(organization, rival, version) -> None:
    price(version)
    base_model = version.adapter.base_model
    base_model.replicas.update(capacity=8)
    give_credit(rival, USD)
    mine, theirs = ([make_adapter(owner, base_model) for _ in range(3)] for owner in (organization, rival))
    for kept in (*mine[:2], *theirs[:2]):
        keep_warm(version=kept, by="user_1", now=db_now())
    with pytest.raises(QuotaExceeded, match="keeps 2 of at most 2 adapters warm"):
        keep_warm(version=mine[2], by="user_1", now=db_now())

    let_cool(version=theirs[0], by="user_1", now=db_now())
    with pytest.raises(QuotaExceeded, match="keeps 2 of at most 2"):
        keep_warm(version=mine[2], by="user_1", now=db_now())
    keep_warm(version=theirs[2], by="user_1", now=db_now())
