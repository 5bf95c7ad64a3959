"""Workers' events under a lease: progress, metrics, checkpoints and log lines, each recorded at most once."""

from typing import assert_never

import msgspec
from django.db import transaction

from apps.contracts import runs as wire
from apps.contracts.worker_api import EventsResponse
from apps.core.database.clock import db_now
from apps.core.database.transitions import advance
from apps.core.errors import RateLimited
from apps.finetuning import events, queries
from apps.finetuning.lifecycle import RUN_TRANSITIONS, RunStatus
from apps.finetuning.models import Checkpoint, FineTuningJob, JobEvent, Run
from apps.finetuning.results.checkpoints import forget_checkpoints
from apps.finetuning.runs import stalls
from apps.finetuning.runs.groups import alive_until
from apps.finetuning.runs.leases import Lease, lock_run
from apps.finetuning.runs.uploads import find_upload, require_complete, verify_uploads

_EVENTS_AT_ONCE, _EVENTS_A_SECOND = 5_000, 20
_LEVELS = ("info", "warn", "error")
_EVENTS_OF_A_STEP = 20  # a checkpoint's own step and evaluation are among the last 20 events
_MAX_SAMPLED_STEPS = 100
_OF_A_CHECKPOINT = ("train_mean_token_accuracy", "valid_loss", "valid_mean_token_accuracy")


def record_events(*, lease: Lease, reported: tuple[wire.RunEvent, ...]) -> EventsResponse:
    """Record the new events in order; ignore repeats.

    Raises StaleLease, UploadIncomplete, and FilesUnread until the files of a checkpoint were looked for; the worker
    then repeats the call. That is before the transaction, so that heartbeats never wait for it.
    """
    verify_uploads(lease, {event.upload_id for event in reported if isinstance(event, wire.CheckpointSaved)})
    return _record_events(lease, reported)


@transaction.atomic
def _record_events(lease: Lease, reported: tuple[wire.RunEvent, ...]) -> EventsResponse:
    run, job = lock_run(lease=lease)
    # The sequence counts a run's events, because it has no gaps.
    sequence = max((event.sequence for event in reported), default=0)
    age_seconds = (db_now() - run.leased_at).total_seconds() if run.leased_at else 0.0
    if sequence > _EVENTS_AT_ONCE + _EVENTS_A_SECOND * age_seconds:
        raise RateLimited("A run reports at most a few events a second.", retry_after_seconds=10)
    fresh = [event for event in sorted(reported, key=lambda e: e.sequence) if event.sequence > run.last_sequence]
    for event in fresh:
        if stalls.is_step(event, job):
            run.idle_ms = run.stepless_ms = 0
        _record(run, job, event)
    if fresh:
        run.last_sequence = fresh[-1].sequence
        run.save(update_fields=["last_sequence", "idle_ms", "stepless_ms"])
    return EventsResponse(accepted=len(fresh), last_sequence=run.last_sequence)


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
            events.append(
                job,
                type="metrics",
                message=f"Evaluated at step {event.step}",
                step=event.step,
                valid_loss=event.valid_loss,
                valid_mean_token_accuracy=event.valid_mean_token_accuracy,
            )
        case wire.CheckpointSaved():
            _record_checkpoint(run, job, event)
        case wire.SamplesGenerated():
            if event.samples and queries.list_samples(job=job).count() < _MAX_SAMPLED_STEPS:
                message = f"Sample answers at step {event.step}"
                events.append(
                    job, type="samples", message=message, step=event.step, samples=msgspec.to_builtins(event.samples)
                )
        case wire.LogLine():
            level = event.level if event.level in _LEVELS else "info"
            events.append(job, type="log", level=level, message=event.message)
        case _:
            assert_never(event)


def _start_training(run: Run, job: FineTuningJob, event: wire.TrainingStarted) -> None:
    advance(run, to=RunStatus.RUNNING, transitions=RUN_TRANSITIONS, training_started_at=db_now())
    job.total_steps, job.step = event.total_steps, min(event.start_step, event.total_steps)
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
    # The work that is left is part of every tenant's quote for the pool, so it must not be negative.
    job.step, job.total_steps = min(event.step, event.total_steps), event.total_steps
    job.trained_tokens = event.trained_tokens
    job.save(update_fields=["step", "total_steps", "trained_tokens"])
    events.append(
        job,
        type="metrics",
        message=f"Step {event.step}/{event.total_steps}: training loss={event.train_loss:.4f}",
        step=event.step,
        total_steps=event.total_steps,
        percent=round(100 * event.step / event.total_steps, 2) if event.total_steps else None,
        epoch=event.epoch,
        train_loss=event.train_loss,
        train_mean_token_accuracy=event.train_mean_token_accuracy,
        learning_rate=event.learning_rate,
        grad_norm=event.grad_norm,
        tokens_per_second=event.tokens_per_second,
        memory_bytes=event.memory_bytes,
        gpu_utilization=event.gpu_utilization,
        gpu_celsius=event.gpu_celsius,
        gpu_watts=event.gpu_watts,
        eta_seconds=event.eta_seconds,
        training_seconds=event.training_seconds,
        attempt=run.attempt,
    )


def _record_checkpoint(run: Run, job: FineTuningJob, event: wire.CheckpointSaved) -> None:
    upload = find_upload(run, event.upload_id, kind="checkpoint")
    require_complete(upload=upload, manifest_sha256=event.manifest_sha256)
    make_durable(run, job, step=event.step, training_seconds=event.training_seconds)
    byte_count = sum(file["bytes"] for file in upload.manifest["files"])  # as stored: its customer pays for them
    Checkpoint.objects.get_or_create(
        run=run,
        step=event.step,
        defaults={
            "organization_id": run.organization_id,
            "job": job,
            "upload": upload,
            "bytes": byte_count,
            "metrics": _metrics_at(job, event),
            "billed_gpu_ms": run.billed_gpu_ms,
        },
    )
    events.append(job, message=f"Checkpoint saved at step {event.step}", step=event.step, bytes=byte_count)
    forget_checkpoints(job=job)


def _metrics_at(job: FineTuningJob, event: wire.CheckpointSaved) -> dict[str, float | None]:
    """Return the metrics of the checkpoint's step from the latest events; its evaluation, if any, comes before it."""
    found: dict[str, float | None] = {"step": event.step, "train_loss": event.train_loss}
    for seen in JobEvent.objects.filter(job=job, type="metrics").order_by("-sequence")[:_EVENTS_OF_A_STEP]:
        if seen.data.get("step") == event.step:
            found |= {name: seen.data[name] for name in _OF_A_CHECKPOINT if seen.data.get(name) is not None}
    return found


def make_durable(run: Run, job: FineTuningJob, *, step: int, training_seconds: float) -> None:
    """Bill the attempt's time up to a durable step on each GPU.

    The worker's count is limited to the time that passed on the database's clock, while all machines were alive.
    """
    if run.training_started_at is None:
        return
    until = alive_until(run=run, job=job, now=db_now())
    seen_ms = max(int((until - run.training_started_at).total_seconds() * 1000), 0)
    counted_ms = int(max(training_seconds, 0) * 1000)
    run.durable_step = max(run.durable_step, step)
    run.billed_gpu_ms = max(run.billed_gpu_ms, min(counted_ms, seen_ms) * job.gpu_count)
    run.save(update_fields=["durable_step", "billed_gpu_ms"])
