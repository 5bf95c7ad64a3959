"""The runs that a worker gets: quotas, drained machines and the order between organizations."""

import math
from datetime import timedelta

import pytest
from django.db import connection
from django.db.models import Count, Max, Q, Sum
from django.db.models.functions import Coalesce
from django.test.utils import CaptureQueriesContext

from apps.contracts import runs as wire
from apps.contracts.failures import FailureCode
from apps.core.database.clock import db_now
from apps.core.errors import QuotaExceeded
from apps.finetuning.jobs import control
from apps.finetuning.lifecycle import RUN_HOLDING_LEASE
from apps.finetuning.models import FineTuningJob, QueueShare, Run, Worker
from apps.finetuning.pools import operations
from apps.finetuning.runs import claims
from apps.finetuning.runs.queue import candidates, queue_order
from apps.finetuning.usage import quotas
from tests.factories.finetuning import give_credit, make_job, make_pool
from tests.support.attempts import charged, held_since


def reason_of(job: FineTuningJob) -> str:
    return quotas.reasons_to_wait(jobs=[job], now=db_now())[job.pk]


def test_the_machine_of_a_replica_gets_no_training_runs(floor, claim):
    floor.job()
    Worker.objects.filter(pk=floor.worker.pk).update(kind="replica")

    assert claim() is None


def test_a_worker_locks_no_run_that_it_cannot_take(floor):
    """Else a machine that asks again and again keeps the others, and the customer, from the whole queue."""
    floor.job()

    with CaptureQueriesContext(connection) as captured:
        assert claims.claim(worker=floor.worker, base_models=()) is None

    assert captured.captured_queries
    assert not [query["sql"] for query in captured if "FOR UPDATE" in query["sql"]]
    assert claims.claim(worker=floor.worker, base_models=(floor.base_model.pk,)) is not None


def test_quotas_hold_a_run_back_and_say_why(floor, organization, claim, reload):
    quotas.set_quota(organization=organization, by="system", now=db_now(), concurrent_gpus=1, queued_jobs=2)
    floor.job()
    waiting = floor.job()

    claim()

    assert claim() is None
    assert "concurrent" in reason_of(waiting)
    with pytest.raises(QuotaExceeded, match="limit is 2"):
        floor.job()


def test_the_months_gpu_seconds_hold_back_what_would_pass_them(floor, organization, claim, reload):
    first, second = (floor.job(hyperparameters={"epochs": 40}) for _ in range(2))
    enough_for_one = math.ceil(first.estimate["run_seconds_p50"] * 1.5)
    quotas.set_quota(organization=organization, by="system", now=db_now(), gpu_seconds_per_month=enough_for_one)

    assert claim().claimed.spec.job_id == first.pk
    assert claim() is None
    assert "GPU-seconds" in reason_of(second)
    with pytest.raises(QuotaExceeded, match="held for your unfinished jobs"):
        floor.job()


def test_a_run_that_a_limit_of_the_month_held_back_is_tried_again_later(floor, organization, claim):
    job = floor.job(hyperparameters={"epochs": 40})
    quotas.set_quota(organization=organization, by="system", now=db_now(), gpu_seconds_per_month=1)
    assert claim() is None
    quotas.set_quota(organization=organization, by="system", now=db_now(), gpu_seconds_per_month=None)

    assert claim() is None
    Run.objects.filter(job=job).update(retry_at=db_now())
    assert claim() is not None


def test_a_run_that_waits_for_its_organizations_own_gpus_is_tried_at_once(floor, organization, claim, monkeypatch):
    """They may have been taken by another claim while this one looked."""
    job = floor.job()
    monkeypatch.setattr(claims, "limit_reached", lambda **_: quotas.Reached(quotas.ReachedLimit.CONCURRENT_GPUS))
    assert claim() is None
    monkeypatch.undo()

    assert claim().claimed.spec.job_id == job.pk


def test_a_holder_at_its_limit_hides_nobody_and_its_runs_are_not_locked(floor, rival, claim, monkeypatch):
    """Each claim looks at a few runs only: those that may not start are not among them."""
    monkeypatch.setattr(candidates, "_LOOKED_AT", 1)
    give_credit(rival)
    quotas.set_quota(organization=floor.organization, by="system", now=db_now(), concurrent_gpus=0)
    floor.job()
    theirs = make_job(rival, floor.base_model)
    QueueShare.objects.filter(organization=floor.organization).update(queued_since=db_now() - timedelta(hours=9))

    with CaptureQueriesContext(connection) as captured:
        assert claim().claimed.spec.job_id == theirs.pk

    assert len([query for query in captured if "SKIP LOCKED" in query["sql"]]) == 1


