"""Workers' reports under a lease: events, uploads and the end of the attempt, each taken in at most once."""

import datetime
import hashlib
from typing import Any, assert_never

import msgspec
from django.db import transaction

from apps.adapters.models import AdapterVersion
from apps.adapters.operations import AdapterRejected, NewVersion, publish_version
from apps.contracts import runs as wire
from apps.contracts.failures import FailureCode
from apps.contracts.result_files import problem_of
from apps.contracts.runs import Manifest
from apps.contracts.worker_api import EventsResponse, UploadResponse
from apps.core.database.clock import db_now
from apps.core.database.locks import lock
from apps.core.database.transitions import advance, try_advance
from apps.core.errors import DomainError, InvalidValue, RateLimited
from apps.core.ids import ulid_of
from apps.core.messages import outbox
from apps.core.objects.store import ObjectMissing, hash_object, object_key, read_object, store
from apps.finetuning import events
from apps.finetuning.lifecycle import NO_LEASE, RUN_TRANSITIONS
from apps.finetuning.models import Checkpoint, FineTuningJob, JobEvent, Run, Upload
from apps.finetuning.results.checkpoints import forget_checkpoints
from apps.finetuning.results.missing_parts import find_missing, list_missing
from apps.finetuning.runs import attempts, outcomes, stalls
from apps.finetuning.runs.leases import Lease, lock_run, sha256_hex

MANIFEST_NAME = "manifest.json"
_PUT_SECONDS = 900
_EVENTS_AT_ONCE, _EVENTS_A_SECOND = 5_000, 20
_MAX_UPLOADS = 10_000  # per run
# Full training stores weights, gradients and two moments of each parameter in 32 bits, and some also in 16 bits.
_MAX_BYTES_A_PARAMETER, _BYTES_BESIDE = 20, 2**30
_EVENTS_OF_A_STEP = 20  # a checkpoint's own step and evaluation are among the last 20 events
_OF_A_CHECKPOINT = ("train_mean_token_accuracy", "valid_loss", "valid_mean_token_accuracy")


class UploadIncomplete(DomainError):
    """The object store lacks something that the manifest lists."""

    code = "upload_incomplete"


@transaction.atomic
def record_events(*, lease: Lease, reported: tuple[wire.RunEvent, ...]) -> EventsResponse:
    """Record the new events in order; ignore repeats. Raises StaleLease."""
    run, job = lock_run(lease=lease)
    _require_pace(run, max((event.sequence for event in reported), default=0))
    fresh = [event for event in sorted(reported, key=lambda e: e.sequence) if event.sequence > run.last_sequence]
    for event in fresh:
        if stalls.is_step(event, job):
            run.idle_ms = run.stepless_ms = 0
        _record(run, job, event)
    if fresh:
        run.last_sequence = fresh[-1].sequence
        run.save(update_fields=["last_sequence", "idle_ms", "stepless_ms"])
    return EventsResponse(accepted=len(fresh), last_sequence=run.last_sequence)


def _require_pace(run: Run, sequence: int) -> None:
    """Raise RateLimited for more events than a run can have; the sequence counts them, because it has no gaps."""
    age_seconds = (db_now() - run.leased_at).total_seconds() if run.leased_at else 0.0
    if sequence > _EVENTS_AT_ONCE + _EVENTS_A_SECOND * age_seconds:
        raise RateLimited("A run reports at most a few events a second.", retry_after_seconds=10)


def _record(run: Run, job: FineTuningJob, event: wire.RunEvent) -> None:
    match event:
        case wire.PhaseChanged():
            if run.phase == event.phase:
                return  # both the worker and its trainer report fetching
            run.phase = event.phase
            run.save(update_fields=["phase"])
            events.append(job, type="state", message=f"{event.phase.capitalize()}", phase=event.phase)
        case wire.TrainingStarted():
            _start_training(run, job, event)
        case wire.StepCompleted():
            _record_step(run, job, event)
        case wire.EvaluationCompleted():
            _record_evaluation(job, event)
        case wire.CheckpointSaved():
            _record_checkpoint(run, job, event)
        case wire.LogLine():
            level = event.level if event.level in ("info", "warn", "error") else "info"
            events.append(job, level=level, message=event.message)
        case _:
            assert_never(event)


