"""The steps of retrainings: each tick looks at those that are open, organizations in turn."""

import datetime
import logging
import time
from collections.abc import Callable

from celery.exceptions import SoftTimeLimitExceeded
from django.db import transaction
from django.db.models import QuerySet, Window
from django.db.models.functions import RowNumber
from django.utils.translation import gettext

from apps.accounts.models import Organization
from apps.contracts.failures import FailureCode
from apps.core.database.clock import db_now
from apps.core.errors import DomainError, PermissionDenied, QuotaExceeded
from apps.finetuning.jobs.retraining.comparisons import (
    ComparisonFailed,
    ask,
    decide_on_held_out,
    decide_on_regression,
    stop,
)
from apps.finetuning.jobs.retraining.endings import finish
from apps.finetuning.jobs.retraining.launches import above_maximum, launch, require_actor
from apps.finetuning.lifecycle import JOB_TERMINAL, RETRAINING_OPEN, JobStatus, RetrainingCode, RetrainingStatus
from apps.finetuning.models import FineTuningJob, Retraining
from apps.serving.aliases import AliasMoved, is_imported, loading_what_is_cold, point_alias

MAX_LOOKED_AT = 100  # by one tick, over all organizations
MAX_SECONDS = 10.0  # of one tick: creating a job takes up to a second, and other short tasks wait meanwhile
MAX_ATTEMPTS = 8  # at a step, within about three hours
MAX_PAUSED = datetime.timedelta(days=3)  # of its job; the plan begins nothing else meanwhile
_PAUSE, _LONGEST_PAUSE = datetime.timedelta(minutes=1), datetime.timedelta(hours=1)
# How a retraining ends whose step cannot be taken.
_GIVEN_UP = {RetrainingStatus.WAITING: RetrainingStatus.REFUSED, RetrainingStatus.PROMOTING: RetrainingStatus.KEPT}
logger = logging.getLogger(__name__)


def advance_open() -> None:
    """Take the next step of each open retraining whose time has come, up to MAX_LOOKED_AT, for up to MAX_SECONDS.

    Share holders take turns. What is left is first in the next tick.
    """
    until = time.monotonic() + MAX_SECONDS
    turn = Window(
        RowNumber(), partition_by=Organization.share_holder_by("organization__"), order_by=["next_at", "pk"]
    )  # fmt: skip
    waiting = _waiting(db_now()).annotate(turn=turn).order_by("turn", "next_at").values_list("pk", flat=True)
    for retraining_id in waiting[:MAX_LOOKED_AT]:
        if time.monotonic() > until:
            return
        try:
            _advance(retraining_id)
        except SoftTimeLimitExceeded:
            raise
        except Exception:  # a process edge: one retraining must not stop the others
            logger.exception("the retraining %s was not advanced", retraining_id)
            text = gettext("A problem on our side ended the retraining.")
            fault = DomainError(text, code=FailureCode.INTERNAL_ERROR.value)
            _try_again_or_give_up(retraining_id, fault, db_now(), may_pass=True)


def _waiting(now: datetime.datetime) -> QuerySet[Retraining]:
    return Retraining.objects.filter(status__in=RETRAINING_OPEN, next_at__lte=now)


def _advance(retraining_id: str) -> None:
    """Take the next step. The lock of the row makes another process pass it over."""
    now = db_now()
    try:
        with loading_what_is_cold(), transaction.atomic():
            retraining = _waiting(now).filter(pk=retraining_id).select_for_update(skip_locked=True).first()
            if retraining is None:
                return
            _STEPS[RetrainingStatus(retraining.status)](retraining, now)
            Retraining.objects.filter(pk=retraining.pk, status__in=RETRAINING_OPEN).update(next_at=now + _PAUSE)
    except ComparisonFailed as failed:
        _give_up(retraining_id, RetrainingCode.COMPARISON_FAILED, str(failed), now)
    except DomainError as refused:
        _try_again_or_give_up(retraining_id, refused, now)


@transaction.atomic
def _try_again_or_give_up(
    retraining_id: str, refused: DomainError, now: datetime.datetime, *, may_pass: bool = False
) -> None:
    """Wait longer after each attempt; end the retraining after MAX_ATTEMPTS, or at once if waiting does not help."""
    retraining = _find_open(retraining_id)
    if retraining is None:
        return
    if not (may_pass or _may_pass(refused, retraining.status)) or retraining.attempts + 1 >= MAX_ATTEMPTS:
        _give_up(retraining_id, refused.code, refused.message, now)
        return
    retraining.attempts += 1
    retraining.next_at = now + min(_PAUSE * 2**retraining.attempts, _LONGEST_PAUSE)
    retraining.save(update_fields=["attempts", "next_at"])