def test_holders_whose_runs_a_worker_cannot_take_hide_nobody(floor, rival, claim, monkeypatch):
    monkeypatch.setattr(candidates, "_LOOKED_AT", 1)
    give_credit(rival)
    FineTuningJob.objects.filter(pk=floor.job().pk).update(gpu_count=8)
    quotas.set_quota(organization=floor.organization, by="system", now=db_now(), concurrent_gpus=8)
    theirs = make_job(rival, floor.base_model)
    QueueShare.objects.filter(organization=floor.organization).update(queued_since=db_now() - timedelta(hours=9))

    assert claim().claimed.spec.job_id == theirs.pk


def test_what_an_organization_holds_in_other_pools_counts_in_this_one(floor, rival, claim):
    give_credit(rival)
    floor.job()
    theirs = make_job(rival, floor.base_model)
    QueueShare.objects.create(organization=floor.organization, pool=make_pool("other"), held_gpus=2)

    assert claim().claimed.spec.job_id == theirs.pk


def test_a_cordoned_worker_gets_no_work(floor, claim):
    floor.job()
    operations.cordon(worker=floor.worker, by="user_operator")

    assert claim() is None


def test_a_drained_worker_gives_its_run_back_unbilled_for_the_move(floor, claim, reload):
    job = floor.job()
    attempt = claim().start()
    attempt.checkpoint(step=2, seconds=4.0)
    operations.drain(worker=floor.worker, by="user_operator")
    assert attempt.beat().is_drain_requested

    attempt.finish(wire.Stopped(reason="preempted", step=2, training_seconds=4.0))

    assert reload(job).status == "queued"
    assert Run.objects.get(job=job, status="queued").attempt == 2


def test_the_organization_that_had_least_goes_first(floor, rival, claim):
    give_credit(rival)
    ours = [floor.job() for _ in range(3)]
    theirs = make_job(rival, floor.base_model)
    Run.objects.filter(job__in=ours).update(created_at=db_now() - timedelta(minutes=15))  # waiting longer buys no more

    order = [claim().claimed.spec.job_id for _ in range(2)]

    assert order == [ours[0].pk, theirs.pk]


def test_what_held_the_gpu_counts_in_the_queue_although_it_cost_nothing(floor, rival, claim):
    give_credit(rival)
    for _ in range(2):  # a fault of ours after an hour of the GPU: nothing to pay
        floor.job()
        attempt = claim()
        held_since(attempt, 3600)
        attempt.finish(wire.Failed(code=FailureCode.OUT_OF_MEMORY, message="too small"))
    ours = floor.job()
    theirs = make_job(rival, floor.base_model)

    assert charged(floor.organization) == 0
    assert [claim().claimed.spec.job_id for _ in range(2)] == [theirs.pk, ours.pk]


def test_an_organization_that_waited_long_enough_goes_before_a_smaller_share(floor, rival, claim):
    give_credit(rival)
    ours = [floor.job() for _ in range(2)]
    claim()
    theirs = make_job(rival, floor.base_model)
    hours = {"queued_since": 9, "served_at": 8}
    QueueShare.objects.filter(organization=floor.organization).update(
        **{name: db_now() - timedelta(hours=count) for name, count in hours.items()}
    )

    assert [claim().claimed.spec.job_id for _ in range(2)] == [ours[1].pk, theirs.pk]


def test_a_run_far_back_in_its_own_queue_has_no_position(floor, monkeypatch):
    monkeypatch.setattr(queue_order, "_CANDIDATES", 1)
    runs = [floor.job().runs.get() for _ in range(2)]

    assert queue_order.queue_positions(pool=floor.pool, runs=runs, now=db_now()) == {runs[0].pk: 1}


def test_the_shares_are_what_the_runs_say(floor, rival, claim):
    """The trigger counts each run once, for every change in any order."""
    give_credit(rival)
    jobs = [floor.job() for _ in range(3)]
    make_job(rival, floor.base_model)
    claim().finish(wire.Failed(code=FailureCode.OUT_OF_MEMORY, message="too small"))
    claim()
    held = claim()
    control.request_cancellation(job=jobs[2], by="system", now=db_now())

    held_gpus, queued = Q(status__in=RUN_HOLDING_LEASE), Q(status="queued")
    runs = (
        Run.objects.order_by()
        .values_list("organization")
        .annotate(
            waiting=Count("pk", filter=queued),
            gpus=Coalesce(Sum("job__gpu_count", filter=held_gpus), 0),
            served=Max("leased_at"),
        )
    )
    shares = QueueShare.objects.values_list("organization", "queued", "held_gpus", "served_at")

    assert held is not None
    assert {row[0]: row for row in shares} == {row[0]: row for row in runs}
    assert {share.queued_since is None for share in QueueShare.objects.filter(queued=0)} <= {True}
    assert QueueShare.objects.get(organization=floor.organization).used_gpu_hours > 0
