"""Where adapters are placed: by demand, in rank classes, fairly and with few moves. No database."""

from collections.abc import Collection, Mapping

import pytest

from apps.serving.placement import MAX_TO_LOAD, AdapterDemand, Placed, ReplicaCapacity, count_moves, place
from tests.bench.placement import Setup, simulate

NOW = 1_000_000.0


def wish(
    name: str,
    rate: float = 0.0,
    *,
    organization: str = "a",
    rank: int = 8,
    age: float = 60.0,
    kept: bool = False,
    refused: bool = False,
    regions: str = "",
) -> AdapterDemand:
    limits = frozenset(regions.split()) or None
    return AdapterDemand(name, organization, rank, NOW - age, rate, kept, refused, limits)


def room(
    name: str,
    *,
    capacity: int = 4,
    slots: int = 2,
    max_rank: int = 16,
    rank_class: int | None = None,
    is_draining: bool = False,
    region: str = "",
) -> ReplicaCapacity:
    return ReplicaCapacity(name, capacity, slots, max_rank, rank_class or max_rank, is_draining, region)


def placed(
    wishes: list[AdapterDemand],
    rooms: list[ReplicaCapacity],
    holding: Mapping[str, Collection[str]] | None = None,
    settled: Mapping[str, Collection[str]] | None = None,
    unable: Collection[tuple[str, str]] = (),
) -> Placed:
    held = holding or {}
    return place(wishes, rooms, holding=held, settled=held if settled is None else settled, now=NOW, unable=unable)


def holders(found: Placed, name: str) -> set[str]:
    return {replica_id for replica_id, held in found.items() if name in held}


def test_a_hot_adapter_is_on_several_replicas_and_one_nobody_asked_for_on_none() -> None:
    wishes = [wish("hot", 40), wish("warm", 0.1), wish("cold", age=3 * 86_400)]

    found = placed(wishes, [room(f"r{i}") for i in range(4)])

    assert len(holders(found, "hot")) == 4
    assert len(holders(found, "warm")) == 1
    assert holders(found, "cold") == set()


def test_a_hot_adapter_gathers_again_only_when_its_demand_has_halved() -> None:
    rooms = [room("r1"), room("r2")]
    both = {"r1": {"hot"}, "r2": {"hot"}}

    assert len(holders(placed([wish("hot", 1.2)], rooms), "hot")) == 2
    assert len(holders(placed([wish("hot", 0.9)], rooms, both), "hot")) == 2
    assert len(holders(placed([wish("hot", 0.4)], rooms, both), "hot")) == 1


def test_what_is_placed_stays_where_it_is() -> None:
    wishes = [wish(f"v{i}", i / 10) for i in range(12)]
    rooms = [room(f"r{i}") for i in range(4)]
    first = placed(wishes, rooms)

    again = placed(wishes, rooms, first)

    assert count_moves(first, again) == 0
    assert again == first


def test_a_lower_rank_goes_to_the_class_that_is_fast_for_it_and_only_then_higher() -> None:
    rooms = [room("small", capacity=1, max_rank=16), room("large", capacity=2, max_rank=64)]

    for name in ("low", "low2", "low3", "low4"):  # whichever replica the name would rather have
        assert holders(placed([wish(name, rank=8)], rooms), name) == {"small"}
    assert holders(placed([wish("high", rank=32)], rooms), "high") == {"large"}
    both = placed([wish("low", 2, rank=8), wish("low2", rank=8)], rooms)
    assert holders(both, "low2") == {"large"}
    assert placed([wish("giant", rank=128)], rooms) == {"small": frozenset(), "large": frozenset()}


def test_a_replica_that_reports_a_lower_rank_than_was_accepted_is_preferred_for_none() -> None:
    rooms = [room("honest", capacity=9, max_rank=64), room("other", capacity=9, max_rank=16, rank_class=64)]
    wishes = [wish(f"low{i}", 1, rank=8) for i in range(8)]

    found = placed([*wishes, wish("high", 1, rank=32)], rooms)

    assert holders(found, "high") == {"honest"}
    assert len(found["honest"]) - len(found["other"]) in (-1, 0, 1)


def test_a_high_rank_takes_back_its_place_from_a_lower_one() -> None:
    rooms = [room("small", capacity=1, max_rank=16), room("large", capacity=1, max_rank=64)]

    found = placed([wish("low", rank=8), wish("high", rank=64)], rooms, {"large": {"low"}})

    assert found == {"small": {"low"}, "large": {"high"}}


def test_no_replica_gets_more_hot_adapters_than_it_has_slots() -> None:
    wishes = [wish(f"hot{i}", 1.0) for i in range(4)]

    found = placed(wishes, [room("r1", slots=1), room("r2", slots=3)])

    assert (len(found["r1"]), len(found["r2"])) == (1, 3)


def test_never_more_than_the_capacity_and_the_busiest_first() -> None:
    wishes = [wish(f"v{i}", i / 100) for i in range(20)]

    found = placed(wishes, [room("r1"), room("r2")])

    assert set().union(*found.values()) == {f"v{i}" for i in range(12, 20)}


def test_one_tenant_with_many_adapters_does_not_push_out_another() -> None:
    many = [wish(f"rich{i}", 5.0, organization="rich") for i in range(70)]

    found = placed([wish("small", 0.01, organization="small"), *many], [room("r1", capacity=64)])

    assert "small" in found["r1"]
    assert len(found["r1"]) == 64


