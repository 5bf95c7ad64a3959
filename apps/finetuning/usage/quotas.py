"""Limits of an organization, checked when a job is created and again when a worker would start it.

Its allowances, the limits that it sets for members, labels and projects, are checked in the same way (allowances.py).
"""

import datetime
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from django.conf import settings
from django.db.models import QuerySet
from django.utils.translation import gettext, ngettext

from apps.accounts.models import Organization, key_of
from apps.accounts.queries import names_of_creators
from apps.accounts.shares import get_share_holder, give_own_share, share_of
from apps.billing.budgets import describe
from apps.billing.models import Budget
from apps.billing.queries import with_past_credit
from apps.core import audit
from apps.core.database import locks
from apps.core.database.prepared import columns_of, fetch_prepared, read_row
from apps.core.database.tenancy import all_tenants
from apps.core.errors import QuotaExceeded
from apps.finetuning.lifecycle import JOB_OPEN
from apps.finetuning.models import Allowance, AllowanceScope, FineTuningJob, Quota
from apps.finetuning.usage.job_use import AllowanceUse, HolderUse, month_of, read_use
from apps.finetuning.usage.occupancy import held_gpu_seconds

LIMITS = (
    "concurrent_gpus", "queued_jobs", "gpu_seconds_per_month", "storage_bytes", "requests_per_minute",
    "tokens_per_minute", "concurrent_requests", "weight",
)  # fmt: skip
_QUOTA = f"""
    SELECT {columns_of(Quota, "quota")} FROM finetuning_quota quota WHERE quota.organization_id = %(organization)s
"""  # noqa: S608 - constants


class ReachedLimit(StrEnum):
    """A limit that keeps a queued job waiting, as the quota calls it, or a budget."""

    CONCURRENT_GPUS = "concurrent_gpus"
    MONTH = "gpu_seconds_per_month"
    BUDGET = "budget"


@dataclass(frozen=True)
class Reached:
    """The limit that a job waits for: of its organization's quota, or of one of its allowances or budgets."""

    limit: ReachedLimit
    allowance: Allowance | None = None
    budget: Budget | None = None


def get_quota(*, organization: Organization | str) -> Quota:
    """Return the organization's limits, as `get_quotas` does."""
    organization_id = key_of(organization)
    for row in fetch_prepared(_QUOTA, {"organization": organization_id}):
        if quota := read_row(Quota, iter(row)):
            return quota
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
    return held_gpu_seconds(by="organization_id", begin=month_of(now), end=now, organizations=organizations)


def require_place_for_job(*, organization: Organization | str, but: FineTuningJob | None = None) -> None:
    """Raise QuotaExceeded if the organization has reached its limit of unfinished jobs; `but` is not counted.

    An allowance that covers `but` counts as well. Until the transaction ends, no other job under the same limits is
    created, admitted or started.
    """
    organization_id = key_of(organization)
    locks.lock(_lock_name(organization_id))
    quota = get_quota(organization=organization_id)
    with share_of(organization_id) as organizations:
        count = _unfinished_jobs(organizations, but).count()
    _require_place(count, quota, organizations)
    if but is None:
        return
    for allowance in Allowance.objects.for_organization(organization_id).exclude(queued_jobs=None):
        if allowance.covers(but):
            own = _unfinished_jobs([organization_id], but).filter(allowance.covered)
            _require_allowed_place(own.count(), allowance)


def require_room_for_job(*, job: FineTuningJob, seconds: float, now: datetime.datetime) -> None:
    """Raise QuotaExceeded, naming the limit, if a new job of about `seconds` GPU-seconds passes one.

    Until the transaction ends, no other job under the same limits is admitted or started, so no two jobs use the same
    room.
    """
    locks.lock(_lock_name(job.organization_id))
    quota = get_quota(organization=job.organization_id)
    with share_of(job.organization_id) as organizations:
        unfinished = list(_unfinished_jobs(organizations, job).values_list("pk", flat=True))
        holder = get_share_holder(organization=job.organization_id)
        use = read_use(holder=holder, jobs=[*unfinished, job.pk], now=now)
    _require_room(job, seconds, quota, use, unfinished, organizations)
    for each in use.allowances:
        if job.pk in each.jobs:
            _require_allowed_room(job, seconds, each, use)


