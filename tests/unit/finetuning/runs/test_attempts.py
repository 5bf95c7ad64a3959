"""A job ends once, is billed once for durable steps only, and survives the loss of any worker."""

import math
from datetime import timedelta
from decimal import Decimal

import msgspec
import pytest

from apps.billing.models import Hold
from apps.billing.queries import get_balance, get_ledger_sum_nano, get_spending
from apps.contracts import runs as wire
from apps.contracts.failures import FailureCode
from apps.core.database.clock import db_now
from apps.core.errors import InvalidState, QuotaExceeded
from apps.core.ids import ulid_of
from apps.core.models import OutboxMessage
from apps.core.money import usd_to_nano
from apps.core.objects.store import store
from apps.finetuning.jobs import control
from apps.finetuning.models import Checkpoint, FineTuningJob, GpuPool, Run, ThroughputProbe, Worker
from apps.finetuning.pools import operations
from apps.finetuning.results.missing_parts import list_missing
from apps.finetuning.runs import leases, queue_order
from apps.finetuning.runs.leases import StaleLease
from apps.finetuning.runs.uploads import UploadIncomplete
from apps.finetuning.usage import quotas
from apps.finetuning.usage.charges import STOP_IN_ORDER_SECONDS, SpendCapTooLow
from tests.factories.finetuning import adapter_files, give_credit, make_job, make_worker, probe_report

MILLI_DOLLAR = 1_000_000  # what one second costs in these tests, in nano-USD
CREDIT = 100_000_000_000


def charged(organization) -> int:
    balance = get_balance(organization=organization)
    assert get_ledger_sum_nano() == 0
    return CREDIT - balance.available_nano - balance.held_nano


def test_a_job_is_queued_with_its_cost_held(floor, organization):
    job = floor.job()

    balance = get_balance(organization=organization)
    assert (job.status, balance.held_nano) == ("queued", job.spend_cap_nano)
    assert job.estimate["cost_nano_p90"] <= job.spend_cap_nano


def test_an_adapter_without_a_name_has_its_datasets_and_the_end_of_the_jobs_id(floor, claim, reload):
    job = floor.job()
    attempt = claim()
    attempt.start()
    attempt.succeed(floor.base_model)

    assert reload(job).adapter_version.adapter.name == f"{job.training_file.dataset.name} {job.pk[-4:]}"


def test_a_finished_job_has_an_adapter_and_pays_for_its_training_seconds(floor, organization, claim, reload):
    job = floor.job(suffix="triage")

    attempt = claim()
    attempt.start()
    attempt.succeed(floor.base_model, seconds=20.0)

    job = reload(job)
    assert job.status == "succeeded"
    assert job.adapter_version.model_name.startswith(f"ft:{floor.base_model.name}:{organization.slug}:triage:")
    assert ulid_of(job.pk) not in job.adapter_version.lora_name  # who knows the job cannot tell its name in an engine
    assert (job.cost_nano, charged(organization)) == (20 * MILLI_DOLLAR, 20 * MILLI_DOLLAR)
    assert Hold.objects.get(pk=job.hold_id).status == "closed"


def test_steps_that_early_stopping_left_out_are_not_billed(floor, organization, claim, reload):
    job = floor.job()
    attempt = claim()
    attempt.start(total_steps=100)

    attempt.succeed(floor.base_model, seconds=12.0, is_stopped_early=True, best_step=6)

    assert (reload(job).status, reload(job).step) == ("succeeded", 10)
    assert charged(organization) == 12 * MILLI_DOLLAR
    assert reload(job).adapter_version.metrics["best_step"] == 6


def test_the_bill_never_passes_the_cap(floor, organization, claim, reload):
    job = floor.job(spend_cap_nano=60 * MILLI_DOLLAR)

    attempt = claim()
    attempt.start()
    attempt.succeed(floor.base_model, seconds=80.0)

    assert reload(job).cost_nano == charged(organization) == 60 * MILLI_DOLLAR


