"""The end of an attempt as its worker reports it: adapter, bill, audit and state in one transaction."""

import datetime
from typing import TypedDict, Unpack, assert_never

import msgspec
from django.db import transaction

from apps.adapters.models import AdapterVersion
from apps.adapters.operations import AdapterRejected
from apps.contracts import runs as wire
from apps.contracts.failures import FailureCode
from apps.contracts.hyperparameters import Method
from apps.core.database.clock import db_now
from apps.core.database.transitions import advance, try_advance
from apps.core.errors import InvalidValue
from apps.core.ids import ulid_of
from apps.core.messages import outbox, tracing
from apps.core.money import rated
from apps.finetuning import events
from apps.finetuning.lifecycle import NO_LEASE, RUN_TRANSITIONS, RunStatus
from apps.finetuning.models import Checkpoint, FineTuningJob, Run, RunUpload
from apps.finetuning.queries import latest_checkpoint
from apps.finetuning.quotes.delivery import GGUF, MERGED_16BIT
from apps.finetuning.recipes.limits import kind_of
from apps.finetuning.recipes.stored_requests import recipe_of, stored_request
from apps.finetuning.results.attempt_traces import trace_attempt
from apps.finetuning.results.checkpoint_models import version_of_job
from apps.finetuning.results.checkpoints import forget_checkpoints
from apps.finetuning.results.missing_parts import find_missing, list_missing
from apps.finetuning.runs import attempts, outcomes
from apps.finetuning.runs.leases import Lease, lock_run
from apps.finetuning.runs.reports import make_durable
from apps.finetuning.runs.uploads import find_upload, require_complete, verify_uploads
from apps.finetuning.usage import charges
from apps.serving.operations import publish

_MOST_EXPORTS = len((MERGED_16BIT, GGUF))


class _RunChanges(TypedDict, total=False):
    failure_code: str
    failure_message: str
    log_tail: str


def finish_run(*, lease: Lease, outcome: wire.RunOutcome) -> tuple[Run, FineTuningJob]:
    """End the attempt: adapter, bill, audit and state in one transaction.

    Raises StaleLease, UploadIncomplete, and FilesUnread until the delivered files were read; the worker then repeats
    the call. They are read before the transaction and outside of requests, so that heartbeats never wait for it.
    """
    if isinstance(outcome, wire.Succeeded):
        if len(outcome.exports) > _MOST_EXPORTS:
            raise InvalidValue("An export was not requested, or was sent twice.", param="exports")
        verify_uploads(lease, (outcome.upload_id, *(export.upload_id for export in outcome.exports)))
    return _finish_run(lease, outcome)


@transaction.atomic
def _finish_run(lease: Lease, outcome: wire.RunOutcome) -> tuple[Run, FineTuningJob]:
    run, job = lock_run(lease=lease)
    end_attempt(run, job, outcome)
    run.refresh_from_db()
    job.refresh_from_db()
    return run, job


def end_attempt(run: Run, job: FineTuningJob, outcome: wire.RunOutcome) -> None:
    """End an attempt whose run and job are locked. Raises UploadIncomplete."""
    now = db_now()
    name = "publish" if isinstance(outcome, wire.Succeeded) else "end attempt"
    span = tracing.begin_child(
        name,
        parent=job.traceparent,
        attributes={"anneal.job.id": job.pk, "anneal.run.id": run.pk, "anneal.run.attempt": run.attempt},
    )
    with tracing.working(span):
        match outcome:
            case wire.Succeeded():
                _finish_succeeded(run, job, outcome, now)
            case wire.Failed():
                _finish_failed(run, job, outcome, now)
            case wire.Stopped():
                _finish_stopped(run, job, outcome, now)
            case _:
                assert_never(outcome)
    trace_attempt(run=run, job=job)


