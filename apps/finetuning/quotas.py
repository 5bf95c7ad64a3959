"""Limits of an organization: checked when a job is created, and again when a worker would start it."""

import datetime
from typing import Any

from django.db.models import Sum

from apps.core import audit
from apps.core.errors import QuotaExceeded
from apps.finetuning.lifecycle import JOB_TERMINAL, RUN_HOLDING_LEASE
from apps.finetuning.models import FineTuningJob, Quota, Run

LIMITS = ("concurrent_gpus", "queued_jobs", "gpu_seconds_per_month", "storage_bytes", "requests_per_minute", "weight")


def get_quota(*, organization: Any) -> Quota:
    """Return the organization's limits; the defaults when an operator has set none."""
    organization_id = getattr(organization, "pk", organization)
    found = Quota.objects.filter(organization_id=organization_id).first()
    return found or Quota(organization_id=organization_id)


def set_quota(*, organization: Any, by: str, now: datetime.datetime, **limits: int | None) -> Quota:
    """Set the named limits and leave the others. None lifts a limit."""
    organization_id = getattr(organization, "pk", organization)
    changes = {name: limits[name] for name in LIMITS if name in limits}
    quota, _ = Quota.objects.update_or_create(
        organization_id=organization_id, defaults=changes | {"updated_by": by, "updated_at": now}
    )
    audit.record(organization=organization_id, by=by, action="quota.set", target=quota.pk, **changes)
    return quota


def used_gpu_seconds(*, organization: Any, now: datetime.datetime) -> int:
    """Return the GPU-seconds billed to jobs since the start of the month (UTC)."""
    month = now.astimezone(datetime.UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    jobs = FineTuningJob.objects.filter(
        organization_id=getattr(organization, "pk", organization), created_at__gte=month
    )
    return (jobs.aggregate(total=Sum("billed_gpu_ms"))["total"] or 0) // 1000


def require_room_for_job(*, job: FineTuningJob, seconds: float, now: datetime.datetime) -> None:
    """Raise QuotaExceeded when a new job of about so many GPU-seconds passes a limit; the message says which."""
    quota = get_quota(organization=job.organization_id)
    others = FineTuningJob.objects.for_organization(job.organization_id).exclude(pk=job.pk)
    unfinished = others.exclude(status__in=JOB_TERMINAL).count()
    if quota.queued_jobs is not None and unfinished >= quota.queued_jobs:
        raise QuotaExceeded(
            f"Your organization already has {unfinished} unfinished jobs and its limit is {quota.queued_jobs}: "
            "wait for one to finish, cancel one, or ask the operator for more."
        )
    used = used_gpu_seconds(organization=job.organization_id, now=now)
    if quota.gpu_seconds_per_month is not None and used + seconds > quota.gpu_seconds_per_month:
        raise QuotaExceeded(
            f"This job needs about {seconds:.0f} GPU-seconds; {used} of {quota.gpu_seconds_per_month} are used this "
            "month: choose a smaller job, or ask the operator for more."
        )


def reason_to_wait(*, organization_id: str) -> str:
    """Return why a queued run of the organization may not start now, or "" when it may."""
    quota = get_quota(organization=organization_id)
    running = Run.objects.filter(organization_id=organization_id, status__in=RUN_HOLDING_LEASE).count()
    if quota.concurrent_gpus is not None and running >= quota.concurrent_gpus:
        return f"Waiting for one of your {quota.concurrent_gpus} concurrent GPUs to come free."
    return ""
