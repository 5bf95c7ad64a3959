"""Checkpoints of jobs that ended without success are kept for a while, then deleted with their files."""

import datetime

import pytest

from apps.contracts import runs as wire
from apps.contracts.failures import FailureCode
from apps.core.clock import db_now
from apps.core.models import OutboxMessage
from apps.core.object_store import store
from apps.core.tasks import delete_objects
from apps.finetuning.models import Checkpoint, FineTuningJob
from apps.finetuning.sweeping import CHECKPOINT_RETENTION, sweep_checkpoints

pytestmark = pytest.mark.django_db


def failed_job(floor, claim) -> FineTuningJob:
    job = floor.job()
    attempt = claim()
    attempt.start()
    attempt.checkpoint(step=4, seconds=8.0)
    attempt.finish(wire.Failed(code=FailureCode.LOSS_NOT_FINITE, message="The loss is not a number."))
    job.refresh_from_db()
    return job


def test_a_failed_jobs_checkpoint_goes_after_its_retention_and_not_before(floor, claim) -> None:
    job = failed_job(floor, claim)
    checkpoint = Checkpoint.objects.get()
    later = job.finished_at + CHECKPOINT_RETENTION

    assert job.status == "failed"
    assert sweep_checkpoints(now=later - datetime.timedelta(hours=1)) == 0
    assert sweep_checkpoints(now=later + datetime.timedelta(hours=1)) == 1
    assert sweep_checkpoints(now=later + datetime.timedelta(hours=1)) == 0
    checkpoint.refresh_from_db()
    assert checkpoint.deleted_at is not None
    message = OutboxMessage.objects.get(key=f"delete:{checkpoint.pk}")
    delete_objects(key=message.key, payload=message.payload)
    assert list(store().list_objects(checkpoint.upload.object_prefix)) == []


def test_a_checkpoint_that_an_unfinished_job_begins_with_stays(floor, claim) -> None:
    job = failed_job(floor, claim)
    later = job.finished_at + CHECKPOINT_RETENTION * 2
    heir = floor.job()
    heir.requested |= {"start_from": {"checkpoint": Checkpoint.objects.get().pk}}
    heir.save(update_fields=["requested"])

    assert sweep_checkpoints(now=later) == 0


def test_a_running_jobs_checkpoints_stay(floor, claim) -> None:
    floor.job()
    attempt = claim()
    attempt.start()
    attempt.checkpoint(step=4, seconds=8.0)

    assert sweep_checkpoints(now=db_now() + CHECKPOINT_RETENTION * 2) == 0
