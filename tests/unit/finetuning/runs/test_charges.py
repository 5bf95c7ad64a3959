"""The charges of a job: durable steps, the minimum of a start, and the spend cap."""

from decimal import Decimal

import msgspec
import pytest

from apps.billing.books.adjustments import request_adjustment
from apps.billing.models import Hold
from apps.billing.queries import get_balance
from apps.contracts import runs as wire
from apps.contracts.failures import FailureCode
from apps.core.database.clock import db_now
from apps.core.errors import InvalidState
from apps.core.ids import ulid_of
from apps.core.money import usd_to_nano
from apps.finetuning.jobs import control
from apps.finetuning.models import FineTuningJob, ThroughputProbe
from apps.finetuning.runs import leases
from apps.finetuning.usage.charges import STOP_IN_ORDER_SECONDS, SpendCapTooLow
from tests.factories.finetuning import probe_report
from tests.support.attempts import charged, held_since, paused_at

pytestmark = pytest.mark.usefixtures("metered")
MILLI_DOLLAR = 1_000_000  # what one second costs in these tests, in nano-USD


def slow_report(base_model) -> dict:
    report = msgspec.to_builtins(probe_report(base_model))
    return report | {name: report[name] / 10_000 for name in report if name.startswith("tokens_per_second")}


def test_a_finished_job_has_an_adapter_and_pays_for_its_training_seconds(floor, organization, claim, reload):
    job = floor.job(suffix="triage")

    claim().start().succeed(floor.base_model, seconds=20.0)

    job = reload(job)
    assert job.status == "succeeded"
    assert job.adapter_version.model_name.startswith(f"ft:{floor.base_model.name}:{organization.slug}:triage:")
    assert ulid_of(job.pk) not in job.adapter_version.lora_name  # who knows the job cannot tell its name in an engine
    assert (job.cost_nano, charged(organization)) == (20 * MILLI_DOLLAR, 20 * MILLI_DOLLAR)
    assert Hold.objects.get(pk=job.hold_id).status == "closed"


def test_steps_that_early_stopping_left_out_are_not_billed(floor, organization, claim, reload):
    job = floor.job()
    attempt = claim().start(total_steps=100)

    attempt.succeed(floor.base_model, seconds=12.0, is_stopped_early=True, best_step=6)

    assert (reload(job).status, reload(job).step) == ("succeeded", 10)
    assert charged(organization) == 12 * MILLI_DOLLAR
    assert reload(job).adapter_version.metrics["best_step"] == 6


def test_the_bill_never_passes_the_cap(floor, organization, claim, reload):
    job = floor.job(spend_cap_nano=60 * MILLI_DOLLAR)

    claim().start().succeed(floor.base_model, seconds=80.0)

    assert reload(job).cost_nano == charged(organization) == 60 * MILLI_DOLLAR


@pytest.mark.parametrize(("held_seconds", "least", "most"), [(3600, 60, 60), (45, 45, 60), (7, 20, 22)])
def test_a_start_is_billed_for_a_minute_of_the_gpu_or_for_as_long_as_it_held_it(
    floor, organization, claim, reload, held_seconds, least, most
):
    job = floor.job()
    attempt = claim().start()
    held_since(attempt, held_seconds)

    attempt.succeed(floor.base_model, seconds=20.0)

    assert least * MILLI_DOLLAR <= charged(organization) <= most * MILLI_DOLLAR  # the test itself takes time
    assert reload(job).runs.get().billed_gpu_ms == 20_000


def test_each_time_a_paused_job_goes_on_is_a_start_of_its_own(floor, organization, claim, reload):
    job = floor.job(spend_cap_nano=200 * MILLI_DOLLAR)
    for step in (1, 2):
        attempt = claim().start(start_step=step - 1)
        held_since(attempt, 300)
        paused_at(attempt, reload(job), step=step, seconds=1.0)
        if step == 1:
            control.resume(job=reload(job), by="key_test", now=db_now())

    assert charged(organization) == 120 * MILLI_DOLLAR


@pytest.mark.parametrize(
    ("how", "cost", "paid"), [("cancelled", 20, 5), ("paused", 30, 15), ("succeeded", 35, 20), ("failed", 0, 0)]
)
def test_what_an_operator_refunded_of_a_paused_job_is_never_charged_again(
    floor, organization, claim, reload, how, cost, paid
):
    job = floor.job(spend_cap_nano=200 * MILLI_DOLLAR)
    paused_at(claim().start(), job, step=4, seconds=20.0)
    request_adjustment(
        organization=organization, amount_nano=15 * MILLI_DOLLAR, reason="goodwill", by="user_olga", now=db_now(),
        refund_of=job.pk,
    )  # fmt: skip
    if how == "cancelled":
        control.request_cancellation(job=reload(job), by="key_test", now=db_now())
    else:
        control.resume(job=reload(job), by="key_test", now=db_now())
        assert get_balance(organization=organization).held_nano == 180 * MILLI_DOLLAR
        second = claim().start(start_step=4)
        if how == "paused":
            paused_at(second, reload(job), step=8, seconds=10.0)
        elif how == "succeeded":
            second.succeed(floor.base_model, seconds=15.0)
        else:
            second.succeed(floor.base_model, files={"adapter_model.safetensors": b"nothing"})

    job = reload(job)
    assert (job.status, job.cost_nano) == (how, cost * MILLI_DOLLAR)
    assert charged(organization) == paid * MILLI_DOLLAR


