"""Moving a queued job to another pool, or to another number of machines, where it may start sooner."""

import datetime
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
from django.db import transaction
from django.utils.translation import gettext, ngettext

from apps.accounts.members.projects import require_work_in
from apps.billing.operations import InsufficientBalance, insufficient_balance
from apps.contracts.hyperparameters import Hyperparameters
from apps.core import audit
from apps.core.database.transitions import try_advance
from apps.core.errors import DomainError, InvalidState, InvalidValue
from apps.core.money import dollars, usd_decimal
from apps.finetuning import events
from apps.finetuning.jobs.admission import CannotLaunch, choose_pool, place, place_words
from apps.finetuning.jobs.waits import Wait, WaitCause
from apps.finetuning.lifecycle import RUN_TRANSITIONS, JobStatus, RunStatus
from apps.finetuning.models import Checkpoint, FineTuningJob, QueueShare
from apps.finetuning.queries import latest_checkpoint
from apps.finetuning.quotes.options import PoolQuote, by_use, split_key
from apps.finetuning.quotes.queries import counting_model, find_counted, quote_counted
from apps.finetuning.recipes.stored_requests import recipe_of, stored_request
from apps.finetuning.runs.specs import parallelism_of
from apps.finetuning.usage import charges
from apps.finetuning.usage.quotas import require_place_for_job

MAX_MOVES = 20  # of one job
MAX_SHOWN = 3
_FACTS_SECONDS = 15.0  # how old the facts about pools may be that a page shows
_PLANNED = ("gradient_accumulation_steps", "gradient_checkpointing")  # what `with_plan` sets
_PARAM = "fine_tuning_job_id"


@dataclass(frozen=True, kw_only=True)
class Move:
    """A pool in which a queued job would start sooner, with the option that is quoted there.

    `sooner_seconds` is None if no machine of its own pool can take the job now. `cost_nano` is the expected cost of the
    whole job if it moves, with what it has cost so far. `extra_nano` is the difference to that where it is, below 0 if
    the pool is cheaper; both are None if a cost is unknown. `maximum_nano` is the most that the job then costs.
    """

    quoted: PoolQuote
    starts_after_seconds: float
    sooner_seconds: float | None
    cost_nano: int | None
    extra_nano: int | None
    maximum_nano: int | None

    @property
    def maximum_usd(self) -> str:
        return "" if self.maximum_nano is None else usd_decimal(self.maximum_nano)

    @property
    def saved_nano(self) -> int:
        """Return what the pool is cheaper by, 0 if it is not."""
        return max(-(self.extra_nano or 0), 0)


@dataclass(frozen=True, kw_only=True)
class _Begun:
    """What a job has done when it moves: its cost so far, and the checkpoint that it resumes from.

    `share_left` is the part of its steps that is still to train.
    """

    has_run: bool
    spent_nano: int
    checkpoint: Checkpoint | None
    share_left: float

    @classmethod
    def of(cls, job: FineTuningJob) -> "_Begun":
        if not job.runs.exclude(leased_at=None).exists():
            return cls(has_run=False, spent_nano=0, checkpoint=None, share_left=1.0)
        checkpoint = latest_checkpoint(job=job)
        done = checkpoint.step / job.total_steps if checkpoint and job.total_steps else 0.0
        return cls(
            has_run=True,
            spent_nano=charges.spent_nano(job=job),
            checkpoint=checkpoint,
            share_left=1.0 - min(done, 1.0),
        )

    def obstacle(self, job: FineTuningJob, quoted: PoolQuote) -> str:
        """Return why the job cannot go on with the option, "" if it can.

        Its earlier attempts are billed by its GPUs, so that their number stays, on however many machines. The other
        pool reads the same checkpoints, from the same object store, if its GPUs share the model in the same way.
        """
        if not self.has_run:
            return ""
        if self.spent_nano >= job.spend_cap_nano:
            text = gettext("The job has already cost its maximum of %(maximum)s, so it cannot move.")
            return text % {"maximum": dollars(job.spend_cap_nano)}
        if quoted.gpu_count != job.gpu_count:
            text = ngettext(
                "The job began on one GPU and can only continue on one. Choose such an option, or cancel the job "
                "and continue from its checkpoint in a new one.",
                "The job began on %(gpus)d GPUs and can only continue on as many. Choose such an option, or cancel the "
                "job and continue from its checkpoint in a new one.",
                job.gpu_count,
            )
            return text % {"gpus": job.gpu_count}
        own, other = (parallelism_of(each) for each in (job.estimate.get("parallelism"), quoted.estimate.parallelism))
        if self.checkpoint and own != other:
            return gettext(
                "%(pool)s cannot read the job's checkpoint of step %(step)s: its GPUs share the model in another way. "
                "Choose another pool."
            ) % {"pool": quoted.pool.name, "step": self.checkpoint.step}
        return ""


