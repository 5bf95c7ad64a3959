"""Firm prices: the customer never pays more than the quoted maximum, and the operator sees what that cost."""

import datetime
from decimal import Decimal

import pytest
from django.db import IntegrityError, transaction

from apps.billing.books.reconciliation import reconcile
from apps.billing.models import AccountKind, LedgerEntry
from apps.billing.operations import record_estimate_loss
from apps.billing.queries import get_balance
from apps.catalog.operations import set_price
from apps.contracts import runs as wire
from apps.contracts.failures import FailureCode
from apps.core.database.clock import db_now
from apps.core.errors import InvalidState, InvalidValue
from apps.core.models import OutboxMessage
from apps.finetuning.jobs import control
from apps.finetuning.jobs.admission import MaximumRaised
from apps.finetuning.jobs.progress import get_progress
from apps.finetuning.models import FineTuningJob, GpuPool
from apps.finetuning.pools.margins import list_estimate_losses, list_margins, sum_estimate_losses
from apps.finetuning.pools.operations import edit_pool
from apps.finetuning.runs import leases
from tests.support.attempts import charged, paused_at

MILLI_DOLLAR = 1_000_000  # what one second costs in these tests, in nano-USD
MAXIMUM = 60 * MILLI_DOLLAR  # what these jobs are quoted at most: the minimum charge


def month_of_charges() -> datetime.date:
    """Return the month of the last posting, also if the next month has begun since."""
    return LedgerEntry.objects.latest("id").created_at.date().replace(day=1)


def losses() -> list[tuple[str, int]]:
    """Return the month's losses by job, as the margin page shows them."""
    now = db_now()
    found = list_estimate_losses(month=month_of_charges(), now=now)
    assert not any(outcome.differences for outcome in reconcile(now=now))
    return [(loss.job.pk, loss.nano) for loss in found]


def overrun(attempt, *, seconds: float, step: int = 5) -> None:
    """Have the run reach the limit and pause as it is asked to."""
    assert attempt.beat(training_seconds=seconds).is_pause_requested
    attempt.pause(step=step, seconds=seconds)


def test_a_slow_run_goes_on_and_the_customer_pays_the_maximum_that_was_shown(floor, organization, claim, reload):
    job = floor.job()
    assert (job.spend_cap_nano, job.is_firm, job.firm_limit_nano) == (MAXIMUM, True, 3 * MAXIMUM)
    attempt = claim().start()

    assert not attempt.beat(training_seconds=150.0).is_pause_requested
    assert get_progress(job=reload(job), now=db_now()).spent_nano <= MAXIMUM
    attempt.succeed(floor.base_model, seconds=160.0)

    assert (reload(job).status, reload(job).cost_nano, charged(organization)) == ("succeeded", MAXIMUM, MAXIMUM)
    record_estimate_loss(hold_id=reload(job).hold_id, total_nano=100 * MILLI_DOLLAR, by="system")  # settled once more
    assert losses() == [(job.pk, 100 * MILLI_DOLLAR)]
    month = month_of_charges()
    [margin] = list_margins(month=month, now=db_now())
    assert margin.revenue_nano == MAXIMUM
    assert sum_estimate_losses(month=month, now=db_now()) == {margin.pool.pk: 100 * MILLI_DOLLAR}


def test_a_run_within_its_maximum_pays_its_time_and_leaves_no_loss(floor, organization, claim):
    floor.job()
    claim().start().succeed(floor.base_model, seconds=20.0)

    assert (charged(organization), losses()) == (20 * MILLI_DOLLAR, [])
    assert not LedgerEntry.objects.filter(account__kind=AccountKind.ESTIMATE_LOSS).exists()


