"""Jobs that are cancelled, paused and resumed, and their charges."""

import pytest

from apps.billing.queries import get_balance, get_spending
from apps.contracts import runs as wire
from apps.contracts.failures import FailureCode
from apps.core.database.clock import db_now
from apps.core.errors import InvalidState, QuotaExceeded
from apps.core.models import OutboxMessage
from apps.finetuning.jobs import control
from apps.finetuning.models import Checkpoint
from apps.finetuning.runs import leases
from tests.support.attempts import CREDIT_NANO, charged, paused_at

pytestmark = pytest.mark.usefixtures("metered")
MILLI_DOLLAR = 1_000_000  # what one second costs in these tests, in nano-USD


def test_a_queued_job_is_cancelled_at_once_for_nothing(floor, organization, claim):
    job = floor.job()

    job = control.request_cancellation(job=job, by="key_test", now=db_now())

    assert (job.status, charged(organization), claim()) == ("cancelled", 0, None)


def test_a_running_job_keeps_its_checkpoint_when_cancelled_and_pays_up_to_it(floor, organization, claim, reload):
    job = floor.job()
    attempt = claim().start()

    control.request_cancellation(job=job, by="key_test", now=db_now())
    assert attempt.beat(step=3).is_cancel_requested
    attempt.checkpoint(step=3, seconds=6.0)
    attempt.finish(wire.Stopped(reason="cancelled", step=3, training_seconds=6.0))

    assert (reload(job).status, charged(organization)) == ("cancelled", 6 * MILLI_DOLLAR)
    assert Checkpoint.objects.filter(job=job, deleted_at=None).exists()


def test_a_result_that_arrives_after_the_cancellation_is_discarded(floor, organization, claim, reload):
    job = floor.job()
    attempt = claim().start()
    attempt.checkpoint(step=3, seconds=6.0)
    control.request_cancellation(job=job, by="key_test", now=db_now())

    attempt.succeed(floor.base_model)

    job = reload(job)
    assert (job.status, job.adapter_version, attempt.run.status) == ("cancelled", None, "cancelled")
    assert charged(organization) == 6 * MILLI_DOLLAR
    assert Checkpoint.objects.filter(job=job, deleted_at=None).exists()
    [adapter] = attempt.run.uploads.filter(kind="adapter")
    [discarded] = OutboxMessage.objects.filter(topic="objects.delete")
    assert discarded.payload == {"prefix": adapter.object_prefix}


def test_cancelling_a_job_whose_worker_died_still_ends_it(floor, claim, reload):
    job = floor.job()
    attempt = claim()
    control.request_cancellation(job=job, by="key_test", now=db_now())

    attempt.fall_silent()
    leases.reclaim_expired_leases()

    assert reload(job).status == "cancelled"


def test_a_finished_job_cannot_be_cancelled(floor, claim):
    job = floor.job()
    claim().start().succeed(floor.base_model)

    with pytest.raises(InvalidState):
        control.request_cancellation(job=job, by="key_test", now=db_now())


def test_a_pause_pays_for_durable_seconds_and_resuming_holds_the_rest_again(floor, organization, claim, reload):
    job = floor.job(spend_cap_nano=90 * MILLI_DOLLAR)
    attempt = claim().start()
    paused_at(attempt, job, step=5, seconds=9.0)
    assert reload(job).status == "paused"
    assert (charged(organization), get_balance(organization=organization).held_nano) == (9 * MILLI_DOLLAR, 0)

    control.resume(job=reload(job), by="key_test", now=db_now())
    resumed = claim()

    assert resumed.claimed.spec.resume_from.step == 5
    assert get_balance(organization=organization).held_nano == 81 * MILLI_DOLLAR


