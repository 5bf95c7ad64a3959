"""Replicas that an elastic pool starts for the requests of a base model, and releases when nothing needs them."""

from types import SimpleNamespace

import pytest

from apps.adapters.models import AdapterVersion
from apps.catalog.operations import set_price
from apps.core.database.clock import db_now
from apps.core.database.tenancy import tenant
from apps.core.errors import InvalidState, InvalidValue
from apps.finetuning.models import CapacityNode, GpuPool, PoolCapacity
from apps.finetuning.pools import operations
from apps.finetuning.pools.capacity import fleets
from apps.finetuning.pools.capacity.demand import wanted_replicas
from apps.finetuning.pools.capacity.metrics import render_pool_metrics
from apps.interfaces.gateway.engines.routes import Routes, _Table
from apps.serving.isolation import isolate_replica
from apps.serving.models import Deployment, Placement, Replica, ReplicaFleet
from apps.serving.operations import accept_address, drain_replica
from apps.serving.placements import record_requests
from apps.serving.queries import FleetRoute, list_routes, serving_states
from tests.factories.serving import make_adapter, make_replica
from tests.support.attempts import age_nodes
from tests.twins.capacity import limit, report


@pytest.fixture
def fleet(floor, elastic) -> ReplicaFleet:
    """Return a fleet of at most two replicas that answer four requests each, in a pool that starts no trainers."""
    limit(floor.pool, maximum=0)
    return set_fleet(floor)


def set_fleet(floor, pool: GpuPool | None = None, **changes) -> ReplicaFleet:
    limits = {"minimum": 0, "maximum": 2, "requests_per_replica": 4, "idle_seconds": 300}
    return fleets.set_fleet(pool=pool or floor.pool, base_model=floor.base_model, by="user_test", **limits | changes)


def ask(fleet: ReplicaFleet) -> None:
    """Have a gateway note a request."""
    record_requests(counts={}, fleets=[fleet.pk], now=db_now())


def routed(fleet: ReplicaFleet) -> tuple[FleetRoute, ...]:
    return next(route.fleets for route in list_routes() if route.model_name == fleet.base_model.name)


@pytest.mark.parametrize(
    ("in_progress", "is_needed", "others", "wanted"),
    [(0, False, 0, 0), (0, True, 0, 1), (4, True, 0, 1), (5, True, 0, 2), (9, False, 1, 2), (0, True, 1, 0)],
)
def test_replicas_are_wanted_by_the_requests_at_once(in_progress, is_needed, others, wanted):
    found = wanted_replicas(in_progress=in_progress, per_replica=4, is_needed=is_needed, others=others)
    assert found == wanted


def test_a_request_starts_a_replica_and_without_requests_there_is_none_again(floor, engine, elastic, fleet):
    assert elastic() == []
    assert routed(fleet) == (FleetRoute(fleet.pk, floor.pool.region_id),)
    ask(fleet)
    assert elastic() == ["starting"]
    (name,) = engine.started
    assert (engine.nodes[name].kind, engine.nodes[name].arguments) == ("replica", ("-m", "gpu_workers.serving.node"))
    replica = engine.serve(name)
    version = make_adapter(floor.organization, floor.base_model)

    assert elastic(later=200) == ["running"]
    assert elastic(later=200) == ["running"]
    assert is_draining(replica), "it still answers what no other can"
    assert elastic() == ["running"]
    assert elastic(later=20) == ["draining"]
    assert engine.nodes == {}
    assert elastic() == ["released"]
    assert not Placement.objects.exists()
    assert not list_ready(version)
    node = CapacityNode.objects.get()
    assert node.reason == "It was not needed any more." and node.worker.revoked_at is not None

    with tenant(organization=floor.organization):
        state = serving_states(versions=[version])[version.pk]
    assert state.state == "cold", "the next request starts a replica"


def test_a_replica_is_no_machine_that_trains_for_the_alerts(floor, engine, elastic, fleet):
    ask(fleet)
    elastic()
    engine.serve(engine.started[0])

    assert elastic() == ["running"]
    assert f'anneal_pool_running_nodes{{pool="{floor.pool.name}"}} 0\n' in render_pool_metrics()


