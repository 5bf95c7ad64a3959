"""Cancel, pause and resume: how a customer stops a job and continues it."""

import datetime
from collections.abc import Collection
from contextlib import suppress

import msgspec
from django.db import transaction
from django.db.models import QuerySet
from django.utils.translation import gettext

from apps.accounts.members.projects import require_work_in
from apps.accounts.models import Organization
from apps.accounts.queries import RegionRefused
from apps.billing.budgets import holds_of_budget
from apps.billing.models import HoldPurpose, HoldStatus
from apps.core import audit
from apps.core.database.transitions import advance, try_advance
from apps.core.errors import InvalidState
from apps.core.money import dollars
from apps.finetuning import events
from apps.finetuning.lifecycle import JOB_TERMINAL, JOB_TRANSITIONS, RUN_ACTIVE, RUN_TRANSITIONS, JobStatus, RunStatus
from apps.finetuning.models import FineTuningJob, QueueShare, Run
from apps.finetuning.queries import find_region_obstacle
from apps.finetuning.recipes.stored_requests import stored_request
from apps.finetuning.runs import attempts
from apps.finetuning.usage import charges

_PARAM = "fine_tuning_job_id"


@transaction.atomic
def lock_several(*, ids: Collection[str], organization: Organization | str | None = None) -> None:
    """Lock these jobs of the organization (None: of all), which the transaction changes one after the other.

    A claim locks a job and then its organization's share of the pool, and the end of a job locks a share and then the
    wallet. Here all jobs come first, and then all shares, so that neither waits for a lock of this transaction while it
    holds the next one.
    """
    jobs = FineTuningJob.objects.filter(pk__in=ids)
    if organization is not None:
        jobs = jobs.for_organization(organization)
    found = list(jobs.order_by("pk").select_for_update().values_list("organization_id", "pool_id"))
    owners, pools = {owner for owner, _ in found}, {pool for _, pool in found if pool}
    shares = QueueShare.objects.filter(organization__in=owners, pool__in=pools)
    list(shares.order_by("pk").select_for_update().values_list("pk", flat=True))


@transaction.atomic
def request_cancellation(*, job: FineTuningJob, by: str, now: datetime.datetime) -> FineTuningJob:
    """Cancel at once if no worker holds the job; else ask the worker, which keeps the checkpoint.

    Raises InvalidState, and PermissionDenied for a viewer of the job's project.
    """
    job = _locked(job, by)
    if job.status in JOB_TERMINAL:
        raise InvalidState(
            gettext("The job cannot be cancelled, because it has ended as %(status)s.") % {"status": job.status},
            param=_PARAM,
        )
    if job.cancel_requested_at is None:
        job.cancel_requested_at, job.cancel_requested_by = now, by
        job.save(update_fields=["cancel_requested_at", "cancel_requested_by"])
        events.append(job, message="Cancellation requested")
        audit.record(organization=job.organization_id, by=by, action="job.cancel_requested", target=job.pk)
    for run in Run.objects.filter(job=job, status=RunStatus.QUEUED):
        try_advance(run, to=RunStatus.CANCELLED, transitions=RUN_TRANSITIONS, finished_at=now)
    if not Run.objects.filter(job=job, status__in=RUN_ACTIVE).exists():
        attempts.cancel_job(job=job, now=now)
    return job


@transaction.atomic
def request_pause(*, job: FineTuningJob, by: str, now: datetime.datetime) -> FineTuningJob:
    """Ask the worker to checkpoint and stop, keeping the hold.

    Raises InvalidState unless the job is running, and PermissionDenied for a viewer of its project.
    """
    job = _locked(job, by)
    if not try_advance(
        job, to=JobStatus.PAUSING, transitions=JOB_TRANSITIONS, pause_requested_at=now, pause_requested_by=by
    ):
        raise InvalidState(
            gettext("The job must be running to be paused; it is %(status)s.") % {"status": job.status}, param=_PARAM
        )
    events.append(job, message="Pause requested")
    audit.record(organization=job.organization_id, by=by, action="job.pause_requested", target=job.pk)
    return job


@transaction.atomic
def dismiss_failure(*, job: FineTuningJob, by: str, now: datetime.datetime) -> None:
    """Dismiss a failed job from the list of what needs attention; nothing else changes. Raises PermissionDenied."""
    require_work_in(project_id=job.project_id, actor=by)
    failed = FineTuningJob.objects.filter(pk=job.pk, status=JobStatus.FAILED, dismissed_at=None)
    if failed.update(dismissed_at=now):
        audit.record(organization=job.organization_id, by=by, action="job.dismissed", target=job.pk)