def _require_room(
    job: FineTuningJob,
    seconds: float,
    quota: Quota,
    use: HolderUse,
    unfinished: Sequence[str],
    organizations: Sequence[str],
) -> None:
    used, promised = int(use.seconds), sum(use.remaining[id] for id in unfinished)
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
                "This job needs about %(seconds)s GPU-seconds. Of your %(gpu_seconds_per_month)s this month, "
                "%(used)s are used and about %(promised)s are held for your unfinished jobs%(organizations)s: "
                "choose a smaller job, or ask the operator for more."
            )
            % {
                "seconds": f"{seconds:.0f}",
                "gpu_seconds_per_month": quota.gpu_seconds_per_month,
                "used": used,
                "promised": f"{promised:.0f}",
                "organizations": _together(organizations),
            }
        )


def _require_allowed_room(job: FineTuningJob, seconds: float, each: AllowanceUse, use: HolderUse) -> None:
    """Raise QuotaExceeded if a new job of about `seconds` GPU-seconds passes an allowance that covers it."""
    allowance, others = each.allowance, each.jobs - {job.pk}
    _require_allowed_place(len(others), allowance)
    if allowance.concurrent_gpus is not None and job.gpu_count > max(allowance.concurrent_gpus, 1):
        raise QuotaExceeded(
            gettext(
                "This job needs %(gpu_count)s GPUs at once and your organization allows %(whose)s "
                "%(concurrent_gpus)s: choose fewer, or ask an owner for more."
            )
            % {
                "gpu_count": job.gpu_count, "whose": words_of(allowance), "concurrent_gpus": allowance.concurrent_gpus,
            },
            param="compute.gpu_count",
        )  # fmt: skip
    promised = sum(use.remaining[id] for id in others)
    if allowance.gpu_seconds_per_month is None or each.seconds + promised + seconds <= allowance.gpu_seconds_per_month:
        return
    raise QuotaExceeded(
        gettext(
            "This job needs about %(seconds)s GPU-seconds. Your organization allows %(whose)s "
            "%(gpu_seconds_per_month)s this month: %(used)s are used and about %(promised)s are held for unfinished "
            "jobs. Choose a smaller job, or ask an owner for more."
        )
        % {
            "seconds": f"{seconds:.0f}",
            "whose": words_of(allowance),
            "gpu_seconds_per_month": allowance.gpu_seconds_per_month,
            "used": int(each.seconds),
            "promised": f"{promised:.0f}",
        }
    )


def words_of(allowance: Allowance, *, names: Mapping[str, str] | None = None) -> str:
    """Return whose jobs an allowance covers, as part of a sentence: the name of a member or project, or the label.

    `names` are those of `names_of_creators`, if they are read already.
    """
    if allowance.scope == AllowanceScope.LABEL:
        return gettext("the label %(label)s") % {"label": allowance.target}
    if allowance.project is not None:
        return gettext("the project %(name)s") % {"name": allowance.project.name}
    known = names_of_creators(organization=allowance.organization_id) if names is None else names
    return known.get(allowance.target, allowance.target)


def reasons_to_wait(*, jobs: Sequence[FineTuningJob], now: datetime.datetime) -> dict[str, str]:
    """Return for each of these queued jobs why its limits do not let it start now, or "" if they do."""
    found = limits_of_waiting(jobs=jobs, now=now)
    return {job.pk: found[job.pk][1] if job.pk in found else "" for job in jobs}


def limits_of_waiting(*, jobs: Sequence[FineTuningJob], now: datetime.datetime) -> dict[str, tuple[ReachedLimit, str]]:
    """Return which limit does not let a queued job start now, and why, by the ids of those that may not."""
    found: dict[str, tuple[ReachedLimit, str]] = {}
    if not jobs:
        return found
    quotas = get_quotas(organizations={job.organization_id for job in jobs})
    with all_tenants():
        holders = Organization.objects.annotate(holder=Organization.share_holder_by()).filter(pk__in=quotas)
        for organization_id, holder in holders.values_list("pk", "holder"):
            quota, own = quotas[organization_id], [job for job in jobs if job.organization_id == organization_id]
            use = read_use(holder=holder, jobs=[job.pk for job in own], now=now)
            has_members = any(each.allowance.member_id for each in use.allowances)
            names = names_of_creators(organization=organization_id) if has_members else {}
            budgets = {each.pk: describe(each) for each in {each.pk: each for each in use.budgets.values()}.values()}
            for job in own:
                if reached := _limit_reached(job, quota, use):
                    found[job.pk] = reached.limit, _words_of(reached, job, quota, names, budgets)
    return found


class Room:
    """What the limits of a share holder leave for these queued jobs of it, which start one after the other."""

    def __init__(self, *, holder: str, jobs: Sequence[FineTuningJob], now: datetime.datetime) -> None:
        self._quotas = get_quotas(organizations={job.organization_id for job in jobs})
        self._use = read_use(holder=holder, jobs=[job.pk for job in jobs], now=now)
        self._planned: list[FineTuningJob] = []

    def take(self, job: FineTuningJob) -> bool:
        """Return whether the job may start beside those that took room before, and give it room if it may."""
        if _limit_reached(job, self._quotas[job.organization_id], self._use, self._planned):
            return False
        self._planned.append(job)
        return True


