"""The next step after an attempt: another attempt, or the end of the job with its bill."""

import datetime
from collections.abc import Sequence
from dataclasses import replace
from typing import TypedDict, Unpack

from django.db.models import Q
from django.utils.translation import gettext

from apps.adapters.models import AdapterVersion
from apps.billing.budgets import Attribution, attribution_of_actor
from apps.billing.models import Hold, HoldPurpose
from apps.billing.operations import InsufficientBalance, hold, record_estimate_loss, refund_source, settle_hold
from apps.billing.queries import get_charged, get_charged_nano
from apps.catalog.models import PriceRule
from apps.contracts.failures import CAUSES, Blame, FailureCode
from apps.core import audit
from apps.core.database.transitions import advance, try_advance
from apps.core.messages import outbox
from apps.core.money import dollars
from apps.finetuning import events
from apps.finetuning.lifecycle import (
    GROUP_RETRY_SECONDS,
    GROUP_RETRY_SECONDS_AT_MOST,
    JOB_TRANSITIONS,
    MAX_ATTEMPTS_WITHOUT_PROGRESS,
    MAX_LOST_ATTEMPTS,
    MAX_STALLED_ATTEMPTS,
    JobStatus,
    RunStatus,
)
from apps.finetuning.models import FineTuningJob, Run, RunMember
from apps.finetuning.notices import alert_of_overrun, publish_end
from apps.finetuning.queries import latest_checkpoint
from apps.finetuning.usage.charges import billed_ms, cost_of, estimate_loss_nano, is_at_cap, least_cap_nano


class JobChanges(TypedDict, total=False):
    """Fields of a job that its end sets beside the bill."""

    adapter_version: AdapterVersion
    step: int
    trained_tokens: int
    error_code: str
    error_message: str
    error_param: str


def queue_attempt(*, job: FineTuningJob, retry_at: datetime.datetime | None = None) -> Run:
    """Queue the next attempt and ring the pool's doorbell after commit. No claim takes it before `retry_at`.

    Call it before `hold_cap`: a change of a run locks the organization's share of the pool (`QueueShare`), and the end
    of a job locks the wallet after that. The other order could end in a deadlock.
    """
    if job.pool is None:
        raise ValueError(f"{job.pk} was never admitted to a pool")
    last = job.runs.order_by("-attempt").values_list("attempt", flat=True).first() or 0
    run = Run.objects.create(
        organization_id=job.organization_id, job=job, attempt=last + 1, pool=job.pool, retry_at=retry_at
    )
    payload, organization = {"pool": job.pool.machines.name}, job.organization_id
    outbox.publish(
        topic="train.wake",
        key=f"wake:{run.pk}",
        payload=payload,
        organization=organization,
        traceparent=job.traceparent,
    )
    return run


def continue_or_give_up(*, job: FineTuningJob, run: Run, code: FailureCode, now: datetime.datetime) -> None:
    """Handle a lost or retryable attempt: obey a requested stop, else try again, else fail the job.

    Attempts that were paused or moved to another pool do not count, and neither do those whose machine the pool that
    lent it wanted back, or that not all machines of a group began: each of the latter is followed by a longer wait.
    """
    not_begun = set(RunMember.objects.filter(run__job=job, started_at=None).values_list("run_id", flat=True))
    is_no_loss = Q(status__in=(RunStatus.CANCELLED, RunStatus.PAUSED)) | Q(return_requested_at__isnull=False)
    uncounted = not_begun | set(job.runs.filter(is_no_loss).values_list("pk", flat=True))
    if job.cancel_requested_at:
        cancel_job(job=job, now=now)
    elif job.pause_requested_at:
        pause_job(job=job, now=now)
    elif code is FailureCode.STALLED and job.runs.filter(failure_code=code).count() >= MAX_STALLED_ATTEMPTS:
        fail_job(job=job, code=code, message=run.failure_message, now=now)
    elif run.attempt - len(uncounted) >= MAX_LOST_ATTEMPTS:
        fail_job(job=job, code=code, message="", now=now)
    elif _attempts_without_progress(job) >= MAX_ATTEMPTS_WITHOUT_PROGRESS and code is not FailureCode.PREEMPTED:
        fail_job(job=job, code=FailureCode.CRASH_LOOP, message="", now=now)
    else:
        try_advance(job, to=JobStatus.QUEUED, transitions=JOB_TRANSITIONS)
        wait = min(GROUP_RETRY_SECONDS * 2 ** min(len(not_begun), 10), GROUP_RETRY_SECONDS_AT_MOST)
        queue_attempt(job=job, retry_at=now + datetime.timedelta(seconds=wait) if run.pk in not_begun else None)
        step = latest_checkpoint(job=job)
        message = "Queued again, to resume from the start"
        if step:
            message = f"Queued again, to resume from step {step.step}"
        events.append(job, type="state", message=message, attempt=run.attempt + 1)