@transaction.atomic
def resume(*, job: FineTuningJob, by: str, now: datetime.datetime, spend_cap_nano: int | None = None) -> FineTuningJob:
    """Hold the rest of the cap (or of a new one) and queue a paused job again, from its last checkpoint.

    A cap above the maximum of a firm price means that maximum. A new cap also counts where the job moves later. In a
    pool that the organization may not use any more, the job waits to be moved. Raises InvalidState unless the job is
    paused and its cap leaves room, RegionRefused if no pool may run it, InsufficientBalance, BudgetExceeded, and
    PermissionDenied for a viewer of its project.
    """
    job = _locked(job, by)
    if job.status != JobStatus.PAUSED:
        raise InvalidState(
            gettext("The job must be paused to be resumed; it is %(status)s.") % {"status": job.status}, param=_PARAM
        )
    if job.overran_at:
        raise InvalidState(
            gettext(
                "We paused the job because it takes much longer than quoted. Our operators can continue it, and "
                "you pay at most %(spend_cap)s. You can also cancel it at no further cost."
            )
            % {"spend_cap": dollars(job.spend_cap_nano)},
            param=_PARAM,
        )
    if obstacle := find_region_obstacle(organization=job.organization_id):
        raise RegionRefused(obstacle, param=_PARAM)
    if spend_cap_nano is not None:
        _set_cap(job, spend_cap_nano)
    least_nano = charges.least_cap_of(job=job)
    if job.spend_cap_nano < least_nano:
        raise InvalidState(
            gettext(
                "The job has cost %(cost)s, and a cap of %(spend_cap)s does not cover another start: raise the cap "
                "to %(least)s or more."
            )
            % {"cost": dollars(job.cost_nano), "spend_cap": dollars(job.spend_cap_nano), "least": dollars(least_nano)},
            param="budget.max_cost_usd",
        )
    run = attempts.queue_attempt(job=job)
    amount_nano = attempts.resume_hold_nano(job=job)
    held = attempts.hold_cap(
        job=job,
        price_rule=job.price_rule,
        amount_nano=amount_nano,
        by=by,
        idempotency_key=f"hold:{job.pk}:{run.attempt}",
    )
    advance(
        job,
        to=JobStatus.QUEUED,
        transitions=JOB_TRANSITIONS,
        pause_requested_at=None,
        pause_requested_by=None,
        spend_cap_nano=job.spend_cap_nano,
        requested=job.requested,
        hold_id=held.pk,
    )
    events.append(job, type="state", message="Resumed", hold_nano=amount_nano)
    audit.record(
        organization=job.organization_id, by=by, action="job.resumed", target=job.pk, cap_nano=job.spend_cap_nano
    )
    return job


def _set_cap(job: FineTuningJob, cap_nano: int) -> None:
    """Set a new cap of the job, here and where it moves later."""
    job.spend_cap_nano = min(cap_nano, job.firm_max_nano or cap_nano)
    job.requested = msgspec.to_builtins(msgspec.structs.replace(stored_request(job), spend_cap_nano=cap_nano))


@transaction.atomic
def continue_overrun(*, job: FineTuningJob, by: str, now: datetime.datetime) -> FineTuningJob:
    """Resume a job that reached the limit of its firm price, up to the limit that follows; an operator asks for it.

    Raises InvalidState unless the job waits for this, and the errors of `resume`.
    """
    job = _locked(job, by)
    if job.status != JobStatus.PAUSED or job.overran_at is None or job.pool is None:
        raise InvalidState(
            gettext("You can only continue a job that paused at the limit of its firm price."), param=_PARAM
        )
    job.firm_limit_nano = (job.firm_limit_nano or 0) + job.pool.firm_limit_nano(job.spend_cap_nano)
    job.overran_at = None
    job.save(update_fields=["firm_limit_nano", "overran_at"])
    audit.record(
        organization=job.organization_id, by=by, action="job.overrun_continued", target=job.pk,
        limit_nano=job.firm_limit_nano,
    )  # fmt: skip
    return resume(job=job, by=by, now=now)


def pause_jobs_of_budget(*, budget_id: str, now: datetime.datetime) -> int:
    """Ask the running jobs that an exhausted budget pays for to checkpoint and pause; return the number asked.

    No claim takes the queued ones (`limit_reached`).
    """
    holds = holds_of_budget(budget_id=budget_id).filter(purpose=HoldPurpose.JOB, status=HoldStatus.OPEN)
    sources = list(holds.values_list("source", flat=True))
    jobs = FineTuningJob.objects.filter(pk__in=sources)
    return _pause_running(jobs, "A budget of the organization is used up: pausing", now)


def pause_jobs_of(*, organization_id: str, now: datetime.datetime) -> int:
    """Ask the running jobs of a suspended organization to checkpoint and pause; return the number asked."""
    jobs = FineTuningJob.objects.filter(organization_id=organization_id)
    return _pause_running(jobs, "The organization is suspended: pausing", now)


def _pause_running(jobs: QuerySet[FineTuningJob], message: str, now: datetime.datetime) -> int:
    count = 0
    for job in jobs.filter(status=JobStatus.RUNNING):
        with suppress(InvalidState):  # it has just stopped running
            request_pause(job=job, by="system", now=now)
            events.append(job, level="warn", message=message)
            count += 1
    return count


def _locked(job: FineTuningJob, by: str) -> FineTuningJob:
    require_work_in(project_id=job.project_id, actor=by)
    locked = FineTuningJob.objects.select_for_update(of=("self",)).select_related("price_rule", "pool", "base_model")
    return locked.get(pk=job.pk)