def is_draining(replica: Replica) -> bool:
    return Replica.objects.filter(pk=replica.pk).exclude(draining_at=None).exists()


def list_ready(version) -> list[str]:
    return [one.url for route in list_routes() if route.adapter_version_id == version.pk for one in route.upstreams]


def test_requests_at_once_start_more_replicas_up_to_the_maximum(engine, elastic, fleet):
    ask(fleet)
    elastic()
    first = engine.serve(engine.started[0], in_progress=4)
    assert elastic() == ["running"]
    report(first, in_progress=20)
    assert elastic() == ["running", "starting"]
    second = engine.serve(engine.started[1], in_progress=3)
    assert elastic() == ["running", "running"]

    report(first, in_progress=1)
    assert elastic(later=290) == ["running", "running"], "they were needed five minutes ago"
    elastic(later=20)
    draining = Replica.objects.exclude(draining_at=None)
    assert list(draining) == [second], "the newest goes first"
    report(second, in_progress=0)
    assert elastic(later=20) == ["running", "draining"]


def test_a_request_during_the_drain_takes_the_replica_back(engine, elastic, fleet):
    ask(fleet)
    elastic()
    replica = engine.serve(engine.started[0])
    elastic(later=310)
    assert is_draining(replica)
    assert elastic(later=10) == ["running"]
    age_nodes(10)
    ask(fleet)
    assert elastic() == ["running"], "it could have ended now"
    assert not is_draining(replica)
    assert elastic(later=250) == ["running"]


def test_a_replica_that_an_operator_drains_is_replaced_and_leaves_when_its_answers_have_ended(engine, elastic, fleet):
    ask(fleet)
    elastic()
    replica = engine.serve(engine.started[0], in_progress=1)
    elastic()
    drain_replica(replica=replica, is_draining=True, by="user_test")
    assert elastic() == ["running", "starting"]
    assert elastic(later=590)[0] == "running", "an answer is running"
    assert elastic(later=20)[0] == "draining", "it takes too long"
    assert CapacityNode.objects.earliest("requested_at").reason == "It was drained."


def test_replicas_that_joined_by_hand_count_and_are_never_stopped(floor, engine, elastic, fleet):
    by_hand = make_replica(floor.base_model, "unix:///nowhere")
    ask(fleet)
    assert elastic() == []
    report(by_hand, in_progress=9)
    assert elastic() == ["starting", "starting"]
    engine.serve(engine.started[0])
    report(by_hand, in_progress=0)
    for _ in range(4):
        elastic(later=310)
    by_hand.refresh_from_db()
    assert by_hand.draining_at is None


def test_a_replica_that_reports_too_much_does_not_start_all_replicas(floor, engine, elastic, fleet):
    set_fleet(floor, maximum=100)
    by_hand = make_replica(floor.base_model, "unix:///nowhere")
    report(by_hand, in_progress=10**9)
    for _ in range(3):
        elastic()
    assert len(engine.started) == 3


def test_an_adapter_that_is_kept_warm_keeps_a_replica(floor, engine, elastic, fleet):
    version = make_adapter(floor.organization, floor.base_model)
    Deployment.objects.filter(adapter_version=version).update(pinned_at=db_now())
    assert elastic() == [], "without a price, its time cannot be charged"
    name = f"warm:{floor.base_model.name}"
    set_price(sku=name, unit="warm_ms", price_nano=1, per=1, by="system", now=db_now())
    versions = AdapterVersion.objects.filter(pk=version.pk)
    versions.update(rank=1000)
    assert elastic() == [], "no replica could load it"
    versions.update(rank=8)
    assert elastic() == ["starting"]
    engine.serve(engine.started[0])
    assert elastic(later=4000) == ["running"]


def test_a_replica_that_loads_for_long_is_kept_though_nobody_asks_any_more(engine, elastic, fleet):
    ask(fleet)
    elastic()
    replica = engine.serve(engine.started[0], is_ready=False)
    assert elastic(later=1200) == ["starting"]
    Replica.objects.filter(pk=replica.pk).update(is_ready=True, readiness_changed_at=db_now())
    assert elastic() == ["running"]
    elastic(later=290)
    assert not is_draining(replica), "it was ready for less than the idle time"
    elastic(later=20)
    assert is_draining(replica)


