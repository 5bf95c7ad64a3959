"""Pools with on-demand and spot nodes: which are started, what takes the place of a spot node, and what goes first."""

import datetime

import pytest

from apps.core.database.clock import db_now
from apps.core.errors import InvalidValue
from apps.finetuning.models import CapacityNode, PoolCapacity, Run
from apps.finetuning.pools import operations
from apps.finetuning.pools.capacity.demand import Limits, kinds_of_further_nodes
from apps.finetuning.usage.quotas import set_quota
from tests.twins.capacity import SLURM, limit

HOUR = 1_000_000_000
SPOT_SLURM = SLURM | {"spot_partition": "spot"}


@pytest.fixture
def mixed(floor, engine, elastic):
    """Return a look at a pool with one on-demand node and up to three spot nodes, as (status, is_spot)."""
    operations.edit_pool(
        pool=floor.pool, region=floor.pool.region_id, memory_bytes=floor.pool.memory_bytes, is_open=True,
        interruptions_per_hour=0.1, by="user_test",
    )  # fmt: skip
    set_quota(organization=floor.organization, by="user_test", now=db_now(), concurrent_gpus=None)
    limit(floor.pool, maximum=4, on_demand_nodes=1, settings=SPOT_SLURM)

    def look(*, later: float = 0) -> list[tuple[str, bool]]:
        elastic(later=later)
        return list(CapacityNode.objects.order_by("requested_at", "pk").values_list("status", "is_spot"))

    return look


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({}, 10),
        ({"budget_nano": 8 * HOUR}, 7),  # one for 2, six for 1
        ({"budget_nano": HOUR}, 0),
        ({"budget_nano": 5 * HOUR, "on_demand": 4}, 2),
        ({"budget_nano": 8 * HOUR, "spot_nano": 0}, 10),
        ({"budget_nano": 8 * HOUR, "on_demand": None}, 4),
        ({"budget_nano": 8 * HOUR, "on_demand": 0}, 8),
    ],
)
def test_the_budget_pays_for_both_kinds(limits, most):
    usual = {"minimum": 0, "maximum": 10, "gpus_per_node": 1, "node_nano": 2 * HOUR, "spot_nano": HOUR, "on_demand": 1}

    assert Limits(**usual | limits).most == most


@pytest.mark.parametrize(
    ("count", "alive", "has_spot", "budget", "kinds"),
    [
        (3, [], True, None, [False, True, True]),
        (3, [False], True, None, [True, True, True]),
        (2, [True], True, None, [False, True]),
        (3, [], False, None, [False, False, False]),
        (3, [], False, 5 * HOUR, [False, False]),
        (3, [False, True], True, 5 * HOUR, [True, True]),
        (0, [], True, None, []),
        (-1, [False], True, None, []),
    ],
)
def test_further_nodes_are_spot_after_those_on_demand(count, alive, has_spot, budget, kinds):
    limits = Limits(
        minimum=0, maximum=9, gpus_per_node=1, node_nano=2 * HOUR, spot_nano=HOUR, on_demand=1, budget_nano=budget
    )

    found = kinds_of_further_nodes(count, alive=alive, unfinished=alive, limits=limits, has_spot=has_spot)
    assert found == kinds


def test_the_first_node_is_on_demand_and_the_engine_is_told_the_kind_of_each(floor, engine, mixed):
    for _ in range(3):
        floor.job()
    assert mixed() == [("starting", False), ("starting", True), ("starting", True)]
    assert [engine.nodes[name].is_spot for name in engine.started] == [False, True, True]

    limit(floor.pool, maximum=4)
    floor.job()
    mixed()
    assert engine.nodes[engine.started[3]].is_spot is None, "all new nodes are alike"


def test_on_demand_nodes_replace_spot_nodes_that_wait_and_spot_is_tried_again_later(floor, engine, mixed):
    engine.has_no_spot = True
    for _ in range(2):
        floor.job()
    assert mixed() == [("starting", False), ("starting", True)]
    assert mixed(later=590) == [("starting", False), ("starting", True)]
    assert mixed(later=20) == [("starting", False), ("draining", True), ("starting", False)]
    assert mixed()[1] == ("released", True)
    assert CapacityNode.objects.get(is_spot=True).reason == "No spot machine was free."

    floor.job()
    assert mixed(later=60)[-1] == ("starting", False), "spot is not tried for half an hour"
    floor.job()
    assert mixed(later=1800)[-1] == ("starting", True)