@pytest.mark.parametrize(("held_seconds", "least", "most"), [(1800, 60, 60), (25, 25, 40)])
def test_a_start_that_the_customer_stops_while_the_model_loads_is_billed_for_its_time_up_to_a_minute(
    floor, organization, claim, reload, held_seconds, least, most
):
    job = floor.job(spend_cap_nano=200 * MILLI_DOLLAR)
    paused = claim()
    held_since(paused, held_seconds)
    control.request_pause(job=reload(job), by="key_test", now=db_now())
    paused.finish(wire.Stopped(reason="paused"))
    once = charged(organization)
    control.resume(job=reload(job), by="key_test", now=db_now())
    cancelled = claim()
    held_since(cancelled, held_seconds)
    control.request_cancellation(job=reload(job), by="key_test", now=db_now())
    cancelled.finish(wire.Stopped(reason="cancelled"))

    assert least * MILLI_DOLLAR <= once <= most * MILLI_DOLLAR
    assert least * MILLI_DOLLAR <= charged(organization) - once <= most * MILLI_DOLLAR


def test_a_start_that_we_end_before_training_costs_nothing(floor, organization, claim, reload):
    job = floor.job()
    attempt = claim()
    held_since(attempt, 1800)
    attempt.finish(wire.Failed(code=FailureCode.OUT_OF_MEMORY, message="too small"))

    assert (reload(job).status, charged(organization)) == ("failed", 0)


def test_an_attempt_that_we_lost_costs_no_minimum(floor, organization, claim, reload):
    job = floor.job()
    lost = claim().start()
    held_since(lost, 300)
    lost.fall_silent()
    leases.reclaim_expired_leases()
    control.request_cancellation(job=reload(job), by="key_test", now=db_now())

    assert (reload(job).status, charged(organization)) == ("cancelled", 0)


@pytest.mark.parametrize("cap_nano", [1, 59_999_999])
def test_a_cap_that_does_not_pay_for_one_start_is_refused_and_leaves_nothing(floor, organization, cap_nano):
    with pytest.raises(SpendCapTooLow, match=r"Set a cap of \$0\.06 or more") as refused:
        floor.job(spend_cap_nano=cap_nano)

    assert (refused.value.param, refused.value.data) == ("budget.max_cost_usd", {"least_usd": "0.06"})
    assert not FineTuningJob.objects.exists()
    assert get_balance(organization=organization).held_nano == 0


def test_a_cap_has_to_pay_for_one_step_where_that_takes_longer_than_the_minimum(floor):
    ThroughputProbe.objects.update(report=slow_report(floor.base_model))

    with pytest.raises(SpendCapTooLow) as refused:
        floor.job(spend_cap_nano=60 * MILLI_DOLLAR)

    step_seconds = float(refused.value.data["least_usd"]) * 1000 - STOP_IN_ORDER_SECONDS
    assert step_seconds > 60
    job = floor.job(spend_cap_nano=usd_to_nano(Decimal(refused.value.data["least_usd"])))
    assert job.status == "queued"


def test_a_job_never_goes_on_with_a_cap_raised_by_less_than_a_start(floor, claim, reload):
    job = floor.job(spend_cap_nano=60 * MILLI_DOLLAR)
    attempt = claim().start()
    paused_at(attempt, job, step=5, seconds=40.0)

    for cap_nano in (None, 60 * MILLI_DOLLAR + 1, 100 * MILLI_DOLLAR - 1, 0):
        with pytest.raises(InvalidState, match=r"raise the cap to \$0\.10"):
            control.resume(job=reload(job), by="key_test", now=db_now(), spend_cap_nano=cap_nano)

    control.resume(job=reload(job), by="key_test", now=db_now(), spend_cap_nano=100 * MILLI_DOLLAR)
    assert reload(job).status == "queued"


def test_a_run_that_ends_before_it_is_stopped_at_its_cap_was_never_paused(floor, claim, reload):
    job = floor.job(spend_cap_nano=60 * MILLI_DOLLAR)
    attempt = claim().start()
    assert attempt.beat(training_seconds=50.0).is_pause_requested

    attempt.succeed(floor.base_model, seconds=52.0)

    assert reload(job).status == "succeeded"
    assert not [event.message for event in job.events.all() if "paus" in event.message.lower()]


def test_a_run_stopped_at_its_cap_says_so_when_it_has_paused(floor, claim, reload):
    job = floor.job(spend_cap_nano=60 * MILLI_DOLLAR)
    attempt = claim().start()
    attempt.beat(training_seconds=50.0)
    attempt.pause(step=5, seconds=52.0)

    assert reload(job).status == "paused"
    assert job.events.last().message == "Paused at the spend cap; the last checkpoint is kept"


def test_time_after_the_last_checkpoint_of_a_lost_attempt_is_not_billed(floor, organization, claim, reload):
    job = floor.job()
    first = claim().start()
    first.checkpoint(step=4, seconds=8.0)
    first.beat(step=7, training_seconds=14.0)

    first.fall_silent()
    leases.reclaim_expired_leases()
    second = claim().start(start_step=4)
    second.succeed(floor.base_model, seconds=11.0)

    assert second.claimed.spec.resume_from.step == 4
    assert reload(job).status == "succeeded"
    assert charged(organization) == 19 * MILLI_DOLLAR
