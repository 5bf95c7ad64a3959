"""Limits of an organization, checked when a job is created and again when a worker would start it."""

import datetime
from collections.abc import Collection, Sequence

from django.conf import settings
from django.db.models import Q, QuerySet, Sum
from django.utils.translation import gettext

from apps.accounts.models import Organization, key_of
from apps.accounts.shares import get_share_holder, give_own_share, list_sharing, share_of
from apps.billing.queries import with_past_credit
from apps.core import audit
from apps.core.database import locks
from apps.core.errors import QuotaExceeded
from apps.finetuning.lifecycle import JOB_TERMINAL, RUN_HOLDING_LEASE
from apps.finetuning.models import FineTuningJob, Quota, Run
from apps.finetuning.usage.occupancy import held_gpu_seconds

LIMITS = (
    "concurrent_gpus", "queued_jobs", "gpu_seconds_per_month", "storage_bytes", "requests_per_minute",
    "tokens_per_minute", "concurrent_requests", "weight",
)  # fmt: skip


def get_quota(*, organization: Organization | str) -> Quota:
    """Return the organization's limits, as `get_quotas` does."""
    organization_id = key_of(organization)
    return get_quotas(organizations=[organization_id])[organization_id]


def get_quotas(*, organizations: Collection[str]) -> dict[str, Quota]:
    """Return each organization's limits: those set by an operator, else the defaults.

    Without operator limits, settings.UNPAID_LIMITS apply as long as the organization never had credit, paid or granted.
    """
    found = {quota.organization_id: quota for quota in Quota.objects.filter(organization_id__in=organizations)}
    others = [each for each in organizations if each not in found]
    paying = with_past_credit(organizations=others) if others else set()
    for each in others:
        found[each] = Quota(organization_id=each, **({} if each in paying else settings.UNPAID_LIMITS))
    return found


def set_quota(*, organization: Organization | str, by: str, now: datetime.datetime, **limits: int | None) -> Quota:
    """Set the named limits and leave the others; None lifts a limit.

    From then on the organization no longer shares its limits with others.
    """
    organization_id = key_of(organization)
    give_own_share(organization=organization_id)
    changes = {name: limits[name] for name in LIMITS if name in limits}
    quota, _ = Quota.objects.update_or_create(
        organization_id=organization_id, defaults=changes | {"updated_by": by, "updated_at": now}
    )
    audit.record(organization=organization_id, by=by, action="quota.set", target=quota.pk, **changes)
    return quota