def test_beyond_the_factor_the_job_pauses_unbilled_and_operators_get_a_mail(floor, organization, claim, reload):
    job = floor.job()
    overrun(claim().start(), seconds=180.0)

    job = reload(job)
    assert (job.status, job.cost_nano, charged(organization)) == ("paused", 0, 0)
    assert losses() == [(job.pk, 180 * MILLI_DOLLAR)]
    [mail] = OutboxMessage.objects.filter(topic="mail")
    assert mail.payload["kind"] == "operators" and job.pk in mail.payload["body"]
    with pytest.raises(InvalidState, match="operators can continue it"):
        control.resume(job=job, by="key_test", now=db_now(), spend_cap_nano=10 * MAXIMUM)


def test_an_operator_continues_it_at_the_same_maximum(floor, organization, claim, reload):
    job = floor.job()
    overrun(claim().start(), seconds=180.0)

    control.continue_overrun(job=reload(job), by="user_operator", now=db_now())

    assert (reload(job).status, reload(job).firm_limit_nano) == ("queued", 6 * MAXIMUM)
    assert get_balance(organization=organization).held_nano == MAXIMUM
    claim().start(start_step=5).succeed(floor.base_model, seconds=90.0)
    assert charged(organization) == MAXIMUM
    assert losses() == [(job.pk, 210 * MILLI_DOLLAR)]
    with pytest.raises(InvalidState):
        control.continue_overrun(job=reload(job), by="user_operator", now=db_now())


def test_with_a_factor_of_one_a_run_within_its_maximum_is_not_paused(floor, claim):
    GpuPool.objects.update(firm_factor=1)
    floor.job()
    attempt = claim().start()

    assert not attempt.beat(training_seconds=59.0).is_pause_requested
    assert attempt.beat(training_seconds=60.0).is_pause_requested


def test_a_job_cancelled_after_it_overran_costs_nothing(floor, organization, claim, reload):
    job = floor.job()
    overrun(claim().start(), seconds=180.0)

    control.request_cancellation(job=reload(job), by="key_test", now=db_now())

    assert (reload(job).status, reload(job).cost_nano, charged(organization)) == ("cancelled", 0, 0)


def test_the_maximum_holds_over_pauses_and_lost_attempts(floor, organization, claim, reload):
    job = floor.job()
    paused_at(claim().start(), job, step=3, seconds=50.0)
    control.resume(job=reload(job), by="key_test", now=db_now())
    lost = claim().start(start_step=3)
    lost.checkpoint(step=5, seconds=30.0)
    lost.fall_silent()
    leases.reclaim_expired_leases()
    paused_at(claim().start(start_step=5), reload(job), step=6, seconds=20.0)
    assert charged(organization) == MAXIMUM - 1  # the least that a hold can be

    control.resume(job=reload(job), by="key_test", now=db_now())
    assert get_balance(organization=organization).held_nano == 1
    claim().start(start_step=6).succeed(floor.base_model, seconds=10.0)

    assert (reload(job).cost_nano, charged(organization)) == (MAXIMUM, MAXIMUM)
    assert losses() == [(job.pk, 50 * MILLI_DOLLAR)]


def test_a_job_cancelled_while_paused_at_its_maximum_costs_what_was_charged(floor, organization, claim, reload):
    job = floor.job()
    paused_at(claim().start(), job, step=5, seconds=100.0)

    control.request_cancellation(job=reload(job), by="key_test", now=db_now())

    assert reload(job).cost_nano == charged(organization) == MAXIMUM - 1


def test_a_cap_below_the_quote_pauses_there_and_may_rise_to_the_quote(floor, organization, claim, reload):
    GpuPool.objects.update(firm_factor=Decimal("2.5"))
    job = floor.job(spend_cap_nano=MAXIMUM)
    assert (job.is_firm, job.firm_limit_nano) == (True, 150 * MILLI_DOLLAR)  # a cap equal to the quote is the quote
    FineTuningJob.objects.filter(pk=job.pk).update(firm_max_nano=2 * MAXIMUM)
    attempt = claim().start()
    overrun(attempt, seconds=50.0)
    assert (reload(job).overran_at, charged(organization)) == (None, 50 * MILLI_DOLLAR)

    control.resume(job=reload(job), by="key_test", now=db_now(), spend_cap_nano=1000 * MAXIMUM)

    assert (reload(job).spend_cap_nano, reload(job).is_firm) == (2 * MAXIMUM, True)
    assert losses() == []