def list_moves(*, job: FineTuningJob, wait: Wait | None, now: datetime.datetime) -> list[Move]:
    """Return up to MAX_SHOWN pools in which the job would start sooner, first those where it starts first.

    Its own pool is one of them if it would start sooner there on another number of machines.
    Empty for jobs that wait for something else than machines. Stored counts and comparisons are used: nothing is
    computed that is missing.
    """
    if wait is None or wait.cause in (WaitCause.QUOTA, WaitCause.BUDGET) or not _can_move(job):
        return []
    own = sum(wait.starts_after) / 2 if wait.starts_after else None
    if own is not None and own < 1:
        return []
    begun = _Begun.of(job)
    found: dict[str, Move] = {}
    for quoted in sorted(_quotes(job, now), key=by_use):  # the cheapest launchable one first
        after = quoted.estimate.queue_seconds
        is_sooner = after is not None and (own is None or after < own)
        is_here = (quoted.pool.pk, quoted.node_count) == (job.pool_id, job.node_count)
        if after is None or not is_sooner or not quoted.is_launchable or is_here:
            continue
        if not begun.obstacle(job, quoted):
            found.setdefault(quoted.pool.pk, _move(job, quoted, begun, after, own))
    return sorted(found.values(), key=lambda move: move.starts_after_seconds)[:MAX_SHOWN]


def _move(job: FineTuningJob, quoted: PoolQuote, begun: _Begun, after: float, own: float | None) -> Move:
    own_cost, cost = job.estimate.get("cost_nano_p50"), quoted.estimate.cost_nano_p50
    rest = quoted.rest_nano(stored_request(job).spend_cap_nano, spent_nano=begun.spent_nano)
    return Move(
        quoted=quoted,
        starts_after_seconds=after,
        sooner_seconds=None if own is None else own - after,
        cost_nano=None if cost is None else begun.spent_nano + round(cost * begun.share_left),
        extra_nano=None if cost is None or own_cost is None else round((cost - own_cost) * begun.share_left),
        maximum_nano=None if rest is None else begun.spent_nano + rest,
    )


@transaction.atomic
def move_job(
    *,
    job: FineTuningJob,
    option: str,
    by: str,
    now: datetime.datetime,
    shown_max_nano: int,
    node_count: int | None = None,
) -> FineTuningJob:
    """Queue the job for another option, such as h200:4: its hold returns, and the option's maximum is held.

    It trains on as many machines as before unless a `node_count` is given. A job that was queued again after an attempt
    is charged for what ran, and resumes from its last checkpoint. `shown_max_nano` is the maximum that its customer was
    shown for the option. Raises InvalidState unless the job is queued, PermissionDenied for a viewer of its project,
    CannotLaunch if the option cannot go on with it, MaximumRaised, and the errors of its admission. The job then stays
    where it is.
    """
    require_work_in(project_id=job.project_id, actor=by)
    job = FineTuningJob.objects.select_for_update(of=("self",)).get(pk=job.pk)
    if not _can_move(job):
        raise _too_late(job)
    if job.runs.filter(status=RunStatus.CANCELLED).count() >= MAX_MOVES:
        raise InvalidState(gettext("A job can move at most %(moves)s times.") % {"moves": MAX_MOVES}, param=_PARAM)
    place_before = (job.pool, job.gpu_count, job.node_count)
    quoted, origin = _chosen(job, option, node_count, now, shown_max_nano), job.pool
    if (quoted.pool, quoted.gpu_count, quoted.node_count) == place_before:
        raise InvalidState(gettext("The job already waits for %(pool)s.") % {"pool": quoted.key}, param="compute.pool")
    begun = _Begun.of(job)
    if obstacle := begun.obstacle(job, quoted):
        raise CannotLaunch(obstacle, param="compute.pool")
    require_place_for_job(organization=job.organization_id, but=job)  # the limits are locked before shares everywhere
    # In one order, so that two opposite moves do not wait for each other.
    shares = QueueShare.objects.for_organization(job.organization_id).filter(pool__in=[job.pool_id, quoted.pool.pk])
    list(shares.order_by("pk").select_for_update().values_list("pk", flat=True))
    run = job.runs.select_for_update().filter(status=RunStatus.QUEUED).first()
    if run is None or not try_advance(run, to=RunStatus.CANCELLED, transitions=RUN_TRANSITIONS, finished_at=now):
        raise _too_late(job)
    try:
        changes = place(job=job, quoted=quoted, by=by, now=now, share_left=begun.share_left)
    except InsufficientBalance as short:  # a move has no spend cap to lower
        raise insufficient_balance(short.data["balance_nano"], short.data["required_nano"]) from short
    changed = FineTuningJob.objects.filter(pk=job.pk, status=JobStatus.QUEUED)
    changed.update(**changes | {"requested": job.requested})
    job.refresh_from_db()
    _record(job, quoted, begun, origin=origin.name if origin else "", by=by)
    return job


