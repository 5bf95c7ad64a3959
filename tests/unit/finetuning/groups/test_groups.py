"""Runs over several machines: all get their places at once or none does, and the end of one is the end of all."""

import datetime

import pytest

from apps.contracts import runs as wire
from apps.contracts.failures import FailureCode
from apps.contracts.worker_api import ClaimRequest, ClaimResponse, LeaveRequest
from apps.core.database.clock import db_now
from apps.core.errors import InvalidValue
from apps.finetuning.jobs import control
from apps.finetuning.lifecycle import MAX_LOST_ATTEMPTS
from apps.finetuning.models import FineTuningJob, Run, RunMember, Worker
from apps.finetuning.pools import operations
from apps.finetuning.runs import claims, leases, members
from apps.finetuning.runs.leases import Lease, StaleLease
from apps.finetuning.usage import quotas
from apps.finetuning.usage.occupancy import held_of, jobs_on
from tests.factories.finetuning import TrainingSetup, give_credit, make_job, make_worker
from tests.support.attempts import Attempt, charged, held_since

SILENT_SECONDS = 61


class Machines:
    """Four machines with one GPU each, which reach each other."""

    def __init__(self, floor: TrainingSetup) -> None:
        Worker.objects.filter(pk=floor.worker.pk).update(cordoned_at=db_now())
        quotas.set_quota(organization=floor.organization, by="system", now=db_now(), concurrent_gpus=8)
        self.floor = floor
        self.workers = [make_worker(floor.pool, credential=f"annw_{number}") for number in range(4)]

    def job(self, *, nodes: int = 2, minutes_old: float = 0.0) -> FineTuningJob:
        job = self.floor.job()
        FineTuningJob.objects.filter(pk=job.pk).update(
            gpu_count=nodes, node_count=nodes, estimate=job.estimate | {"parallelism": "ddp" if nodes > 1 else "single"}
        )
        Run.objects.filter(job=job).update(created_at=db_now() - datetime.timedelta(minutes=minutes_old))
        return FineTuningJob.objects.get(pk=job.pk)

    def claim(self, number: int, *held: str, base_models: tuple[str, ...] | None = None) -> ClaimResponse | None:
        worker = Worker.objects.get(pk=self.workers[number].pk)
        request = ClaimRequest(address=f"10.0.0.{number}", port=29_500 + number, leases=held, base_models=base_models)
        return members.claim(worker=worker, request=request)

    def offer(self, *numbers: int) -> None:
        for number in numbers:
            assert self.claim(number) is None

    def form(self) -> tuple[Attempt, ClaimResponse]:
        """A group of two that has begun: 0 offers itself, and 1 completes it."""
        self.offer(0)
        self.job()
        led = self.claim(1)
        joined = self.claim(0)
        assert led is not None and joined is not None
        members.heartbeat(lease=lease_of(joined))
        return Attempt(led), joined


def lease_of(claimed: ClaimResponse) -> Lease:
    return Lease(id=claimed.lease_id, token=claimed.lease_token)


def fall_silent(claimed: ClaimResponse) -> None:
    RunMember.objects.filter(run=claimed.spec.run_id).update(
        heartbeat_at=db_now() - datetime.timedelta(seconds=SILENT_SECONDS)
    )


@pytest.fixture
def machines(floor) -> Machines:
    return Machines(floor)


@pytest.mark.parametrize("address", ["127.0.0.1", "0x7f.1", "169.254.169.254"])
def test_a_machine_cannot_send_others_to_themselves_or_a_metadata_service(machines, settings, address: str):
    settings.INTERNAL_URL = "https://anneal.internal:8001"
    machines.job()
    machines.offer(0)
    request = ClaimRequest(address=address, port=29_500)

    with pytest.raises(InvalidValue, match="ANNEAL_NODE_ADDRESS"):
        members.claim(worker=Worker.objects.get(pk=machines.workers[1].pk), request=request)

    assert held_of() == {}


