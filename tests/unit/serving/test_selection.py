"""Which adapters a replica holds when it cannot hold all, and how the others come back."""

import datetime

import pytest

from apps.adapters.models import AdapterVersion
from apps.catalog.models import BaseModel
from apps.core.clock import db_now
from apps.core.tenancy import tenant
from apps.serving.models import Deployment, LoadedAdapter, Replica
from apps.serving.operations import desired_state, note_requests
from apps.serving.queries import list_routes, serving_states
from apps.serving.selection import choose
from tests.api.gateway.process import make_adapter, make_replica, make_served_model

NOON = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)


def deployment(organization: str, minute: int, *, rank: int = 8, asked: int | None = None) -> Deployment:
    return Deployment(
        pk=f"dep_{organization}{minute}",
        organization_id=organization,
        adapter_version=AdapterVersion(rank=rank),
        created_at=NOON + datetime.timedelta(minutes=minute),
        last_requested_at=None if asked is None else NOON + datetime.timedelta(minutes=asked),
    )


def chosen(deployments: list[Deployment], capacity: int) -> set[str]:
    return {one.pk for one in choose(deployments, capacity=capacity, max_rank=16)}


def test_one_tenant_with_many_adapters_does_not_push_out_another() -> None:
    many = [deployment("rich", minute) for minute in range(10, 80)]

    assert "dep_small0" in chosen([deployment("small", 0), *many], 64)
    assert len(chosen([deployment("small", 0), *many], 64)) == 64


def test_what_was_used_last_stays() -> None:
    held = chosen([deployment("a", 1, asked=50), deployment("a", 2), deployment("a", 3)], 2)

    assert held == {"dep_a1", "dep_a3"}


def test_what_the_replica_could_not_load_takes_no_place() -> None:
    assert chosen([deployment("a", 1), deployment("a", 2, rank=64)], 1) == {"dep_a1"}


@pytest.fixture
def base_model(db: None) -> BaseModel:
    return make_served_model("small", "unix:///nowhere", is_priced=False)


@pytest.fixture
def replica(base_model: BaseModel) -> Replica:
    replica = base_model.replicas.get()
    replica.capacity = 2
    replica.save()
    return replica


@pytest.fixture
def versions(organization, base_model: BaseModel, replica: Replica) -> list[AdapterVersion]:
    """Three adapters on a replica that holds two: the first has no place."""
    versions = [make_adapter(organization, base_model) for _ in range(3)]
    for age, version in enumerate(versions):
        made_at = db_now() - datetime.timedelta(hours=9 - age)
        Deployment.objects.filter(adapter_version=version).update(created_at=made_at)
    LoadedAdapter.objects.filter(adapter_version=versions[0]).delete()
    return versions


def routes() -> dict[str, tuple[bool, bool]]:
    return {route.adapter_version_id: (route.is_loading, route.is_cold) for route in list_routes()}


def test_an_adapter_without_a_place_is_cold_and_not_waited_for(organization, replica, versions) -> None:
    assert routes()[versions[0].pk] == (False, True)
    with tenant(organization=organization):
        states = serving_states(versions=versions)
    assert [states[version.pk].state for version in versions] == ["cold", "loaded", "loaded"]
    assert "used last" in states[versions[0].pk].reason


def test_a_request_brings_a_cold_adapter_back(replica, versions) -> None:
    note_requests(version_ids=[versions[0].pk], now=db_now())

    replica.refresh_from_db()
    assert {adapter.version_id for adapter in desired_state(replica=replica).adapters} == {
        versions[0].pk,
        versions[2].pk,
    }
    assert replica.generation == 1
    assert routes()[versions[0].pk] == (True, False)


def test_a_request_for_a_loaded_adapter_has_no_replica_look_again(replica, versions) -> None:
    note_requests(version_ids=[versions[1].pk], now=db_now())

    replica.refresh_from_db()
    assert replica.generation == 0
    assert Deployment.objects.get(adapter_version=versions[1]).last_requested_at is not None


def test_with_room_elsewhere_nothing_is_cold(base_model, replica, versions) -> None:
    make_replica(base_model, "unix:///elsewhere")

    assert routes()[versions[0].pk] == (True, False)