def _record_evaluation(job: FineTuningJob, event: wire.EvaluationCompleted) -> None:
    events.append(
        job,
        type="metrics",
        message=f"Evaluated at step {event.step}",
        step=event.step,
        valid_loss=event.valid_loss,
        valid_mean_token_accuracy=event.valid_mean_token_accuracy,
    )


def _start_training(run: Run, job: FineTuningJob, event: wire.TrainingStarted) -> None:
    advance(run, to="running", transitions=RUN_TRANSITIONS, training_started_at=db_now())
    job.total_steps, job.step = event.total_steps, event.start_step
    job.save(update_fields=["total_steps", "step"])
    events.append(
        job,
        type="state",
        message=f"Training started at step {event.start_step} of {event.total_steps}",
        total_steps=event.total_steps,
        start_step=event.start_step,
        attempt=run.attempt,
    )


def _record_step(run: Run, job: FineTuningJob, event: wire.StepCompleted) -> None:
    job.step, job.total_steps, job.trained_tokens = event.step, event.total_steps, event.trained_tokens
    job.save(update_fields=["step", "total_steps", "trained_tokens"])
    data: dict[str, Any] = {
        "step": event.step,
        "total_steps": event.total_steps,
        "percent": round(100 * event.step / event.total_steps, 2) if event.total_steps else None,
        "epoch": event.epoch,
        "train_loss": event.train_loss,
        "train_mean_token_accuracy": event.train_mean_token_accuracy,
        "learning_rate": event.learning_rate,
        "grad_norm": event.grad_norm,
        "tokens_per_second": event.tokens_per_second,
        "memory_bytes": event.memory_bytes,
        "gpu_utilization": event.gpu_utilization,
        "eta_seconds": event.eta_seconds,
        "training_seconds": event.training_seconds,
        "attempt": run.attempt,
    }
    message = f"Step {event.step}/{event.total_steps}: training loss={event.train_loss:.4f}"
    events.append(job, type="metrics", message=message, **data)


def _record_checkpoint(run: Run, job: FineTuningJob, event: wire.CheckpointSaved) -> None:
    upload = _result(run, event.upload_id, kind="checkpoint")
    require_complete(upload=upload, manifest_sha256=event.manifest_sha256)
    _make_durable(run, job, step=event.step, training_seconds=event.training_seconds)
    Checkpoint.objects.get_or_create(
        run=run,
        step=event.step,
        defaults={
            "organization_id": run.organization_id,
            "job": job,
            "upload": upload,
            "bytes": event.bytes,
            "metrics": _metrics_at(job, event),
            "billed_gpu_ms": run.billed_gpu_ms,
        },
    )
    events.append(job, message=f"Checkpoint saved at step {event.step}", step=event.step, bytes=event.bytes)
    forget_checkpoints(job=job)


def _metrics_at(job: FineTuningJob, event: wire.CheckpointSaved) -> dict[str, Any]:
    """Return the metrics of the checkpoint's step from the latest events; its evaluation, if any, comes before it."""
    found: dict[str, Any] = {"step": event.step, "train_loss": event.train_loss}
    for seen in JobEvent.objects.filter(job=job, type="metrics").order_by("-sequence")[:_EVENTS_OF_A_STEP]:
        if seen.data.get("step") == event.step:
            found |= {name: seen.data[name] for name in _OF_A_CHECKPOINT if seen.data.get(name) is not None}
    return found


