"""Elastic pools: the number of nodes, and a pool that goes from zero to nodes and back with an engine in memory."""

import datetime

import pytest

from apps.core.database.clock import db_now
from apps.core.errors import InvalidState, InvalidValue
from apps.finetuning.models import (
    CapacityNode,
    Conversion,
    Examination,
    FineTuningJob,
    GpuPool,
    PoolCapacity,
    Run,
    Worker,
    WorkerToken,
)
from apps.finetuning.pools import operations
from apps.finetuning.pools.capacity import needs, reconciliation
from apps.finetuning.pools.capacity.demand import Limits, wanted_nodes
from apps.finetuning.pools.capacity.port import NodeRequest
from apps.finetuning.runs import claims
from apps.finetuning.usage.quotas import set_quota
from tests.factories.finetuning import make_pool
from tests.factories.serving import make_version
from tests.support.attempts import age_nodes
from tests.twins.capacity import SLURM, limit

HOUR = 1_000_000_000


@pytest.mark.parametrize(
    ("waiting", "busy", "limits", "wanted"),
    [
        ((), (), {}, 0),
        ((), (), {"minimum": 2}, 2),
        (((1, 1),) * 3, (), {}, 3),
        (((1, 1),) * 3, (), {"gpus_per_node": 2}, 2),
        (((1, 1),) * 2, (1, 1), {"gpus_per_node": 2}, 2),
        (((2, 1), (1, 1), (1, 1)), (1,), {"gpus_per_node": 2}, 3),
        (((4, 1),), (), {"gpus_per_node": 2}, 0),
        (((1, 1),) * 9, (), {"maximum": 4}, 4),
        (((1, 1),) * 9, (), {"node_nano": 3 * HOUR, "budget_nano": 7 * HOUR}, 2),
        (((1, 1),), (), {"node_nano": 3 * HOUR, "budget_nano": HOUR}, 0),
        (((1, 1),), (1, 1, 1), {"maximum": 2}, 3),
        ((), (), {"minimum": 3, "node_nano": HOUR, "budget_nano": HOUR}, 1),
        (((1, 2),), (), {"maximum": 2}, 2),
        (((1, 2),), (1,), {"maximum": 2}, 1),  # the group cannot be complete while the other run goes on
        (((1, 2), (1, 1)), (1,), {"maximum": 2}, 2),
        (((1, 2),), (1,), {"maximum": 2, "gpus_per_node": 2}, 2),
    ],
)
def test_the_number_of_nodes_follows_queue_leases_and_limits(waiting, busy, limits, wanted):
    given = Limits(**{"minimum": 0, "maximum": 10, "gpus_per_node": 1} | limits)

    assert wanted_nodes(waiting=waiting, busy=busy, limits=given) == wanted


def test_a_pool_starts_a_node_for_a_job_and_is_empty_again_when_it_is_idle(floor, engine, elastic):
    assert elastic() == []
    job = floor.job()
    assert elastic() == ["starting"]
    assert elastic() == ["starting"]
    worker = engine.enrol(engine.started[0])
    assert worker.pool == floor.pool
    with pytest.raises(operations.InvalidWorkerCredential):
        engine.enrol(engine.started[0])
    assert claims.claim(worker=worker, base_models=None) is not None
    assert elastic(later=3000) == ["running"]

    Run.objects.filter(job=job).update(
        status="failed", finished_at=db_now(), lease_id=None, lease_token_sha256=None, lease_expires_at=None
    )
    assert elastic() == ["running"]
    assert elastic(later=61) == ["draining"]
    assert elastic() == ["released"]
    worker.refresh_from_db()
    assert worker.revoked_at
    assert claims.claim(worker=worker, base_models=None) is None
    assert engine.nodes == {}
    assert len(engine.started) == 1


def test_a_lent_node_is_no_reason_for_another_one(floor, engine, elastic):
    low = make_pool("low")
    GpuPool.objects.filter(pk=low.pk).update(is_spot=True, interruptions_per_hour=1.0, borrows_from=floor.pool)
    floor.job(pool=floor.pool.name)
    elastic()
    worker = engine.enrol(engine.started[0])
    elastic()
    Run.objects.update(status="cancelled", finished_at=db_now())
    lent = floor.job(pool="low")
    assert claims.claim(worker=worker, base_models=None).spec.job_id == lent.pk

    floor.job(pool=floor.pool.name)
    assert elastic() == ["running"], "the run gets the lent node"
    assert elastic(later=61) == ["running"], "which stays while a run works on it"


