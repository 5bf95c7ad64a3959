"""The trace of an attempt, made when it has ended from what its worker reported, with times of the database.

Workers need no way to the operator's collector, and write nothing of their own into a trace but numbers. An attempt has
at most seven spans: itself, its time in the queue, and each phase. Training steps are attributes of the last of these;
checkpoints and evaluations are events.
"""

import datetime
from collections.abc import Iterator

from django.db.models import QuerySet

from apps.contracts.runs import Phase
from apps.core.messages import outbox, tracing
from apps.core.messages.tracing import Attributes
from apps.finetuning.lifecycle import RunStatus
from apps.finetuning.models import FineTuningJob, JobEvent, Run

_MOST_EVENTS = 50  # of each kind, in one span
_MOST_CHANGES = 1_000  # of an attempt's phase, the first and the last ones: a trainer makes three for each evaluation
_MOST_METRICS = 20_000  # the last ones of a job, among which evaluations are looked for
_FAULTS = (RunStatus.FAILED, RunStatus.LOST)

Event = tuple[str, datetime.datetime, Attributes]
Change = tuple[Phase, datetime.datetime]


def trace_attempt(*, run: Run, job: FineTuningJob) -> None:
    """Have the trace of an attempt that has ended be sent after commit, if its job is traced."""
    if job.traceparent:
        key, organization = f"trace:{run.pk}", job.organization_id
        payload = {"run_id": run.pk}
        outbox.publish(topic="run.ended", key=key, payload=payload, organization=organization, traceparent="")


def send(*, run_id: str) -> None:
    """Send the spans of an attempt."""
    run = Run.objects.select_related("job__base_model", "pool").filter(pk=run_id).first()
    if run is None or run.finished_at is None or run.leased_at is None:
        return
    job, ended_at = run.job, run.finished_at
    reported = JobEvent.objects.filter(job=job, created_at__gte=run.leased_at, created_at__lte=ended_at)
    changes, left_out = _changes(reported)
    attributes: Attributes = {
        "anneal.organization.id": run.organization_id,
        "anneal.job.id": job.pk,
        "anneal.run.id": run.pk,
        "anneal.run.attempt": run.attempt,
        "anneal.run.status": run.status,
        "anneal.run.billed_gpu_ms": run.billed_gpu_ms,
        "anneal.run.peak_memory_bytes": run.peak_memory_bytes,
        "anneal.run.phase_changes_left_out": left_out or None,
        "anneal.run.resumed_from_step": run.resume_from.step if run.resume_from else None,
        "anneal.job.method": job.method,
        "anneal.job.gpus": job.gpu_count,
        "anneal.job.machines": job.node_count,
        "anneal.base_model": job.base_model.name,
        "anneal.pool": run.pool.name,
        "anneal.worker.id": run.worker_id,
    }
    leased: Event = ("leased", run.leased_at, {"anneal.worker.id": run.worker_id})
    attempt = tracing.record(
        "attempt",
        parent=job.traceparent,
        since=run.created_at,
        until=ended_at,
        attributes=attributes,
        events=[leased],
        error_type=(run.failure_code or run.status) if run.status in _FAULTS else "",
    )
    tracing.record("queued", parent=attempt, since=run.created_at, until=run.leased_at, attributes={})
    for phase, since, until in _phases(changes, ended_at):
        is_training = phase is Phase.TRAINING
        tracing.record(
            phase,
            parent=attempt,
            since=since,
            until=until,
            attributes=_progress(reported, job) if is_training else {},
            events=[*_checkpoints(run), *_evaluations(reported, job)] if is_training else (),
        )


def _changes(reported: QuerySet[JobEvent]) -> tuple[list[Change], int]:
    """Return the phases that the attempt entered first and last, in order, and how many between are left out."""
    states = reported.filter(type="state", data__has_key="phase").values_list("data__phase", "created_at")
    count, half = states.count(), _MOST_CHANGES // 2
    first, last = states.order_by("sequence")[:half], states.order_by("-sequence")[: min(half, max(count - half, 0))]
    found = [(Phase(phase), at) for phase, at in (*first, *reversed(last))]
    return found, count - len(found)


def _phases(
    changes: list[Change], ended_at: datetime.datetime
) -> Iterator[tuple[Phase, datetime.datetime, datetime.datetime]]:
    """Yield each phase once, with its begin and its end; evaluations between training steps belong to the training."""
    last_step = max((place for place, (phase, _) in enumerate(changes) if phase is Phase.TRAINING), default=-1)
    for phase in Phase:
        places = [
            place
            for place, (entered, _) in enumerate(changes)
            if entered is phase and (place > last_step or phase is not Phase.EVALUATING)
        ]
        if places:
            after = places[-1] + 1
            yield phase, changes[places[0]][1], changes[after][1] if after < len(changes) else ended_at


def _progress(reported: QuerySet[JobEvent], job: FineTuningJob) -> Attributes:
    """Return how far the training got, by its last step."""
    steps = reported.filter(type="metrics", data__has_key="train_loss").order_by("-sequence")
    last = steps.values_list("data", flat=True).first() or {}
    return {
        "anneal.training.step": last.get("step"),
        "anneal.training.total_steps": last.get("total_steps"),
        "anneal.training.loss": last.get("train_loss"),
        "anneal.training.tokens_per_second": last.get("tokens_per_second"),
        "anneal.training.seconds": last.get("training_seconds"),
        "anneal.training.tokens": job.trained_tokens,
    }


def _checkpoints(run: Run) -> Iterator[Event]:
    saved = run.checkpoints.order_by("-step").values_list("created_at", "step", "bytes")
    for at, step, size_bytes in reversed(saved[:_MOST_EVENTS]):
        yield "checkpoint", at, {"anneal.training.step": step, "anneal.checkpoint.bytes": size_bytes}


def _evaluations(reported: QuerySet[JobEvent], job: FineTuningJob) -> Iterator[Event]:
    recent = reported.filter(sequence__gt=job.last_event_sequence - _MOST_METRICS, type="metrics")
    made = recent.filter(data__has_key="valid_loss").order_by("-sequence").values_list("created_at", "data")
    for at, data in reversed(made[:_MOST_EVENTS]):
        yield "evaluation", at, {"anneal.training.step": data["step"], "anneal.training.valid_loss": data["valid_loss"]}