@pytest.mark.parametrize(("held_seconds", "billed_seconds"), [(3600, 60), (45, 45), (7, 20)])
def test_a_start_is_billed_for_a_minute_of_the_gpu_or_for_as_long_as_it_held_it(
    floor, organization, claim, reload, held_seconds, billed_seconds
):
    job = floor.job()
    attempt = claim()
    attempt.start()
    held_since(attempt, held_seconds)

    attempt.succeed(floor.base_model, seconds=20.0)

    assert charged(organization) == pytest.approx(billed_seconds * MILLI_DOLLAR, abs=MILLI_DOLLAR)
    assert reload(job).runs.get().billed_gpu_ms == 20_000


def test_each_time_a_paused_job_goes_on_is_a_start_of_its_own(floor, organization, claim, reload):
    job = floor.job(spend_cap_nano=200 * MILLI_DOLLAR)
    for step in (1, 2):
        attempt = claim()
        attempt.start(start_step=step - 1)
        held_since(attempt, 300)
        paused_at(attempt, reload(job), step=step, seconds=1.0)
        if step == 1:
            control.resume(job=reload(job), by="key_test", now=db_now())

    assert charged(organization) == 120 * MILLI_DOLLAR


def test_an_attempt_that_we_lost_costs_no_minimum(floor, organization, claim, reload):
    job = floor.job()
    lost = claim()
    lost.start()
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
    attempt = claim()
    attempt.start()
    paused_at(attempt, job, step=5, seconds=40.0)

    for cap_nano in (None, 60 * MILLI_DOLLAR + 1, 100 * MILLI_DOLLAR - 1, 0):
        with pytest.raises(InvalidState, match=r"raise the cap to \$0\.10"):
            control.resume(job=reload(job), by="key_test", now=db_now(), spend_cap_nano=cap_nano)

    control.resume(job=reload(job), by="key_test", now=db_now(), spend_cap_nano=100 * MILLI_DOLLAR)
    assert reload(job).status == "queued"


def test_a_run_that_ends_before_it_is_stopped_at_its_cap_was_never_paused(floor, claim, reload):
    job = floor.job(spend_cap_nano=60 * MILLI_DOLLAR)
    attempt = claim()
    attempt.start()
    assert attempt.beat(training_seconds=50.0).is_pause_requested

    attempt.succeed(floor.base_model, seconds=52.0)

    assert reload(job).status == "succeeded"
    assert not [event.message for event in job.events.all() if "paus" in event.message.lower()]


def test_a_run_stopped_at_its_cap_says_so_when_it_has_paused(floor, claim, reload):
    job = floor.job(spend_cap_nano=60 * MILLI_DOLLAR)
    attempt = claim()
    attempt.start()
    attempt.beat(training_seconds=50.0)
    attempt.checkpoint(step=5, seconds=52.0)
    attempt.finish(wire.Stopped(reason="paused", step=5, training_seconds=52.0))

    assert reload(job).status == "paused"
    assert job.events.last().message == "Paused at the spend cap; the last checkpoint is kept"


def test_time_after_the_last_checkpoint_of_a_lost_attempt_is_not_billed(floor, organization, claim, reload):
    job = floor.job()
    first = claim()
    first.start()
    first.checkpoint(step=4, seconds=8.0)
    first.beat(step=7, training_seconds=14.0)

    first.fall_silent()
    leases.reclaim_expired_leases()
    second = claim()
    second.start(start_step=4)
    second.succeed(floor.base_model, seconds=11.0)

    assert second.claimed.spec.resume_from.step == 4
    assert reload(job).status == "succeeded"
    assert charged(organization) == 19 * MILLI_DOLLAR


def test_workers_of_a_spot_pool_save_for_the_losses_its_operator_expects(floor, claim):
    GpuPool.objects.filter(pk=floor.pool.pk).update(is_spot=True, interruptions_per_hour=4.0)
    floor.job()

    assert claim(Worker.objects.get(pk=floor.worker.pk)).claimed.spec.seconds_between_failures == 900


def test_a_worker_that_lost_its_lease_can_change_nothing(floor, claim, reload):
    job = floor.job()
    first = claim()
    first.start()
    first.fall_silent()
    leases.reclaim_expired_leases()
    second = claim()

    with pytest.raises(StaleLease):
        first.report(wire.LogLine, level="info", message="I am still here")
    with pytest.raises(StaleLease):
        first.beat()
    with pytest.raises(StaleLease):
        first.finish(wire.Failed(code=FailureCode.OUT_OF_MEMORY, message="late"))

    second.start()
    second.succeed(floor.base_model)
    assert reload(job).status == "succeeded"


