"""Placements in the database: who has a place, how a request brings a cold adapter back, what replicas are told."""

import datetime
from io import StringIO

import pytest
from django.core.management import call_command
from django.db import transaction

from apps.adapters.models import AdapterVersion
from apps.adapters.operations import record_verdict
from apps.catalog.models import BaseModel
from apps.contracts.serving import EngineLoad, LoadState, ObservedAdapter, ObservedState
from apps.core.database.clock import db_now
from apps.core.database.tenancy import tenant
from apps.core.errors import RateLimited
from apps.serving import placements
from apps.serving.models import Alias, Deployment, LoadedAdapter, Placement, Replica
from apps.serving.operations import MAX_DEPLOYMENTS_AN_HOUR, deploy, desired_state, record_observed, undeploy
from apps.serving.placements import record_requests, replan
from apps.serving.queries import list_routes, serving_states
from apps.serving.ready_replicas import credible
from tests.factories.serving import make_adapter, make_replica, make_served_model


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
    """Three adapters on a replica that holds two: the first, asked for longest ago, has no place."""
    versions = [make_adapter(organization, base_model) for _ in range(3)]
    for age, version in enumerate(versions):
        made_at = db_now() - datetime.timedelta(hours=9 - age)
        Deployment.objects.filter(adapter_version=version).update(created_at=made_at)
    LoadedAdapter.objects.filter(adapter_version=versions[0]).delete()
    replan(base_model_id=base_model.pk, now=db_now())
    return versions


def report(replica: Replica, *adapters: ObservedAdapter) -> None:
    said = ObservedState(replica_id=replica.pk, generation=1, engine_generation="e1", is_ready=True, adapters=adapters)
    record_observed(replica=replica, observed=said)


def routes() -> dict[str, tuple[bool, bool]]:
    return {route.adapter_version_id: (route.is_loading, route.is_cold) for route in list_routes()}


def test_an_adapter_without_a_place_is_cold_and_not_waited_for(organization, replica, versions) -> None:
    assert routes()[versions[0].pk] == (False, True)
    with tenant(organization=organization):
        states = serving_states(versions=versions)
    assert [states[version.pk].state for version in versions] == ["cold", "loaded", "loaded"]
    assert "no recent requests" in states[versions[0].pk].reason


def test_an_adapter_of_a_rank_that_no_engine_supports_is_not_cold(replica, versions) -> None:
    AdapterVersion.objects.filter(pk=versions[0].pk).update(rank=32)
    Replica.objects.update(reported_room={"capacity": 2, "slots": 2, "max_rank": 16})

    assert routes()[versions[0].pk] == (False, False)


def test_a_request_brings_a_cold_adapter_back_and_the_replica_is_told(replica, versions) -> None:
    before = replica.generation

    record_requests(counts={versions[0].pk: 1}, now=db_now())

    replica.refresh_from_db()
    assert {adapter.version_id for adapter in desired_state(replica=replica).adapters} == {
        versions[0].pk,
        versions[2].pk,
    }
    assert replica.generation > before
    assert routes()[versions[0].pk] == (True, False)


@pytest.mark.parametrize("state", [LoadState.FAILED, LoadState.REJECTED])
def test_adapters_that_cannot_be_loaded_do_not_keep_others_out(organization, base_model, replica, state) -> None:
    Replica.objects.filter(pk=replica.pk).update(capacity=56)
    held = [make_adapter(organization, base_model) for _ in range(56)]
    LoadedAdapter.objects.filter(adapter_version__in=held[:4]).update(state=state)
    waiting = make_adapter(organization, base_model)
    Placement.objects.filter(adapter_version=waiting).delete()

    record_requests(counts={waiting.pk: 1}, now=db_now())

    assert replica.placements.filter(adapter_version=waiting).exists() and replica.placements.count() == 56


def test_a_request_for_a_placed_adapter_has_no_replica_look_again(replica, versions) -> None:
    replica.refresh_from_db()
    before = replica.generation

    record_requests(counts={versions[1].pk: 5}, now=db_now())

    replica.refresh_from_db()
    assert replica.generation == before
    deployment = Deployment.objects.get(adapter_version=versions[1])
    assert deployment.last_requested_at is not None
    assert deployment.quick_demand == pytest.approx(5 / 20)


def test_requests_fade_and_add_up(versions) -> None:
    now = db_now()
    record_requests(counts={versions[1].pk: 20}, now=now - datetime.timedelta(seconds=20))
    record_requests(counts={versions[1].pk: 20}, now=now)

    deployment = Deployment.objects.get(adapter_version=versions[1])
    assert deployment.quick_demand == pytest.approx(1 + 0.3679, abs=1e-3)


def test_deployments_that_can_have_no_place_are_not_read(organization, rival, base_model, replica, versions) -> None:
    old = db_now() - datetime.timedelta(days=2)
    idle, kept, named, *recent = (make_adapter(organization, base_model) for _ in range(9))
    theirs = make_adapter(rival, base_model)
    Placement.objects.filter(adapter_version__in=[idle, kept, named, theirs, *recent]).delete()
    Deployment.objects.filter(adapter_version__in=[idle, kept, named]).update(created_at=old)
    Deployment.objects.filter(adapter_version=kept).update(pinned_at=old)
    Alias.objects.create(
        organization=organization, adapter=named.adapter, name="production", model_name="ft:x", version=named
    )
    held = set(Placement.objects.values_list("adapter_version_id", flat=True))

    read = {wish.version_id for wish in placements._wishes(base_model.pk, db_now(), held=held, places=2)}

    assert {kept.pk, theirs.pk} | held <= read and idle.pk not in read
    assert len(read - {theirs.pk}) == 4, "an organization cannot have more than all places, and replace them"
    everything = placements._wishes(base_model.pk, db_now(), held=held, places=100)
    assert {wish.version_id for wish in everything} == {
        theirs.pk, kept.pk, named.pk, *(version.pk for version in (*versions, *recent))
    }  # fmt: skip


