"""The progress of a running job on pages and in the API: no moment in the past, and no unknown number."""

from datetime import datetime, timedelta

import pytest

from apps.contracts import runs as wire
from apps.core.database.clock import db_now
from apps.finetuning.jobs.progress import finish_of, get_progress
from apps.finetuning.models import FineTuningJob, Run
from tests.support.attempts import step

MILLI_DOLLAR = 1_000_000


def progress_of(job, *, since: datetime | None = None, after_seconds: float = 0.0):
    now = (since or db_now()) + timedelta(seconds=after_seconds)
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
    at = Run.objects.get(job=job).leased_at
    begun, later, last = (
        progress_of(job, since=at, after_seconds=seconds).seconds_left for seconds in (0.0, 2.0, 60.0)
    )

    assert begun == pytest.approx(job.estimate["run_seconds_p50"], abs=1.0)
    assert begun > later > last > 0.0  # slower than quoted, and never in the past


def test_the_runs_own_pace_takes_over_within_the_first_minute_without_a_jump(floor, claim):
    """A run that takes twice the quoted time of a step: the time left approaches the true one from below."""
    job = floor.job()
    FineTuningJob.objects.filter(pk=job.pk).update(estimate={"train_seconds_p50": 1000.0})
    attempt = claim()
    attempt.report(wire.TrainingStarted, total_steps=1000, start_step=0, rows=100, trained_tokens_per_epoch=500)
    before, shares = progress_of(job).seconds_left, []

    for number in (1, 15, 30, 60, 150, 300, 600):
        Run.objects.filter(job=job).update(training_started_at=db_now() - timedelta(seconds=2 * number))
        attempt.report(wire.StepCompleted, **(step(number, 1.0) | {"total_steps": 1000}))
        left = progress_of(job).seconds_left
        shares.append(left / (2 * (1000 - number)))
        assert left < 1.4 * before
        before = left

    assert shares == sorted(shares) and shares[0] < 0.6
    assert shares[2] > 0.75 and shares[-1] > 0.95  # after one minute, and after twenty


def test_without_a_report_the_time_left_runs_down_and_stays_above_zero(floor, claim):
    job = floor.job()
    claim().start().report(wire.StepCompleted, **step(4, 1.0))
    now = db_now()

    found = progress_of(job, since=now)

    assert found.percent == 40
    assert found.seconds_left == pytest.approx(6 * 1800 / 5, rel=0.01)  # its four steps, and one at the quoted pace
    later = progress_of(job, since=now, after_seconds=60.0)
    assert later.seconds_left == pytest.approx(found.seconds_left - 60.0, abs=1.0)
    assert progress_of(job, after_seconds=86_400.0).seconds_left > 0.0
    back = progress_of(job, since=now, after_seconds=-3600.0)  # a clock that went back
    assert back.seconds_left == pytest.approx(found.seconds_left, abs=1.0)


def test_after_the_last_step_and_while_it_pauses_the_rest_is_unknown(floor, claim):
    job = floor.job()
    claim().start().report(wire.StepCompleted, **step(10, 1.0), eta_seconds=0.0)

    assert (progress_of(job).percent, progress_of(job).seconds_left) == (99, None)


def test_what_another_attempt_reported_counts_no_more(floor, claim):
    job = floor.job()
    first = claim().start()
    first.report(wire.StepCompleted, **step(4, 1.0))
    first.finish(wire.Stopped(reason="preempted", step=0, training_seconds=0.0))

    assert progress_of(job).seconds_left is None  # in the queue
    claim()
    assert progress_of(job).seconds_left < 600.0
    assert progress_of(job).tokens_per_second is None


@pytest.mark.usefixtures("metered")
def test_what_is_spent_holds_the_minimum_and_ends_at_the_charge(floor, claim):
    job = floor.job(spend_cap_nano=200 * MILLI_DOLLAR)
    attempt = claim()
    leased_at = db_now() - timedelta(seconds=40)
    Run.objects.filter(job=job).update(leased_at=leased_at)
    for seconds in (0, 40):  # loading: due if it stops here
        assert progress_of(job, since=leased_at, after_seconds=seconds).spent_nano == seconds * MILLI_DOLLAR

    attempt.start()
    attempt.report(wire.StepCompleted, **(step(5, 1.0) | {"training_seconds": 90.0}))
    assert progress_of(job).spent_nano == 90 * MILLI_DOLLAR
    attempt.succeed(floor.base_model, seconds=95.0)

    done = FineTuningJob.objects.get(pk=job.pk)
    assert progress_of(job).spent_nano == done.cost_nano
    assert (progress_of(job).percent, progress_of(job).seconds_left) == (100, None)