def test_three_attempts_without_progress_end_the_job_unbilled(floor, organization, claim, reload):
    job = floor.job()

    for _ in range(3):
        attempt = claim()
        attempt.start()
        attempt.fall_silent()
        leases.reclaim_expired_leases()

    job = reload(job)
    assert (job.status, job.error_code) == ("failed", "crash_loop")
    assert (charged(organization), get_balance(organization=organization).held_nano) == (0, 0)


def test_a_broken_checkpoint_is_set_aside_and_the_one_before_is_used(floor, claim):
    floor.job()
    first = claim()
    first.start()
    first.checkpoint(step=2, seconds=4.0)
    first.checkpoint(step=4, seconds=8.0)
    first.fall_silent()
    leases.reclaim_expired_leases()

    second = claim()
    second.finish(wire.Failed(code=FailureCode.CHECKPOINT_INVALID, message="optimizer.pt differs from its manifest."))

    assert second.claimed.spec.resume_from.step == 4
    assert claim().claimed.spec.resume_from.step == 2


def test_steps_a_broken_checkpoint_alone_held_are_paid_when_they_are_trained_again(floor, organization, claim, reload):
    job = floor.job()
    first = claim()
    first.start()
    first.checkpoint(step=4, seconds=10.0)
    first.checkpoint(step=8, seconds=20.0)
    first.fall_silent()
    leases.reclaim_expired_leases()
    claim().finish(wire.Failed(code=FailureCode.CHECKPOINT_INVALID, message="optimizer.pt differs from its manifest."))

    third = claim()
    third.start(start_step=4)
    third.succeed(floor.base_model, seconds=15.0)

    assert reload(job).status == "succeeded"
    assert charged(organization) == 25 * MILLI_DOLLAR


def test_a_revoked_worker_loses_its_run_to_another(floor, claim, reload):
    job = floor.job()
    revoked = claim()
    revoked.start()
    operations.revoke(worker=floor.worker, by="user_operator")

    with pytest.raises(StaleLease):
        revoked.beat()
    with pytest.raises(StaleLease):
        revoked.succeed(floor.base_model)
    revoked.fall_silent()
    leases.reclaim_expired_leases()
    other = claim(make_worker(floor.pool, credential="annw_other"))
    other.start()
    other.succeed(floor.base_model)

    assert reload(job).status == "succeeded"


def test_the_machine_of_a_replica_gets_no_training_runs(floor, claim):
    floor.job()
    Worker.objects.filter(pk=floor.worker.pk).update(kind="replica")

    assert claim() is None


def test_attempts_that_were_stopped_in_order_are_no_crashes(floor, claim, reload):
    job = floor.job()
    for _ in range(2):
        attempt = claim()
        attempt.start()
        attempt.finish(wire.Stopped(reason="preempted", step=0, training_seconds=0.0))
    lost = claim()
    lost.start()
    lost.fall_silent()

    leases.reclaim_expired_leases()

    assert reload(job).status == "queued"


def test_a_users_mistake_is_not_tried_again_and_pays_for_durable_steps(floor, organization, claim, reload):
    job = floor.job()
    attempt = claim()
    attempt.start()
    attempt.checkpoint(step=4, seconds=8.0)

    attempt.finish(wire.Failed(code=FailureCode.LOSS_NOT_FINITE, message="The loss became infinite at step 5."))

    job = reload(job)
    assert (job.status, job.error_code, job.runs.count()) == ("failed", "loss_not_finite", 1)
    assert charged(organization) == 8 * MILLI_DOLLAR


def test_a_queued_job_is_cancelled_at_once_for_nothing(floor, organization, claim):
    job = floor.job()

    job = control.request_cancellation(job=job, by="key_test", now=db_now())

    assert (job.status, charged(organization), claim()) == ("cancelled", 0, None)


