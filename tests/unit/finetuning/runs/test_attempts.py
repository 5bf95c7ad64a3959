"""A job ends once, and survives the loss of any worker."""

import time
from urllib.parse import parse_qs, urlsplit

import pytest

from apps.billing.models import LedgerTransaction
from apps.billing.queries import get_balance
from apps.contracts import runs as wire
from apps.contracts.failures import FailureCode
from apps.core.database.clock import db_now
from apps.core.objects.store import store
from apps.finetuning.jobs import control
from apps.finetuning.models import Checkpoint, GpuPool, Worker
from apps.finetuning.pools import operations
from apps.finetuning.results.missing_parts import list_missing
from apps.finetuning.runs import attempts, leases
from apps.finetuning.runs.leases import StaleLease
from apps.finetuning.runs.uploads import UploadIncomplete
from apps.finetuning.usage.storage import stored_bytes
from apps.serving.queries import list_routes, serving_states
from tests.factories.finetuning import adapter_files, make_worker
from tests.support.attempts import charged, paused_at

MILLI_DOLLAR = 1_000_000  # what one second costs in these tests, in nano-USD


def test_a_job_is_queued_with_its_cost_held(floor, organization):
    job = floor.job()

    balance = get_balance(organization=organization)
    assert (job.status, balance.held_nano) == ("queued", job.spend_cap_nano)
    assert job.estimate["cost_nano_p90"] <= job.spend_cap_nano


def test_an_adapter_without_a_name_has_its_datasets_and_the_end_of_the_jobs_id(floor, claim, reload):
    job = floor.job()
    claim().start().succeed(floor.base_model)

    assert reload(job).adapter_version.adapter.name == f"{job.training_file.dataset.name} {job.pk[-4:]}"


def test_the_model_of_a_job_is_known_to_gateways_and_the_playground_when_the_job_ends(floor, claim, reload):
    job = floor.job()
    claim().start().succeed(floor.base_model)

    version = reload(job).adapter_version
    assert version.model_name in {route.model_name for route in list_routes()}
    assert serving_states(versions=[version])[version.pk].is_deployed


def test_workers_of_a_spot_pool_save_for_the_losses_its_operator_expects(floor, claim):
    GpuPool.objects.filter(pk=floor.pool.pk).update(is_spot=True, interruptions_per_hour=4.0)
    floor.job()

    assert claim(Worker.objects.get(pk=floor.worker.pk)).claimed.spec.seconds_between_failures == 900


def test_a_worker_that_lost_its_lease_can_change_nothing(floor, claim, reload):
    job = floor.job()
    first = claim().start()
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
        claim().start().fall_silent()
        leases.reclaim_expired_leases()

    job = reload(job)
    assert (job.status, job.error_code) == ("failed", "crash_loop")
    assert (charged(organization), get_balance(organization=organization).held_nano) == (0, 0)


def test_the_files_to_resume_from_may_take_hours_to_fetch(floor, claim):
    floor.job()
    first = claim().start()
    first.checkpoint(step=2, seconds=4.0)
    first.fall_silent()
    leases.reclaim_expired_leases()

    urls = [file.url for file in claim().claimed.spec.resume_from.files]

    assert all(int(parse_qs(urlsplit(url).query)["expires"][0]) > time.time() + 5 * 3600 for url in urls)


def test_a_broken_checkpoint_is_set_aside_unbilled_and_the_one_before_is_used(floor, organization, claim):
    floor.job()
    first = claim().start()
    first.checkpoint(step=2, seconds=4.0)
    first.checkpoint(step=4, seconds=8.0)
    first.fall_silent()
    leases.reclaim_expired_leases()

    second = claim()
    before = stored_bytes(organizations=[organization.pk]).total()
    second.finish(wire.Failed(code=FailureCode.CHECKPOINT_INVALID, message="optimizer.pt differs from its manifest."))

    broken = Checkpoint.objects.exclude(quarantined_at=None).get()
    assert before - stored_bytes(organizations=[organization.pk]).total() == broken.bytes > 0
    assert second.claimed.spec.resume_from.step == 4
    assert claim().claimed.spec.resume_from.step == 2