def _find_open(retraining_id: str) -> Retraining | None:
    """Return the retraining, locked; None if it has ended, or was deleted with its plan."""
    rows = Retraining.objects.filter(pk=retraining_id, status__in=RETRAINING_OPEN)
    return rows.select_for_update().first()


def _may_pass(refused: DomainError, status: str) -> bool:
    """Return whether the step may succeed later: limits of runs end, and a replica loads the new model."""
    if isinstance(refused, AliasMoved | PermissionDenied):
        return False
    is_limit = isinstance(refused, QuotaExceeded) and status != RetrainingStatus.WAITING
    return refused.is_retryable or is_limit or status == RetrainingStatus.PROMOTING


@transaction.atomic
def _give_up(retraining_id: str, code: str, reason: str, now: datetime.datetime) -> None:
    retraining = _find_open(retraining_id)
    if retraining is not None:
        stop(retraining, now)
        to = _GIVEN_UP.get(RetrainingStatus(retraining.status), RetrainingStatus.FAILED)
        finish(retraining, to=to, code=code, reason=reason, now=now)


# --- Steps ------------------------------------------------------------------------------------------------------------


def _follow_job(retraining: Retraining, now: datetime.datetime) -> None:
    """Compare the model once the job has succeeded. If the job stays paused, end only the retraining."""
    job = retraining.job
    assert job is not None and retraining.held_out_file is not None
    if job.status == JobStatus.SUCCEEDED:
        ask(retraining, file=retraining.held_out_file, to=RetrainingStatus.COMPARING, now=now)
    elif job.status in JOB_TERMINAL and job.queued_at is None and job.error_code:
        is_dear = job.error_code == "maximum_raised"
        code = RetrainingCode.ABOVE_MAXIMUM if is_dear else job.error_code
        reason = above_maximum(retraining) if is_dear else job.error_message
        finish(retraining, to=RetrainingStatus.REFUSED, code=code, reason=reason, now=now)
    elif job.status in JOB_TERMINAL:
        reason = job.error_message or f"The job is {job.status}."
        finish(retraining, to=RetrainingStatus.FAILED, code=RetrainingCode.JOB_FAILED, reason=reason, now=now)
    elif job.status == JobStatus.PAUSED and _paused_since(job) <= now - MAX_PAUSED:
        reason = f"The job was paused for {MAX_PAUSED.days} days. It stays paused, and its model will not be compared."
        finish(retraining, to=RetrainingStatus.FAILED, code=RetrainingCode.JOB_PAUSED, reason=reason, now=now)


def _paused_since(job: FineTuningJob) -> datetime.datetime:
    ended = job.runs.latest("attempt").finished_at
    assert ended is not None
    return ended


def _promote(retraining: Retraining, now: datetime.datetime) -> None:
    """Move the alias to the new model if it still stands for the one that was compared, without a canary."""
    require_actor(retraining, now)
    alias, job, production = retraining.plan.alias, retraining.job, retraining.production
    assert job is not None and job.adapter_version is not None and production is not None
    is_elsewhere = alias is not None and alias.adapter_id != job.adapter_version.adapter_id and not is_imported(alias)
    if alias is None or is_elsewhere:
        reason = "The alias was deleted, or belongs to another adapter by now."
        finish(retraining, to=RetrainingStatus.KEPT, code=RetrainingCode.ALIAS_DELETED, reason=reason, now=now)
        return
    point_alias(
        version=job.adapter_version,
        name=alias.name,
        by=retraining.created_by,
        now=now,
        expected=production.model_name,
    )
    reason = f"{alias.model_name} stands for {job.adapter_version.model_name}."
    finish(retraining, to=RetrainingStatus.PROMOTED, code=RetrainingCode.BETTER, reason=reason, now=now)


_STEPS: dict[RetrainingStatus, Callable[[Retraining, datetime.datetime], None]] = {
    RetrainingStatus.WAITING: launch,
    RetrainingStatus.TRAINING: _follow_job,
    RetrainingStatus.COMPARING: decide_on_held_out,
    RetrainingStatus.CHECKING: decide_on_regression,
    RetrainingStatus.PROMOTING: _promote,
}