def test_with_room_elsewhere_nothing_is_cold_and_each_adapter_has_one_place(base_model, replica, versions) -> None:
    other = make_replica(base_model, "unix:///elsewhere")
    replan(base_model_id=base_model.pk, now=db_now())

    assert routes()[versions[0].pk] == (True, False)
    assert [one.version_id for one in desired_state(replica=other).adapters] == [versions[0].pk]


@pytest.mark.parametrize(
    ("state", "status", "moves"),
    [("failed", "ready", True), ("rejected", "ready", True), ("rejected", "checking", False)],
)
def test_an_adapter_that_a_replica_cannot_load_moves_once(
    organization, base_model, replica, state: str, status: str, moves: bool
) -> None:
    other = make_replica(base_model, "unix:///elsewhere")
    version = make_adapter(organization, base_model)
    AdapterVersion.objects.filter(pk=version.pk).update(status=status)
    other.placements.all().delete()
    other.loaded.all().delete()
    Replica.objects.update(generation=0)

    for turn in range(4):
        for each in (replica, other):
            is_placed = each.placements.exists()
            report(each, *[ObservedAdapter(lora_name=version.lora_name, state=LoadState(state))] * is_placed)
        replan(base_model_id=base_model.pk, now=db_now())
        assert [each.placements.count() for each in (replica, other)] == [not moves, moves], turn
        if moves and turn:  # the first failure gets old, the second one is reported again
            LoadedAdapter.objects.filter(replica=replica).update(observed_at=db_now() - datetime.timedelta(minutes=11))

    assert set(Replica.objects.values_list("generation", flat=True)) == {int(moves)}
    assert (routes()[version.pk][0], credible().count()) == (False, 1)
    Placement.objects.update(placed_at=db_now())
    assert (routes()[version.pk][0], credible().count()) == (True, 0)
    LoadedAdapter.objects.update(observed_at=db_now() - datetime.timedelta(minutes=11))
    report(replica)
    assert not replica.loaded.exists()


def test_a_silent_replicas_adapters_move_to_one_that_speaks(base_model, replica, versions) -> None:
    other = make_replica(base_model, "unix:///elsewhere")
    Replica.objects.filter(pk=replica.pk).update(observed_at=db_now() - datetime.timedelta(minutes=2))

    replan(base_model_id=base_model.pk, now=db_now())

    assert other.placements.count() == 3
    assert replica.placements.count() == 0


def test_after_a_restore_each_replica_reads_its_adapters_though_its_generation_was_higher(replica) -> None:
    def restore() -> int:
        Replica.objects.update(generation=7)
        call_command("endleases", stdout=StringIO())
        replica.refresh_from_db()
        return replica.generation

    first = restore()

    assert restore() > first > 1_000_000


def test_while_no_replica_speaks_nothing_changes(base_model, replica, versions) -> None:
    Replica.objects.update(observed_at=db_now() - datetime.timedelta(hours=9))

    replan(base_model_id=base_model.pk, now=db_now())

    assert replica.placements.count() == 2


def test_a_replica_says_what_it_can_and_how_it_is_doing(replica, versions) -> None:
    said = ObservedState(
        replica_id=replica.pk,
        generation=1,
        engine_generation="e1",
        is_ready=True,
        adapters=(ObservedAdapter(lora_name=versions[2].lora_name, state=LoadState.LOADED),),
        capacity=12,
        max_lora_rank=16,
        max_loras=4,
        base_model_sha256="ab" * 32,
        load=EngineLoad(memory_bytes=5, tokens_per_second=7.5),
    )

    record_observed(replica=replica, observed=said)

    replica.refresh_from_db()
    assert (replica.room.capacity, replica.room.max_rank, replica.room.slots) == (2, 16, 4)  # 2 were accepted
    assert replica.revision == "ab" * 32
    assert replica.load["tokens_per_second"] == 7.5


@pytest.mark.parametrize(("is_accepted", "is_tried"), [(True, True), (False, False)])
def test_a_replica_is_told_which_versions_an_engine_has_answered_with(replica, versions, is_accepted, is_tried) -> None:
    tried = versions[1]
    assert {adapter.is_tried for adapter in desired_state(replica=replica).adapters} == {False}

    record_verdict(version=tried, is_accepted=is_accepted, reason="", parity=None, now=db_now())

    told = {adapter.version_id: adapter.is_tried for adapter in desired_state(replica=replica).adapters}
    assert told == {tried.pk: is_tried, versions[2].pk: False}


def test_serving_a_model_again_and_again_is_limited(organization, base_model) -> None:
    """Each time the adapters of others make room for it."""
    version = make_adapter(organization, base_model)
    served = Deployment.objects.filter(adapter_version=version)
    for _ in range(MAX_DEPLOYMENTS_AN_HOUR - 1):
        undeploy(version=version, by="user_1", now=db_now())
        deploy(version=version, by="user_1")
    undeploy(version=version, by="user_1", now=db_now())

    with pytest.raises(RateLimited, match="10 times an hour"), transaction.atomic():
        deploy(version=version, by="user_1")

    assert not served.filter(removed_at=None).exists()
    served.update(created_at=db_now() - datetime.timedelta(hours=1))
    deploy(version=version, by="user_1")