def test_steps_a_broken_checkpoint_alone_held_are_paid_when_they_are_trained_again(floor, organization, claim, reload):
    job = floor.job()
    first = claim().start()
    first.checkpoint(step=4, seconds=10.0)
    first.checkpoint(step=8, seconds=20.0)
    first.fall_silent()
    leases.reclaim_expired_leases()
    claim().finish(wire.Failed(code=FailureCode.CHECKPOINT_INVALID, message="optimizer.pt differs from its manifest."))

    claim().start(start_step=4).succeed(floor.base_model, seconds=15.0)

    assert reload(job).status == "succeeded"
    assert charged(organization) == 25 * MILLI_DOLLAR


def test_a_job_whose_checkpoints_were_all_refused_pays_only_for_its_new_start(floor, organization, claim, reload):
    job, refused = floor.job(), wire.Failed(code=FailureCode.CHECKPOINT_INVALID, message="optimizer.pt differs.")
    first = claim().start()
    first.checkpoint(step=4, seconds=10.0)
    first.finish(wire.Stopped(reason="preempted", step=4, training_seconds=10.0))
    second = claim().start(start_step=4)
    second.checkpoint(step=6, seconds=5.0)
    second.checkpoint(step=8, seconds=9.0)
    second.finish(wire.Stopped(reason="preempted", step=8, training_seconds=9.0))
    job.checkpoints.filter(step=4).update(deleted_at=db_now())  # as after two newer ones

    bills = []
    for _ in range(2):
        claim().finish(refused)
        bills.append(list(job.runs.order_by("attempt").values_list("billed_gpu_ms", flat=True))[:2])
    last = claim()
    last.start().succeed(floor.base_model, seconds=25.0)

    assert (bills, last.claimed.spec.resume_from) == ([[10_000, 5_000], [0, 0]], None)
    assert (reload(job).status, charged(organization)) == ("succeeded", 25 * MILLI_DOLLAR)


@pytest.mark.usefixtures("metered")
@pytest.mark.parametrize("how", ["cancelled", "paused", "succeeded"])
def test_steps_that_were_paid_at_a_pause_are_refunded_once_if_their_checkpoint_is_refused(
    floor, organization, claim, reload, how
):
    job = floor.job()
    first = claim().start()
    first.checkpoint(step=4, seconds=10.0)
    paused_at(first, job, step=8, seconds=20.0)
    assert charged(organization) == 20 * MILLI_DOLLAR
    control.resume(job=reload(job), by="key_test", now=db_now(), spend_cap_nano=200 * MILLI_DOLLAR)
    claim().finish(wire.Failed(code=FailureCode.CHECKPOINT_INVALID, message="optimizer.pt differs from its manifest."))

    if how == "cancelled":
        control.request_cancellation(job=reload(job), by="key_test", now=db_now())
    else:
        third = claim().start(start_step=4)
        if how == "paused":
            paused_at(third, job, step=5, seconds=3.0)
        else:
            third.succeed(floor.base_model, seconds=15.0)

    job, refunds = reload(job), LedgerTransaction.objects.filter(kind="refund", source=job.pk)
    cost = {"cancelled": 10, "paused": 13, "succeeded": 25}[how] * MILLI_DOLLAR
    assert (job.status, job.cost_nano, charged(organization)) == (how, cost, cost)
    assert refunds.count() == (how != "succeeded")
    said = job.events.filter(message__startswith="Refunded $", data__refunded_nano=20 * MILLI_DOLLAR - cost)
    assert said.count() == refunds.count()
    if how == "paused":
        control.resume(job=job, by="key_test", now=db_now())
        claim().start(start_step=5).succeed(floor.base_model, seconds=9.0)
        assert (charged(organization), refunds.count()) == (22 * MILLI_DOLLAR, 1)


def test_a_revoked_worker_loses_its_run_to_another(floor, claim, reload):
    job = floor.job()
    revoked = claim().start()
    operations.revoke(worker=floor.worker, by="user_operator")

    with pytest.raises(StaleLease):
        revoked.beat()
    with pytest.raises(StaleLease):
        revoked.succeed(floor.base_model)
    revoked.fall_silent()
    leases.reclaim_expired_leases()
    other = claim(make_worker(floor.pool, credential="annw_other")).start()
    other.succeed(floor.base_model)

    assert reload(job).status == "succeeded"