def limit_reached(*, job: FineTuningJob, holder: str, now: datetime.datetime) -> Reached | None:
    """Return the limit that keeps this queued job waiting. Hold the lock of `lock_name` to start it.

    `holder` is its share holder.
    """
    quota = get_quota(organization=job.organization_id)
    use = read_use(holder=holder, jobs=[job.pk], now=now)
    return _limit_reached(job, quota, use)


def lock_name(holder: str) -> str:
    """Return the name of the lock on the limits of a share holder (`apps.core.database.locks`)."""
    return f"quota:{holder}"


def _limit_reached(
    job: FineTuningJob, quota: Quota, use: HolderUse, planned: Sequence[FineTuningJob] = ()
) -> Reached | None:
    if budget := use.budgets.get(job.pk):
        return Reached(ReachedLimit.BUDGET, budget=budget)
    if limit := _passed(quota, use, use.remaining, [job, *planned]):
        return Reached(limit)
    for each in use.allowances:
        covered = [other for other in (job, *planned) if other.pk in each.jobs]
        if job.pk in each.jobs and (limit := _passed(each.allowance, each, use.remaining, covered)):
            return Reached(limit, each.allowance)
    return None


def _passed(
    limits: Quota | Allowance,
    use: HolderUse | AllowanceUse,
    remaining: Mapping[str, float],
    jobs: Sequence[FineTuningJob],
) -> ReachedLimit | None:
    """Return the limit that these queued jobs would pass together."""
    if limits.concurrent_gpus is not None and use.gpus + sum(job.gpu_count for job in jobs) > limits.concurrent_gpus:
        return ReachedLimit.CONCURRENT_GPUS
    expected = use.seconds + use.running_seconds + sum(remaining[job.pk] for job in jobs)
    if limits.gpu_seconds_per_month is not None and expected > limits.gpu_seconds_per_month:
        return ReachedLimit.MONTH
    return None


def _words_of(
    reached: Reached,
    job: FineTuningJob,
    quota: Quota,
    names: Mapping[str, str] | None = None,
    budgets: Mapping[str, str] | None = None,
) -> str:
    if reached.budget is not None:
        budget = budgets[reached.budget.pk] if budgets else describe(reached.budget)
        text = gettext("The budget of %(budget)s is used up. Raise it, or wait until next month.")
        return text % {"budget": budget}
    limits = reached.allowance or quota
    known = {"wanted": job.gpu_count, "gpus": limits.concurrent_gpus, "seconds": limits.gpu_seconds_per_month}
    if reached.allowance is not None:
        return _reason_of_allowance(job, reached.limit, known | {"whose": words_of(reached.allowance, names=names)})
    if reached.limit is ReachedLimit.MONTH:
        text = gettext("Waiting for next month: your %(seconds)s GPU-seconds of this month are used or in use.")
    else:
        text = ngettext(
            "Waiting until one of your %(gpus)s concurrent GPUs is free.",
            "Waiting until %(wanted)s of your %(gpus)s concurrent GPUs are free.",
            job.gpu_count,
        )
    return text % known


def _reason_of_allowance(job: FineTuningJob, limit: ReachedLimit, known: Mapping[str, object]) -> str:
    if limit is ReachedLimit.MONTH:
        text = gettext(
            "Waiting for next month: the %(seconds)s GPU-seconds that your organization allows %(whose)s are used or "
            "in use. An owner can allow more."
        )
    else:
        text = ngettext(
            "Waiting for a GPU: your organization allows %(whose)s %(gpus)s at once. An owner can allow more.",
            "Waiting for %(wanted)s GPUs: your organization allows %(whose)s %(gpus)s at once. An owner can allow "
            "more.",
            job.gpu_count,
        )
    return text % known


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


def _require_allowed_place(count: int, allowance: Allowance) -> None:
    limit = allowance.queued_jobs
    if limit is not None and count >= limit:
        raise QuotaExceeded(
            gettext(
                "Your organization allows %(whose)s %(limit)s unfinished jobs, and there are %(count)s: wait for one "
                "to finish, cancel one, or ask an owner for more."
            )
            % {"count": count, "whose": words_of(allowance), "limit": limit}
        )


def _lock_name(organization_id: str) -> str:
    return lock_name(get_share_holder(organization=organization_id))