def _make_durable(run: Run, job: FineTuningJob, *, step: int, training_seconds: float) -> None:
    """Bill the attempt's time up to a durable step on each GPU.

    The worker's count is limited to the time that passed on the database's clock.
    """
    if run.training_started_at is None:
        return
    seen_ms = int((db_now() - run.training_started_at).total_seconds() * 1000)
    counted_ms = int(max(training_seconds, 0) * 1000)
    run.durable_step = max(run.durable_step, step)
    run.billed_gpu_ms = max(run.billed_gpu_ms, min(counted_ms, seen_ms) * job.gpu_count)
    run.save(update_fields=["durable_step", "billed_gpu_ms"])


@transaction.atomic
def create_upload(*, lease: Lease, manifest: Manifest, manifest_sha256: str) -> UploadResponse:
    """Return a signed PUT URL for each file of the manifest; the same manifest gets the same locations."""
    run, job = lock_run(lease=lease)
    body = msgspec.json.encode(manifest)
    if hashlib.sha256(body).hexdigest() != manifest_sha256:
        raise InvalidValue("manifest_sha256 is not the hash of the manifest's own encoding", param="manifest_sha256")
    if manifest.kind not in ("checkpoint", "adapter", "model"):
        raise InvalidValue("kind must be checkpoint, adapter or model", param="manifest.kind")
    if (manifest.run_id, manifest.attempt) != (run.pk, run.attempt):
        raise InvalidValue("The manifest is of another run or attempt.", param="manifest.run_id")
    if problem := problem_of(manifest):
        raise InvalidValue(problem, param="manifest.files")
    if sum(file.bytes for file in manifest.files) > _most_bytes(job):
        raise InvalidValue("The files are larger than anything made of this base model.", param="manifest.files")
    if run.uploads.exclude(manifest_sha256=manifest_sha256).count() >= _MAX_UPLOADS:
        raise InvalidValue(f"A run has at most {_MAX_UPLOADS} uploads.", param="manifest")
    upload, _ = Upload.objects.get_or_create(
        run=run,
        manifest_sha256=manifest_sha256,
        defaults={
            "organization_id": run.organization_id,
            "kind": manifest.kind,
            "manifest": msgspec.to_builtins(manifest),
            # The key contains the attempt and the content, so a zombie of an older attempt writes elsewhere.
            "object_prefix": object_key(
                run.organization_id, "runs", run.job_id, f"a{run.attempt}", manifest.kind, manifest_sha256[:32]
            ),
        },
    )
    names = [file.name for file in manifest.files] + [MANIFEST_NAME]
    sizes = {file.name: file.bytes for file in manifest.files} | {MANIFEST_NAME: len(body)}
    urls = {
        name: store().signed_url(
            f"{upload.object_prefix}/{name}",
            "PUT",
            expires_seconds=_PUT_SECONDS,
            base="internal",
            content_bytes=sizes[name],
            is_once=True,  # a verified file cannot be overwritten while the URL is valid
        )
        for name in names
    }
    return UploadResponse(upload_id=upload.pk, files=urls)


def _most_bytes(job: FineTuningJob) -> int:
    return _BYTES_BESIDE + _MAX_BYTES_A_PARAMETER * job.base_model.parameter_count


def require_complete(*, upload: Upload, manifest_sha256: str) -> None:
    """Raise UploadIncomplete unless every file is stored and the manifest has the expected hash."""
    if upload.manifest_sha256 != manifest_sha256:
        raise UploadIncomplete("The manifest is not the one this upload was opened for.")
    try:
        for file in upload.manifest["files"]:
            is_hashed = upload.kind != "checkpoint" and upload.verified_at is None
            _require_file(f"{upload.object_prefix}/{file['name']}", file, is_hashed=is_hashed)
        body = read_object(f"{upload.object_prefix}/{MANIFEST_NAME}")
    except ObjectMissing as missing:
        raise UploadIncomplete("A file of the manifest was not uploaded.") from missing
    if hashlib.sha256(body).hexdigest() != manifest_sha256:
        raise UploadIncomplete("The stored manifest differs from the one promised.")