def test_a_running_job_keeps_its_checkpoint_when_cancelled_and_pays_up_to_it(floor, organization, claim, reload):
    job = floor.job()
    attempt = claim()
    attempt.start()

    control.request_cancellation(job=job, by="key_test", now=db_now())
    assert attempt.beat(step=3).is_cancel_requested
    attempt.checkpoint(step=3, seconds=6.0)
    attempt.finish(wire.Stopped(reason="cancelled", step=3, training_seconds=6.0))

    assert (reload(job).status, charged(organization)) == ("cancelled", 6 * MILLI_DOLLAR)
    assert Checkpoint.objects.filter(job=job, deleted_at=None).exists()


def test_a_result_that_arrives_after_the_cancellation_is_discarded(floor, organization, claim, reload):
    job = floor.job()
    attempt = claim()
    attempt.start()
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
    attempt = claim()
    attempt.start()
    attempt.succeed(floor.base_model)

    with pytest.raises(InvalidState):
        control.request_cancellation(job=job, by="key_test", now=db_now())


def held_since(attempt, seconds: float) -> None:
    """Have the worker's claim lie so many seconds back."""
    attempt_of = Run.objects.filter(pk=attempt.claimed.spec.run_id)
    attempt_of.update(leased_at=db_now() - timedelta(seconds=seconds))


def slow_report(base_model) -> dict:
    report = msgspec.to_builtins(probe_report(base_model))
    return report | {name: report[name] / 10_000 for name in report if name.startswith("tokens_per_second")}


def paused_at(attempt, job, *, step: int, seconds: float) -> None:
    control.request_pause(job=job, by="key_test", now=db_now())
    assert attempt.beat().is_pause_requested
    attempt.checkpoint(step=step, seconds=seconds)
    attempt.finish(wire.Stopped(reason="paused", step=step, training_seconds=seconds))


def test_a_pause_pays_for_durable_seconds_and_resuming_holds_the_rest_again(floor, organization, claim, reload):
    job = floor.job(spend_cap_nano=90 * MILLI_DOLLAR)
    attempt = claim()
    attempt.start()
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
        attempt = claim()
        attempt.start()
        paused_at(attempt, reload(job), step=step, seconds=seconds)
        control.resume(job=reload(job), by="key_test", now=db_now())

    last = claim()
    last.start(start_step=6)
    last.succeed(floor.base_model, seconds=8.0)

    assert (reload(job).cost_nano, charged(organization)) == (20 * MILLI_DOLLAR, 20 * MILLI_DOLLAR)
    assert get_spending(organization=organization).training_nano == 20 * MILLI_DOLLAR
    assert get_balance(organization=organization).held_nano == 0


def test_seconds_after_the_checkpoint_of_a_pause_are_not_billed(floor, organization, claim):
    job = floor.job(spend_cap_nano=60 * MILLI_DOLLAR)
    attempt = claim()
    attempt.start()
    attempt.checkpoint(step=3, seconds=5.0)
    control.request_pause(job=job, by="key_test", now=db_now())
    attempt.beat(step=5, training_seconds=9.0)

    attempt.finish(wire.Stopped(reason="paused", step=3, training_seconds=5.0))

    assert charged(organization) == 5 * MILLI_DOLLAR


def test_what_a_pause_charged_is_given_back_when_the_platform_fails_the_job(floor, organization, claim, reload):
    job = floor.job(spend_cap_nano=90 * MILLI_DOLLAR)
    attempt = claim()
    attempt.start()
    paused_at(attempt, job, step=5, seconds=9.0)
    control.resume(job=reload(job), by="key_test", now=db_now())

    claim().finish(wire.Failed(code=FailureCode.OUT_OF_MEMORY, message="Out of memory."))

    assert (reload(job).status, charged(organization)) == ("failed", 0)
    assert get_spending(organization=organization).training_nano == 0


def test_a_paused_job_can_be_cancelled_and_pays_no_more(floor, organization, claim, reload):
    job = floor.job(spend_cap_nano=60 * MILLI_DOLLAR)
    attempt = claim()
    attempt.start()
    paused_at(attempt, job, step=5, seconds=9.0)

    control.request_cancellation(job=reload(job), by="key_test", now=db_now())

    assert (reload(job).status, charged(organization)) == ("cancelled", 9 * MILLI_DOLLAR)


def test_a_job_cancelled_while_it_pauses_ends(floor, claim, reload):
    job = floor.job()
    attempt = claim()
    attempt.start()
    control.request_pause(job=job, by="key_test", now=db_now())
    attempt.beat()
    control.request_cancellation(job=reload(job), by="key_test", now=db_now())

    attempt.finish(wire.Stopped(reason="paused"))

    assert reload(job).status == "cancelled"