def _attempts_without_progress(job: FineTuningJob) -> int:
    """Count consecutive attempts that ended before any progress. Pauses, moves and preemptions do not count."""
    count = 0
    alive = (RunStatus.QUEUED, RunStatus.PAUSED, RunStatus.CANCELLED)
    died = job.runs.exclude(status__in=alive).exclude(failure_code=FailureCode.PREEMPTED)
    for run in died.order_by("-attempt"):
        if run.durable_step > (run.resume_from.step if run.resume_from else 0):
            break
        count += 1
    return count


def fail_job(*, job: FineTuningJob, code: FailureCode, message: str, now: datetime.datetime, param: str = "") -> None:
    """End the job as failed; the customer pays for durable steps only if the cause is theirs to fix."""
    gpu_ms = billed_ms(job=job) if code.blame is Blame.CUSTOMER else 0
    text = message or CAUSES[code]
    _end_job(
        job,
        JobStatus.FAILED,
        gpu_ms,
        now,
        message=f"Failed: {text}",
        level="error",
        error_code=code.value,
        error_message=text[:500],
        error_param=param,
    )


def cancel_job(*, job: FineTuningJob, now: datetime.datetime) -> None:
    """End the job as cancelled; the customer pays for durable steps."""
    _end_job(job, JobStatus.CANCELLED, billed_ms(job=job), now, message="Cancelled")


def succeed_job(
    *, job: FineTuningJob, now: datetime.datetime, without: tuple[str, ...] = (), **changes: Unpack[JobChanges]
) -> None:
    """End the job as succeeded; `without` names the promised parts that could not be made."""
    message = "The job has successfully completed"
    if without:
        message = f"The job has successfully completed, without {' and '.join(without)}"
    _end_job(job, JobStatus.SUCCEEDED, billed_ms(job=job), now, message=message, **changes)


def pause_job(*, job: FineTuningJob, now: datetime.datetime) -> None:
    """Pause the job with its checkpoint: charge the durable steps and release the rest of the hold.

    A job that reached the limit of its firm price is charged nothing, and operators get a mail.
    """
    try_advance(job, to=JobStatus.PAUSING, transitions=JOB_TRANSITIONS)
    gpu_ms = billed_ms(job=job)
    cost = _due_nano(job, JobStatus.PAUSED, gpu_ms)
    advance(job, to=JobStatus.PAUSED, transitions=JOB_TRANSITIONS, billed_gpu_ms=gpu_ms, cost_nano=cost)
    _settle(job, cost, JobStatus.PAUSED, gpu_ms)
    is_capped = job.pause_requested_by == "system" and is_at_cap(job=job, gpu_ms=gpu_ms)
    message, has_kept = "Paused at the spend cap" if is_capped else "Paused", latest_checkpoint(job=job) is not None
    if job.overran_at:
        message = "Paused by us, unbilled, because the run takes much longer than quoted"
        alert_of_overrun(job=job)
    events.append(
        job,
        type="state",
        message=f"{message}; the last checkpoint is kept" if has_kept else f"{message}; no step is finished",
        status=JobStatus.PAUSED,
        cost_nano=cost,
    )
    publish_end(job=job, by=job.pause_requested_by or "")
    audit.record(
        organization=job.organization_id,
        by=job.pause_requested_by or "system",
        action="job.paused",
        target=job.pk,
        billed_gpu_ms=gpu_ms,
        cost_nano=cost,
    )


def settle_before_move(*, job: FineTuningJob, by: str) -> None:
    """Charge what ran before the job moves to another pool, and return the rest of its hold.

    Call it before the job's price changes: `moved_gpu_ms` and `moved_nano` keep what was billed at the old one. A job
    that never began costs nothing.
    """
    if not job.hold_id:
        return
    gpu_ms = billed_ms(job=job)
    cost = cost_of(job=job, gpu_ms=gpu_ms)
    job.moved_gpu_ms, job.moved_nano = gpu_ms, cost
    job.billed_gpu_ms, job.cost_nano = gpu_ms, cost
    rest = max(cost - get_charged_nano(source=job.pk), 0)
    settle_hold(hold_id=job.hold_id, capture_nano=rest, by=by, reason=f"{job.pk} {job.status}" if rest else "")


def hold_cap(
    *, job: FineTuningJob, price_rule: PriceRule | None, amount_nano: int, by: str, idempotency_key: str
) -> Hold:
    """Hold the job's cap.

    Raises BudgetExceeded, and InsufficientBalance, which names the field that lowers the cap. A lower cap is advised
    only if the balance pays for one start.
    """
    try:
        return hold(
            organization=job.organization_id,
            purpose=HoldPurpose.JOB,
            source=job.pk,
            amount_nano=amount_nano,
            by=by,
            idempotency_key=idempotency_key,
            attribution=attribution_of(job=job),
            price_rule=price_rule,
        )
    except InsufficientBalance as short:
        short.param = "budget.max_cost_usd"
        least_nano = least_cap_nano(price=price_rule, gpu_count=job.gpu_count) if price_rule else 0
        if short.data["balance_nano"] >= least_nano:
            short.message += " " + gettext("You can also set a lower spend cap.")
        raise