def test_every_second_is_billed_once_over_two_pauses(floor, organization, claim, reload):
    job = floor.job(spend_cap_nano=90 * MILLI_DOLLAR)
    for step, seconds in ((3, 5.0), (6, 7.0)):
        attempt = claim().start()
        paused_at(attempt, reload(job), step=step, seconds=seconds)
        control.resume(job=reload(job), by="key_test", now=db_now())

    claim().start(start_step=6).succeed(floor.base_model, seconds=8.0)

    assert (reload(job).cost_nano, charged(organization)) == (20 * MILLI_DOLLAR, 20 * MILLI_DOLLAR)
    assert get_spending(organization=organization).training_nano == 20 * MILLI_DOLLAR
    assert get_balance(organization=organization).held_nano == 0


def test_seconds_after_the_checkpoint_of_a_pause_are_not_billed(floor, organization, claim):
    job = floor.job(spend_cap_nano=60 * MILLI_DOLLAR)
    attempt = claim().start()
    attempt.checkpoint(step=3, seconds=5.0)
    control.request_pause(job=job, by="key_test", now=db_now())
    attempt.beat(step=5, training_seconds=9.0)

    attempt.finish(wire.Stopped(reason="paused", step=3, training_seconds=5.0))

    assert charged(organization) == 5 * MILLI_DOLLAR


def test_what_a_pause_charged_is_given_back_when_the_platform_fails_the_job(floor, organization, claim, reload):
    job = floor.job(spend_cap_nano=90 * MILLI_DOLLAR)
    attempt = claim().start()
    paused_at(attempt, job, step=5, seconds=9.0)
    control.resume(job=reload(job), by="key_test", now=db_now())

    claim().finish(wire.Failed(code=FailureCode.OUT_OF_MEMORY, message="Out of memory."))

    assert (reload(job).status, charged(organization)) == ("failed", 0)
    assert get_spending(organization=organization).training_nano == 0


def test_a_paused_job_can_be_cancelled_and_pays_no_more(floor, organization, claim, reload):
    job = floor.job(spend_cap_nano=60 * MILLI_DOLLAR)
    attempt = claim().start()
    paused_at(attempt, job, step=5, seconds=9.0)

    control.request_cancellation(job=reload(job), by="key_test", now=db_now())

    assert (reload(job).status, charged(organization)) == ("cancelled", 9 * MILLI_DOLLAR)


def test_a_job_cancelled_while_it_pauses_ends(floor, claim, reload):
    job = floor.job()
    attempt = claim().start()
    control.request_pause(job=job, by="key_test", now=db_now())
    attempt.beat()
    control.request_cancellation(job=reload(job), by="key_test", now=db_now())

    attempt.finish(wire.Stopped(reason="paused"))

    assert reload(job).status == "cancelled"


def test_a_job_paused_at_its_cap_goes_on_only_with_a_higher_one(floor, organization, claim, reload):
    job = floor.job(spend_cap_nano=60 * MILLI_DOLLAR)
    attempt = claim().start()
    assert attempt.beat(training_seconds=46.0).is_pause_requested
    attempt.pause(step=5, seconds=47.0)

    with pytest.raises(InvalidState, match="raise the cap"):
        control.resume(job=reload(job), by="key_test", now=db_now())
    control.resume(job=reload(job), by="key_test", now=db_now(), spend_cap_nano=120 * MILLI_DOLLAR)

    assert (reload(job).status, reload(job).spend_cap_nano) == ("queued", 120 * MILLI_DOLLAR)
    assert get_balance(organization=organization).held_nano == 73 * MILLI_DOLLAR


def test_resuming_without_the_money_leaves_the_job_paused(floor, organization, claim, reload):
    job = floor.job(spend_cap_nano=60 * MILLI_DOLLAR)
    attempt = claim().start()
    paused_at(attempt, job, step=5, seconds=9.0)

    with pytest.raises(QuotaExceeded):
        control.resume(job=reload(job), by="key_test", now=db_now(), spend_cap_nano=2 * CREDIT_NANO)

    assert (reload(job).status, reload(job).runs.count()) == ("paused", 1)


def test_a_run_about_to_pass_its_cap_is_asked_to_pause(floor, claim):
    floor.job(spend_cap_nano=60 * MILLI_DOLLAR)
    attempt = claim().start()

    assert not attempt.beat(training_seconds=35.0).is_pause_requested
    assert attempt.beat(training_seconds=46.0).is_pause_requested
