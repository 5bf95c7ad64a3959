"""A machine of a group that another one leads, before a control plane's twin, with a scripted child."""

import pytest

from apps.contracts.addresses.machines import NodeGroup
from apps.contracts.failures import FailureCode
from apps.contracts.runs import Failed, Stopped, StopReason
from gpu_workers.trainer.supervision import group_member
from tests.support.agent import Draining, add_run, make_agent

PLACE = NodeGroup(rank=1, node_count=2, master_address="10.0.0.1", master_port=29_500, address="127.0.0.1")


@pytest.fixture
def begin(plane, models, tmp_path):
    """Have a machine with one GPU take its place among two."""

    def start(behaviour: str) -> Draining:
        add_run(plane, models, gpu_count=2, group=PLACE)
        return Draining(make_agent(plane, tmp_path, behaviour, address="127.0.0.1"))

    return start


def test_it_offers_itself_trains_and_leaves_without_a_report(plane, begin, tmp_path):
    plane.heartbeat_seconds = 60
    begin("succeed").join()

    offered = plane.claimed[0]
    assert (offered.address, offered.leases) == ("127.0.0.1", ())
    assert 1024 <= offered.port <= 65_535
    assert [each.outcome for each in plane.left] == [None]
    assert plane.places_kept == 1  # at once, so that the group has begun
    assert (plane.events, plane.beats, plane.puts, plane.outcomes) == ([], [], [], [])
    assert list((tmp_path / "work" / "runs").iterdir()) == []


def test_a_worker_that_waits_for_doorbells_offers_itself_to_no_group(plane, models, tmp_path):
    Draining(make_agent(plane, tmp_path, "succeed")).join()

    assert {(claimed.address, claimed.port) for claimed in plane.claimed} == {("", None)}


def test_its_failure_is_the_attempts(plane, begin):
    begin("fail").join()

    [left] = plane.left
    assert isinstance(left.outcome, Failed)
    assert left.outcome.code is FailureCode.NO_TRAINABLE_TOKENS


@pytest.mark.slow
def test_it_stops_in_order_and_leaves_the_rest_to_the_first_machine(plane, begin, tmp_path):
    draining = begin("wait")
    plane.wait_for(lambda: any(b'"train_loss"' in path.read_bytes() for path in tmp_path.rglob("events.jsonl")))

    plane.is_drain_requested = True
    draining.join()

    assert [each.outcome for each in plane.left] == [None]


@pytest.mark.slow
def test_it_gives_the_attempt_up_if_it_stops_before_it_trained(plane, begin, monkeypatch):
    def asked(*_, before_each, **__):
        plane.is_drain_requested = True
        plane.wait_for(lambda: plane.places_kept > 1)
        before_each()

    monkeypatch.setattr(group_member, "prepare", asked)

    begin("succeed").join()

    assert [each.outcome for each in plane.left] == [Stopped(reason=StopReason.PREEMPTED)]


def test_it_ends_its_child_when_the_group_has_ended(plane, begin):
    draining = begin("stubborn")
    plane.wait_for(lambda: plane.places_kept)

    plane.is_lease_stale = True
    draining.join(20)

    assert plane.left == []
