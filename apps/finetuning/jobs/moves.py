"""Moving a queued job to another pool, where it may start sooner."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from django.db import transaction
from django.utils.translation import gettext

from apps.billing.operations import InsufficientBalance, insufficient_balance
from apps.contracts.runs import Hyperparameters
from apps.core import audit
from apps.core.database.transitions import try_advance
from apps.core.errors import DomainError, InvalidState, InvalidValue
from apps.core.money import usd_decimal
from apps.finetuning import events
from apps.finetuning.jobs.admission import choose_pool, place, place_words
from apps.finetuning.jobs.waits import Wait, WaitCause
from apps.finetuning.lifecycle import RUN_TRANSITIONS, JobStatus, RunStatus
from apps.finetuning.models import FineTuningJob, QueueShare
from apps.finetuning.quotes.options import PoolQuote, split_key
from apps.finetuning.quotes.queries import counting_model, find_counted, quote_counted
from apps.finetuning.recipes.stored_requests import recipe_of, stored_request
from apps.finetuning.usage.quotas import require_place_for_job

MAX_MOVES = 20  # of one job
MAX_SHOWN = 3
_FACTS_SECONDS = 15.0  # how old the facts about pools may be that a page shows
_PLANNED = ("gradient_accumulation_steps", "gradient_checkpointing")  # what `with_plan` sets
_PARAM = "fine_tuning_job_id"


@dataclass(frozen=True, kw_only=True)
class Move:
    """A pool in which a queued job would start sooner, with the option that is quoted there.

    `sooner_seconds` is None if no machine of its own pool can take the job now. `extra_nano` is the difference between
    the expected costs, below 0 if the pool is cheaper; None if one is unknown. `maximum_nano` is the most that the job
    costs there.
    """

    quoted: PoolQuote
    starts_after_seconds: float
    sooner_seconds: float | None
    extra_nano: int | None
    maximum_nano: int | None

    @property
    def maximum_usd(self) -> str:
        return "" if self.maximum_nano is None else usd_decimal(self.maximum_nano)

    @property
    def saved_nano(self) -> int:
        """Return what the pool is cheaper by, 0 if it is not."""
        return max(-(self.extra_nano or 0), 0)


def list_moves(*, job: FineTuningJob, wait: Wait | None, now: datetime.datetime) -> list[Move]:
    """Return up to MAX_SHOWN pools in which the job would start sooner, first those where it starts first.

    Empty for jobs that wait for something else than machines, and for those that have begun. Stored counts and
    comparisons are used: nothing is computed that is missing.
    """
    if wait is None or wait.cause not in (WaitCause.CAPACITY, WaitCause.SHARE) or not _can_move(job):
        return []
    own = sum(wait.starts_after) / 2 if wait.starts_after else None
    if own is not None and own < 1:
        return []
    try:
        quotes = _quotes(job, now)
    except DomainError:  # a file is still counted or compared, or the job cannot be quoted any more
        return []
    own_cost = job.estimate.get("cost_nano_p50")
    found: dict[str, Move] = {}
    for quoted in quotes:  # the cheapest launchable one first
        after, cost = quoted.estimate.queue_seconds, quoted.estimate.cost_nano_p50
        is_sooner = after is not None and (own is None or after < own)
        if after is None or not is_sooner or not quoted.is_launchable or quoted.pool.pk == job.pool_id:
            continue
        found.setdefault(
            quoted.pool.pk,
            Move(
                quoted=quoted,
                starts_after_seconds=after,
                sooner_seconds=None if own is None else own - after,
                extra_nano=None if cost is None or own_cost is None else cost - own_cost,
                maximum_nano=quoted.maximum_nano(stored_request(job).spend_cap_nano),
            ),
        )
    return sorted(found.values(), key=lambda move: move.starts_after_seconds)[:MAX_SHOWN]


@transaction.atomic
def move_job(*, job: FineTuningJob, option: str, by: str, now: datetime.datetime, shown_max_nano: int) -> FineTuningJob:
    """Queue the job for another option, such as h200:4: its hold returns, and the option's maximum is held.

    `shown_max_nano` is the maximum that its customer was shown for the option. Raises InvalidState once a machine has
    taken the job, MaximumRaised, and the errors of its admission. The job then stays where it is.
    """
    job = FineTuningJob.objects.select_for_update(of=("self",)).get(pk=job.pk)
    if not _can_move(job):
        raise _too_late()
    if job.runs.count() > MAX_MOVES:
        raise InvalidState(gettext("A job moves at most %(moves)s times.") % {"moves": MAX_MOVES}, param=_PARAM)
    name, gpu_count = split_key(option)
    if not name:  # or the best pool would be chosen
        text = gettext("There is no open GPU pool named '%(name)s'. Use one of an estimate's.")
        raise InvalidValue(text % {"name": option[:60]}, param="compute.pool")
    asked = msgspec.structs.replace(stored_request(job), pool=name, gpu_count=gpu_count, shown_max_nano=shown_max_nano)
    job.requested, job.hyperparameters = msgspec.to_builtins(asked), msgspec.to_builtins(_without_plan(job))
    quoted, origin = choose_pool(job, now), job.pool
    if quoted.pool == origin and quoted.gpu_count == job.gpu_count:
        raise InvalidState(gettext("The job waits for %(pool)s already.") % {"pool": quoted.key}, param="compute.pool")
    require_place_for_job(organization=job.organization_id, but=job)  # the limits are locked before shares everywhere
    _lock_shares(job, quoted)
    run = job.runs.select_for_update().filter(status=RunStatus.QUEUED).first()
    if run is None or not try_advance(run, to=RunStatus.CANCELLED, transitions=RUN_TRANSITIONS, finished_at=now):
        raise _too_late()
    try:
        changes = place(job=job, quoted=quoted, by=by, now=now) | {"requested": job.requested}
    except InsufficientBalance as short:  # a move has no spend cap to lower
        raise insufficient_balance(short.data["balance_nano"], short.data["required_nano"]) from short
    FineTuningJob.objects.filter(pk=job.pk, status=JobStatus.QUEUED).update(**changes)
    job.refresh_from_db()
    events.append(
        job,
        type="state",
        message=f"Moved to {place_words(quoted)}",
        hold_nano=job.spend_cap_nano,
        pool=quoted.pool.name,
        gpu_count=quoted.gpu_count,
    )
    audit.record(
        organization=job.organization_id,
        by=by,
        action="job.moved",
        target=job.pk,
        from_pool=origin.name if origin else "",
        to_pool=quoted.key,
        cap_nano=job.spend_cap_nano,
    )
    return job


def _can_move(job: FineTuningJob) -> bool:
    """Return whether the job is queued and no machine ever took it: nothing is trained, billed or saved yet."""
    return job.status == JobStatus.QUEUED and not job.runs.exclude(leased_at=None).exists()


def _too_late() -> InvalidState:
    return InvalidState(gettext("Only a job that no machine has taken yet can move to another pool."), param=_PARAM)


def _without_plan(job: FineTuningJob) -> Hyperparameters:
    """Return the recipe as it was asked for, without the micro-batches and checkpointing that fit its pool."""
    asked, plain = stored_request(job).asked or {}, Hyperparameters()
    return msgspec.structs.replace(recipe_of(job), **{name: asked.get(name, getattr(plain, name)) for name in _PLANNED})


def _quotes(job: FineTuningJob, now: datetime.datetime) -> Sequence[PoolQuote]:
    counting = counting_model(job.base_model)
    counted = find_counted(version=job.training_file, validation=job.validation_file, counting=counting)
    return quote_counted(
        base_model=job.base_model,
        counted=counted,
        recipes=[_without_plan(job)],
        now=now,
        with_ways=False,
        max_age_seconds=_FACTS_SECONDS,
        node_count=stored_request(job).node_count,
    )[0]


def _lock_shares(job: FineTuningJob, quoted: PoolQuote) -> None:
    """Lock the shares of both pools in one order, so that two opposite moves do not wait for each other."""
    shares = QueueShare.objects.for_organization(job.organization_id).filter(pool__in=[job.pool_id, quoted.pool.pk])
    list(shares.order_by("pk").select_for_update().values_list("pk", flat=True))