def test_a_lost_answer_starts_no_second_node(floor, engine, elastic):
    floor.job()
    engine.fails_after = True
    assert elastic() == ["requested"]
    engine.fails_after = False
    assert elastic() == ["starting"]
    assert engine.enrol(engine.started[0])
    assert elastic(later=40) == ["running"]
    assert len(engine.started) == 1


def test_failed_starts_wait_longer_each_time_and_say_why(floor, engine, elastic):
    floor.job()
    engine.fails_before = True
    for failures, wait in ((1, 30), (2, 60), (3, 120)):
        assert elastic(later=wait) == ["requested"]
        capacity = PoolCapacity.objects.get()
        assert (capacity.failures, capacity.problem) == (failures, "no partition")
        assert round((capacity.retry_at - db_now()).total_seconds() / 10) * 10 == wait
    engine.fails_before = False
    assert elastic() == ["requested"]
    assert elastic(later=130) == ["starting"]


def test_nodes_that_die_do_not_enrol_or_belong_to_no_row_are_released(floor, engine, elastic):
    floor.job()
    elastic()
    engine.nodes.clear()
    assert elastic() == ["lost", "requested"]  # its successor waits
    assert "before it enrolled" in CapacityNode.objects.get(status="lost").reason
    elastic(later=31)
    assert elastic(later=3601)[1] == "draining"
    assert not WorkerToken.objects.filter(used_at=None, expires_at__gt=db_now()).exists()
    assert engine.nodes == {}

    stray = NodeRequest(name=engine.started[0], pool="p", token="t", internal_url="u", idle_seconds=1)
    foreign = NodeRequest(name="anneal-pool-other-1", pool="p", token="t", internal_url="u", idle_seconds=1)
    engine.nodes = {stray.name: stray, foreign.name: foreign}
    elastic()
    assert list(engine.nodes) == [foreign.name]


def test_a_node_may_wait_in_the_engines_queue_for_hours(floor, engine, elastic):
    floor.job()
    elastic()
    engine.is_full = True
    for _ in range(3):
        assert elastic(later=3500) == ["starting"]
    engine.is_full = False
    assert elastic(later=3500) == ["starting"]
    assert PoolCapacity.objects.get().failures == 0
    assert engine.enrol(engine.started[0])
    assert elastic() == ["running"]


@pytest.mark.parametrize("quota", [{"concurrent_gpus": 2}, {"gpu_seconds_per_month": 250}])
def test_runs_of_one_organization_start_no_more_nodes_than_its_quota_allows(quota, floor, engine, elastic):
    limit(floor.pool, maximum=8)
    for _ in range(4):
        floor.job()
    FineTuningJob.objects.update(estimate={"run_seconds_p50": 100})
    set_quota(organization=floor.organization, by="user_test", now=db_now(), **quota)
    assert elastic() == ["starting"] * 2


def test_a_run_larger_than_a_node_does_not_hide_the_next_one(floor, engine, elastic):
    set_quota(organization=floor.organization, by="user_test", now=db_now(), concurrent_gpus=None)
    FineTuningJob.objects.filter(pk=floor.job().pk).update(gpu_count=4)
    floor.job()
    assert elastic() == ["starting"]


def test_runs_that_limits_hold_back_hide_no_others_however_many_come_first(floor, engine, elastic, monkeypatch):
    monkeypatch.setattr(needs, "_LOOKED_AT", (2, 8))
    set_quota(organization=floor.organization, by="user_test", now=db_now(), concurrent_gpus=None)
    for _ in range(3):
        FineTuningJob.objects.filter(pk=floor.job().pk).update(gpu_count=4)  # more than a node has
    floor.job()

    assert elastic() == ["starting"]


