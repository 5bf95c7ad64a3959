"""Why a queued job waits, and when it will start: computed when it is asked for, and stored nowhere."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from apps.accounts.models import Organization
from apps.billing.queries import stop_reason
from apps.core.database.tenancy import system
from apps.finetuning import queries
from apps.finetuning.lifecycle import RUN_HOLDING_LEASE, JobStatus, RunStatus
from apps.finetuning.models import FineTuningJob, Run
from apps.finetuning.quotes.pool_facts import live_worker_filter
from apps.finetuning.runs.queue_order import queue_order, queue_position
from apps.finetuning.usage.quotas import reasons_to_wait

_LOOKED_AT = 200  # runs before it in the queue; behind more, the time of its start is unknown


class WaitCause(StrEnum):
    """What a queued job waits for."""

    CAPACITY = "capacity"  # a machine, or GPUs that others use
    SHARE = "share"  # the turn of organizations that used less for their weight
    QUOTA = "quota"  # a limit of its own organization
    BUDGET = "budget"  # its organization owes, or is suspended


@dataclass(frozen=True, kw_only=True)
class Wait:
    """`position` is 1 for the run that starts next. `starts_after` are the least and the most seconds expected.

    Both are None if unknown: for jobs that may not start now, or that no machine could take.
    """

    cause: WaitCause
    reason: str
    position: int | None = None
    starts_after: tuple[float, float] | None = None


@dataclass
class _Machine:
    """The seconds after which each of its GPUs is free."""

    free_after: list[float]

    def take(self, gpus: int, seconds: float) -> None:
        self.free_after.sort()
        start = self.free_after[gpus - 1]
        self.free_after[:gpus] = [start + seconds] * gpus


def explain_wait(*, job: FineTuningJob, now: datetime.datetime) -> Wait | None:
    """Return why the job waits and when it will start; None unless it is queued."""
    run = queries.get_active_run(job=job) if job.status == JobStatus.QUEUED else None
    if run is None or run.status != RunStatus.QUEUED:
        return None
    with system():  # the queue is shared: other tenants' runs are counted, and never shown
        organization = Organization.objects.get(pk=job.organization_id)
        if organization.suspended_at or (stopped := stop_reason(organization=organization)):
            reason = "Your organization is suspended." if organization.suspended_at else stopped
            return Wait(cause=WaitCause.BUDGET, reason=reason)
        if reason := reasons_to_wait(jobs=[job], now=now)[job.pk]:
            return Wait(cause=WaitCause.QUOTA, reason=reason)
        sizes = dict(run.pool.workers.filter(live_worker_filter(now)).values_list("pk", "gpus"))
        machines = {pk: max(1, len(gpus)) for pk, gpus in sizes.items() if max(1, len(gpus)) >= job.gpu_count}
        position = queue_position(run=run, now=now)
        if not machines:
            wanted = "machine" if job.gpu_count == 1 else f"machine with {job.gpu_count} GPUs"
            reason = f"No {wanted} of {run.pool.name} is online now. The job starts when one is."
            return Wait(cause=WaitCause.CAPACITY, reason=reason, position=position)
        ahead = _runs_ahead(run, position, now)
        starts_after = None if ahead is None else _starts_after(job, machines, ahead)
    is_overtaken = ahead is not None and any(other.created_at > run.created_at for other in ahead)
    if is_overtaken:
        cause, reason = WaitCause.SHARE, f"Organizations that used less of {run.pool.name} for their share go first."
    elif starts_after == (0.0, 0.0):
        cause, reason = WaitCause.CAPACITY, f"A machine of {run.pool.name} is free and takes it within seconds."
    else:
        wanted = "a GPU" if job.gpu_count == 1 else f"{job.gpu_count} GPUs"
        cause, reason = WaitCause.CAPACITY, f"Waiting for {wanted} of {run.pool.name} to come free."
    return Wait(cause=cause, reason=reason, position=position, starts_after=starts_after)


def _runs_ahead(run: Run, position: int | None, now: datetime.datetime) -> list[Run] | None:
    """Return the queued runs before this one; None if they are too many to look at."""
    if position is None or position > _LOOKED_AT:
        return None
    order = queue_order(pool=run.pool, now=now, limit=position)
    return [other for other in order if other.pk != run.pk]


def _starts_after(job: FineTuningJob, machines: dict[str, int], ahead: Sequence[Run]) -> tuple[float, float]:
    """Return the least and the most seconds until the job's GPUs are free, by the estimates of the work before it."""
    held = list(Run.objects.filter(worker__in=machines, status__in=RUN_HOLDING_LEASE).select_related("job"))
    least, most = (
        _free_after(job.gpu_count, machines, held, ahead, of=of) for of in ("train_seconds_p10", "train_seconds_p90")
    )
    return least, max(least, most)


def _free_after(
    gpu_count: int, machines: dict[str, int], held: Sequence[Run], ahead: Sequence[Run], *, of: str
) -> float:
    rooms = {pk: _Machine([0.0] * gpus) for pk, gpus in machines.items()}
    for run in held:
        rooms[str(run.worker_id)].take(min(run.job.gpu_count, machines[str(run.worker_id)]), _seconds_left(run.job, of))
    for run in ahead:
        able = [room for room in rooms.values() if len(room.free_after) >= run.job.gpu_count]
        if able:
            first = min(able, key=lambda room: sorted(room.free_after)[run.job.gpu_count - 1])
            first.take(run.job.gpu_count, _seconds_left(run.job, of))
    return min(sorted(room.free_after)[gpu_count - 1] for room in rooms.values())


def _seconds_left(job: FineTuningJob, of: str) -> float:
    """Return the seconds that a run of the job still needs, by the quantile `of` of its estimate."""
    estimate, done = job.estimate, job.step / job.total_steps if job.total_steps else 0.0
    training = estimate.get("train_seconds_p50") or 0.0
    beside = max((estimate.get("run_seconds_p50") or training) - training, 0.0)  # download, start-up, checkpoints
    return float((estimate.get(of) or training) * (1.0 - done) + (beside if not job.step else 0.0))
