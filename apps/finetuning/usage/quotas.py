"""Limits of an organization, checked when a job is created and again when a worker would start it."""

import datetime
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from django.conf import settings
from django.db.models import QuerySet
from django.utils.translation import gettext

from apps.accounts.models import Organization, key_of
from apps.accounts.shares import get_share_holder, give_own_share, share_of
from apps.billing.queries import with_past_credit
from apps.core import audit
from apps.core.database import locks
from apps.core.database.prepared import fetch_prepared
from apps.core.database.tenancy import all_tenants
from apps.core.errors import QuotaExceeded
from apps.finetuning.lifecycle import JOB_OPEN, RUN_HOLDING_LEASE
from apps.finetuning.models import FineTuningJob, Quota
from apps.finetuning.usage.occupancy import held_gpu_seconds

LIMITS = (
    "concurrent_gpus", "queued_jobs", "gpu_seconds_per_month", "storage_bytes", "requests_per_minute",
    "tokens_per_minute", "concurrent_requests", "weight",
)  # fmt: skip


class ReachedLimit(StrEnum):
    """A limit that keeps a queued job waiting, as the quota calls it."""

    CONCURRENT_GPUS = "concurrent_gpus"
    MONTH = "gpu_seconds_per_month"


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
    return held_gpu_seconds(by="organization_id", begin=_month_of(now), end=now, organizations=organizations)


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
        unfinished = list(_unfinished_jobs(organizations, job).values_list("pk", flat=True))
        use = _use(get_share_holder(organization=job.organization_id), unfinished, now)
    used, promised = int(use.seconds), sum(use.remaining.values())
    _require_place(len(unfinished), quota, organizations)
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


def reasons_to_wait(*, jobs: Sequence[FineTuningJob], now: datetime.datetime) -> dict[str, str]:
    """Return for each of these queued jobs why its limits do not let it start now, or "" if they do."""
    reasons: dict[str, str] = {}
    if not jobs:
        return reasons
    quotas = get_quotas(organizations={job.organization_id for job in jobs})
    with all_tenants():
        holders = Organization.objects.annotate(holder=Organization.share_holder_by()).filter(pk__in=quotas)
        for organization_id, holder in holders.values_list("pk", "holder"):
            own = [job for job in jobs if job.organization_id == organization_id]
            use = _use(holder, [job.pk for job in own], now)
            reasons |= {job.pk: _reason_to_wait(job, quotas[organization_id], use) for job in own}
    return reasons


def reason_to_wait(
    *, job: FineTuningJob, holder: str, now: datetime.datetime, planned: Sequence[FineTuningJob] = ()
) -> str:
    """Return why this queued job may not start now, or "" if it may. Hold the lock of `lock_name` to start it.

    `holder` is its share holder. `planned` are other queued jobs under the same limits that are to start before it.
    """
    quota = get_quota(organization=job.organization_id)
    return _reason_to_wait(job, quota, _use(holder, [job.pk, *(each.pk for each in planned)], now), planned)


def limit_reached(*, job: FineTuningJob, holder: str, now: datetime.datetime) -> ReachedLimit | None:
    """Return the limit of its organization that keeps this queued job waiting, as `reason_to_wait` does in words."""
    return _limit_reached(job, get_quota(organization=job.organization_id), _use(holder, [job.pk], now))


def lock_name(holder: str) -> str:
    """Return the name of the lock on the limits of a share holder (`apps.core.database.locks`)."""
    return f"quota:{holder}"


@dataclass(frozen=True)
class _Use:
    """What a share holder uses: GPUs now, GPU-seconds of this month, and those that its running jobs still need.

    `remaining` has the GPU-seconds that further jobs need, by their ids.
    """

    gpus: int
    seconds: float
    running_seconds: float
    remaining: dict[str, float]