def _chosen(
    job: FineTuningJob, option: str, node_count: int | None, now: datetime.datetime, shown_max_nano: int
) -> PoolQuote:
    """Return the quote of the option, and let the job ask for it. Raises the errors of its admission."""
    name, gpu_count = split_key(option)
    if not name:  # or the best pool would be chosen
        text = gettext("There is no open GPU pool named '%(name)s'. Use a pool from an estimate.")
        raise InvalidValue(text % {"name": option[:60]}, param="compute.pool")
    stored = stored_request(job)
    asked = msgspec.structs.replace(
        stored,
        pool=name,
        gpu_count=gpu_count,
        node_count=stored.node_count if node_count is None else node_count,
        shown_max_nano=shown_max_nano,
    )
    job.requested, job.hyperparameters = msgspec.to_builtins(asked), msgspec.to_builtins(_without_plan(job))
    return choose_pool(job, now)


def _record(job: FineTuningJob, quoted: PoolQuote, begun: _Begun, *, origin: str, by: str) -> None:
    words = f"Moved to {place_words(quoted)}"
    if begun.checkpoint:
        words = f"Moved to {place_words(quoted)}, to resume from step {begun.checkpoint.step}"
    events.append(
        job,
        type="state",
        message=words,
        hold_nano=job.spend_cap_nano - begun.spent_nano,
        pool=quoted.pool.name,
        gpu_count=quoted.gpu_count,
    )
    audit.record(
        organization=job.organization_id, by=by, action="job.moved", target=job.pk, from_pool=origin,
        to_pool=quoted.key, cap_nano=job.spend_cap_nano, spent_nano=begun.spent_nano,
    )  # fmt: skip


def _can_move(job: FineTuningJob) -> bool:
    """Return whether the job waits in a queue, from its launch on or again after an attempt."""
    return job.status == JobStatus.QUEUED and job.runs.filter(status=RunStatus.QUEUED).exists()


def _too_late(job: FineTuningJob) -> InvalidState:
    text = gettext("Only a job that waits in a queue can move to another pool. This one is %(status)s.")
    return InvalidState(text % {"status": job.status}, param=_PARAM)


def _without_plan(job: FineTuningJob) -> Hyperparameters:
    """Return the recipe as it was asked for, without the micro-batches and checkpointing that fit its pool."""
    asked, plain = stored_request(job).asked or {}, Hyperparameters()
    return msgspec.structs.replace(recipe_of(job), **{name: asked.get(name, getattr(plain, name)) for name in _PLANNED})


def _quotes(job: FineTuningJob, now: datetime.datetime) -> Iterator[PoolQuote]:
    """Yield the options for each number of machines; none while a file is counted, or if it cannot be quoted so."""
    counting = counting_model(job.base_model)
    try:
        counted = find_counted(version=job.training_file, validation=job.validation_file, counting=counting)
    except DomainError:
        return
    for node_count in _node_counts(job):
        try:
            (quotes,) = quote_counted(
                base_model=job.base_model,
                counted=counted,
                recipes=[_without_plan(job)],
                now=now,
                with_ways=False,
                max_age_seconds=_FACTS_SECONDS,
                node_count=node_count,
            )
        except DomainError:
            continue
        yield from quotes


def _node_counts(job: FineTuningJob) -> Iterator[int]:
    """Yield the job's number of machines, half of it and so on, and twice as many if their GPUs are even."""
    if job.gpus_per_node % 2 == 0:
        yield 2 * job.node_count
    count = job.node_count
    while True:
        yield count
        if count % 2:
            return
        count //= 2