def test_a_group_forms_with_the_claim_that_completes_it(machines):
    job = machines.job(nodes=3)
    machines.offer(0, 1)
    assert held_of() == {}

    led = machines.claim(2)

    assert Run.objects.get(job=job).status == "leased"
    assert {pk: held.gpus for pk, held in held_of().items()} == {worker.pk: 1 for worker in machines.workers[:3]}
    assert jobs_on(workers=[worker.pk for worker in machines.workers]) == {key: [job.pk] for key in held_of()}
    joined = [machines.claim(number) for number in (0, 1)]
    assert {answer.lease_id for answer in joined} == {led.lease_id}
    places = [answer.spec.group for answer in (led, *joined)]
    assert sorted(place.rank for place in places) == [0, 1, 2]
    assert {(place.node_count, place.master_address, place.master_port) for place in places} == {(3, "10.0.0.2", 29502)}
    assert [place.address for place in places] == ["10.0.0.2", "10.0.0.0", "10.0.0.1"]
    assert (led.spec.gpu_count, led.spec.gpus_here, led.spec.parallelism) == (3, 1, "ddp")


def test_a_machine_without_an_address_is_no_part_of_a_group(machines):
    machines.job()
    machines.offer(0)
    worker = machines.workers[1]

    assert claims.claim(worker=worker, base_models=None) is None
    assert members.claim(worker=worker, request=ClaimRequest()) is None


@pytest.mark.parametrize("is_first_older", [True, False])
def test_two_groups_never_hold_half_of_what_each_needs(machines, is_first_older):
    """Three machines, two groups of two: one group gets two machines in any order of claims. The other gets none."""
    jobs = [machines.job(minutes_old=20 if is_first_older else 0), machines.job(minutes_old=20)]
    answers = [machines.claim(number) for number in (0, 1, 2, 0, 1, 2)]

    assert len([answer for answer in answers if answer]) == 2
    assert sorted(run.status for run in Run.objects.filter(job__in=jobs)) == ["leased", "queued"]
    assert sum(held.gpus for held in held_of().values()) == 2


def test_machines_that_are_too_few_for_a_group_work(machines):
    group = machines.job(nodes=3, minutes_old=11)
    machines.offer(0, 1)
    small = [machines.job(nodes=1) for _ in range(2)]

    assert {machines.claim(number).spec.job_id for number in (0, 1)} == {job.pk for job in small}
    assert Run.objects.get(job=group).status == "queued"


def test_smaller_runs_do_not_take_what_a_waiting_group_keeps(machines):
    machines.offer(0, 1, 2)
    running = machines.job(nodes=1)
    first = machines.claim(0)
    group, small = machines.job(nodes=3), machines.job(nodes=1)

    assert [machines.claim(number, *held) for number, held in ((1, ()), (2, ()), (0, (first.lease_id,)))] == [None] * 3
    assert Run.objects.get(job=small).status == "queued"

    Attempt(first).finish(wire.Failed(code=FailureCode.OUT_OF_MEMORY, message="too small"))
    assert machines.claim(1).spec.job_id == group.pk
    assert Run.objects.get(job=running).status == "failed"


def test_each_group_that_has_just_queued_keeps_other_machines_that_are_partly_used(machines, rival):
    floor, workers = machines.floor, [worker.pk for worker in machines.workers]
    Worker.objects.filter(pk__in=workers).update(gpus=machines.workers[0].gpus * 2)
    held = []
    for number in range(4):
        machines.job(nodes=1)
        held.append(machines.claim(number).lease_id)
    give_credit(rival)
    quotas.set_quota(organization=rival, by="system", now=db_now(), concurrent_gpus=8)
    groups = [machines.job(nodes=2), make_job(rival, floor.base_model)]
    FineTuningJob.objects.filter(pk__in=[group.pk for group in groups]).update(gpu_count=4, node_count=2)
    small = machines.job(nodes=1)

    assert [machines.claim(number, held[number]) for number in range(4)] == [None] * 4
    assert Run.objects.get(job=small).status == "queued"