def test_what_is_paid_for_is_kept_whatever_its_demand() -> None:
    busy = [wish(f"v{i}", 5.0) for i in range(9)]

    assert "kept" in placed([wish("kept", kept=True, age=9 * 86_400), *busy], [room("r1")])["r1"]


def test_a_customer_who_waits_gets_the_adapter_in_but_no_faster_than_replicas_load() -> None:
    holding = {"r1": {f"v{i}" for i in range(20)}}
    held = [wish(f"v{i}", 0.2) for i in range(20)]
    waited_for = [wish(f"w{i}", 0.05, age=1) for i in range(20)]
    rooms = [room("r1", capacity=20)]

    found = placed(held + waited_for, rooms, holding)
    is_behind = placed(held + waited_for, rooms, holding, settled={"r1": {f"v{i}" for i in range(MAX_TO_LOAD, 20)}})

    assert count_moves(holding, found) == MAX_TO_LOAD
    assert count_moves(holding, is_behind) == 0


def test_a_refused_adapter_has_a_place_only_as_long_as_no_other_needs_it() -> None:
    refused = [wish(f"bad{i}", 9.0, organization="bad", kept=i == 0, refused=True) for i in range(4)]
    held = [*refused, wish("good", 0.1)]
    rooms = [room("r1", capacity=5), room("r2", capacity=5)]

    assert sum(name.startswith("bad") for versions in placed(held, rooms).values() for name in versions) == 4
    found = placed([*held, wish("other", age=3_600)], rooms[:1], {"r1": {each.version_id for each in held}})
    assert {"good", "other"} <= found["r1"] and len(found["r1"]) == 5


def test_a_draining_replica_keeps_what_it_has_while_others_take_it_over() -> None:
    found = placed([wish("v1"), wish("v2")], [room("old", is_draining=True), room("new")], {"old": {"v1"}})

    assert found == {"old": {"v1"}, "new": {"v1", "v2"}}


def test_a_replica_that_failed_to_load_it_is_passed_over() -> None:
    found = placed([wish("v1")], [room("r1"), room("r2")], {"r1": {"v1"}}, unable=[("r1", "v1")])

    assert found == {"r1": frozenset(), "r2": {"v1"}}


def test_a_lost_replicas_adapters_move_and_a_new_replica_takes_over_few_at_a_time() -> None:
    wishes = [wish(f"v{i}", 0.5) for i in range(8)]
    two = placed(wishes, [room("r1", capacity=8), room("r2", capacity=8)])

    one = placed(wishes, [room("r1", capacity=8)], two)
    again = placed(wishes, [room("r1", capacity=8), room("r2", capacity=8)], one)

    assert one["r1"] == {f"v{i}" for i in range(8)}
    assert 1 <= count_moves(one, again) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("places", [256, 245])
def test_of_zipf_traffic_over_2000_adapters_nearly_all_is_warm_after_the_first_minute(places: int) -> None:
    """With 245 places there are fewer than adapters: the coldest come and go."""
    outcome = simulate(Setup(seconds=180, places=places))

    assert outcome.warm_share >= 0.99, outcome
    assert outcome.most_moves_a_minute <= 60 * 8 / 4, outcome  # a quarter of what replicas could load


def test_an_adapter_that_must_stay_in_a_region_displaces_one_that_need_not() -> None:
    rooms = [room("eu", capacity=2, region="eu"), room("us", capacity=2, region="us")]
    holding = {"eu": {"a", "b"}, "us": {"c"}}
    wishes = [wish("a", 0.2), wish("b", 0.1), wish("c"), wish("mine", age=1, regions="eu ch")]

    found = placed(wishes, rooms, holding)

    assert holders(found, "mine") == {"eu"} and found["us"] == {"b", "c"} and holders(found, "a") == {"eu"}


def test_more_adapters_than_their_region_has_places_for_leave_the_places_of_others_alone() -> None:
    rooms = [room("eu", capacity=2, region="eu"), room("us", capacity=2, region="us")]
    wishes = [*(wish(f"mine{i}", 1.0, regions="eu") for i in range(5)), wish("a"), wish("b")]

    found = placed(wishes, rooms)

    assert len(found["eu"]) == 2 and all(name.startswith("mine") for name in found["eu"])
    assert found["us"] == {"a", "b"}


@pytest.mark.parametrize("is_draining", [False, True])
def test_an_adapter_leaves_a_replica_where_it_may_not_be_any_more(is_draining: bool) -> None:
    rooms = [room("eu", region="eu"), room("us", region="us", is_draining=is_draining)]

    found = placed([wish("mine", 1.0, regions="eu"), wish("a")], rooms, {"us": {"mine", "a"}})

    assert holders(found, "mine") == {"eu"} and "a" in found["us"]


def test_adapters_of_regions_that_displace_each_other_come_to_an_end() -> None:
    rooms = [room("eu", capacity=2, region="eu"), room("us", capacity=3, region="us")]
    wishes = [wish("f", 0.1, regions="eu"), wish("x", 40, regions="eu us"), wish("v", 40, regions="eu us")]

    found = placed(wishes, rooms, {"eu": {"f", "x"}, "us": {"x", "v"}})

    assert holders(found, "f") == {"eu"} and {"x", "v"} <= found["us"]