def test_a_job_paused_at_its_cap_goes_on_only_with_a_higher_one(floor, organization, claim, reload):
    job = floor.job(spend_cap_nano=60 * MILLI_DOLLAR)
    attempt = claim()
    attempt.start()
    assert attempt.beat(training_seconds=46.0).is_pause_requested
    attempt.checkpoint(step=5, seconds=47.0)
    attempt.finish(wire.Stopped(reason="paused", step=5, training_seconds=47.0))

    with pytest.raises(InvalidState, match="raise the cap"):
        control.resume(job=reload(job), by="key_test", now=db_now())
    control.resume(job=reload(job), by="key_test", now=db_now(), spend_cap_nano=120 * MILLI_DOLLAR)

    assert (reload(job).status, reload(job).spend_cap_nano) == ("queued", 120 * MILLI_DOLLAR)
    assert get_balance(organization=organization).held_nano == 73 * MILLI_DOLLAR


def test_resuming_without_the_money_leaves_the_job_paused(floor, organization, claim, reload):
    job = floor.job(spend_cap_nano=60 * MILLI_DOLLAR)
    attempt = claim()
    attempt.start()
    paused_at(attempt, job, step=5, seconds=9.0)

    with pytest.raises(QuotaExceeded):
        control.resume(job=reload(job), by="key_test", now=db_now(), spend_cap_nano=2 * CREDIT)

    assert (reload(job).status, reload(job).runs.count()) == ("paused", 1)


def test_a_run_about_to_pass_its_cap_is_asked_to_pause(floor, claim):
    floor.job(spend_cap_nano=60 * MILLI_DOLLAR)
    attempt = claim()
    attempt.start()

    assert not attempt.beat(training_seconds=35.0).is_pause_requested
    assert attempt.beat(training_seconds=46.0).is_pause_requested


def test_events_sent_twice_are_recorded_once(floor, claim):
    job = floor.job()
    attempt = claim()
    attempt.start()
    before = job.events.count()

    attempt.report(wire.LogLine, level="info", message="once")
    attempt.sequence -= 1
    attempt.report(wire.LogLine, level="info", message="once")

    assert job.events.count() == before + 1


def test_a_missing_file_keeps_a_run_from_finishing(floor, claim):
    floor.job()
    attempt = claim()
    attempt.start()
    files = adapter_files(floor.base_model)
    upload = attempt.upload("adapter", 10, files)
    store().delete(f"{upload.object_prefix}/adapter_model.safetensors")

    with pytest.raises(UploadIncomplete):
        attempt.finish(wire.Succeeded(upload_id=upload.pk, manifest_sha256=upload.manifest_sha256, step=10))


def test_an_adapter_that_could_not_be_served_fails_the_job_unbilled(floor, organization, claim, reload):
    job = floor.job()
    attempt = claim()
    attempt.start()
    files = adapter_files(floor.base_model) | {"adapter_model.safetensors": b"\x08\0\0\0\0\0\0\0{}      "}

    attempt.succeed(floor.base_model, files=files)

    assert (reload(job).error_code, charged(organization)) == ("adapter_rejected", 0)


def test_quotas_hold_a_run_back_and_say_why(floor, organization, claim, reload):
    quotas.set_quota(organization=organization, by="system", now=db_now(), concurrent_gpus=1, queued_jobs=2)
    floor.job()
    waiting = floor.job()

    claim()

    assert claim() is None
    assert "concurrent" in reload(waiting).waiting_reason
    with pytest.raises(QuotaExceeded, match="limit is 2"):
        floor.job()


def test_the_months_gpu_seconds_hold_back_what_would_pass_them(floor, organization, claim, reload):
    first, second = (floor.job(hyperparameters={"epochs": 40}) for _ in range(2))
    enough_for_one = math.ceil(first.estimate["train_seconds_p50"] * 1.5)
    quotas.set_quota(organization=organization, by="system", now=db_now(), gpu_seconds_per_month=enough_for_one)

    assert claim().claimed.spec.job_id == first.pk
    assert claim() is None
    assert "GPU-seconds" in reload(second).waiting_reason
    with pytest.raises(QuotaExceeded, match="promised to your unfinished jobs"):
        floor.job()


