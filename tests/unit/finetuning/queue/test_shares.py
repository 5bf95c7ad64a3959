"""The shares of the queue, while many transactions change the runs of one organization at once."""

import copy
import random

import pytest
from django.db import transaction
from django.db.models import Sum

from apps.contracts.worker_api import ClaimResponse
from apps.core.database.clock import db_now
from apps.core.ids import new_id
from apps.finetuning.jobs import control
from apps.finetuning.jobs.files import usable_files
from apps.finetuning.lifecycle import RUN_HOLDING_LEASE, JobStatus, RunStatus
from apps.finetuning.models import FineTuningJob, QueueShare, Quota, Run
from apps.finetuning.runs import attempts, claims, leases
from apps.finetuning.runs.queue.shares import repair_shares
from apps.finetuning.usage.quotas import require_place_for_job
from tests.factories.accounts import make_organization, make_user
from tests.factories.finetuning import TrainingSetup, make_worker
from tests.support.database import at_once

THREADS, ROUNDS = 4, 8
MAX_GPUS = 5


def shares() -> list[tuple[int, int]]:
    return list(QueueShare.objects.values_list("queued", "held_gpus"))


def create_like(made: FineTuningJob) -> FineTuningJob:
    """Queue a copy of the job as it was first, by the locks of `create_job` in their order."""
    job = copy.copy(made)
    with transaction.atomic():
        usable_files(job.organization_id, job.training_file_id, None)
        job.pk, job.status, job.hold_id, job.queued_at = new_id("ftjob"), JobStatus.VALIDATING_FILES, "", None
        job.save(force_insert=True)
        require_place_for_job(organization=job.organization_id, but=job)
        attempts.queue_attempt(job=job)
        held = attempts.hold_cap(
            job=job, price_rule=job.price_rule, amount_nano=job.spend_cap_nano, by="key_test", idempotency_key=job.pk
        )
        FineTuningJob.objects.filter(pk=job.pk).update(status=JobStatus.QUEUED, hold_id=held.pk, queued_at=db_now())
    return job


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_changes_at_once_end_in_no_deadlock_and_are_all_counted() -> None:
    floor = TrainingSetup(make_organization("Crowd", owner=make_user("crowd")))
    Quota.objects.create(organization=floor.organization, concurrent_gpus=None, queued_jobs=None, updated_at=db_now())
    made, done = FineTuningJob.objects.get(pk=floor.job().pk), set[str]()  # others may soon have ended it

    def change(number: int) -> None:
        chance = random.Random(number)
        for _ in range(ROUNDS):
            job = create_like(made)
            if claimed := claims.claim(worker=floor.worker, base_models=None):
                done.add("claim")
                if chance.random() < 0.7:
                    leases.reclaim(claimed.spec.run_id, lease_id=claimed.lease_id)
            if chance.random() < 0.5:
                control.request_cancellation(job=job, by="system", now=db_now())
            else:
                # One statement: QuerySet.delete() reads first, and would delete a run that was claimed since.
                queued_runs = Run.objects.filter(job=job, status=RunStatus.QUEUED)
                done.add(f"delete {queued_runs._raw_delete(queued_runs.db)}")

    assert at_once(change, THREADS) == [None] * THREADS
    assert done >= {"claim", "delete 1"}
    queued = Run.objects.filter(status=RunStatus.QUEUED).count()
    held = Run.objects.filter(status__in=RUN_HOLDING_LEASE).count()  # each of one GPU
    assert shares() == [(queued, held)]
    assert repair_shares() == 0


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_claims_at_once_lease_each_run_once_and_never_pass_the_quota() -> None:
    """Of three machines with twelve GPUs, the organization may use five, with runs of one and of two."""
    floor = TrainingSetup(make_organization("Crowd", owner=make_user("crowd")))
    Quota.objects.create(
        organization=floor.organization, concurrent_gpus=MAX_GPUS, queued_jobs=None, updated_at=db_now()
    )
    made = FineTuningJob.objects.get(pk=floor.job().pk)
    jobs = [create_like(made).pk for _ in range(11)]
    FineTuningJob.objects.filter(pk__in=jobs[::2]).update(gpu_count=2)
    workers = [make_worker(floor.pool, credential=f"annw_{number}", gpus=4) for number in range(2)] + [floor.worker]
    most_held: list[int] = []

    def take(number: int) -> list[ClaimResponse | None]:
        claimed = []
        for _ in range(3):
            claimed.append(claims.claim(worker=workers[number % len(workers)], base_models=None))
            most_held.append(held_gpus())
        return claimed

    found = at_once(take, 6)
    rest = [claims.claim(worker=worker, base_models=None) for worker in workers for _ in range(MAX_GPUS)]

    taken = [each for answers in [*found, rest] for each in answers if each is not None]
    assert len({each.lease_id for each in taken}) == len({each.spec.run_id for each in taken}) == len(taken)
    leased = Run.objects.filter(status=RunStatus.LEASED).values_list("pk", "lease_id")
    assert sorted((each.spec.run_id, each.lease_id) for each in taken) == sorted(leased)
    assert max(most_held) <= held_gpus() == MAX_GPUS


def held_gpus() -> int:
    """Return how many GPUs are leased, by the committed rows of one moment."""
    held = FineTuningJob.objects.filter(runs__status__in=RUN_HOLDING_LEASE)
    return held.aggregate(held=Sum("gpu_count", default=0))["held"]


def test_wrong_shares_are_counted_again(floor, claim, caplog) -> None:
    floor.job(), floor.job()
    claim()
    right = shares()
    QueueShare.objects.update(queued=7, held_gpus=-1)

    assert (repair_shares(), repair_shares()) == (1, 0)
    assert shares() == right == [(1, 1)]
    QueueShare.objects.all().delete()
    assert repair_shares() == 1 and shares() == right
    assert "had wrong counts" in caplog.text
