"""Why a queued job waits, and when it will start: computed when it is asked for, and stored nowhere."""

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from apps.accounts.models import Organization
from apps.billing.queries import stop_reason
from apps.core.database.tenancy import system
from apps.finetuning import queries
from apps.finetuning.lifecycle import RUN_HOLDING_LEASE, JobStatus, RunStatus
from apps.finetuning.models import FineTuningJob, Run, RunMember
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
        live = run.pool.workers.filter(live_worker_filter(now))
        live = live if job.node_count == 1 else live.filter(offer__isnull=False)
        sizes = dict(live.values_list("pk", "gpus"))
        machines = {pk: max(1, len(gpus)) for pk, gpus in sizes.items() if max(1, len(gpus)) >= job.gpus_per_node}
        position = queue_position(run=run, now=now)
        if len(machines) < job.node_count:
            reason = _too_few(job, run.pool.name, len(machines))
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


def _too_few(job: FineTuningJob, pool: str, online: int) -> str:
    of_size = "" if job.gpus_per_node == 1 else f" with {job.gpus_per_node} GPUs"
    if job.node_count == 1:
        return f"No machine{of_size} of {pool} is online now. The job starts when one is."
    needed = f"{job.node_count} machines{of_size} that reach each other"
    return f"The job needs {needed}. {pool} has {online} now. The job starts when all are online."


def _runs_ahead(run: Run, position: int | None, now: datetime.datetime) -> list[Run] | None:
    """Return the queued runs before this one; None if they are too many to look at."""
    if position is None or position > _LOOKED_AT:
        return None
    order = queue_order(pool=run.pool, now=now, limit=position)
    return [other for other in order if other.pk != run.pk]


def _starts_after(job: FineTuningJob, machines: dict[str, int], ahead: Sequence[Run]) -> tuple[float, float]:
    """Return the least and the most seconds until the job's GPUs are free, by the estimates of the work before it."""
    led = Run.objects.filter(worker__in=machines, status__in=RUN_HOLDING_LEASE).select_related("job")
    joined = RunMember.objects.filter(worker__in=machines, run__status__in=RUN_HOLDING_LEASE, left_at=None)
    held = [(str(run.worker_id), run.job) for run in led]
    held += [(str(member.worker_id), member.run.job) for member in joined.select_related("run__job")]
    least, most = (_free_after(job, machines, held, ahead, of=of) for of in ("train_seconds_p10", "train_seconds_p90"))
    return least, max(least, most)


def _free_after(
    job: FineTuningJob,
    machines: dict[str, int],
    held: Sequence[tuple[str, FineTuningJob]],
    ahead: Sequence[Run],
    *,
    of: str,
) -> float:
    rooms = {pk: _Machine([0.0] * gpus) for pk, gpus in machines.items()}
    for worker_id, other in held:
        rooms[worker_id].take(min(other.gpus_per_node, machines[worker_id]), _seconds_left(other, of))
    for run in ahead:
        for room in _first_free(run.job, rooms.values()):
            room.take(run.job.gpus_per_node, _seconds_left(run.job, of))
    return max(sorted(room.free_after)[job.gpus_per_node - 1] for room in _first_free(job, rooms.values()))


def _first_free(job: FineTuningJob, rooms: Iterable[_Machine]) -> list[_Machine]:
    """Return the machines that the job can take first; none if they are too few."""
    able = [room for room in rooms if len(room.free_after) >= job.gpus_per_node]
    able.sort(key=lambda room: sorted(room.free_after)[job.gpus_per_node - 1])
    return able[: job.node_count] if len(able) >= job.node_count else []


def _seconds_left(job: FineTuningJob, of: str) -> float:
    """Return the seconds that a run of the job still needs, by the quantile `of` of its estimate."""
    estimate, done = job.estimate, job.step / job.total_steps if job.total_steps else 0.0
    training = estimate.get("train_seconds_p50") or 0.0
    beside = max((estimate.get("run_seconds_p50") or training) - training, 0.0)  # download, start-up, checkpoints
    return float((estimate.get(of) or training) * (1.0 - done) + (beside if not job.step else 0.0))