_HOLDING = ", ".join(f"'{status}'" for status in RUN_HOLDING_LEASE)
_USE = f"""
    WITH sharing AS MATERIALIZED (
        SELECT organization.id FROM accounts_organization organization
        WHERE (organization.id = %(holder)s OR organization.founded_by_id = %(holder)s)
            AND {Organization.SHARE_HOLDER_SQL} = %(holder)s
    ), running AS MATERIALIZED (
        SELECT run.job_id FROM sharing JOIN finetuning_run run ON run.organization_id = sharing.id
        WHERE run.finished_at IS NULL AND run.status IN ({_HOLDING})
    ), needed AS MATERIALIZED (
        SELECT job.id, job.gpu_count, running.job_id IS NOT NULL AS is_running, greatest(
            job.gpu_count * coalesce(
                nullif((job.estimate->>'run_seconds_p50')::float8, 0), (job.estimate->>'train_seconds_p50')::float8, 0
            ) - coalesce((
                SELECT sum(job.gpu_count * extract(epoch FROM
                    least(run.finished_at, %(now)s::timestamptz) - run.leased_at)::float8)
                FROM finetuning_run run WHERE run.job_id = job.id AND run.leased_at < %(now)s::timestamptz
            ), 0), 0) AS seconds
        FROM finetuning_finetuningjob job LEFT JOIN running ON running.job_id = job.id
        WHERE job.id IN (SELECT job_id FROM running UNION SELECT unnest(%(jobs)s::text[]))
    )
    SELECT coalesce(sum(gpu_count) FILTER (WHERE is_running), 0),
        -- As occupancy.held_gpu_seconds adds it up: days that are over, and the runs of today.
        coalesce((
            SELECT sum(before.held_gpu_us)::float8 / 1000000
            FROM sharing JOIN finetuning_gpuday before ON before.organization_id = sharing.id
            WHERE before.day >= (%(month)s::timestamptz AT TIME ZONE 'UTC')::date
                AND before.day < (%(now)s::timestamptz AT TIME ZONE 'UTC')::date
        ), 0) + coalesce((
            SELECT sum(job.gpu_count * greatest(extract(epoch FROM least(run.finished_at, %(now)s::timestamptz)
                - greatest(run.leased_at, CASE WHEN run.finished_at IS NULL THEN %(month)s::timestamptz
                    ELSE date_trunc('day', %(now)s::timestamptz, 'UTC') END))::float8, 0))
            FROM sharing JOIN finetuning_run run ON run.organization_id = sharing.id
            JOIN finetuning_finetuningjob job ON job.id = run.job_id
            WHERE (run.finished_at IS NULL OR run.finished_at > date_trunc('day', %(now)s::timestamptz, 'UTC'))
                AND run.leased_at < %(now)s::timestamptz
        ), 0),
        coalesce(sum(seconds) FILTER (WHERE is_running), 0),
        coalesce(jsonb_object_agg(id, seconds) FILTER (WHERE id = ANY(%(jobs)s::text[])), '{{}}')::text
    FROM needed
"""  # noqa: S608 - constants


def _use(holder: str, jobs: Sequence[str], now: datetime.datetime) -> _Use:
    known = {"holder": holder, "jobs": list(jobs), "now": now, "month": _month_of(now)}
    ((gpus, seconds, running_seconds, remaining),) = fetch_prepared(_USE, known)
    return _Use(gpus, seconds, running_seconds, json.loads(remaining))


def _month_of(now: datetime.datetime) -> datetime.datetime:
    return now.astimezone(datetime.UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)


def _limit_reached(
    job: FineTuningJob, quota: Quota, use: _Use, planned: Sequence[FineTuningJob] = ()
) -> ReachedLimit | None:
    taken = use.gpus + sum(each.gpu_count for each in planned)
    if quota.concurrent_gpus is not None and taken + job.gpu_count > quota.concurrent_gpus:
        return ReachedLimit.CONCURRENT_GPUS
    expected = use.running_seconds + sum(use.remaining[each.pk] for each in (job, *planned))
    if quota.gpu_seconds_per_month is not None and use.seconds + expected > quota.gpu_seconds_per_month:
        return ReachedLimit.MONTH
    return None


def _reason_to_wait(job: FineTuningJob, quota: Quota, use: _Use, planned: Sequence[FineTuningJob] = ()) -> str:
    limit = _limit_reached(job, quota, use, planned)
    if limit is ReachedLimit.CONCURRENT_GPUS:
        wanted = "one" if job.gpu_count == 1 else str(job.gpu_count)
        return f"Waiting for {wanted} of your {quota.concurrent_gpus} concurrent GPUs to come free."
    if limit is ReachedLimit.MONTH:
        return f"Waiting for next month: your {quota.gpu_seconds_per_month} GPU-seconds of this one are used or in use."
    return ""


def _unfinished_jobs(organizations: Sequence[str], but: FineTuningJob | None) -> QuerySet[FineTuningJob]:
    jobs = FineTuningJob.objects.filter(organization_id__in=organizations, status__in=JOB_OPEN)
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
    return lock_name(get_share_holder(organization=organization_id))
