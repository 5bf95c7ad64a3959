"""What a queued job waits for, and when it will start."""

from datetime import timedelta

import pytest

from apps.billing.operations import set_spending
from apps.core.database.clock import db_now
from apps.core.database.tenancy import tenant
from apps.finetuning.jobs.waits import Wait, WaitCause, explain_wait
from apps.finetuning.models import Allowance, CapacityNode, FineTuningJob, PoolCapacity, QueueShare, Run, Worker
from apps.finetuning.usage.quotas import set_quota
from tests.factories.finetuning import TrainingSetup, give_credit, make_job, make_worker
from tests.twins.capacity import limit


def wait_of(job: FineTuningJob) -> Wait:
    with tenant(organization=job.organization_id):
        found = explain_wait(job=FineTuningJob.objects.get(pk=job.pk), now=db_now())
    assert found is not None
    return found


@pytest.fixture
def one_gpu(floor: TrainingSetup) -> TrainingSetup:
    Worker.objects.filter(pk=floor.worker.pk).update(gpus=floor.worker.gpus[:1])
    return floor


def test_a_job_waits_for_a_free_gpu_and_starts_after_the_work_before_it(one_gpu, claim):
    running = one_gpu.job()
    assert wait_of(running).reason == "A machine of local-cpu is free and takes it within seconds."
    claim()
    first, second = one_gpu.job(), one_gpu.job()
    alone = running.estimate["train_seconds_p10"], running.estimate["run_seconds_p90"]

    waits = [wait_of(first), wait_of(second)]

    assert explain_wait(job=FineTuningJob.objects.get(pk=running.pk), now=db_now()) is None
    assert [(wait.cause, wait.position) for wait in waits] == [(WaitCause.CAPACITY, 1), (WaitCause.CAPACITY, 2)]
    assert waits[0].reason == "Waiting for a free GPU of local-cpu."
    (least, most), (later_least, later_most) = (wait.starts_after for wait in waits)
    assert alone[0] <= least <= most and most >= running.estimate["train_seconds_p90"]
    assert later_least == pytest.approx(2 * least) and later_most == pytest.approx(2 * most)


def test_a_job_of_a_large_share_waits_for_the_turn_of_others(one_gpu, rival):
    give_credit(rival)
    ours, theirs = one_gpu.job(), make_job(rival, one_gpu.base_model)
    QueueShare.objects.filter(organization=one_gpu.organization).update(used_gpu_hours=3.0)

    assert (wait_of(ours).cause, wait_of(ours).position) == (WaitCause.SHARE, 2)
    assert (wait_of(theirs).cause, wait_of(theirs).position) == (WaitCause.CAPACITY, 1)


@pytest.mark.parametrize("held_back_by", ["quota", "allowance", "retry"])
def test_runs_that_may_not_start_are_not_ahead(held_back_by, one_gpu, rival, claim):
    give_credit(rival)
    theirs = make_job(rival, one_gpu.base_model)
    ours = one_gpu.job()
    assert wait_of(ours).position == 2
    if held_back_by == "quota":
        set_quota(organization=rival, by="system", now=db_now(), concurrent_gpus=0)
    elif held_back_by == "allowance":
        Allowance.objects.create(
            organization=rival,
            project_id=theirs.project_id,
            concurrent_gpus=0,
            updated_at=db_now(),
            updated_by="user_1",
        )
    else:
        Run.objects.filter(job=theirs).update(retry_at=db_now() + timedelta(minutes=4))

    wait = wait_of(ours)

    assert (wait.position, wait.starts_after) == (1, (0.0, 0.0))
    assert wait.reason == "A machine of local-cpu is free and takes it within seconds."
    if held_back_by == "retry":
        later = wait_of(theirs)
        assert (later.position, later.reason) == (1, "It is tried again in 4 minutes.")
        assert later.starts_after == pytest.approx((240, 240), abs=10)


def test_a_job_waits_for_a_machine_a_limit_or_a_payment_and_its_start_is_unknown(one_gpu, organization):
    job = one_gpu.job()
    Worker.objects.filter(pk=one_gpu.worker.pk).update(last_seen_at=db_now() - timedelta(hours=1))
    offline = wait_of(job)
    set_quota(organization=organization, by="system", now=db_now(), concurrent_gpus=0)
    limited = wait_of(job)
    set_spending(organization=organization, stopped_because="You owe $5.00. Top up to continue.")
    stopped = wait_of(job)

    assert [wait.cause for wait in (offline, limited, stopped)] == [
        WaitCause.CAPACITY, WaitCause.QUOTA, WaitCause.BUDGET,
    ]  # fmt: skip
    assert offline.reason == "No machine of local-cpu is online now. The job starts when one is."
    assert "your 0 concurrent GPUs" in limited.reason and stopped.reason == "You owe $5.00. Top up to continue."
    assert {wait.starts_after for wait in (offline, limited, stopped)} == {None}


def test_a_job_waits_for_the_machine_that_an_elastic_pool_starts(one_gpu, claim):
    running, now = one_gpu.job(), db_now()
    claim()
    job, next_one, last = one_gpu.job(), one_gpu.job(), one_gpu.job()
    FineTuningJob.objects.update(estimate={"train_seconds_p10": 5000, "train_seconds_p50": 5000})
    capacity = limit(one_gpu.pool, maximum=1)
    assert wait_of(job).starts_after == (300, 300), "until starts were measured"
    for seconds in (100, 200, 300):
        worker = make_worker(one_gpu.pool, credential=f"annw_{seconds}")
        Worker.objects.filter(pk=worker.pk).update(created_at=now, revoked_at=now)
        requested_at = now - timedelta(seconds=seconds)
        CapacityNode.objects.create(
            pool=one_gpu.pool, worker=worker, status="released", requested_at=requested_at, ended_at=now
        )
    CapacityNode.objects.create(pool=one_gpu.pool, status="starting", requested_at=now - timedelta(seconds=80))

    assert wait_of(job).starts_after == pytest.approx((120, 120), abs=20)
    assert wait_of(next_one).starts_after == (5000, 5000) and wait_of(last).starts_after[0] > 5000
    Run.objects.filter(job=running).update(
        status="lost", finished_at=now, lease_id=None, lease_token_sha256=None, lease_expires_at=None
    )
    Worker.objects.update(revoked_at=now)
    assert wait_of(job).reason == "local-cpu starts a machine for it."
    for problem in ({"failures": 1}, {"failures": 0, "retry_at": now + timedelta(minutes=9)}):
        PoolCapacity.objects.filter(pk=capacity.pk).update(**problem)
        assert wait_of(job).starts_after is None


def test_a_job_on_several_machines_waits_for_its_group(one_gpu):
    job = one_gpu.job()
    FineTuningJob.objects.filter(pk=job.pk).update(gpu_count=2, node_count=2)

    wait = wait_of(job)

    assert (wait.cause, wait.starts_after) == (WaitCause.GROUP, None)
    assert wait.reason.startswith("The job needs 2 machines that can reach each other. local-cpu has 0 now.")
