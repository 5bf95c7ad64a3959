"""Admission of jobs whose files are validated: the pool is chosen, the cost is held and the first attempt queued."""

import datetime
import logging
import time
from typing import Any

import msgspec
from celery.exceptions import SoftTimeLimitExceeded
from django.db import transaction
from django.db.models import F, Max, Q, QuerySet, Window
from django.db.models.functions import RowNumber
from django.utils.translation import gettext

from apps.accounts.models import Organization
from apps.contracts.failures import FailureCode
from apps.contracts.hyperparameters import Hyperparameters, Method, Objective
from apps.core import audit
from apps.core.database.clock import db_now
from apps.core.database.transitions import advance
from apps.core.errors import DomainError, InvalidValue, Unavailable
from apps.core.messages.translation import translated
from apps.core.money import dollars, usd_decimal
from apps.datasets.lifecycle import DatasetVersionStatus
from apps.datasets.operations import request_count
from apps.datasets.queries import find_refusal, find_token_count
from apps.finetuning import events
from apps.finetuning.jobs.files import invalid_file, require_objective, require_rows_to_train
from apps.finetuning.jobs.requests import JobRequest, choose_recipe
from apps.finetuning.lifecycle import JOB_TRANSITIONS, JobStatus
from apps.finetuning.models import FineTuningJob
from apps.finetuning.notices import publish_end
from apps.finetuning.pools.rehearsals import ask
from apps.finetuning.quotes.computation import snapshot, with_plan
from apps.finetuning.quotes.options import PoolQuote, split_key
from apps.finetuning.quotes.queries import counting_model, get_quotes, is_still_comparing, is_still_counting
from apps.finetuning.recipes.start_points import find_start_point
from apps.finetuning.recipes.stored_requests import recipe_of, stored_request
from apps.finetuning.runs import attempts, outcomes
from apps.finetuning.usage import charges
from apps.finetuning.usage.quotas import require_room_for_job
from apps.finetuning.usage.storage import require_any_storage

logger = logging.getLogger(__name__)
MOST_CHECKED, CHECK_SECONDS = 50, 3.0  # waiting jobs by one tick, which comes every five seconds
# A job fails at the last of these unforeseen errors within the hour; those that follow at once count as one.
_MAX_FAULTS = 4
_FAULTS_APART, _FAULTS_KEPT = datetime.timedelta(minutes=2), datetime.timedelta(hours=1)


class DoesNotFit(DomainError):
    """No pool can hold the job; the message describes what would fit."""

    code = "job_too_large"


class CannotLaunch(DomainError):
    """The pool (or every pool) cannot take the job now; the message gives the reason."""

    code = "cannot_launch"


class MaximumRaised(DomainError):
    """The maximum of the job rose after its customer saw it; the message gives both."""

    code = "maximum_raised"


def require_maximum(*, cap_nano: int, shown_nano: int | None) -> None:
    """Raise MaximumRaised if the job may now cost more than the customer was shown. None: no maximum was shown."""
    if shown_nano is not None and shown_nano < cap_nano:
        raise MaximumRaised(
            gettext("The maximum is now %(cap)s instead of %(shown)s. Check it, then start the job.")
            % {"cap": dollars(cap_nano), "shown": dollars(shown_nano)},
            param="budget.quoted_max_usd",
            maximum_usd=usd_decimal(cap_nano),
        )


def is_ready_to_admit(job: FineTuningJob) -> bool:
    """Return whether the job's files are validated, counted and compared."""
    files = [job.training_file, *([job.validation_file] if job.validation_file else [])]
    if any(version.status != DatasetVersionStatus.READY for version in files):
        return False
    count = find_token_count(version=job.training_file, base_model=job.base_model)
    if is_still_counting(version=job.training_file, count=count, base_model=job.base_model):
        return False
    return not is_still_comparing(version=job.training_file, validation=job.validation_file)