def _require_file(key: str, promised: dict[str, Any], *, is_hashed: bool) -> None:
    """Check one file's size, and its hash if `is_hashed`.

    Checkpoints are large, and the run that resumes from one hashes it again. Files for customers are hashed here.
    """
    if store().stat(key).bytes != promised["bytes"]:
        raise UploadIncomplete(f"{promised['name']} has another size than the manifest says.")
    if is_hashed and hash_object(key).sha256 != promised["sha256"]:
        raise UploadIncomplete(f"{promised['name']} has another content than the manifest says.")


def finish_run(*, lease: Lease, outcome: wire.RunOutcome) -> tuple[Run, FineTuningJob]:
    """End the attempt: adapter, bill, audit and state in one transaction. Raises StaleLease, UploadIncomplete.

    The files are hashed before the transaction, because hashing is slow and heartbeats must not wait. If the worker
    repeats the call in the meantime, it waits for the same hashes.
    """
    if isinstance(outcome, wire.Succeeded):
        for upload_id in (outcome.upload_id, *(export.upload_id for export in outcome.exports)):
            _verify(lease, upload_id)
    return _finish_run(lease, outcome)


@transaction.atomic
def _verify(lease: Lease, upload_id: str) -> None:
    """Hash an upload of the lease, once. Raises UploadIncomplete."""
    lock(f"upload:{upload_id}")
    upload = Upload.objects.filter(
        pk=upload_id, run__lease_id=lease.id, run__lease_token_sha256=sha256_hex(lease.token), verified_at=None
    ).first()
    if upload is not None:
        require_complete(upload=upload, manifest_sha256=upload.manifest_sha256)
        Upload.objects.filter(pk=upload.pk).update(verified_at=db_now())


@transaction.atomic
def _finish_run(lease: Lease, outcome: wire.RunOutcome) -> tuple[Run, FineTuningJob]:
    run, job = lock_run(lease=lease)
    now = db_now()
    match outcome:
        case wire.Succeeded():
            _finish_succeeded(run, job, outcome, now)
        case wire.Failed():
            _finish_failed(run, job, outcome, now)
        case wire.Stopped():
            _finish_stopped(run, job, outcome, now)
        case _:
            assert_never(outcome)
    run.refresh_from_db()
    job.refresh_from_db()
    return run, job


def _finish_succeeded(run: Run, job: FineTuningJob, outcome: wire.Succeeded, now: datetime.datetime) -> None:
    if job.cancel_requested_at:  # requested after the worker's last heartbeat: the result is not wanted
        _discard_result(run, job, outcome, now)
        return
    upload = _result(run, outcome.upload_id, kind="model" if job.method == wire.Method.FULL else "adapter")
    require_complete(upload=upload, manifest_sha256=outcome.manifest_sha256)
    try:
        with transaction.atomic():
            version = _publish(job, run, upload, outcome)
    except AdapterRejected as rejected:
        failure = wire.Failed(code=FailureCode.ADAPTER_REJECTED, message=rejected.message)
        _finish_failed(run, job, failure, now)
        return
    _make_durable(run, job, step=outcome.step, training_seconds=outcome.training_seconds)
    _end_run(run, "succeeded", outcome, now)
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


def _discard_result(run: Run, job: FineTuningJob, outcome: wire.Succeeded, now: datetime.datetime) -> None:
    """End the job as cancelled, keep its checkpoints and delete the result."""
    _end_run(run, "cancelled", outcome, now)
    attempts.cancel_job(job=job, now=now)
    for upload in run.uploads.exclude(kind="checkpoint"):
        outbox.publish(topic="objects.delete", key=f"delete:{upload.pk}", payload={"prefix": upload.object_prefix})


def _publish(job: FineTuningJob, run: Run, upload: Upload, outcome: wire.Succeeded) -> AdapterVersion:
    new = NewVersion(
        organization=job.organization,
        base_model=job.base_model,
        adapter_name=job.adapter_name,
        suffix=job.suffix,
        source=run.pk,
        ulid=ulid_of(job.pk),
        object_prefix=upload.object_prefix,
        manifest=upload.manifest,
        manifest_sha256=upload.manifest_sha256,
        method=job.method,
        rank=job.hyperparameters["lora_rank"],
        target_modules=list(job.hyperparameters["target_modules"]),
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
        is_servable=msgspec.convert(job.hyperparameters, wire.Hyperparameters).is_servable,
    )
    return publish_version(new)