def test_a_group_that_cannot_be_complete_starts_no_node_and_hides_no_other_run(floor, engine, elastic):
    limit(floor.pool, maximum=2)
    set_quota(organization=floor.organization, by="user_test", now=db_now(), concurrent_gpus=None)
    floor.job()
    elastic()
    worker = engine.enrol(engine.started[0])
    assert claims.claim(worker=worker, base_models=None)
    for _ in range(2):
        FineTuningJob.objects.filter(pk=floor.job().pk).update(gpu_count=2, node_count=2)
    assert elastic() == ["running"], "the other node would wait for the end of the run"

    floor.job()
    assert elastic() == ["running", "starting"]


def test_a_node_waits_an_hour_for_the_rest_of_its_group_and_then_starts_pause(floor, engine, elastic):
    set_quota(organization=floor.organization, by="user_test", now=db_now(), concurrent_gpus=None)
    FineTuningJob.objects.filter(pk=floor.job().pk).update(gpu_count=2, node_count=2)
    elastic()
    first = engine.started[0]
    engine.enrol(first)
    engine.is_full = True  # the other one waits in the engine's queue
    assert engine.nodes[first].arguments[-1] == "3600", "although the pool's idle time is a minute"
    assert elastic(later=3500) == ["running", "starting"]

    age_nodes(101)
    del engine.nodes[first]
    assert elastic() == ["released", "starting", "requested"]
    capacity = PoolCapacity.objects.get()
    assert "waited an hour" in capacity.problem and capacity.retry_at > db_now() + datetime.timedelta(minutes=29)
    engine.is_full = False
    assert elastic(later=1801) == ["released", "starting", "starting"]


@pytest.mark.parametrize("is_wanted", [True, False])
def test_only_a_wanted_node_that_found_no_work_pauses_starts(is_wanted, floor, engine, elastic):
    limit(floor.pool, idle_seconds=7200)
    floor.job()
    elastic()
    engine.enrol(engine.started[0])
    elastic()
    if not is_wanted:
        Run.objects.update(status="cancelled", finished_at=db_now())
    elastic()
    engine.nodes.clear()

    assert elastic(later=7201)[0] == "released"
    assert bool(PoolCapacity.objects.get().retry_at) == is_wanted


@pytest.mark.parametrize("kind", ["conversion", "examination"])
def test_a_node_stays_while_it_does_what_idle_trainers_do(kind, floor, engine, elastic):
    version, now = make_version(floor.organization, floor.base_model), db_now()
    floor.job()
    elastic()
    worker = engine.enrol(engine.started[0])
    Run.objects.update(status="cancelled", finished_at=now)
    if kind == "conversion":
        order = order_conversion(version, status="running", worker=worker, leased_at=now, heartbeat_at=now)
    else:
        order = Examination.objects.create(
            organization=floor.organization, version=version, asked_at=now, worker=worker, taken_at=now
        )
    assert elastic(later=61) == ["running"]

    ended = {"status": "succeeded"} if kind == "conversion" else {}
    type(order).objects.update(ended_at=db_now(), **ended)
    assert elastic() == ["running"], "its idle time begins at the end of the work"
    type(order).objects.update(ended_at=db_now() - datetime.timedelta(seconds=61))
    assert elastic() == ["draining"]


def test_the_pool_with_the_cheapest_nodes_starts_one_for_a_conversion_that_no_trainer_takes(floor, engine, elastic):
    dear = limit(make_pool("dear"), node_nano_per_hour=2 * HOUR)
    order = order_conversion(make_version(floor.organization, floor.base_model))
    assert elastic() == [], "an idle trainer would take it within seconds"
    Conversion.objects.update(created_at=db_now() - datetime.timedelta(minutes=2))
    reconciliation.reconcile_pool(pool_id=dear.pk)
    assert engine.started == []

    assert elastic() == ["starting"]
    worker = engine.enrol(engine.started[0])
    assert elastic(later=61) == ["running"]
    Conversion.objects.update(status="running", worker=worker, leased_at=db_now(), heartbeat_at=db_now())
    order_conversion(make_version(floor.organization, floor.base_model), created_at=order.created_at)
    assert elastic() == ["running"], "the organization's next one waits for its turn"