def admit(*, job: FineTuningJob, now: datetime.datetime) -> None:
    """Choose the pool, hold the cost and queue the first attempt. Raises the errors of `create_job`."""
    require_objective(Objective(job.hyperparameters["objective"]), job.training_file, job.validation_file)
    require_rows_to_train(job.training_file, job.validation_file)
    quoted = choose_pool(job, now)
    changes: dict[str, Any] = place(job=job, quoted=quoted, by=job.created_by, now=now)
    advance(job, to=JobStatus.QUEUED, transitions=JOB_TRANSITIONS, queued_at=now, **changes)
    events.append(
        job,
        type="state",
        message=f"Files validated, moving job to queued state on {place_words(quoted)}",
        hold_nano=job.spend_cap_nano,
        pool=quoted.pool.name,
        gpu_count=quoted.gpu_count,
    )


def place(
    *, job: FineTuningJob, quoted: PoolQuote, by: str, now: datetime.datetime, share_left: float = 1.0
) -> dict[str, object]:
    """Queue an attempt on the option and hold its maximum; return the job's columns that follow from it.

    If the job moves here, its earlier time is charged first, and the rest of its earlier hold returns. Its maximum is
    then its cost so far plus the maximum here. `share_left` is the part of its steps that is still to train. Raises the
    errors of `create_job`.
    """
    estimate, asked = quoted.estimate, stored_request(job)
    spent_nano = charges.spent_nano(job=job)
    own_nano = quoted.rest_nano(asked.spend_cap_nano, spent_nano=spent_nano)
    if quoted.price is None or own_nano is None or quoted.cap_nano is None:
        raise CannotLaunch(gettext("The job has no price."), param="compute.pool")
    require_maximum(cap_nano=spent_nano + own_nano, shown_nano=asked.shown_max_nano)
    charges.require_cap(cap_nano=own_nano, least_nano=quoted.least_cap_nano or 0)
    job.gpu_count, job.node_count = estimate.gpu_count, quoted.node_count
    require_any_storage(organization=job.organization_id, by=job.member_id)
    run_seconds = (estimate.run_seconds_p50 or estimate.train_seconds_p50 or 0.0) * share_left
    require_room_for_job(job=job, seconds=run_seconds * job.gpu_count, now=now)
    recipe = with_plan(recipe_of(job), estimate)
    job.pool = quoted.pool
    run = attempts.queue_attempt(job=job)
    is_first = not job.hold_id
    attempts.settle_before_move(job=job, by=by)
    held = attempts.hold_cap(
        job=job,
        price_rule=quoted.price,
        amount_nano=own_nano,
        by=by,
        idempotency_key=f"hold:{job.pk}" if is_first else f"hold:{job.pk}:{run.attempt}",
    )
    rehearsal = quoted.rehearsal
    if rehearsal and rehearsal.peak_bytes is None and not rehearsal.request.is_on_cpu:
        # Idle workers trace it while the job waits, so that it does not cost time on the job's GPUs.
        ask(organization=job.organization_id, rehearsal=rehearsal, pool=quoted.pool, now=now)
    cap_nano = spent_nano + own_nano
    return _columns(job, quoted, recipe) | _prices(quoted, cap_nano, spent_nano) | {"hold_id": held.pk}


def _columns(job: FineTuningJob, quoted: PoolQuote, recipe: Hyperparameters) -> dict[str, object]:
    """Return the columns of a job with its pool, its settings there, and its cost before it moved there."""
    estimate = quoted.estimate
    return {
        "pool": quoted.pool,
        "gpu_count": estimate.gpu_count,
        "node_count": quoted.node_count,
        "estimate": snapshot(estimate) | outcomes.provenance(base_model=job.base_model, correction=quoted.correction),
        "hyperparameters": msgspec.to_builtins(recipe),
        "total_steps": estimate.steps,
        **{name: getattr(job, name) for name in ("moved_gpu_ms", "moved_nano", "billed_gpu_ms", "cost_nano")},
    }


def _prices(quoted: PoolQuote, cap_nano: int, spent_nano: int) -> dict[str, object]:
    """Return the columns of a job with its price, and its limits, which include what it spent before."""
    firm_nano = quoted.cap_nano if quoted.is_firm else None
    return {
        "price_rule": quoted.price,
        "spend_cap_nano": cap_nano,
        "firm_max_nano": None if firm_nano is None else spent_nano + firm_nano,
        "firm_limit_nano": None if firm_nano is None else spent_nano + quoted.pool.firm_limit_nano(firm_nano),
    }


def place_words(quoted: PoolQuote) -> str:
    place = quoted.pool.name if quoted.gpu_count == 1 else f"{quoted.gpu_count} GPUs of {quoted.pool.name}"
    return place if quoted.node_count == 1 else f"{place}, on {quoted.node_count} machines"


