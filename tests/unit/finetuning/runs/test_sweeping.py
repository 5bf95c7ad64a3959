"""Checkpoints of jobs that ended without success are kept for a while, then deleted with their files."""

import datetime

import pytest

from apps.adapters.operations import delete_version
from apps.billing.queries import get_charged_nano
from apps.contracts import runs as wire
from apps.contracts.failures import FailureCode
from apps.core.database.clock import db_now
from apps.core.models import OutboxMessage
from apps.core.objects.store import store
from apps.core.tasks import delete_objects
from apps.finetuning.models import Checkpoint, FineTuningJob, Run, RunUpload
from apps.finetuning.results.retention import CHECKPOINT_RETENTION, UPLOAD_RETENTION, sweep_checkpoints, sweep_uploads
from tests.factories.finetuning import adapter_files
from tests.factories.serving import make_version

pytestmark = pytest.mark.django_db


def failed_job(floor, claim) -> FineTuningJob:
    job = floor.job()
    attempt = claim().start()
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
    delete_objects(**message.payload)
    assert list(store().list_objects(checkpoint.upload.object_prefix)) == []


def test_a_checkpoint_that_an_unfinished_job_begins_with_stays(floor, claim) -> None:
    job = failed_job(floor, claim)
    later = job.finished_at + CHECKPOINT_RETENTION * 2
    heir = floor.job()
    heir.requested |= {"start_from": {"checkpoint": Checkpoint.objects.get().pk}}
    heir.save(update_fields=["requested"])

    assert sweep_checkpoints(now=later) == 0


def test_a_checkpoint_that_a_waiting_job_begins_with_stays_while_its_own_job_saves_more(floor, claim) -> None:
    floor.job()
    attempt = claim().start()
    attempt.checkpoint(step=1, seconds=2.0)
    first = Checkpoint.objects.get()
    heir = floor.job()
    heir.requested |= {"start_from": {"checkpoint": first.pk}}
    heir.save(update_fields=["requested"])
    FineTuningJob.objects.update(total_steps=1_000)  # all of one epoch, of which the newest stays

    for step in (2, 3, 4):
        attempt.checkpoint(step=step, seconds=2.0 * step)

    kept = Checkpoint.objects.filter(deleted_at=None).values_list("step", flat=True)
    assert sorted(kept) == [1, 3, 4]


def test_a_queued_job_whose_beginning_was_deleted_fails_and_keeps_no_other_waiting(floor, claim, reload) -> None:
    gone = floor.job()
    gone.requested |= {"start_from": {"checkpoint": "ckpt_gone"}}
    gone.save(update_fields=["requested"])
    waiting = floor.job()

    claim()

    assert Run.objects.get(status="leased").job_id == waiting.pk
    found = reload(gone)
    assert (found.status, found.error_code, found.cost_nano) == ("failed", "checkpoint_invalid", 0)
    assert "ckpt_gone" in found.error_message and not Run.objects.filter(job=gone, status="queued").exists()


def test_steps_that_were_saved_are_paid_for_though_the_starting_model_was_deleted(floor, claim, reload) -> None:
    job = floor.job()
    version = make_version(floor.organization, floor.base_model)
    attempt = claim().start()
    attempt.checkpoint(step=4, seconds=8.0)
    attempt.finish(wire.Stopped(reason=wire.StopReason.PREEMPTED, step=4, training_seconds=8.0))
    start = {"start_from": {"version": version.pk, "model": version.model_name}}
    FineTuningJob.objects.filter(pk=job.pk).update(requested=job.requested | start)
    delete_version(version=version, by="user_1", now=db_now())

    assert claim() is None

    found = reload(job)
    assert (found.status, found.error_code) == ("failed", "start_deleted")
    assert found.cost_nano == get_charged_nano(source=job.pk) > 0


def test_a_running_jobs_checkpoints_stay(floor, claim) -> None:
    floor.job()
    claim().start().checkpoint(step=4, seconds=8.0)

    assert sweep_checkpoints(now=db_now() + CHECKPOINT_RETENTION * 2) == 0


def long_ago(job: FineTuningJob) -> None:
    ended = db_now() - UPLOAD_RETENTION * 2
    Run.objects.filter(job=job, finished_at__isnull=False).update(finished_at=ended)
    RunUpload.objects.filter(run__job=job).update(created_at=ended)


def test_what_a_failed_run_uploaded_as_its_result_goes_and_its_checkpoint_stays(floor, claim) -> None:
    job = floor.job()
    attempt = claim().start()
    attempt.checkpoint(step=4, seconds=8.0)
    result = attempt.upload("adapter", 10, adapter_files(floor.base_model))
    attempt.finish(wire.Failed(code=FailureCode.LOSS_NOT_FINITE, message="The loss is not a number."))

    assert sweep_uploads(now=db_now()) == 0  # it may have ended just now
    long_ago(job)
    assert sweep_uploads(now=db_now()) == 1
    assert sweep_uploads(now=db_now()) == 0
    message = OutboxMessage.objects.get(key=f"delete:{result.pk}")
    delete_objects(**message.payload)
    assert list(store().list_objects(result.object_prefix)) == []
    kept = Checkpoint.objects.get().upload
    assert list(store().list_objects(kept.object_prefix)) and RunUpload.objects.get() == kept


def test_what_is_published_or_belongs_to_a_run_that_goes_on_stays(floor, claim) -> None:
    job = floor.job()
    claim().start().succeed(floor.base_model)
    running = floor.job()
    claim().start().upload("adapter", 10, adapter_files(floor.base_model))
    for each in (job, running):
        long_ago(each)

    assert sweep_uploads(now=db_now()) == 0
