"""What a replica may say: of what was placed on it, from where it enrolled, and nothing once it was found faulty."""

import pytest

from apps.adapters.models import AdapterVersion
from apps.contracts.serving import LoadState, ObservedAdapter, ObservedState
from apps.serving.isolation import clear_replica, isolate_replica
from apps.serving.models import LoadedAdapter, Placement, Replica
from apps.serving.operations import accept_room, deploy, desired_state, record_observed
from apps.serving.queries import list_routes
from tests.factories.serving import make_adapter, make_replica, make_served_model, make_version


@pytest.fixture
def version(db: None, organization) -> AdapterVersion:
    return make_adapter(organization, make_served_model("small", "unix:///honest", is_priced=False))


@pytest.fixture
def honest(version) -> Replica:
    return version.adapter.base_model.replicas.get()


@pytest.fixture
def hostile(version) -> Replica:
    return make_replica(version.adapter.base_model, "unix:///hostile")


def say(replica: Replica, *adapters: ObservedAdapter, **fields) -> None:
    replica = Replica.objects.get(pk=replica.pk)
    observed = ObservedState(
        replica_id=replica.pk, generation=1, engine_generation="e1", is_ready=True, adapters=adapters, **fields
    )
    record_observed(replica=replica, observed=observed)


def loaded(version: AdapterVersion) -> ObservedAdapter:
    return ObservedAdapter(lora_name=version.lora_name, state=LoadState.LOADED)


def urls(version: AdapterVersion) -> list[str]:
    route = next(route for route in list_routes() if route.adapter_version_id == version.pk)
    return sorted(upstream.url for upstream in route.upstreams)


def test_a_replica_without_a_token_gets_no_request_and_keeps_none_from_the_others(version, honest) -> None:
    bare = {"url": "unix:///bare", "region": honest.region, "is_ready": True, "observed_at": "2100-01-01T00:00Z"}
    Replica.objects.create(base_model=version.adapter.base_model, **bare)

    upstreams = {upstream.url for route in list_routes() for upstream in route.upstreams}
    assert upstreams == {"unix:///honest"}


@pytest.mark.parametrize("state", list(LoadState))
def test_an_adapter_that_was_not_placed_on_a_replica_is_none_of_its_business(version, hostile, state) -> None:
    say(hostile, ObservedAdapter(lora_name=version.lora_name, state=state, reason="I say so"))

    version.refresh_from_db()
    assert (urls(version), version.status) == (["unix:///honest"], "checking")
    assert not hostile.loaded.exists()


def test_what_a_replica_had_loaded_counts_no_more_once_its_place_is_gone(version, honest) -> None:
    before = urls(version)
    Placement.objects.filter(replica=honest, adapter_version=version).delete()
    at_once = urls(version)

    say(honest, loaded(version))

    assert (before, at_once, urls(version)) == (["unix:///honest"], [], [])
    assert not LoadedAdapter.objects.exists()


def test_a_place_on_a_replica_of_another_base_model_is_none(organization, version) -> None:
    other = make_served_model("other", "unix:///other", is_priced=False).replicas.get()
    Placement.objects.create(organization=organization, replica=other, adapter_version=version)

    say(other, loaded(version))

    assert urls(version) == ["unix:///honest"]


def test_a_replica_of_a_whole_model_speaks_of_that_alone(organization, version, hostile) -> None:
    Replica.objects.filter(pk=hostile.pk).update(
        whole_model=make_version(organization, version.adapter.base_model, status="files_only")
    )

    say(hostile, loaded(version))

    assert urls(version) == ["unix:///honest"]


def test_a_report_does_not_move_a_replica(version, honest) -> None:
    say(honest, loaded(version), url="http://169.254.169.254/")

    assert urls(version) == ["unix:///honest"]


def test_a_report_claims_no_room_beyond_what_an_operator_accepted(organization, version, honest, hostile) -> None:
    say(honest, loaded(version), capacity=56, max_loras=8, max_lora_rank=64)
    say(hostile, capacity=10_000, max_loras=10_000, max_lora_rank=16)
    others = [make_version(organization, version.adapter.base_model) for _ in range(6)]
    for new in others:
        deploy(version=new, by="user_olga")

    hostile.refresh_from_db()
    assert (hostile.room.capacity, hostile.room.slots, hostile.room.max_rank) == (56, 8, 16)
    assert 2 <= hostile.placements.count() <= 4  # as many as the other one, of rank 8

    accept_room(replica=hostile, capacity=112, slots=16, max_rank=16, by="user_olga")

    hostile.refresh_from_db()
    assert (hostile.room.capacity, hostile.room.slots) == (112, 16)


def test_an_isolated_replica_gets_no_request_no_adapter_and_no_hearing(version, honest, hostile) -> None:
    isolate_replica(replica_id=honest.pk, reason="counted too much")
    isolate_replica(replica_id=honest.pk, reason="and again")
    honest.refresh_from_db()

    say(honest, ObservedAdapter(lora_name=version.lora_name, state=LoadState.REJECTED, reason="spite"))

    version.refresh_from_db()
    base = next(route for route in list_routes() if route.model_name == "small")
    assert (urls(version), [upstream.url for upstream in base.upstreams]) == ([], ["unix:///hostile"])
    assert desired_state(replica=honest).adapters == ()
    assert version.status == "checking"
    assert [place.replica_id for place in Placement.objects.all()] == [hostile.pk]  # another takes it over
    assert (honest.fault_count, honest.isolated_because) == (2, "counted too much")


def test_a_cleared_replica_is_asked_again(version, honest) -> None:
    isolate_replica(replica_id=honest.pk, reason="counted too much")
    told = Replica.objects.get(pk=honest.pk).generation

    clear_replica(replica=Replica.objects.get(pk=honest.pk), by="user_olga")

    honest.refresh_from_db()
    assert urls(version) == ["unix:///honest"]
    assert [one.version_id for one in desired_state(replica=honest).adapters] == [version.pk]
    assert honest.generation > told and honest.fault_count == 1