def choose_pool(job: FineTuningJob, now: datetime.datetime) -> PoolQuote:
    """Return the option that the job asked for, else the best one. Raises the errors of `create_job`."""
    recipe, asked = recipe_of(job), stored_request(job)
    quotes = get_quotes(
        base_model=job.base_model,
        version=job.training_file,
        recipe=recipe,
        now=now,
        validation=job.validation_file,
        node_count=asked.node_count,
    )
    name, gpu_count = split_key(asked.pool or "", gpu_count=asked.gpu_count)
    if name:
        quotes = [quoted for quoted in quotes if quoted.pool.name == name]
        if not quotes:
            raise InvalidValue(
                gettext("There is no open GPU pool named '%(name)s'. Use a pool from an estimate.")
                % {"name": name[:60]},
                param="compute.pool",
            )
    if not quotes:
        raise CannotLaunch(gettext("No GPU pool is open on this platform."), param="compute.pool")
    quotes = _with_gpus(quotes, gpu_count)
    if not name:
        quotes.sort(key=lambda quoted: not (quoted.is_launchable and quoted.pool.name == asked.preferred_pool))
    if not any(quoted.estimate.fits for quoted in quotes):
        first, fixes = quotes[0], quotes[0].estimate.fixes
        ways = " ".join(translated(fix.text) for fix in fixes) or gettext("Choose a smaller base model.")
        raise DoesNotFit(
            gettext("The job doesn't fit any open pool. %(name)s: %(reason)s %(ways)s")
            % {"name": first.pool.name, "reason": translated(first.estimate.reason or ""), "ways": ways},
            param="compute.pool",
            fixes=[msgspec.to_builtins(fix) for fix in fixes],
        )
    if not quotes[0].is_launchable:
        raise CannotLaunch(
            f"{quotes[0].pool.name}: {translated(quotes[0].block_reason)}",
            param="compute.pool",
        )
    return quotes[0]


def _with_gpus(quotes: list[PoolQuote], gpu_count: int | None) -> list[PoolQuote]:
    """Return the options with this number of GPUs, all for None. Raises InvalidValue listing the numbers offered."""
    found = [quoted for quoted in quotes if gpu_count in (None, quoted.gpu_count)]
    if not found:
        offered = ", ".join(str(count) for count in sorted({quoted.gpu_count for quoted in quotes}))
        raise InvalidValue(
            gettext(
                "This job is not offered on %(gpu_count)s GPUs: they cannot share its batch evenly, it does not "
                "fit, or they would not be faster. Offered: %(offered)s."
            )
            % {"gpu_count": gpu_count, "offered": offered},
            param="compute.gpu_count",
        )
    return found


def admit_in_turn(*, waiting: Q, most: int = MOST_CHECKED) -> None:
    """Check the waiting jobs of this condition, at most so many and for up to CHECK_SECONDS.

    Share holders take turns. The remaining jobs come first at the next call. Each job is checked separately, so that an
    error in one does not delay the others. A job that something else has locked is left to a later call.
    """
    until = time.monotonic() + CHECK_SECONDS
    for job_id in _in_turn(waiting)[:most]:
        if time.monotonic() > until:
            return
        try:
            _note_check(job_id)
            admit_when_ready(job_id=job_id)
        except SoftTimeLimitExceeded:
            raise
        except Exception:  # a process edge: the job is tried again, for some minutes
            logger.exception("job %s could not be admitted", job_id)
            note_fault(job_id=job_id)


def _unlocked(job_id: str) -> QuerySet[FineTuningJob]:
    """Return the job, to lock it; nothing while something else has locked it."""
    return FineTuningJob.objects.filter(pk=job_id).select_for_update(skip_locked=True, of=("self",))


@transaction.atomic
def _note_check(job_id: str) -> None:
    for job in _unlocked(job_id):
        job.checked_at = db_now()
        job.save(update_fields=["checked_at"])


