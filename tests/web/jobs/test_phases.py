"""The phases of a job on its page: their lengths to scale, and what follows the last step."""

import datetime

import pytest

from apps.contracts import runs as wire
from apps.contracts.failures import FailureCode
from apps.finetuning.models import FineTuningJob
from apps.finetuning.runs import leases
from tests.support.attempts import step


@pytest.fixture
def phases_of(client_for, alice):
    def find(job):
        return {phase.name: phase for phase in client_for(alice).get(f"/jobs/{job.pk}").context["phases"]}

    return find


def began_before(job, hours: float) -> None:
    """Move what happened to the job so far into the past."""
    ago = datetime.timedelta(hours=hours)
    for run in job.runs.all():
        times = {name: getattr(run, name) - ago for name in ("leased_at", "training_started_at")}
        job.runs.filter(pk=run.pk).update(created_at=run.created_at - ago, **times)


def test_the_phases_are_those_of_the_latest_attempt(floor, claim, phases_of):
    job = floor.job()
    first = claim().start()
    job.runs.update(leased_at=job.created_at - datetime.timedelta(hours=1))
    first.checkpoint(step=2, seconds=4.0)
    first.fall_silent()
    leases.reclaim_expired_leases()
    claim()

    phases = phases_of(job)

    assert phases["Starting"].state == "now"
    assert phases["Starting"].note.endswith("s") and "m" not in phases["Starting"].note, "not since the first attempt"


def test_a_running_job_is_to_scale_from_the_passed_and_the_expected_time(floor, claim, phases_of):
    job = floor.job()
    estimate = {"startup_seconds": 1.0, "train_seconds_p50": 3600.0, "beside_seconds_p50": 1801.0}
    FineTuningJob.objects.filter(pk=job.pk).update(estimate=job.estimate | estimate)
    queued = phases_of(job)
    attempt = claim().start(total_steps=10)
    began_before(job, 5)
    attempt.report(wire.StepCompleted, **step(5, 1.5))
    running = phases_of(job)

    assert [queued[name].share for name in ("Queue", "Starting", "Train", "Finishing")] == [0, 0, 8, 4]
    assert [running[name].share for name in ("Validate", "Queue", "Starting", "Train", "Finishing")] == [0, 0, 0, 11, 1]
    assert running["Train"].percent == 50 and running["Finishing"].state == ""


def test_what_follows_the_last_step_is_no_training(floor, claim, phases_of):
    job = floor.job()
    attempt = claim().start(total_steps=10)
    began_before(job, 5)
    attempt.report(wire.StepCompleted, **step(10, 1.5))
    finishing = phases_of(job)
    attempt.succeed(floor.base_model)
    ended = FineTuningJob.objects.get(pk=job.pk).finished_at + datetime.timedelta(hours=1)
    FineTuningJob.objects.filter(pk=job.pk).update(finished_at=ended)
    done = phases_of(job)

    assert (finishing["Train"].state, finishing["Finishing"].state) == ("done", "now")
    assert (done["Train"].note, done["Finishing"].note) == ("5h 30m", "1h 00m")
    assert (done["Train"].share, done["Finishing"].share) == (10, 2)


def test_a_job_that_failed_in_training_did_not_finish(floor, claim, phases_of):
    job = floor.job()
    claim().start(total_steps=10).finish(wire.Failed(code=FailureCode.OUT_OF_MEMORY, message="CUDA out of memory."))

    phases = phases_of(job)

    assert phases["Train"].state == "failed" and "Finishing" not in phases