def test_no_node_waits_for_a_conversion_that_its_worker_may_not_take_yet(floor, engine, elastic):
    order_conversion(
        make_version(floor.organization, floor.base_model), created_at=db_now() - datetime.timedelta(hours=1)
    )
    elastic()
    worker = engine.enrol(engine.started[0])
    assert elastic(later=61) == ["running"]

    Conversion.objects.update(worker=worker, attempt=2, leased_at=db_now() - datetime.timedelta(minutes=21))
    assert elastic(later=61) == ["running"]
    Conversion.objects.update(leased_at=db_now() - datetime.timedelta(minutes=19))
    assert elastic() == ["draining"]


def order_conversion(version, **fields) -> Conversion:
    values = {"kind": "merged_16bit", "created_by": "user_test", "created_at": db_now(), "bytes": 1, "price_nano": 0}
    return Conversion.objects.create(organization=version.organization, version=version, **values | fields)


def test_a_worker_that_falls_silent_makes_room_for_another(floor, engine, elastic):
    limit(floor.pool, maximum=1)
    floor.job()
    elastic()
    engine.enrol(engine.started[0])
    for silent, status in ((590, "running"), (610, "draining")):
        Worker.objects.update(last_seen_at=db_now() - datetime.timedelta(seconds=silent))
        assert elastic(later=700) == [status]
    assert elastic() == ["released", "starting"]


@pytest.mark.parametrize("seconds", [0, 3500])
def test_a_node_that_ends_before_it_worked_delays_its_successor(seconds, floor, engine, elastic):
    floor.job()
    elastic()
    engine.enrol(engine.started[0])
    engine.nodes.clear()
    assert elastic(later=seconds) == ["lost", "requested"]
    assert PoolCapacity.objects.get().failures == 1
    assert elastic(later=31) == ["lost", "starting"]


def test_only_failed_starts_delay_the_next_and_idle_nodes_are_released_meanwhile(floor, engine, elastic):
    floor.job()
    elastic()
    engine.fails_to_list = True
    elastic()
    capacity = PoolCapacity.objects.get()
    assert (capacity.failures, capacity.retry_at, capacity.problem) == (0, None, "squeue failed")
    engine.fails_to_list = False
    engine.enrol(engine.started[0])
    elastic()

    floor.job()
    engine.fails_before = True
    assert elastic() == ["running", "requested"]
    assert reconciliation.list_elastic_pools() == [floor.pool.pk]
    Run.objects.update(status="cancelled", finished_at=db_now())
    PoolCapacity.objects.update(retry_at=db_now() + datetime.timedelta(hours=1))
    assert elastic(later=61) == ["draining", "released"]
    assert PoolCapacity.objects.get().problem == "no partition"


def test_a_pool_made_static_during_a_look_starts_nothing(floor, engine, elastic):
    floor.job()
    engine.on_list = lambda: limit(floor.pool, kind="static")
    assert elastic() == []
    assert engine.started == []


def test_only_one_task_at_a_time_works_on_a_pool(floor, engine, elastic):
    floor.job()
    PoolCapacity.objects.update(busy_until=db_now() + datetime.timedelta(minutes=1))
    reconciliation.reconcile_pool(pool_id=floor.pool.pk)
    assert engine.started == []


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"maximum": 201}, "maximum"),
        ({"minimum": 3}, "minimum"),
        ({"budget_nano_per_hour": 1}, "node_usd"),
        ({"budget_nano_per_hour": HOUR, "node_nano_per_hour": 2 * HOUR}, "budget_usd"),
        ({"settings": SLURM | {"partition": "--uid=0"}}, "partition"),
        ({"settings": SLURM | {"work_dir": "/tmp/$(id)"}}, "work_dir"),
        ({"settings": SLURM | {"install_dir": ""}}, "install_dir"),
        ({"settings": SLURM | {"shell": "yes"}}, "shell"),
        ({"kind": "magic"}, "kind"),
    ],
)
def test_wrong_settings_name_their_field(changes, field, floor):
    with pytest.raises(InvalidValue) as refused:
        limit(floor.pool, **changes)
    assert refused.value.param == field


def test_the_engine_stays_while_it_has_nodes(floor, engine, elastic):
    floor.job()
    elastic()
    with pytest.raises(InvalidState):
        limit(floor.pool, kind="static")
    with pytest.raises(InvalidState):
        limit(floor.pool, settings=SLURM | {"slurm_conf": "/etc/other.conf"})