def _finish_succeeded(run: Run, job: FineTuningJob, outcome: wire.Succeeded, now: datetime.datetime) -> None:
    if job.cancel_requested_at:  # requested after the worker's last heartbeat: the result is not wanted
        _end_run(run, RunStatus.CANCELLED, outcome, now)
        attempts.cancel_job(job=job, now=now)
        for upload in run.uploads.exclude(kind="checkpoint"):
            outbox.publish(topic="objects.delete", key=f"delete:{upload.pk}", payload={"prefix": upload.object_prefix})
        return
    upload = find_upload(run, outcome.upload_id, kind="model" if job.method == Method.FULL else "adapter")
    require_complete(upload=upload, manifest_sha256=outcome.manifest_sha256)
    if failure := _undelivered(job, outcome):
        _finish_failed(run, job, failure, now)
        return
    try:
        with transaction.atomic():
            version = _publish(job, run, upload, outcome)
    except AdapterRejected as rejected:
        failure = wire.Failed(code=FailureCode.ADAPTER_REJECTED, message=rejected.message)
        _finish_failed(run, job, failure, now)
        return
    make_durable(run, job, step=outcome.step, training_seconds=outcome.training_seconds)
    _end_run(run, RunStatus.SUCCEEDED, outcome, now)
    missing = list_missing(version)
    for part in missing:
        events.append(job, level="warn", message=part.message)
    attempts.succeed_job(
        job=job,
        now=now,
        without=tuple(part.label for part in missing),
        adapter_version=version,
        trained_tokens=outcome.trained_tokens,
        step=outcome.step,
    )
    outcomes.record_success(run=run, job=job, tokens=outcome.tokens, now=now)
    forget_checkpoints(job=job)


def _undelivered(job: FineTuningJob, outcome: wire.Succeeded) -> wire.Failed | None:
    """Return the failure of a result whose only form is missing. What only could not be stored is tried again."""
    if job.method == Method.FULL or _is_served(job):
        return None
    cause = next((part["cause"] for part in find_missing(job, outcome) if part["kind"] == MERGED_16BIT), None)
    if cause is None:
        return None
    is_made = any(part.is_made for part in outcome.missing if part.kind == MERGED_16BIT)
    return wire.Failed(
        code=FailureCode.OBJECT_STORE_UNAVAILABLE if is_made else FailureCode.DELIVERY_FAILED,
        message=f"The result is delivered as a merged model, which is missing: {cause}.",
    )


def _is_served(job: FineTuningJob) -> bool:
    """Return whether the shared engines load the adapter; otherwise a whole model is delivered."""
    recipe = recipe_of(job)
    return kind_of(base_model=job.base_model, recipe=recipe).delivered_as == "adapter"


def _publish(job: FineTuningJob, run: Run, upload: RunUpload, outcome: wire.Succeeded) -> AdapterVersion:
    new = version_of_job(
        job,
        source=run.pk,
        ulid=ulid_of(job.pk),
        object_prefix=upload.object_prefix,
        manifest=upload.manifest,
        manifest_sha256=upload.manifest_sha256,
        metrics={
            "train_loss": outcome.train_loss,
            "valid_loss": outcome.valid_loss,
            "step": outcome.step,
            "best_step": outcome.best_step,
            "is_stopped_early": outcome.is_stopped_early,
        },
        report=msgspec.to_builtins(outcome.report) if outcome.report else {},
        exports=_exports(run, job, outcome),
        missing=find_missing(job, outcome),
        is_servable=_is_served(job),
    )
    return publish(new)


def _exports(run: Run, job: FineTuningJob, outcome: wire.Succeeded) -> list[dict[str, object]]:
    """Return the requested other forms of the result. Raises InvalidValue for any other, UploadIncomplete."""
    kinds = [export.kind for export in outcome.exports]
    if len(set(kinds)) < len(kinds) or not set(kinds) <= set(stored_request(job).exports):
        raise InvalidValue("An export was not requested, or was sent twice.", param="exports")
    return [_export(run, export) for export in outcome.exports]


def _export(run: Run, export: wire.Export) -> dict[str, object]:
    """Return one other form of the result, as stored with the version. Raises UploadIncomplete."""
    upload = find_upload(run, export.upload_id, kind="model")
    require_complete(upload=upload, manifest_sha256=export.manifest_sha256)
    return {
        "kind": export.kind,
        "object_prefix": upload.object_prefix,
        "manifest": upload.manifest,
        "manifest_sha256": upload.manifest_sha256,
        "bytes": sum(file["bytes"] for file in upload.manifest["files"]),
    }