def price_of(*, run: Run) -> PriceRule | None:
    """Return the price at which the attempt is paid: that of the job's last hold before a worker took it."""
    if run.leased_at is None:
        return None
    holds = Hold.objects.filter(source=run.job_id, purpose=HoldPurpose.JOB, created_at__lte=run.leased_at)
    paid_by = holds.select_related("price_rule").order_by("-created_at").first()
    return paid_by.price_rule if paid_by else None


def attribution_of(*, job: FineTuningJob) -> Attribution:
    """Return the attribution of the job's cost: its creator, its metadata and its project."""
    by = attribution_of_actor(organization=job.organization_id, by=job.created_by, labels=job.metadata)
    return replace(by, project_id=job.project_id)


def resume_hold_nano(*, job: FineTuningJob) -> int:
    """Return the hold of a resume: the cap less the amount already paid."""
    return resume_holds_nano(jobs=[job])[job.pk]


def resume_holds_nano(*, jobs: Sequence[FineTuningJob]) -> dict[str, int]:
    """Return the hold of each job's resume by its id, as `resume_hold_nano` does."""
    charged = get_charged(sources=[job.pk for job in jobs]) if jobs else {}
    return {job.pk: job.spend_cap_nano - charged[job.pk] for job in jobs}


def request_pause_at_cap(*, job: FineTuningJob, now: datetime.datetime) -> None:
    """Ask the run to checkpoint and stop, because continuing would pass the customer's cap or the firm price's limit.

    A run that ends before it receives the request succeeds. So the event reports the request, and `pause_job` reports
    the pause.
    """
    changed = FineTuningJob.objects.filter(pk=job.pk, pause_requested_at=None).update(
        pause_requested_at=now, pause_requested_by="system", overran_at=now if job.is_firm else None
    )
    if changed:
        job.refresh_from_db()
        try_advance(job, to=JobStatus.PAUSING, transitions=JOB_TRANSITIONS)
        reason = "The run takes much longer than quoted" if job.overran_at else "The spend cap is close"
        message = f"{reason}: asked the worker to save a checkpoint"
        events.append(job, type="state", level="warn", message=message)


def _due_nano(job: FineTuningJob, status: JobStatus, gpu_ms: int) -> int:
    """Return the cost of the job in its new status: past the limit of a firm price, no more than was charged before.

    A pause leaves a nano-dollar of a firm price unpaid, because the hold of the resume must be above zero.
    """
    cost = cost_of(job=job, gpu_ms=gpu_ms)
    if job.overran_at is not None and status != JobStatus.SUCCEEDED:
        return min(cost, get_charged_nano(source=job.pk))
    return min(cost, job.spend_cap_nano - 1) if job.is_firm and status == JobStatus.PAUSED else cost


def _settle(job: FineTuningJob, cost: int, status: JobStatus, gpu_ms: int) -> None:
    """Close the open hold: charge the cost not covered by earlier holds (closed at a pause), and return the rest.

    The value of the time that a firm price leaves unpaid is posted as estimate loss.
    """
    paid = get_charged_nano(source=job.pk)
    settle_hold(hold_id=job.hold_id, capture_nano=max(cost - paid, 0), by="system", reason=f"{job.pk} {status}")
    if paid > cost:
        _refund_surplus(job, cost, status)
    loss_nano = estimate_loss_nano(job=job, gpu_ms=gpu_ms, cost_nano=cost)
    record_estimate_loss(hold_id=job.hold_id, total_nano=loss_nano, by="system")


def _refund_surplus(job: FineTuningJob, cost: int, status: JobStatus) -> None:
    """Refund charges above the job's cost: all after a failure of ours, else of steps with a refused checkpoint."""
    refunded = refund_source(
        organization=job.organization_id, source=job.pk, keep_nano=cost, by="system", reason=f"{job.pk} {status}"
    )
    if refunded and cost:
        message = f"Refunded {dollars(refunded)}: a checkpoint that you had paid for could not be used"
        events.append(job, message=message, refunded_nano=refunded)


def _end_job(
    job: FineTuningJob,
    status: JobStatus,
    gpu_ms: int,
    now: datetime.datetime,
    *,
    message: str,
    level: str = "info",
    **changes: Unpack[JobChanges],
) -> None:
    cost = _due_nano(job, status, gpu_ms)
    is_held = bool(job.hold_id) and job.status != JobStatus.PAUSED
    if not is_held:
        cost = min(cost, get_charged_nano(source=job.pk))
    advance(
        job,
        to=status,
        transitions=JOB_TRANSITIONS,
        finished_at=now,
        billed_gpu_ms=gpu_ms,
        cost_nano=cost,
        **changes,
    )
    if is_held:
        _settle(job, cost, status, gpu_ms)
    else:
        _refund_surplus(job, cost, status)
    events.append(job, type="state", level=level, message=message, status=status, cost_nano=cost)
    publish_end(job=job)
    audit.record(
        organization=job.organization_id,
        by="system",
        action=f"job.{status}",
        target=job.pk,
        billed_gpu_ms=gpu_ms,
        cost_nano=cost,
    )