def test_a_cap_above_the_quote_is_never_charged(floor, organization, claim, reload):
    job = floor.job(spend_cap_nano=100 * MAXIMUM)
    assert get_balance(organization=organization).held_nano == MAXIMUM

    claim().start().succeed(floor.base_model, seconds=120.0)

    assert (reload(job).cost_nano, charged(organization)) == (MAXIMUM, MAXIMUM)


def test_what_we_break_is_neither_billed_nor_a_loss_of_the_estimate(floor, organization, claim, reload):
    job = floor.job()
    paused_at(claim().start(), job, step=5, seconds=100.0)
    assert losses() == [(job.pk, 40 * MILLI_DOLLAR + 1)]
    control.resume(job=reload(job), by="key_test", now=db_now())

    claim().finish(wire.Failed(code=FailureCode.OUT_OF_MEMORY, message="Out of memory."))

    assert (reload(job).status, charged(organization), losses()) == ("failed", 0, [])


def test_a_worker_that_claims_more_time_than_passed_costs_the_customer_no_more(floor, organization, claim, reload):
    job = floor.job()
    attempt = claim().start()
    FineTuningJob.objects.filter(pk=job.pk).update(firm_limit_nano=10**15)
    attempt.beat(training_seconds=1e12)

    attempt.succeed(floor.base_model, seconds=1e12)

    assert charged(organization) == MAXIMUM
    [(_, nano)] = losses()
    assert nano == pytest.approx(1740 * MILLI_DOLLAR, rel=0.01)  # of the half hour that passed


def test_a_free_pool_never_pauses_and_charges_nothing(floor, organization, claim, reload):
    set_price(sku="training:local-cpu", unit="gpu_ms", price_nano=0, per=3_600_000, by="user_a",
              approved_by="user_b", now=db_now())  # fmt: skip
    job = floor.job()
    assert (job.spend_cap_nano, job.is_firm) == (1, True)  # a hold is above zero
    attempt = claim().start()

    assert not attempt.beat(training_seconds=1700.0).is_pause_requested
    attempt.succeed(floor.base_model, seconds=1700.0)

    assert (reload(job).cost_nano, charged(organization), losses()) == (0, 0, [])


def test_the_database_refuses_a_cap_above_the_firm_maximum(floor):
    job = floor.job()

    with pytest.raises(IntegrityError, match="job_cap_within_firm_max"), transaction.atomic():
        FineTuningJob.objects.filter(pk=job.pk).update(spend_cap_nano=MAXIMUM + 1)


def test_a_maximum_that_rose_after_it_was_shown_is_shown_again(floor):
    with pytest.raises(MaximumRaised, match=r"now \$0\.06 instead of \$0\.05"):
        floor.job(shown_max_nano=50 * MILLI_DOLLAR)

    assert floor.job(shown_max_nano=MAXIMUM).is_firm


def test_a_metered_pool_pauses_at_the_cap(floor, organization, claim, reload):
    edit_pool(pool=floor.pool, region="local", memory_bytes=floor.pool.memory_bytes, is_open=True,
              price_policy="metered", by="user_operator")  # fmt: skip
    job = floor.job(spend_cap_nano=2 * MAXIMUM)
    overrun(claim().start(), seconds=110.0)

    assert (reload(job).status, charged(organization), losses()) == ("paused", 110 * MILLI_DOLLAR, [])


@pytest.mark.parametrize("factor", [Decimal("0.99"), Decimal("10.01"), Decimal("NaN")])
def test_a_factor_that_makes_no_sense_is_refused(floor, factor):
    with pytest.raises(InvalidValue) as refused:
        edit_pool(pool=floor.pool, region="local", memory_bytes=1, is_open=True, firm_factor=factor, by="user_operator")

    assert refused.value.param == "firm_factor"