def test_a_cordoned_worker_gets_no_work(floor, claim):
    floor.job()
    operations.cordon(worker=floor.worker, by="user_operator")

    assert claim() is None


def test_a_drained_worker_gives_its_run_back_unbilled_for_the_move(floor, claim, reload):
    job = floor.job()
    attempt = claim()
    attempt.start()
    attempt.checkpoint(step=2, seconds=4.0)
    operations.drain(worker=floor.worker, by="user_operator")
    assert attempt.beat().is_drain_requested

    attempt.finish(wire.Stopped(reason="preempted", step=2, training_seconds=4.0))

    assert reload(job).status == "queued"
    assert Run.objects.get(job=job, status="queued").attempt == 2


def test_the_organization_that_had_least_goes_first(floor, rival, claim):
    give_credit(rival)
    ours = [floor.job() for _ in range(3)]
    theirs = make_job(rival, floor.base_model)
    Run.objects.filter(job__in=ours).update(created_at=db_now() - timedelta(minutes=15))  # waiting longer buys no more

    order = [claim().claimed.spec.job_id for _ in range(2)]

    assert order == [ours[0].pk, theirs.pk]


def test_what_held_the_gpu_counts_in_the_queue_although_it_cost_nothing(floor, rival, claim, reload):
    give_credit(rival)
    for _ in range(2):  # cancelled before training begins: nothing to pay, and an hour of the GPU
        job = floor.job()
        attempt = claim()
        held_since(attempt, 3600)
        control.request_cancellation(job=reload(job), by="key_test", now=db_now())
        attempt.finish(wire.Stopped(reason="cancelled"))
    ours = floor.job()
    theirs = make_job(rival, floor.base_model)

    assert charged(floor.organization) == 0
    assert [claim().claimed.spec.job_id for _ in range(2)] == [theirs.pk, ours.pk]


def test_an_organization_that_waited_long_enough_goes_before_a_smaller_share(floor, rival, claim):
    give_credit(rival)
    ours = [floor.job() for _ in range(2)]
    claim()
    theirs = make_job(rival, floor.base_model)
    Run.objects.filter(job__in=ours).update(created_at=db_now() - timedelta(hours=9))
    Run.objects.filter(job=ours[0]).update(leased_at=db_now() - timedelta(hours=8))

    assert [claim().claimed.spec.job_id for _ in range(2)] == [ours[1].pk, theirs.pk]


def test_a_run_far_back_in_its_own_queue_has_no_position(floor, monkeypatch):
    monkeypatch.setattr(queue_order, "_CANDIDATES", 1)
    runs = [floor.job().runs.get() for _ in range(2)]

    assert [queue_order.queue_position(run=run, now=db_now()) for run in runs] == [1, None]


@pytest.mark.parametrize(
    ("told", "cause"),
    [
        (
            (wire.MissingPart(kind="gguf", cause="the disk of the machine was full"),),
            "the disk of the machine was full",
        ),
        ((), "the worker did not deliver it and gave no reason"),
    ],
)
def test_a_job_without_an_export_that_it_promised_says_so(floor, claim, reload, told, cause):
    job = floor.job()
    job.requested |= {"exports": ["gguf"]}
    job.save(update_fields=["requested"])
    attempt = claim()
    attempt.start()

    attempt.succeed(floor.base_model, missing=told)

    job = reload(job)
    assert job.status == "succeeded" and job.adapter_version.exports == []
    assert job.adapter_version.missing == [{"kind": "gguf", "cause": cause}]
    warning, end = [(event.level, event.message) for event in job.events.order_by("sequence")][-2:]
    assert warning == ("warn", f"The GGUF file could not be made: {cause}. {list_missing(job.adapter_version)[0].fix}")
    assert end == ("info", "The job has successfully completed, without the GGUF file")


def test_a_job_that_promised_no_export_misses_none(floor, claim, reload):
    job = floor.job()
    attempt = claim()
    attempt.start()

    attempt.succeed(floor.base_model)

    assert reload(job).adapter_version.missing == []
    assert reload(job).events.order_by("sequence").last().message == "The job has successfully completed"