def test_a_run_that_ends_before_a_waiting_group_starts_passes_it(machines):
    def expect(job: FineTuningJob, low: float, high: float) -> None:
        spread = {"train_seconds_p10": low, "train_seconds_p50": low, "train_seconds_p90": high}
        FineTuningJob.objects.filter(pk=job.pk).update(estimate=spread)

    machines.offer(0, 1, 2)
    expect(machines.job(nodes=1), 1000, 1500)
    machines.claim(0)
    machines.job(nodes=3)
    small = machines.job(nodes=1)

    expect(small, 600, 1001)
    assert machines.claim(1) is None, "the first machine may be free after 1000 seconds"
    expect(small, 600, 999)
    assert machines.claim(1).spec.job_id == small.pk


def test_a_group_too_large_for_now_hides_no_smaller_one_of_its_organization(machines):
    machines.job(nodes=4, minutes_old=5)
    pair = machines.job(nodes=2)
    machines.offer(0)

    assert machines.claim(1).spec.job_id == pair.pk


def test_machines_without_its_base_model_keep_nothing_for_a_group(machines):
    machines.offer(0)
    assert machines.claim(1, base_models=("other",)) is None
    group, small = machines.job(nodes=2, minutes_old=11), machines.job(nodes=1)

    assert machines.claim(0).spec.job_id == small.pk
    assert Run.objects.get(job=group).status == "queued"


@pytest.mark.parametrize("locked", [None, (1, True)])
def test_a_waiting_group_that_another_claim_has_locked_keeps_its_machines(machines, monkeypatch, locked):
    machines.offer(0, 1)
    machines.job(nodes=2, minutes_old=11)
    machines.job(nodes=1)
    monkeypatch.setattr(claims, "lock_first", lambda candidates: locked if len(candidates) > 1 else (0, True))

    assert machines.claim(0) is None


def test_a_place_is_handed_out_until_it_is_used(machines):
    machines.offer(0)
    machines.job()
    led = machines.claim(1)
    lost, kept = machines.claim(0), machines.claim(0)

    with pytest.raises(StaleLease):
        members.heartbeat(lease=lease_of(lost))
    members.heartbeat(lease=lease_of(kept))

    assert machines.claim(0, led.lease_id) is None
    assert kept.spec.group.rank == 1


def test_another_machines_token_reports_nothing(machines):
    _, joined = machines.form()
    other = Attempt(joined)

    for call in (other.start, other.beat, lambda: other.finish(wire.Stopped(reason="preempted"))):
        with pytest.raises(StaleLease):
            call()


def test_the_death_of_one_machine_ends_the_lease_of_all_and_bills_up_to_its_last_heartbeat(machines, reload):
    first, joined = machines.form()
    job = FineTuningJob.objects.get(pk=first.claimed.spec.job_id)
    first.start().checkpoint(step=4, seconds=10.0)
    trained = db_now() - datetime.timedelta(seconds=100)
    Run.objects.filter(job=job).update(training_started_at=trained)
    fall_silent(joined)

    first.checkpoint(step=6, seconds=90.0)  # its own clock went on while it waited for the other
    run = Run.objects.get(job=job)
    assert run.billed_gpu_ms == pytest.approx(2 * 1000 * (100 - SILENT_SECONDS), abs=2000)

    first.beat()
    assert leases.reclaim_expired_leases() == 1
    run.refresh_from_db()
    assert (run.status, run.failure_code) == ("lost", FailureCode.WORKER_LOST)
    assert held_of() == {}
    for call in (lambda: members.heartbeat(lease=lease_of(joined)), first.beat):
        with pytest.raises(StaleLease):
            call()

    machines.offer(0)  # what the others offered before they joined does not count
    again = machines.claim(1)
    assert (again.spec.attempt, again.spec.resume_from.step) == (2, 6)


def test_a_group_that_never_came_together_costs_nothing_and_is_no_failure(machines, organization, reload):
    machines.offer(0)
    job = machines.job()
    first = Attempt(machines.claim(1))
    fall_silent(first.claimed)
    first.beat()

    assert leases.reclaim_expired_leases() == 1

    run, again = Run.objects.filter(job=job).order_by("attempt")
    assert (run.failure_code, run.billed_gpu_ms, charged(organization)) == (FailureCode.PREEMPTED, 0, 0)
    assert reload(job).status == "queued"
    assert again.retry_at - run.finished_at == datetime.timedelta(seconds=30)

    machines.offer(0, 2)
    Run.objects.filter(job=job, status="queued").update(retry_at=None)
    machines.claim(1)
    assert RunMember.objects.get(run__attempt=2).worker == machines.workers[2]  # not the one that did not begin


