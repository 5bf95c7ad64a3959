"""A replica of its own for a merged model: who may have one, what it is told, and that nothing else is put on it."""

import pytest

from apps.adapters.models import AdapterVersion
from apps.contracts.serving import ObservedState
from apps.contracts.worker_api import EnrollRequest
from apps.core.database.clock import db_now
from apps.core.errors import InvalidState, InvalidValue
from apps.finetuning.pools import operations
from apps.serving.isolation import isolate_replica
from apps.serving.keep_warm import keep_warm
from apps.serving.models import Deployment, Placement, Replica
from apps.serving.operations import (
    delete_model,
    deploy,
    describe_model,
    desired_state,
    record_observed,
    register_replica,
    undeploy,
)
from apps.serving.placements import record_requests, replan
from apps.serving.queries import Route, list_routes, serving_states
from tests.factories.finetuning import TrainingSetup
from tests.factories.serving import make_adapter, make_replica, make_whole_model


@pytest.fixture
def version(floor: TrainingSetup, organization) -> AdapterVersion:
    return make_whole_model(organization, floor.base_model)


def allow(floor: TrainingSetup) -> None:
    floor.pool.serves_whole_models = True
    floor.pool.save()


def admit(floor: TrainingSetup, version: AdapterVersion) -> Replica:
    """As the operator's token and the machine's enrolment do it."""
    secret = operations.issue_worker_token(
        pool=floor.pool, kind="replica", base_model=None, whole_model=version, by="user_olga"
    )
    worker, token, _ = operations.enroll(request=EnrollRequest(token=secret, kind="replica", hostname="gpu-9"))
    replica, _ = register_replica(
        worker_id=worker.pk, base_model=token.base_model, url="unix:///own", whole_model=token.whole_model
    )
    return replica


def say(replica: Replica, *, is_ready: bool, reason: str = "") -> None:
    observed = ObservedState(
        replica_id=replica.pk, generation=1, engine_generation="e1", is_ready=is_ready, adapters=(), reason=reason
    )
    record_observed(replica=replica, observed=observed)


def route_of(version: AdapterVersion) -> Route | None:
    return next((route for route in list_routes() if route.adapter_version_id == version.pk), None)


def test_only_a_pool_that_allows_it_gives_a_merged_model_a_replica(floor, organization, version) -> None:
    with pytest.raises(InvalidValue, match="does not serve whole models"):
        admit(floor, version)
    allow(floor)
    with pytest.raises(InvalidValue, match="is an adapter"):
        admit(floor, make_adapter(organization, floor.base_model))
    AdapterVersion.objects.filter(pk=version.pk).update(exports=[])
    with pytest.raises(InvalidValue, match="no merged model"):
        admit(floor, AdapterVersion.objects.get(pk=version.pk))
    assert not Replica.objects.exists()


def test_its_replica_is_told_the_files_and_a_name_of_its_own(floor, version) -> None:
    allow(floor)
    replica = admit(floor, version)

    told = describe_model(replica=replica)
    desired = desired_state(replica=replica)

    assert told == {"id": version.pk, "name": version.model_name, "served_name": version.whole_model_name}
    assert desired.base_lora_served_name == "b-" + version.lora_name.removeprefix("a-")
    assert [file.name for file in desired.model_files] == ["config.json", "model.safetensors"]
    assert all("merged/" in file.url for file in desired.model_files)
    assert (desired.base_model_sha256, desired.adapters) == ("0" * 64, ())


def test_an_isolated_replica_is_given_no_files_and_no_requests(floor, version) -> None:
    allow(floor)
    replica = admit(floor, version)
    say(replica, is_ready=True)

    isolate_replica(replica_id=replica.pk, reason="counted too much")
    told = Replica.objects.select_related("whole_model", "base_model").get(pk=replica.pk)
    desired = desired_state(replica=told)
    route = route_of(version)

    assert (desired.model_files, desired.is_withdrawn) == ((), False)
    assert route is not None and not route.upstreams


def test_it_answers_once_its_replica_is_ready_and_tells_its_owner_why_not_before(floor, version) -> None:
    allow(floor)
    replica = admit(floor, version)
    say(replica, is_ready=False, reason="downloading the model")

    before = serving_states(versions=[version])[version.pk]
    waiting = route_of(version)
    say(replica, is_ready=True)
    route = route_of(version)

    assert (before.state, before.reason) == ("loading", "downloading the model")
    assert waiting is not None and not waiting.upstreams
    assert route is not None and [upstream.url for upstream in route.upstreams] == ["unix:///own"]
    assert (route.organization_id, route.engine_name) == (version.organization_id, version.whole_model_name)
    assert (route.base_model_name, route.is_cold) == (floor.base_model.name, False)
    assert serving_states(versions=[version])[version.pk].state == "loaded"


def test_neither_is_it_placed_elsewhere_nor_anything_else_on_its_replica(floor, organization, version) -> None:
    allow(floor)
    own = admit(floor, version)
    say(own, is_ready=True)
    shared = make_replica(floor.base_model, "unix:///shared")
    adapter = make_adapter(organization, floor.base_model)

    replan(base_model_id=floor.base_model.pk, now=db_now())
    record_requests(counts={version.pk: 3, adapter.pk: 3}, now=db_now())

    held = set(Placement.objects.values_list("replica_id", "adapter_version_id"))
    assert held == {(own.pk, version.pk), (shared.pk, adapter.pk)}
    base = next(route for route in list_routes() if route.model_name == floor.base_model.name)
    assert [upstream.url for upstream in base.upstreams] == ["unix:///shared"]


def test_a_merged_model_without_a_replica_is_not_served_and_one_with_it_is_never_cold(floor, version) -> None:
    with pytest.raises(InvalidState, match="ask the operator"):
        deploy(version=version, by="user_1")
    allow(floor)
    admit(floor, version)
    with pytest.raises(InvalidState):
        keep_warm(version=version, by="user_1", now=db_now())


def test_what_its_owner_stopped_another_replica_does_not_start_again(floor, version) -> None:
    allow(floor)
    say(admit(floor, version), is_ready=True)
    undeploy(version=version, by="user_1", now=db_now())

    say(admit(floor, version), is_ready=True)
    stopped = route_of(version)
    deploy(version=version, by="user_1")

    assert stopped is None
    route = route_of(version)
    assert route is not None and len(route.upstreams) == 2


def test_the_replica_of_a_deleted_model_is_told_to_let_it_go(floor, organization, version) -> None:
    allow(floor)
    replica = admit(floor, version)
    say(replica, is_ready=True)

    delete_model(organization=organization, model_name=version.model_name, by="user_1", now=db_now())

    told = Replica.objects.select_related("whole_model", "base_model").get(pk=replica.pk)
    desired = desired_state(replica=told)
    assert told.generation > replica.generation
    assert (desired.is_withdrawn, desired.model_files) == (True, ())
    assert route_of(version) is None
    assert not Deployment.objects.filter(removed_at=None).exists()