def used_gpu_seconds(*, organizations: Collection[str], now: datetime.datetime) -> dict[str, float]:
    """Return the GPU-seconds that each one's attempts held since the start of the month (UTC), from claim to end."""
    month = now.astimezone(datetime.UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    runs = Run.objects.filter(organization_id__in=organizations)
    return held_gpu_seconds(runs, by="organization_id", begin=month, end=now)


def _sum_used_gpu_seconds(organizations: Collection[str], now: datetime.datetime) -> int:
    return int(sum(used_gpu_seconds(organizations=organizations, now=now).values()))


def require_place_for_job(*, organization: Organization | str, but: FineTuningJob | None = None) -> None:
    """Raise QuotaExceeded if the organization has reached its limit of unfinished jobs; `but` is not counted.

    Until the transaction ends, no other job under the same limits is created, admitted or started.
    """
    organization_id = key_of(organization)
    locks.lock(_lock_name(organization_id))
    quota = get_quota(organization=organization_id)
    with share_of(organization_id) as organizations:
        count = _unfinished_jobs(organizations, but).count()
    _require_place(count, quota, organizations)


def require_room_for_job(*, job: FineTuningJob, seconds: float, now: datetime.datetime) -> None:
    """Raise QuotaExceeded, naming the limit, if a new job of about `seconds` GPU-seconds passes one.

    Until the transaction ends, no other job under the same limits is admitted or started, so no two jobs use the same
    room.
    """
    locks.lock(_lock_name(job.organization_id))
    quota = get_quota(organization=job.organization_id)
    with share_of(job.organization_id) as organizations:
        unfinished = _unfinished_jobs(organizations, job)
        count = unfinished.count()
        used = _sum_used_gpu_seconds(organizations, now)
        promised = _expected_seconds(unfinished, now)
    _require_place(count, quota, organizations)
    if quota.concurrent_gpus is not None and job.gpu_count > max(quota.concurrent_gpus, 1):
        raise QuotaExceeded(
            gettext(
                "This job needs %(gpu_count)s GPUs at once and your organization may use %(concurrent_gpus)s: "
                "choose fewer, or ask the operator for more."
            )
            % {"gpu_count": job.gpu_count, "concurrent_gpus": quota.concurrent_gpus},
            param="compute.gpu_count",
        )
    if quota.gpu_seconds_per_month is not None and used + promised + seconds > quota.gpu_seconds_per_month:
        raise QuotaExceeded(
            gettext(
                "This job needs about %(seconds)s GPU-seconds; of %(gpu_seconds_per_month)s this month %(used)s "
                "are used and about %(promised)s promised to your unfinished jobs%(organizations)s: choose a "
                "smaller job, or ask the operator for more."
            )
            % {
                "seconds": f"{seconds:.0f}",
                "gpu_seconds_per_month": quota.gpu_seconds_per_month,
                "used": used,
                "promised": f"{promised:.0f}",
                "organizations": _together(organizations),
            }
        )


def try_lock_quota(*, organization_id: str) -> bool:
    """Lock the organization's limits for this transaction; return False if another transaction holds them."""
    return locks.try_lock(_lock_name(organization_id))


def reason_to_wait(*, job: FineTuningJob, now: datetime.datetime, planned: Sequence[FineTuningJob] = ()) -> str:
    """Return why this queued job may not start now, or "" if it may. Hold the lock of `try_lock_quota`.

    `planned` are other queued jobs under the same limits that are to start before it.
    """
    quota = get_quota(organization=job.organization_id)
    organizations = list(list_sharing(organizations=[job.organization_id]))
    running = Run.objects.filter(organization_id__in=organizations, status__in=RUN_HOLDING_LEASE)
    taken = running.aggregate(total=Sum("job__gpu_count"))["total"] or 0
    taken += sum(each.gpu_count for each in planned)
    if quota.concurrent_gpus is not None and taken + job.gpu_count > quota.concurrent_gpus:
        wanted = "one" if job.gpu_count == 1 else str(job.gpu_count)
        return f"Waiting for {wanted} of your {quota.concurrent_gpus} concurrent GPUs to come free."
    if quota.gpu_seconds_per_month is None:
        return ""
    used = _sum_used_gpu_seconds(organizations, now)
    starting = Q(pk__in=[job.pk, *(each.pk for each in planned)])
    expected = _expected_seconds(FineTuningJob.objects.filter(Q(pk__in=running.values("job_id")) | starting), now)
    if used + expected > quota.gpu_seconds_per_month:
        return f"Waiting for next month: your {quota.gpu_seconds_per_month} GPU-seconds of this one are used or in use."
    return ""


def _expected_seconds(jobs: QuerySet[FineTuningJob], now: datetime.datetime) -> float:
    """Return the remaining GPU-seconds of unfinished jobs, by their estimates."""
    held = held_gpu_seconds(Run.objects.filter(job__in=jobs), by="job_id", begin=None, end=now)
    rows = jobs.values_list("pk", "estimate", "gpu_count")
    remaining = 0.0
    for pk, estimate, gpus in rows:
        seconds = estimate.get("run_seconds_p50") or estimate.get("train_seconds_p50") or 0.0
        remaining += max(seconds * gpus - held.get(pk, 0.0), 0.0)
    return remaining


def _unfinished_jobs(organizations: Sequence[str], but: FineTuningJob | None) -> QuerySet[FineTuningJob]:
    jobs = FineTuningJob.objects.filter(organization_id__in=organizations).exclude(status__in=JOB_TERMINAL)
    return jobs.exclude(pk=but.pk) if but else jobs


def _together(organizations: Sequence[str]) -> str:
    """Return the addition to a message if several organizations share one limit."""
    return " (all organizations of its founder count until it pays)" if len(organizations) > 1 else ""


def _require_place(count: int, quota: Quota, organizations: Sequence[str]) -> None:
    limit = quota.queued_jobs
    if limit is not None and count >= limit:
        raise QuotaExceeded(
            gettext(
                "Your organization already has %(count)s unfinished jobs%(organizations)s and its limit is "
                "%(limit)s: wait for one to finish, cancel one, or ask the operator for more."
            )
            % {"count": count, "organizations": _together(organizations), "limit": limit}
        )


def _lock_name(organization_id: str) -> str:
    return f"quota:{get_share_holder(organization=organization_id)}"
