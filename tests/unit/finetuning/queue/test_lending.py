"""A pool that borrows machines: when its runs start, when they give a machine back, and what its quotes show."""

import datetime

import pytest

from apps.contracts import runs as wire
from apps.core.database.clock import db_now
from apps.core.errors import InvalidState, InvalidValue
from apps.finetuning.jobs.control import request_cancellation
from apps.finetuning.jobs.waits import explain_wait
from apps.finetuning.lifecycle import MAX_LOST_ATTEMPTS
from apps.finetuning.models import CalibrationPoint, FineTuningJob, GpuPool, JobEvent, Run, Worker
from apps.finetuning.pools import operations
from apps.finetuning.quotes.pool_facts import find_open_pools
from apps.finetuning.runs.lending import MAX_LEFT_IN_AN_HOUR, ask_machines_back
from apps.finetuning.usage.allowances import set_allowance
from apps.finetuning.usage.quotas import set_quota
from tests.factories.finetuning import make_job, make_pool
from tests.twins.capacity import limit

MINUTE = datetime.timedelta(minutes=1)


@pytest.fixture
def cheap(floor) -> GpuPool:
    """A pool that borrows the machine of the floor, which has four GPUs."""
    set_quota(organization=floor.organization, by="user_test", now=db_now(), concurrent_gpus=None)
    pool = make_pool("cheap")
    GpuPool.objects.filter(pk=pool.pk).update(is_spot=True, interruptions_per_hour=1.0, borrows_from=floor.pool)
    pool.refresh_from_db()
    return pool


@pytest.fixture
def job_in(floor, cheap):
    """Return a function that makes a job in the lending pool, or in the one that borrows, waiting for some minutes."""

    def make(pool: GpuPool, *, gpus: int = 1, minutes: float = 0) -> FineTuningJob:
        job = make_job(floor.organization, floor.base_model, pool=pool.name)
        FineTuningJob.objects.filter(pk=job.pk).update(gpu_count=gpus)
        Run.objects.filter(job=job).update(created_at=db_now() - minutes * MINUTE)
        return job

    return make


def test_borrowed_machines_take_runs_only_while_no_run_of_their_own_could_start(floor, cheap, job_in, claim) -> None:
    borrowed, own = job_in(cheap, minutes=9), job_in(floor.pool)

    first, second = claim(), claim()

    assert [each.claimed.spec.job_id for each in (first, second)] == [own.pk, borrowed.pk]
    assert second.run.pool == cheap and second.run.worker == floor.worker
    larger = job_in(floor.pool, gpus=4)
    third = job_in(cheap)
    assert claim().claimed.spec.job_id == third.pk, "the larger run waits for the GPU that its own pool holds"
    first.succeed(floor.base_model)
    job_in(cheap)
    assert claim() is None, "the larger run could start on what is lent"
    assert ask_machines_back(now=db_now() + MINUTE / 2) == 2 and larger.pk


def test_a_run_that_cannot_start_keeps_no_machine_from_borrowers(floor, rival, cheap, job_in, claim) -> None:
    job_in(floor.pool, gpus=8)  # larger than every machine
    set_quota(organization=rival, by="user_test", now=db_now(), concurrent_gpus=0)
    borrowed = job_in(cheap)

    assert claim().claimed.spec.job_id == borrowed.pk


@pytest.mark.slow
def test_a_waiting_run_gets_the_newest_borrowed_machines_back(floor, cheap, job_in, claim, reload) -> None:
    jobs = [job_in(cheap, minutes=9 - place) for place in range(3)]
    attempts = [claim().start() for _ in jobs]
    waiting = job_in(floor.pool, gpus=2)
    assert not ask_machines_back(now=db_now()), "a free machine takes it within seconds"
    Run.objects.filter(job=waiting).update(created_at=db_now() - MINUTE)

    assert ask_machines_back(now=db_now()) == 1
    assert [each.beat().is_drain_requested for each in attempts] == [False, False, True]
    assert not ask_machines_back(now=db_now()), "one waiting run at a time"
    assert "goes back to local-cpu" in JobEvent.objects.filter(job=jobs[2]).latest("sequence").message

    attempts[2].checkpoint(step=2, seconds=4.0)
    attempts[2].finish(wire.Stopped(reason="preempted", step=2, training_seconds=4.0))
    assert reload(jobs[2]).status == "queued"
    assert claim().claimed.spec.job_id == waiting.pk
    assert claim() is None, "the third run waits until two GPUs are free"
    attempts[0].succeed(floor.base_model)
    again = claim()
    assert again.claimed.spec.job_id == jobs[2].pk and again.claimed.spec.resume_from is not None