def test_a_spot_node_that_may_not_be_replaced_waits(floor, engine, mixed):
    limit(floor.pool, maximum=4, on_demand_nodes=0, replaces_spot=False, settings=SPOT_SLURM)
    engine.has_no_spot = True
    floor.job()
    for _ in range(3):
        assert mixed(later=3500) == [("starting", True)]


def test_a_refused_spot_node_is_replaced_as_far_as_the_budget_pays(floor, engine, mixed):
    costs = {"node_nano_per_hour": 2 * HOUR, "spot_node_nano_per_hour": HOUR, "budget_nano_per_hour": 3 * HOUR}
    limit(floor.pool, maximum=4, on_demand_nodes=0, settings=SPOT_SLURM, **costs)
    engine.fails_before = True
    for _ in range(3):
        floor.job()
    assert mixed() == [("requested", True)] * 3
    engine.fails_before = False
    assert PoolCapacity.objects.get().failures == 0
    assert mixed(later=31) == [("released", True)] * 3 + [("starting", False)]
    assert engine.nodes[engine.started[0]].is_spot is False


def test_a_spot_node_taken_away_while_it_starts_is_replaced(floor, engine, mixed):
    limit(floor.pool, maximum=4, on_demand_nodes=0, settings=SPOT_SLURM)
    floor.job()
    assert mixed() == [("starting", True)]
    engine.nodes.clear()
    assert mixed() == [("lost", True), ("requested", False)]
    assert mixed(later=31)[1] == ("starting", False)


def test_spot_nodes_keep_waiting_while_the_budget_pays_for_no_other(floor, engine, mixed):
    costs = {"node_nano_per_hour": 10 * HOUR, "spot_node_nano_per_hour": 3 * HOUR, "budget_nano_per_hour": 14 * HOUR}
    limit(floor.pool, maximum=4, on_demand_nodes=1, settings=SPOT_SLURM, **costs)
    engine.has_no_spot = True
    for _ in range(2):
        floor.job()
    assert mixed() == [("starting", False), ("starting", True)]
    assert mixed(later=700) == [("starting", False), ("starting", True)]


def test_idle_replacements_are_released_before_spot_nodes_and_the_first_node_last(floor, engine, mixed):
    for _ in range(2):
        floor.job()
    mixed()
    PoolCapacity.objects.update(spot_retry_at=db_now() + datetime.timedelta(minutes=20))
    floor.job()
    assert mixed() == [("starting", False), ("starting", True), ("starting", False)]
    for name in engine.started:
        engine.enrol(name)
    mixed()
    [last, *_] = Run.objects.order_by("pk")
    for left, gone in ((2, [2]), (1, [2, 1]), (0, [2, 1, 0])):
        Run.objects.filter(pk__in=Run.objects.exclude(pk=last.pk).filter(status="queued").values("pk")[:1]).update(
            status="cancelled", finished_at=db_now()
        )
        if not left:
            Run.objects.update(status="cancelled", finished_at=db_now())
        statuses = [status for status, _ in mixed(later=61)]
        assert [place for place, status in enumerate(statuses) if status != "running"] == sorted(gone), left


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"on_demand_nodes": 3}, "on_demand_nodes"),
        ({"settings": SLURM}, "spot_partition"),
        ({"settings": SLURM | {"spot_partition": "-p x"}}, "spot_partition"),
        ({"node_nano_per_hour": HOUR, "budget_nano_per_hour": HOUR}, "spot_node_usd"),
    ],
)
def test_wrong_settings_of_spot_nodes_name_their_field(changes, field, floor, mixed):
    with pytest.raises(InvalidValue) as refused:
        limit(floor.pool, **{"on_demand_nodes": 1, "settings": SPOT_SLURM} | changes)
    assert refused.value.param == field


def test_a_pool_with_spot_nodes_is_a_spot_pool(floor, mixed):
    pool = {"pool": floor.pool, "region": floor.pool.region_id, "memory_bytes": 1, "is_open": True, "by": "user_test"}
    with pytest.raises(InvalidValue) as refused:
        operations.edit_pool(**pool)
    assert refused.value.param == "interruptions_per_hour"

    limit(floor.pool)
    operations.edit_pool(**pool)
    with pytest.raises(InvalidValue) as refused:
        limit(floor.pool, on_demand_nodes=1, settings=SPOT_SLURM)
    assert refused.value.param == "on_demand_nodes"