def _finish_failed(run: Run, job: FineTuningJob, outcome: wire.Failed, now: datetime.datetime) -> None:
    _end_run(
        run,
        RunStatus.FAILED,
        outcome,
        now,
        failure_code=outcome.code,
        failure_message=outcome.message[:500],
        log_tail=outcome.log_tail[-20_000:],
    )
    if outcome.code is FailureCode.CHECKPOINT_INVALID and run.resume_from:
        _quarantine(run.resume_from, job, now)
    if outcome.code.is_retryable:
        events.append(job, level="warn", message=f"Attempt {run.attempt} failed: {outcome.message}")
        attempts.continue_or_give_up(job=job, run=run, code=outcome.code, now=now)
    else:
        param = "training_file" if outcome.code is FailureCode.INVALID_TRAINING_FILE else ""
        attempts.fail_job(job=job, code=outcome.code, message=outcome.message, now=now, param=param)
    if outcome.code is FailureCode.OUT_OF_MEMORY:
        outcomes.record_out_of_memory(run=run, job=job)


def _quarantine(checkpoint: Checkpoint, job: FineTuningJob, now: datetime.datetime) -> None:
    """Set the checkpoint aside, and remove from the bill the steps that the newest of the others does not hold.

    These are trained again. What was charged for them at a pause or a move pays for that, and is refunded when the job
    stops before (attempts.py). What was billed before a move is removed at the price of its attempt's pool.
    """
    checkpoint.quarantined_at = now
    checkpoint.save(update_fields=["quarantined_at"])
    elsewhere = job.runs.exclude(pool=job.pool_id).order_by("-attempt").first()
    kept = _held_by(latest_checkpoint(job=job))
    for run in job.runs.order_by("attempt"):
        step, kept_ms = kept.get(run.pk, (0, 0))
        if run.durable_step <= step:
            continue
        billed_ms = charges.billed_ms(job=job)
        run.durable_step, run.billed_gpu_ms = step, min(run.billed_gpu_ms, kept_ms)
        run.save(update_fields=["durable_step", "billed_gpu_ms"])
        removed_ms = billed_ms - charges.billed_ms(job=job)
        if removed_ms and elsewhere is not None and run.attempt <= elsewhere.attempt:  # billed before the job moved
            price = attempts.price_of(run=run)
            removed_nano = rated(quantity=removed_ms, price_nano=price.price_nano, per=price.per) if price else 0
            job.moved_gpu_ms = max(job.moved_gpu_ms - removed_ms, 0)
            job.moved_nano = max(job.moved_nano - removed_nano, 0) if job.moved_gpu_ms else 0
    job.save(update_fields=["moved_gpu_ms", "moved_nano"])


def _held_by(checkpoint: Checkpoint | None) -> dict[str, tuple[int, int]]:
    """Return the last step and the billed GPU milliseconds that the checkpoint holds of each attempt, by the run's id.

    They are of its own attempt, and of those before it from whose checkpoints the training was resumed.
    """
    held: dict[str, tuple[int, int]] = {}
    while checkpoint is not None:
        held[checkpoint.run_id] = (checkpoint.step, checkpoint.billed_gpu_ms)
        checkpoint = checkpoint.run.resume_from
    return held


def _finish_stopped(run: Run, job: FineTuningJob, outcome: wire.Stopped, now: datetime.datetime) -> None:
    is_paused = outcome.reason == wire.StopReason.PAUSED
    # The cancellation may come after the pause.
    if job.cancel_requested_at and (is_paused or outcome.reason == wire.StopReason.CANCELLED):
        _end_run(run, RunStatus.CANCELLED, outcome, now)
        attempts.cancel_job(job=job, now=now)
    elif is_paused and job.pause_requested_at:
        _end_run(run, RunStatus.PAUSED, outcome, now)
        attempts.pause_job(job=job, now=now)
    else:
        _end_run(run, RunStatus.LOST, outcome, now, failure_code=FailureCode.PREEMPTED)
        attempts.continue_or_give_up(job=job, run=run, code=FailureCode.PREEMPTED, now=now)


def _end_run(
    run: Run, status: RunStatus, outcome: wire.Outcome, now: datetime.datetime, **changes: Unpack[_RunChanges]
) -> None:
    if status is RunStatus.SUCCEEDED:
        try_advance(run, to=RunStatus.RUNNING, transitions=RUN_TRANSITIONS)
    advance(
        run,
        to=status,
        transitions=RUN_TRANSITIONS,
        finished_at=now,
        peak_memory_bytes=outcome.peak_memory_bytes,
        **NO_LEASE,
        **changes,
    )