def test_attempts_that_not_all_machines_began_do_not_end_the_job(machines, reload):
    machines.offer(0)
    job = machines.job()
    Run.objects.filter(job=job).update(attempt=MAX_LOST_ATTEMPTS)
    first = Attempt(machines.claim(1))
    fall_silent(first.claimed)
    first.beat()

    assert leases.reclaim_expired_leases() == 1
    assert reload(job).status == "queued"


def test_a_job_cancelled_before_all_machines_began_costs_nothing(machines, organization, reload):
    machines.offer(0)
    job = machines.job()
    first = Attempt(machines.claim(1))
    held_since(first, 40)
    control.request_cancellation(job=job, by="system", now=db_now())

    first.finish(wire.Stopped(reason="cancelled"))

    assert (reload(job).status, charged(organization)) == ("cancelled", 0)


def test_a_machine_that_forgot_its_place_releases_the_group(machines):
    first, joined = machines.form()
    RunMember.objects.update(handed_at=db_now() - datetime.timedelta(minutes=1))

    assert machines.claim(0, joined.lease_id) is None
    with pytest.raises(StaleLease):
        machines.claim(0)
        first.beat()


def test_a_machine_that_has_trained_is_free_while_the_first_one_delivers(machines, reload):
    first, joined = machines.form()
    first.start()

    members.leave(lease=lease_of(joined), outcome=LeaveRequest())

    assert list(held_of()) == [machines.workers[1].pk]
    RunMember.objects.update(heartbeat_at=db_now() - datetime.timedelta(hours=1))
    first.beat()
    assert leases.reclaim_expired_leases() == 0
    with pytest.raises(StaleLease):
        members.heartbeat(lease=lease_of(joined))
    first.succeed(machines.floor.base_model, seconds=20.0)
    job = reload(Run.objects.get().job)
    assert (job.status, job.billed_gpu_ms) == ("succeeded", 40_000)


@pytest.mark.parametrize(
    ("code", "kept"),
    [
        (FailureCode.GPU_FAULT, FailureCode.GPU_FAULT),
        (FailureCode.NO_TRAINABLE_TOKENS, FailureCode.INTERNAL_ERROR),
        (FailureCode.CHECKPOINT_INVALID, FailureCode.INTERNAL_ERROR),
        (FailureCode.STALLED, FailureCode.INTERNAL_ERROR),
    ],
)
def test_a_failure_of_another_machine_ends_the_attempt_and_not_the_job(machines, reload, code, kept):
    first, joined = machines.form()
    first.start()

    members.leave(
        lease=lease_of(joined), outcome=LeaveRequest(outcome=wire.Failed(code=code, message="Nothing to train on."))
    )

    ended, again = Run.objects.order_by("attempt")
    assert (ended.failure_code, again.status) == (kept, "queued")
    assert (reload(ended.job).status, charged(machines.floor.organization)) == ("queued", 0)
    with pytest.raises(StaleLease):
        first.beat()


def test_a_machine_of_a_group_that_failed_is_chosen_last(machines):
    """A machine that keeps its place and does nothing would otherwise stall every group of its pool."""
    first, _ = machines.form()
    first.start()
    first.finish(wire.Failed(code=FailureCode.STALLED, message="No progress."))
    assert RunMember.objects.get().worker == machines.workers[0]

    queued = Run.objects.filter(status="queued")
    queued.update(retry_at=db_now() + datetime.timedelta(hours=1))
    machines.offer(0, 2)
    queued.update(retry_at=None)
    machines.claim(1)

    assert RunMember.objects.get(run__attempt=2).worker == machines.workers[2]


def test_draining_any_machine_stops_the_group_in_order(machines):
    first, joined = machines.form()
    operations.drain(worker=machines.workers[0], by="user_operator")

    assert members.heartbeat(lease=lease_of(joined)).is_drain_requested
    assert first.beat().is_drain_requested
