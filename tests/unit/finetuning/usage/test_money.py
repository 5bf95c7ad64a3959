"""What billing decides about jobs that wait or ran: nothing starts for who is suspended, idle hours are counted."""

import datetime

import pytest

from apps.billing.operations import set_spending
from apps.core.database.clock import db_now
from apps.finetuning.jobs.control import pause_jobs_of
from apps.finetuning.models import FineTuningJob, Run, Worker
from apps.finetuning.pools.margins import list_margins
from apps.finetuning.runs.queue.queue_order import queue_positions
from tests.support.attempts import TrainingSetup


def test_what_a_suspended_organization_queued_waits_until_it_has_paid(floor: TrainingSetup, claim) -> None:
    job = floor.job()
    set_spending(organization=floor.organization, stopped_because="You owe $5.00. Top up to continue.")

    assert claim() is None
    assert queue_positions(pool=floor.pool, runs=[job.runs.get()], now=db_now()) == {}

    set_spending(organization=floor.organization, stopped_because="")
    assert claim() is not None


def test_a_suspended_organizations_running_jobs_keep_a_checkpoint_and_pause(floor: TrainingSetup, claim) -> None:
    job = floor.job()
    claim().start()

    for expected in (1, 0):
        assert pause_jobs_of(organization_id=floor.organization.pk, now=db_now()) == expected

    assert FineTuningJob.objects.get(pk=job.pk).status == "pausing"


@pytest.mark.parametrize(("gpus", "idle_seconds"), [(1, 3 * 3600), (4, 0)])
def test_idle_is_the_time_online_that_no_run_had_of_each_gpu(
    floor: TrainingSetup, claim, gpus: int, idle_seconds: int
) -> None:
    job = floor.job()
    claim()
    now = db_now().replace(day=15, hour=12)
    Worker.objects.update(
        created_at=now - datetime.timedelta(hours=1), last_seen_at=now, gpus=[{"index": n} for n in range(4)]
    )
    FineTuningJob.objects.filter(pk=job.pk).update(gpu_count=gpus)
    Run.objects.update(leased_at=now - datetime.timedelta(hours=1))

    (margin,) = list_margins(month=now.date().replace(day=1), now=now)

    assert margin.online_gpu_seconds == 4 * 3600
    assert margin.idle_gpu_seconds == idle_seconds