@pytest.mark.slow
@pytest.mark.parametrize("way", ["cancelled", "moved"])
def test_who_cancels_or_moves_jobs_before_they_start_interrupts_no_more_borrowed_runs(
    way: str, floor, cheap, job_in, claim
) -> None:
    """Each such job costs nothing, and would stop another organization's run."""
    job_in(cheap, minutes=9, gpus=4)
    borrowed = claim().start()
    for _ in range(MAX_LEFT_IN_AN_HOUR):
        waiting = job_in(floor.pool, minutes=1)
        if way == "cancelled":
            request_cancellation(job=waiting, by="user_test", now=db_now())
        else:
            Run.objects.filter(job=waiting).update(status="cancelled", finished_at=db_now())
            FineTuningJob.objects.filter(pk=waiting.pk).update(pool=make_pool(f"other-{waiting.pk[-4:].lower()}"))
    job_in(floor.pool, minutes=1)
    assert ask_machines_back(now=db_now()) == 0
    assert not borrowed.beat().is_drain_requested

    Run.objects.filter(status="cancelled").update(finished_at=db_now() - 61 * MINUTE)
    assert ask_machines_back(now=db_now()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("state", [{"started_at": db_now}, {"status": "failed", "finished_at": db_now}])
def test_jobs_that_had_trained_or_lost_what_they_start_from_do_not_count_as_cancelled_before_their_start(
    state, floor, cheap, job_in, claim
) -> None:
    job_in(cheap, minutes=9, gpus=4)
    claim().start()
    values = {name: value() if callable(value) else value for name, value in state.items()}
    for _ in range(MAX_LEFT_IN_AN_HOUR):
        waiting = job_in(floor.pool, minutes=1)
        FineTuningJob.objects.filter(pk=waiting.pk).update(**values)
        Run.objects.filter(job=waiting).update(status="cancelled", finished_at=db_now())
    job_in(floor.pool, minutes=1)

    assert ask_machines_back(now=db_now()) == 1


@pytest.mark.slow
def test_a_job_may_give_its_machine_back_as_often_as_it_is_asked(floor, cheap, job_in, claim, reload) -> None:
    job = job_in(cheap)
    for _ in range(MAX_LOST_ATTEMPTS + 1):
        attempt = claim().start()
        Run.objects.filter(pk=attempt.run.pk).update(return_requested_at=db_now())
        attempt.finish(wire.Stopped(reason="preempted", step=0, training_seconds=0.0))

    assert reload(job).status == "queued"


def test_no_run_is_asked_back_if_that_would_not_help(floor, cheap, job_in, claim) -> None:
    own = job_in(floor.pool, gpus=2)
    assert claim().claimed.spec.job_id == own.pk
    job_in(cheap)
    claim()
    job_in(floor.pool, gpus=4, minutes=1)

    assert not ask_machines_back(now=db_now()), "its own pool holds two of the four GPUs"


def test_a_run_that_no_return_helps_hides_no_later_one(floor, cheap, job_in, claim) -> None:
    job_in(floor.pool, gpus=2)
    claim()
    lent = job_in(cheap, gpus=2)
    attempt = claim()
    job_in(floor.pool, gpus=4, minutes=9)
    job_in(floor.pool, minutes=1)

    assert ask_machines_back(now=db_now()) == 1
    assert attempt.claimed.spec.job_id == lent.pk and attempt.beat().is_drain_requested


def test_a_run_is_asked_back_for_the_memory_of_its_machine(floor, cheap, job_in, claim) -> None:
    Worker.objects.filter(pk=floor.worker.pk).update(memory_bytes=10)
    for pool, minutes in ((cheap, 0), (floor.pool, 1)):
        job = job_in(pool, minutes=minutes)
        FineTuningJob.objects.filter(pk=job.pk).update(estimate=job.estimate | {"host_bytes": 6})
        if pool == cheap:
            assert claim() is not None
    assert claim() is None, "three GPUs are free, and too little memory"

    assert ask_machines_back(now=db_now()) == 1


def test_a_run_that_its_members_allowance_holds_back_keeps_no_machine(floor, alice, cheap, job_in, claim) -> None:
    limits = {"concurrent_gpus": 1}
    set_allowance(
        organization=floor.organization, scope="member", target=alice.pk, limits=limits, by=alice.pk, now=db_now()
    )
    own = job_in(floor.pool, gpus=2, minutes=1)
    FineTuningJob.objects.filter(pk=own.pk).update(member_id=alice.pk)
    borrowed = job_in(cheap)

    assert claim().claimed.spec.job_id == borrowed.pk
    assert not ask_machines_back(now=db_now())


def test_of_several_borrowers_the_one_that_waited_longest_is_served(floor, cheap, job_in, claim) -> None:
    other = make_pool("also-cheap")
    GpuPool.objects.filter(pk=other.pk).update(is_spot=True, interruptions_per_hour=1.0, borrows_from=floor.pool)
    job_in(other), job_in(cheap, minutes=5)

    assert [claim().run.pool.name for _ in range(2)] == ["cheap", "also-cheap"]


def test_its_quote_has_the_machines_speeds_and_queue_of_the_pool_that_lends(floor, cheap, job_in, claim) -> None:
    job_in(cheap)
    claim().start()

    def states():
        pools = find_open_pools(base_model=floor.base_model, methods={"lora"}, now=db_now())
        return {state.pool.name: state for state in pools.states(family="llama", method="lora")}

    own, borrowing = states()["local-cpu"], states()["cheap"]
    assert (borrowing.live_workers, borrowing.worker_gpus, borrowing.probe) == (1, (4,), own.probe)
    assert (own.free_gpus, borrowing.free_gpus) == ((4,), (3,)), "what is lent comes back"
    assert own.seconds_ahead == 0.0 < borrowing.seconds_ahead

    job_in(floor.pool)
    assert states()["cheap"].free_gpus == () and states()["cheap"].seconds_ahead > borrowing.seconds_ahead


def test_a_job_waits_for_a_lent_machine_to_come_back(floor, cheap, job_in, claim) -> None:
    for _ in range(4):
        job_in(cheap)
        claim()
    waiting = job_in(floor.pool)

    assert "takes a borrowed machine back for it within minutes" in explain_wait(job=waiting, now=db_now()).reason


def test_a_job_that_waits_says_whose_jobs_go_first(floor, cheap, job_in, claim) -> None:
    blocked = job_in(floor.pool, gpus=8)
    alone = job_in(cheap)
    assert "is free and takes it" in explain_wait(job=alone, now=db_now()).reason, blocked.pk
    job_in(floor.pool, gpus=4)
    waiting = job_in(cheap)

    wait = explain_wait(job=waiting, now=db_now())

    assert "Jobs of local-cpu go first" in wait.reason and wait.starts_after[0] > 0


def test_what_its_runs_teach_is_about_the_machines(floor, cheap, job_in, claim) -> None:
    job_in(cheap)
    claim().start().succeed(floor.base_model)

    assert CalibrationPoint.objects.get().pool == floor.pool


def test_it_is_a_spot_pool_in_the_place_of_its_lender_and_has_no_machines(floor, cheap) -> None:
    def create(name: str = "low", **changes):
        asked = {"gpu_type": floor.pool.gpu_type, "memory_bytes": 1, "interruptions_per_hour": 0.5, "by": "user_test"}
        return operations.create_pool(name=name, **asked | {"borrows_from": floor.pool} | changes)

    low = create()
    assert (low.region, low.is_spot, low.machines) == (floor.pool.region, True, floor.pool)
    for changes, field in (
        ({"borrows_from": cheap}, "borrows_from"),
        ({"interruptions_per_hour": None}, "interruptions_per_hour"),
    ):
        with pytest.raises(InvalidValue) as refused:
            create("other", **changes)
        assert refused.value.param == field
    with pytest.raises(InvalidState, match="local-cpu"):
        operations.issue_worker_token(pool=low, kind="trainer", base_model=None, by="user_test")
    with pytest.raises(InvalidValue, match="local-cpu"):
        limit(low)
    with pytest.raises(InvalidValue) as refused:
        operations.edit_pool(pool=low, region=low.region_id, memory_bytes=1, is_open=True, by="user_test")
    assert refused.value.param == "interruptions_per_hour"
    assert not Worker.objects.filter(pool=low).exists()