def test_replicas_that_never_become_ready_are_released_and_not_tried_at_once_again(engine, elastic, fleet):
    ask(fleet)
    elastic()
    engine.serve(engine.started[0], is_ready=False)
    assert elastic(later=3500) == ["starting"]
    ask(fleet)
    assert elastic(later=200) == ["draining"]
    assert engine.nodes == {}
    ask(fleet)
    assert elastic() == ["released"], "the next attempt is later"
    capacity = PoolCapacity.objects.get()
    assert capacity.failures == 1 and "it was not ready" in capacity.problem


def test_a_replica_whose_address_nobody_accepted_does_not_work(engine, elastic, fleet):
    ask(fleet)
    elastic()
    replica = engine.serve(engine.started[0])
    Replica.objects.filter(pk=replica.pk).update(is_address_accepted=False)
    assert elastic() == ["starting"]
    assert CapacityNode.objects.get().reason == "Accept the address of its replica."
    assert routed(fleet) == (), "requests would wait for nothing"
    accept_address(replica=replica, by="user_test")
    assert elastic() == ["running"]
    assert routed(fleet)


@pytest.mark.parametrize("fault", ["isolated", "ended"])
def test_replicas_that_fail_soon_after_they_were_ready_start_less_and_less_often(fault, engine, elastic, fleet):
    for failures in (1, 2):
        elastic(later=100)
        ask(fleet)
        assert elastic()[-1] == "starting"
        replica = engine.serve(engine.started[-1])
        assert elastic()[-1] == "running"
        if fault == "isolated":
            isolate_replica(replica_id=replica.pk, reason="It counts wrong.")
        else:
            engine.nodes.clear()
        elastic()
        assert PoolCapacity.objects.get().failures == failures
    elastic(later=100)
    elastic()
    engine.serve(engine.started[-1])
    elastic(later=700)
    elastic(later=700)
    elastic(later=20)
    assert elastic()[-1] == "released"
    assert PoolCapacity.objects.get().failures == 0, "this one worked"


def test_a_model_that_ends_its_engine_again_and_again_is_started_less_and_less_often(engine, elastic, fleet):
    for failures in (1, 2):
        elastic(later=100)
        ask(fleet)
        assert elastic()[-1] == "starting"
        engine.serve(engine.started[-1], is_ready=False)
        elastic()
        engine.nodes.clear()
        assert elastic()[-1] == "lost"
        capacity = PoolCapacity.objects.get()
        assert capacity.failures == failures and "ended before its replica was ready" in capacity.problem


@pytest.mark.parametrize("fault", ["silent", "isolated", "gone"])
def test_a_replica_that_fails_is_replaced(fault, engine, elastic, fleet):
    ask(fleet)
    elastic()
    replica = engine.serve(engine.started[0])
    assert elastic() == ["running"]
    if fault == "silent":
        Replica.objects.filter(pk=replica.pk).update(observed_at=db_now() - fleets._SILENT_AT_MOST * 1.1)
    elif fault == "isolated":
        isolate_replica(replica_id=replica.pk, reason="It counts wrong.")
    else:
        engine.nodes.clear()
    ask(fleet)
    statuses = elastic()
    assert statuses[0] == ("lost" if fault == "gone" else "draining")
    ask(fleet)
    assert elastic(later=31 if fault == "gone" else 0)[1] == "starting"


def test_the_budget_pays_for_replicas_before_trainers(floor, engine, elastic, fleet):
    limit(floor.pool, maximum=2, node_nano_per_hour=10, budget_nano_per_hour=15)
    floor.job()
    set_fleet(floor, minimum=1, maximum=3)
    assert elastic() == ["starting"]
    assert [engine.nodes[name].kind for name in engine.started] == ["replica"]
    limit(floor.pool, maximum=2, node_nano_per_hour=10, budget_nano_per_hour=25)
    assert elastic() == ["starting", "starting"]
    assert [engine.nodes[name].kind for name in engine.started] == ["replica", "trainer"]
    set_fleet(floor, minimum=3, maximum=3)
    assert elastic() == ["starting", "starting"], "nothing is left of the budget"
    assert routed(fleet), "one is starting"