def _result(run: Run, upload_id: str, *, kind: str) -> Upload:
    """Return the run's upload of this kind. Raises InvalidValue."""
    found = Upload.objects.filter(pk=upload_id, run=run, kind=kind).first()
    if found is None:
        raise InvalidValue(f"No upload of this run with the kind {kind} has this id.", param="upload_id")
    return found


def _exports(run: Run, job: FineTuningJob, outcome: wire.Succeeded) -> list[dict[str, Any]]:
    """Return the requested other forms of the result. Raises InvalidValue for any other, UploadIncomplete."""
    kinds = [export.kind for export in outcome.exports]
    if len(set(kinds)) < len(kinds) or not set(kinds) <= set(job.requested.get("exports") or ()):
        raise InvalidValue("An export was not asked for, or comes twice.", param="exports")
    return [_export(run, export) for export in outcome.exports]


def _export(run: Run, export: wire.Export) -> dict[str, Any]:
    """Return one other form of the result, as stored with the version. Raises UploadIncomplete."""
    upload = _result(run, export.upload_id, kind="model")
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
        "failed",
        outcome,
        now,
        failure_code=outcome.code,
        failure_message=outcome.message[:500],
        log_tail=outcome.log_tail[-20_000:],
    )
    if outcome.code is FailureCode.CHECKPOINT_INVALID and run.resume_from:
        _set_aside(run.resume_from, now)
    if outcome.code.is_retryable:
        events.append(job, level="warn", message=f"Attempt {run.attempt} failed: {outcome.message}")
        attempts.continue_or_give_up(job=job, run=run, code=outcome.code, now=now)
    else:
        param = "training_file" if outcome.code is FailureCode.INVALID_TRAINING_FILE else ""
        attempts.fail_job(job=job, code=outcome.code, message=outcome.message, now=now, param=param)
    if outcome.code is FailureCode.OUT_OF_MEMORY:
        outcomes.record_out_of_memory(run=run, job=job)


def _set_aside(checkpoint: Checkpoint, now: datetime.datetime) -> None:
    """Quarantine the checkpoint, and remove from the bill the steps that only it held: they are trained again."""
    checkpoint.quarantined_at = now
    checkpoint.save(update_fields=["quarantined_at"])
    author = checkpoint.run
    whole = author.checkpoints.filter(quarantined_at=None, deleted_at=None).order_by("-step").first()
    author.durable_step, author.billed_gpu_ms = (whole.step, whole.billed_gpu_ms) if whole else (0, 0)
    author.save(update_fields=["durable_step", "billed_gpu_ms"])


def _finish_stopped(run: Run, job: FineTuningJob, outcome: wire.Stopped, now: datetime.datetime) -> None:
    if job.cancel_requested_at and outcome.reason in ("cancelled", "paused"):  # the cancellation came after the pause
        _end_run(run, "cancelled", outcome, now)
        attempts.cancel_job(job=job, now=now)
    elif outcome.reason == "paused" and job.pause_requested_at:
        _end_run(run, "paused", outcome, now)
        attempts.pause_job(job=job, now=now)
    else:
        _end_run(run, "lost", outcome, now, failure_code=FailureCode.PREEMPTED)
        attempts.continue_or_give_up(job=job, run=run, code=FailureCode.PREEMPTED, now=now)


def _end_run(run: Run, status: str, outcome: wire.Outcome, now: datetime.datetime, **changes: Any) -> None:
    if status == "succeeded":
        try_advance(run, to="running", transitions=RUN_TRANSITIONS)
    advance(
        run,
        to=status,
        transitions=RUN_TRANSITIONS,
        finished_at=now,
        peak_memory_bytes=outcome.peak_memory_bytes,
        **(NO_LEASE | changes),
    )
