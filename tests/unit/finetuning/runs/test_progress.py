"""The progress of a running job on pages and in the API: no moment in the past, and no unknown number."""

from datetime import timedelta

import pytest

from apps.contracts import runs as wire
from apps.core.database.clock import db_now
from apps.finetuning.jobs.progress import finish_of, get_progress
from apps.finetuning.models import FineTuningJob, Run
from tests.support.attempts import step

MILLI_DOLLAR = 1_000_000


def progress_of(job, *, after_seconds: float = 0.0):
    now = db_now() + timedelta(seconds=after_seconds)
    found = get_progress(job=FineTuningJob.objects.get(pk=job.pk), now=now)
    finish = finish_of(found, now=now)
    assert finish is None or finish > now
    assert (finish is None) == (found.seconds_left is None)
    return found


def test_a_queued_job_does_not_say_when_it_ends(floor):
    assert progress_of(floor.job()).seconds_left is None


def test_before_the_first_step_the_estimate_says_what_is_left(floor, claim):
    job = floor.job()
    claim()

    begun, later = (progress_of(job, after_seconds=seconds).seconds_left for seconds in (0.0, 2.0))

    assert begun == pytest.approx(job.estimate["run_seconds_p50"], abs=1.0)
    assert later == pytest.approx(begun - 2.0, abs=1.0)
    assert progress_of(job, after_seconds=3600.0).seconds_left is None  # slower than quoted: unknown


def test_then_the_runs_own_pace_does(floor, claim):
    job = floor.job()
    attempt = claim().start()
    attempt.report(wire.StepCompleted, **step(4, 1.0), eta_seconds=600.0)

    found = progress_of(job, after_seconds=60.0)

    assert found.percent == 40
    assert found.seconds_left == pytest.approx(540.0, abs=5.0)
    assert progress_of(job, after_seconds=700.0).seconds_left is None


def test_after_the_last_step_and_while_it_pauses_the_rest_is_unknown(floor, claim):
    job = floor.job()
    attempt = claim().start()
    attempt.report(wire.StepCompleted, **step(10, 1.0), eta_seconds=0.0)

    assert (progress_of(job).percent, progress_of(job).seconds_left) == (99, None)


def test_what_another_attempt_reported_counts_no_more(floor, claim):
    job = floor.job()
    first = claim().start()
    first.report(wire.StepCompleted, **step(4, 1.0), eta_seconds=600.0)
    first.finish(wire.Stopped(reason="preempted", step=0, training_seconds=0.0))

    assert progress_of(job).seconds_left is None  # in the queue
    claim()
    assert progress_of(job).seconds_left < 600.0
    assert progress_of(job).tokens_per_second is None


@pytest.mark.usefixtures("metered")
def test_what_is_spent_holds_the_minimum_and_ends_at_the_charge(floor, claim):
    job = floor.job(spend_cap_nano=200 * MILLI_DOLLAR)
    attempt = claim()
    assert progress_of(job).spent_nano < MILLI_DOLLAR
    Run.objects.filter(job=job).update(leased_at=db_now() - timedelta(seconds=40))
    assert progress_of(job).spent_nano == pytest.approx(40 * MILLI_DOLLAR, rel=0.1)  # loading: due if it stops here

    attempt.start()
    attempt.report(wire.StepCompleted, **(step(5, 1.0) | {"training_seconds": 90.0}))
    assert progress_of(job).spent_nano == 90 * MILLI_DOLLAR
    attempt.succeed(floor.base_model, seconds=95.0)

    done = FineTuningJob.objects.get(pk=job.pk)
    assert progress_of(job).spent_nano == done.cost_nano
    assert (progress_of(job).percent, progress_of(job).seconds_left) == (100, None)
