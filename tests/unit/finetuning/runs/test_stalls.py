"""A run that stands still is tried once more; the second time the job fails with the evidence, and is not billed."""

import datetime

import pytest
from django.db.models import F

from apps.contracts import runs as wire
from apps.contracts.failures import FailureCode
from apps.core.database.clock import db_now
from apps.core.objects.readings import FilesUnread
from apps.core.objects.store import store
from apps.finetuning.jobs.explanations import explain
from apps.finetuning.models import Run
from apps.finetuning.runs import leases, stalls
from apps.finetuning.runs.leases import StaleLease
from apps.finetuning.runs.uploads import READ_AT_ONCE_FILES, UploadIncomplete
from tests.factories.finetuning import checkpoint_files
from tests.support.attempts import step
from tests.support.waiting import join_readings

BEAT_SECONDS = 50  # less than a lease
STALLED = wire.Failed(code=FailureCode.STALLED, message="No progress for 900 s while training, after step 4.")


@pytest.fixture(autouse=True)
def impatience(settings):
    settings.STALL_SECONDS = 100


def beat_for(attempt, seconds, **fields):
    """Send heartbeats for so long, as the database's clock has it."""
    for _ in range(seconds // BEAT_SECONDS):
        earlier = F("heartbeat_at") - datetime.timedelta(seconds=BEAT_SECONDS)
        Run.objects.filter(pk=attempt.run.pk).update(heartbeat_at=earlier)
        attempt.beat(**fields)


def test_a_stalled_run_resumes_once_from_its_checkpoint_and_fails_the_second_time(floor, claim, reload):
    job = floor.job()
    first = claim().start()
    first.checkpoint(step=4, seconds=8.0)

    first.finish(STALLED)
    assert reload(job).status == "queued"
    second = claim().start(start_step=4)
    second.checkpoint(step=6, seconds=4.0)
    second.finish(STALLED)

    job = reload(job)
    assert second.claimed.spec.resume_from.step == 4
    assert (job.status, job.error_code, job.cost_nano) == ("failed", "stalled", 0)
    explanation = explain(job=job, now=db_now())
    assert explanation.blame == "platform" and "stalled twice" in explanation.cause
    assert ("Reported", STALLED.message) in [(each.name, each.value) for each in explanation.evidence]
    assert "start the job again" in explanation.suggestion.text


def test_a_stall_that_another_attempt_got_past_is_not_billed(floor, claim, reload):
    job = floor.job()
    first = claim().start()
    first.checkpoint(step=4, seconds=8.0)
    first.finish(STALLED)

    claim().start(start_step=4).succeed(floor.base_model, seconds=11.0)

    assert (reload(job).status, reload(job).billed_gpu_ms) == ("succeeded", 19_000)


def test_a_worker_that_beats_and_does_nothing_loses_its_run(floor, claim, reload):
    job = floor.job()
    attempt = claim().start()
    attempt.beat(step=3, work=17)

    beat_for(attempt, 150, step=3, work=17)
    assert stalls.end_stalled_runs() == 0
    beat_for(attempt, 100, step=3, work=17)
    assert stalls.end_stalled_runs() == 1

    assert (attempt.run.status, attempt.run.failure_code) == ("failed", "stalled")
    assert "No progress for" in attempt.run.failure_message
    assert reload(job).status == "queued"
    with pytest.raises(StaleLease):
        attempt.beat(step=4, work=18)


def test_words_and_steps_that_were_reached_before_are_no_progress(floor, claim):
    floor.job()
    attempt = claim().start()
    attempt.report(wire.StepCompleted, **step(5, 1.0))

    beat_for(attempt, 300)
    attempt.report(wire.LogLine, level="info", message="Still here")
    attempt.report(wire.PhaseChanged, phase=wire.Phase.EVALUATING)
    attempt.report(wire.StepCompleted, **step(5, 1.0))

    assert stalls.end_stalled_runs() == 1


def test_a_checkpoint_that_is_never_stored_is_no_progress(floor, claim):
    floor.job()
    attempt = claim().start()
    upload = attempt.upload("checkpoint", 4, checkpoint_files())
    store().delete_prefix(upload.object_prefix)
    sent = {"step": 4, "bytes": 12, "trained_tokens": 100, "training_seconds": 8.0}
    sealed = {"upload_id": upload.pk, "manifest_sha256": upload.manifest_sha256}

    for _ in range(2):
        beat_for(attempt, 150)
        with pytest.raises(UploadIncomplete):
            attempt.report(wire.CheckpointSaved, **sent, **sealed)

    assert stalls.end_stalled_runs() == 1


def test_a_checkpoint_of_many_files_that_never_come_is_progress_only_while_they_are_first_read(floor, claim):
    floor.job()
    attempt = claim().start()
    files = {f"model-{number}.safetensors": b"state" for number in range(READ_AT_ONCE_FILES)}
    upload = attempt.upload("checkpoint", 4, checkpoint_files() | files)
    store().delete_prefix(upload.object_prefix)
    sent = {"step": 4, "bytes": 12, "trained_tokens": 100, "training_seconds": 8.0}
    idle_ms = []

    for refusal in (FilesUnread, UploadIncomplete) * 2:
        beat_for(attempt, 100)
        with pytest.raises(refusal):
            attempt.report(wire.CheckpointSaved, **sent, upload_id=upload.pk, manifest_sha256=upload.manifest_sha256)
        join_readings()
        idle_ms.append(attempt.run.idle_ms)

    assert [round(each, -4) for each in idle_ms] == [0, 100_000, 200_000, 300_000]
    assert stalls.end_stalled_runs() == 1


@pytest.mark.parametrize("sign", ["work", "step"])
def test_a_run_that_gets_on_is_left_alone(floor, claim, sign):
    floor.job()
    attempt = claim().start()

    for number in range(1, 6):
        beat_for(attempt, 150, work=number if sign == "work" else 0)
        if sign == "step":
            attempt.report(wire.StepCompleted, **step(number, 1.0))

    assert stalls.end_stalled_runs() == 0


def test_a_step_that_takes_long_by_the_quote_has_its_time(floor, claim, reload):
    job = floor.job()
    attempt = claim().start(total_steps=10)
    job = reload(job)
    job.estimate |= {"train_seconds_p50": 10 * 60.0}
    job.save(update_fields=["estimate"])

    beat_for(attempt, 1_000)
    assert stalls.end_stalled_runs() == 0
    beat_for(attempt, 250)

    assert stalls.end_stalled_runs() == 1


def test_work_without_a_step_ends_after_a_day(floor, claim):
    """However much work its worker reports."""
    floor.job()
    attempt = claim()
    Run.objects.update(stepless_ms=24 * 3_600_000)

    beat_for(attempt, 50, work=10**9)

    assert stalls.end_stalled_runs() == 1


def test_a_machine_that_slept_did_not_stand_still(floor, claim):
    floor.job()
    attempt = claim()
    Run.objects.update(heartbeat_at=F("heartbeat_at") - datetime.timedelta(hours=8))

    attempt.beat()

    assert stalls.end_stalled_runs() == 0
    assert attempt.run.idle_ms == leases.LEASE_SECONDS * 1000
