"""Retention of a job's checkpoints: to resume from while it runs, and as models to serve after it succeeded."""

import math
from collections.abc import Sequence

from apps.accounts.models import Organization
from apps.core.database.clock import db_now
from apps.core.messages import outbox
from apps.finetuning.lifecycle import JOB_OPEN, JobStatus
from apps.finetuning.models import Checkpoint, FineTuningJob
from apps.finetuning.recipes.checkpoint_names import may_answer

_TO_RESUME_FROM = 2  # the newest, and the one before in case the newest is damaged
_MAX_KEPT = 10


def forget_checkpoints(*, job: FineTuningJob) -> None:
    """Delete the checkpoints not needed to resume or to serve.

    Kept are the newest, the best, and the newest of each epoch. If the job's checkpoints cannot be served, only those
    to resume from are kept, and none after success. So are those that unfinished jobs start from.
    """
    there = list(job.checkpoints.filter(deleted_at=None, quarantined_at=None).order_by("-step", "-created_at"))
    kept = {checkpoint.pk for checkpoint in _kept(job, there)} | started_from(organization=job.organization_id)
    for checkpoint in there:
        if checkpoint.pk not in kept:
            checkpoint.deleted_at = db_now()
            checkpoint.save(update_fields=["deleted_at"])
            prefix = checkpoint.upload.object_prefix
            outbox.publish(topic="objects.delete", key=f"delete:{checkpoint.pk}", payload={"prefix": prefix})


def started_from(*, organization: Organization | str | None = None) -> set[str]:
    """Return the checkpoints that unfinished jobs start from, of one organization or of all."""
    jobs = FineTuningJob.objects.filter(status__in=JOB_OPEN, requested__start_from__has_key="checkpoint")
    if organization is not None:
        jobs = jobs.filter(organization=organization)
    return set(jobs.values_list("requested__start_from__checkpoint", flat=True))


def _kept(job: FineTuningJob, newest_first: Sequence[Checkpoint]) -> list[Checkpoint]:
    is_over = job.status == JobStatus.SUCCEEDED
    if not may_answer(job):
        return [] if is_over else list(newest_first[:_TO_RESUME_FROM])
    scored = [checkpoint for checkpoint in newest_first if checkpoint.metrics.get("valid_loss") is not None]
    best = min(scored, key=lambda checkpoint: checkpoint.metrics["valid_loss"], default=None)
    of_epochs: dict[int, Checkpoint] = {}
    for checkpoint in newest_first:
        steps_per_epoch = (job.total_steps or 0) / job.hyperparameters["epochs"]
        epoch = math.ceil(checkpoint.step / steps_per_epoch) if steps_per_epoch else 0  # from 1; 0 if unknown
        of_epochs.setdefault(epoch, checkpoint)
    wanted = [*newest_first[: 1 if is_over else _TO_RESUME_FROM], *([best] if best else []), *of_epochs.values()]
    return list({checkpoint.pk: checkpoint for checkpoint in wanted}.values())[:_MAX_KEPT]
