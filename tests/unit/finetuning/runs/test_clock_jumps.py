"""Leases while the clock of the database jumps: a run may start again, but two workers never both have it."""

import pytest

from apps.finetuning.lifecycle import LEASE_SECONDS
from apps.finetuning.models import FineTuningJob, Run
from apps.finetuning.runs.leases import StaleLease, reclaim_expired_leases
from tests.fuzz.simulation.clock import VirtualClock
from tests.support.attempts import Attempt

JUMP_SECONDS = LEASE_SECONDS


@pytest.fixture
def clock(floor) -> VirtualClock:
    """The clock of the database, after a job was queued."""
    floor.job()
    return VirtualClock()


@pytest.fixture
def attempt(clock, claim) -> Attempt:
    begun = claim().start()
    clock.advance(10)
    return begun


def lease_seconds(attempt: Attempt, clock: VirtualClock) -> float:
    return (attempt.run.lease_expires_at - clock.now).total_seconds()


def test_a_jump_forward_after_a_heartbeat_costs_an_attempt_and_no_more(attempt, claim, clock) -> None:
    attempt.beat()
    clock.advance(JUMP_SECONDS + 1)

    assert reclaim_expired_leases() == 1
    again = claim()
    clock.advance(-JUMP_SECONDS - 1)

    with pytest.raises(StaleLease):
        attempt.beat()
    again.beat()
    assert again.claimed.spec.job_id == attempt.claimed.spec.job_id
    assert (lease_seconds(again, clock), reclaim_expired_leases()) == (LEASE_SECONDS, 0)


def test_a_heartbeat_before_a_jump_back_extends_the_lease_by_the_jump_at_most(attempt, clock) -> None:
    clock.advance(JUMP_SECONDS - 10)  # reaches the end of the lease, and not more
    attempt.beat()
    clock.advance(-JUMP_SECONDS)

    assert (lease_seconds(attempt, clock), reclaim_expired_leases()) == (LEASE_SECONDS + JUMP_SECONDS, 0)
    attempt.beat()
    assert lease_seconds(attempt, clock) == LEASE_SECONDS
    assert attempt.run.idle_ms == JUMP_SECONDS * 1000  # time that ran backwards counts as none
    clock.advance(LEASE_SECONDS + 1)
    assert reclaim_expired_leases() == 1


def test_a_reclaim_after_a_jump_back_waits_for_the_end_of_the_lease(attempt, clock) -> None:
    attempt.beat()
    clock.advance(-JUMP_SECONDS)
    assert reclaim_expired_leases() == 0
    clock.advance(JUMP_SECONDS + LEASE_SECONDS + 1)

    assert reclaim_expired_leases() == 1
    run, job = Run.objects.get(pk=attempt.claimed.spec.run_id), FineTuningJob.objects.get()
    assert (run.status, run.billed_gpu_ms, job.status) == ("lost", 0, "queued")