def _in_turn(waiting: Q) -> QuerySet[FineTuningJob, str]:
    """Return the ids of one job of each share holder, then another of each, from the one looked at longest ago."""
    holder, longest_ago = Organization.share_holder_by("organization__"), F("checked_at").asc(nulls_first=True)
    jobs = FineTuningJob.objects.filter(waiting, status=JobStatus.VALIDATING_FILES).annotate(
        turn=Window(RowNumber(), partition_by=holder, order_by=[longest_ago, "created_at", "pk"]),
        last_turn=Window(Max("checked_at"), partition_by=holder),
    )
    in_turn = jobs.order_by("turn", F("last_turn").asc(nulls_first=True), "created_at", "pk")
    return in_turn.values_list("pk", flat=True)


@transaction.atomic
def admit_when_ready(*, job_id: str) -> None:
    """Admit a job whose files are now validated, or fail it with the reason; leave it if it must still wait."""
    job = _unlocked(job_id).select_related("training_file", "validation_file", "base_model").first()
    if job is None or job.status != JobStatus.VALIDATING_FILES:
        return
    now = db_now()
    try:
        with transaction.atomic():
            _admit_if_validated(job, now)
    except Unavailable:
        return  # temporary: the job is checked again in some seconds
    except DomainError as refused:
        job.refresh_from_db()
        _refuse(job, refused, now)


@transaction.atomic
def note_fault(*, job_id: str) -> None:
    """Record that an unforeseen error kept a job from being admitted. Fail the job if errors go on for minutes."""
    job = _unlocked(job_id).first()
    if job is None or job.status != JobStatus.VALIDATING_FILES:
        return
    now = db_now()
    faults = job.events.filter(data__is_fault=True, created_at__gt=now - _FAULTS_KEPT)
    if faults.filter(created_at__gt=now - _FAULTS_APART).exists():
        return
    if faults.count() < _MAX_FAULTS:
        events.append(job, level="warn", message="A problem on our side delays the job. Trying again", is_fault=True)
        return
    _refuse(
        job,
        DomainError(
            gettext("We couldn't start the job because of a problem on our side. Nothing was charged. Try again."),
            code=FailureCode.INTERNAL_ERROR.value,
        ),
        now,
    )


def _admit_if_validated(job: FineTuningJob, now: datetime.datetime) -> None:
    for version, param in ((job.training_file, "training_file"), (job.validation_file, "validation_file")):
        if version is None:
            continue
        if version.status in (DatasetVersionStatus.INVALID, DatasetVersionStatus.DELETED):
            raise invalid_file(version, param)
        if version.status != DatasetVersionStatus.READY:
            return
    counting = counting_model(job.base_model)
    count = find_token_count(version=job.training_file, base_model=counting)
    is_refused = find_refusal(version=job.training_file, base_model=counting) is not None
    if counting.is_installed and count is None and not is_refused:
        request_count(version=job.training_file, base_model=counting)
        return
    if is_still_comparing(version=job.training_file, validation=job.validation_file):
        return
    _choose_again(job)
    admit(job=job, now=now)


def _choose_again(job: FineTuningJob) -> None:
    """Choose again the values the customer left open, now that the rows are known.

    A job that waited for its file gets the same recipe as one created after validation.
    """
    stored = stored_request(job)
    if stored.asked is None:
        return  # the job is older than this field
    model = stored.start_from.name or job.base_model.name
    asked = JobRequest(
        base_model=model,
        training_file=job.training_file.pk,
        method=Method(job.method),
        objective=stored.objective,
        hyperparameters=stored.asked,
    )
    chosen = choose_recipe(
        find_start_point(organization=job.organization_id, model=model),
        asked,
        training_file=job.training_file,
        validation_file=job.validation_file,
    )
    job.hyperparameters = msgspec.to_builtins(chosen.hyperparameters)
    job.requested = msgspec.to_builtins(msgspec.structs.replace(stored, choices=chosen.choices))
    job.save(update_fields=["hyperparameters", "requested"])


def _refuse(job: FineTuningJob, refused: DomainError, now: datetime.datetime) -> None:
    advance(
        job,
        to=JobStatus.FAILED,
        transitions=JOB_TRANSITIONS,
        finished_at=now,
        error_code=refused.code,
        error_message=refused.message[:500],
        error_param=refused.param or "",
    )
    events.append(job, type="state", level="error", message=f"Failed: {refused.message}", status=JobStatus.FAILED)
    publish_end(job=job)
    audit.record(organization=job.organization_id, by="system", action="job.failed", target=job.pk, code=refused.code)