def test_attempts_that_were_stopped_in_order_are_no_crashes(floor, claim, reload):
    job = floor.job()
    for _ in range(2):
        claim().start().finish(wire.Stopped(reason="preempted", step=0, training_seconds=0.0))
    claim().start().fall_silent()

    leases.reclaim_expired_leases()

    assert reload(job).status == "queued"


def test_pauses_are_no_losses(floor, claim, reload, monkeypatch):
    monkeypatch.setattr(attempts, "MAX_LOST_ATTEMPTS", 2)
    job = floor.job()
    paused_at(claim().start(), job, step=4, seconds=5.0)
    control.resume(job=reload(job), by="key_test", now=db_now(), spend_cap_nano=200 * MILLI_DOLLAR)

    claim().start(start_step=4).fall_silent()
    leases.reclaim_expired_leases()

    assert reload(job).status == "queued"


def test_a_users_mistake_is_not_tried_again_and_pays_for_durable_steps(floor, organization, claim, reload):
    job = floor.job()
    attempt = claim().start()
    attempt.checkpoint(step=4, seconds=8.0)

    attempt.finish(wire.Failed(code=FailureCode.LOSS_NOT_FINITE, message="The loss became infinite at step 5."))

    job = reload(job)
    assert (job.status, job.error_code, job.runs.count()) == ("failed", "loss_not_finite", 1)
    assert charged(organization) == 8 * MILLI_DOLLAR


def test_events_sent_twice_are_recorded_once(floor, claim):
    job = floor.job()
    attempt = claim().start()
    before = job.events.count()

    attempt.report(wire.LogLine, level="info", message="once")
    attempt.sequence -= 1
    attempt.report(wire.LogLine, level="info", message="once")

    assert job.events.count() == before + 1


def test_a_missing_file_keeps_a_run_from_finishing(floor, claim):
    floor.job()
    attempt = claim().start()
    files = adapter_files(floor.base_model)
    upload = attempt.upload("adapter", 10, files)
    store().delete(f"{upload.object_prefix}/adapter_model.safetensors")

    with pytest.raises(UploadIncomplete):
        attempt.finish(wire.Succeeded(upload_id=upload.pk, manifest_sha256=upload.manifest_sha256, step=10))


def test_an_adapter_that_could_not_be_served_fails_the_job_unbilled(floor, organization, claim, reload):
    job = floor.job()
    attempt = claim().start()
    files = adapter_files(floor.base_model) | {"adapter_model.safetensors": b"\x08\0\0\0\0\0\0\0{}      "}

    attempt.succeed(floor.base_model, files=files)

    assert (reload(job).error_code, charged(organization)) == ("adapter_rejected", 0)


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
    attempt = claim().start()

    attempt.succeed(floor.base_model, missing=told)

    job = reload(job)
    assert job.status == "succeeded" and job.adapter_version.exports == []
    assert job.adapter_version.missing == [{"kind": "gguf", "cause": cause}]
    warning, end = [(event.level, event.message) for event in job.events.order_by("sequence")][-2:]
    [part] = list_missing(job.adapter_version)
    assert warning == ("warn", f"The GGUF file could not be delivered: {cause}. {part.fix}")
    assert end == ("info", "The job has successfully completed, without the GGUF file")


def test_an_evaluation_that_the_worker_left_out_is_missing_where_rows_are_held_out(floor, claim, reload):
    job = floor.job()
    attempt = claim().start()

    attempt.succeed(floor.base_model, valid_loss=1.5)

    unsaid = "the worker did not deliver it and gave no reason"
    assert reload(job).adapter_version.missing == [{"kind": "evaluation", "cause": unsaid}]


def test_a_job_that_promised_no_export_misses_none(floor, claim, reload):
    job = floor.job()
    attempt = claim().start()

    attempt.succeed(floor.base_model)

    assert reload(job).adapter_version.missing == []
    assert reload(job).events.order_by("sequence").last().message == "The job has successfully completed"