def test_requests_wait_only_while_a_replica_can_start(floor, engine, elastic, fleet):
    elastic()
    assert routed(fleet)
    engine.fails_to_list = True
    elastic()
    assert routed(fleet) == (), "the engine does not answer"
    engine.fails_to_list, engine.fails_before = False, True
    ask(fleet)
    elastic()
    assert PoolCapacity.objects.get().problem == "no partition"
    assert routed(fleet), "the first attempt"
    elastic()
    assert routed(fleet) == (), "the next attempt is later"
    engine.fails_before = False
    assert elastic(later=31) == ["starting"]
    assert routed(fleet)

    engine.fails_to_list = True
    elastic()
    assert routed(fleet), "one is starting"
    engine.fails_to_list = False
    set_fleet(floor, maximum=0)
    assert elastic() == ["draining"]
    assert routed(fleet) == ()


def test_a_minimum_is_there_without_a_request(floor, engine, elastic, fleet):
    set_fleet(floor, minimum=2)
    assert elastic() == ["starting", "starting"]


def test_an_adapter_is_cold_only_if_its_request_starts_a_replica(floor, elastic, fleet):
    loaded, refused = (make_adapter(floor.organization, floor.base_model) for _ in range(2))
    AdapterVersion.objects.filter(pk=refused.pk).update(status="refused")
    refused.refresh_from_db()

    def states() -> list[str]:
        with tenant(organization=floor.organization):
            found = serving_states(versions=[loaded, refused])
        return [found[version.pk].state for version in (loaded, refused)]

    assert states() == ["waiting", "waiting"], "the pool was not looked at yet"
    elastic()
    assert states() == ["cold", "waiting"]
    replica = make_replica(floor.base_model, "unix:///nowhere")
    Placement.objects.create(organization=floor.organization, replica=replica, adapter_version=loaded)
    assert states()[0] == "waiting", "it will be loaded"


def test_a_request_for_an_adapter_waits_while_the_only_replica_drains(floor, elastic, fleet):
    """It is taken back, or another one starts. The base model is answered meanwhile."""
    version = make_adapter(floor.organization, floor.base_model)
    replicas = [make_replica(floor.base_model, f"unix:///{name}") for name in ("drains", "stays")]
    Replica.objects.filter(pk=replicas[0].pk).update(draining_at=db_now())
    elastic()
    names = (version.model_name, floor.base_model.name)
    assert [is_starting(name, floor.organization) for name in names] == [False, False]
    Replica.objects.filter(pk=replicas[1].pk).delete()
    assert [is_starting(name, floor.organization) for name in names] == [True, False]


def is_starting(model_name: str, organization) -> bool:
    routes = Routes(SimpleNamespace(call=None))
    routes._table = _Table({route.model_name: route for route in list_routes()}, {}, 0.0, {})
    return routes._is_starting(model_name, SimpleNamespace(organization_id=organization.pk, sight=None))


def test_limits_that_make_no_sense_are_refused(floor, engine, fleet):
    for field, changes in {
        "minimum": {"minimum": 3}, "maximum": {"maximum": 201}, "requests_per_replica": {"requests_per_replica": 0},
        "idle_seconds": {"idle_seconds": 1},
    }.items():  # fmt: skip
        with pytest.raises(InvalidValue) as refused:
            set_fleet(floor, **changes)
        assert refused.value.param == field

    other = operations.create_pool(name="other", gpu_type=floor.pool.gpu_type, memory_bytes=1, by="user_test")
    with pytest.raises(InvalidState, match="Choose what starts"):
        set_fleet(floor, other)
    limit(other)
    with pytest.raises(InvalidValue, match=r"starts replicas of .* in this region already"):
        set_fleet(floor, other)
    limit(other, kind="static", settings={})
    set_fleet(floor, maximum=0)
    limit(other)
    set_fleet(floor, other)
    limit(other, kind="static", settings={})
    set_fleet(floor)
    with pytest.raises(InvalidValue, match=r"starts replicas of .* in this region already") as refused:
        limit(other)
    assert refused.value.param == "kind"
