"""Held GPUs and their time: from a worker's claim to the end of the attempt, billed or not."""

import datetime
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

from django.db import models
from django.db.models import Case, ExpressionWrapper, Max, OuterRef, Q, QuerySet, Subquery, Sum, Value, When
from django.db.models.functions import Coalesce, Greatest, Least

from apps.core.database.prepared import fetch_prepared
from apps.finetuning.lifecycle import RUN_HOLDING_LEASE, ConversionStatus
from apps.finetuning.models import Conversion, Examination, FineTuningJob, GpuDay, Run, RunMember, Worker
from apps.finetuning.usage.job_use import HOLDING

EXAMINED_WITHIN = datetime.timedelta(minutes=35)  # a trainer ends an examination after half an hour


def _held(run_of: str, member_of: str) -> str:
    """Return the statement of the GPUs and the memory that runs hold of each worker; both conditions choose workers."""
    return f"""
        SELECT held.worker_id, sum(job.gpu_count / job.node_count)::bigint,
            sum(coalesce((job.estimate->>'host_bytes')::numeric, 0))::bigint
        FROM (
            SELECT run.worker_id, run.job_id FROM finetuning_run run WHERE run.status IN ({HOLDING}) {run_of}
            UNION ALL
            SELECT member.worker_id, run.job_id
            FROM finetuning_runmember member JOIN finetuning_run run ON run.id = member.run_id
            WHERE run.status IN ({HOLDING}) AND member.left_at IS NULL {member_of}
        ) held
        JOIN finetuning_finetuningjob job ON job.id = held.job_id
        GROUP BY held.worker_id
    """  # noqa: S608 - constants


_HELD_OF_ALL = _held("", "")
_HELD = _held("AND run.worker_id = ANY(%(workers)s::text[])", "AND member.worker_id = ANY(%(workers)s::text[])")


@dataclass(frozen=True, kw_only=True)
class Held:
    """What runs hold of one worker now."""

    gpus: int = 0
    host_bytes: int = 0


def held_of(*, workers: Collection[str] | None = None) -> dict[str, Held]:
    """Return the GPUs and the machine's own memory that runs hold now, by worker (None: of all).

    A worker without any has no entry. A run over several machines holds its share of each.
    """
    rows = fetch_prepared(_HELD_OF_ALL, {}) if workers is None else fetch_prepared(_HELD, {"workers": list(workers)})
    return {worker_id: Held(gpus=gpus, host_bytes=host_bytes) for worker_id, gpus, host_bytes in rows}


def leased_gpus(*, workers: Collection[str] | None = None, lent_by: str = "") -> dict[str, int]:
    """Return the number of GPUs that runs lease now, by worker (None: of all); a worker without any has no entry.

    With `lent_by`, only runs of pools that borrow the machines of that pool count.
    """
    if not lent_by:
        return {worker_id: held.gpus for worker_id, held in held_of(workers=workers).items()}
    found: dict[str, int] = defaultdict(int)
    led = Run.objects.filter(pool__borrows_from=lent_by, status__in=RUN_HOLDING_LEASE).select_related("job")
    joined = RunMember.objects.filter(run__in=led, left_at=None).select_related("run__job")
    for run in led:
        found[str(run.worker_id)] += run.job.gpus_per_node
    for place in joined:
        found[place.worker_id] += place.run.job.gpus_per_node
    return dict(found)


def jobs_on(*, workers: Collection[str]) -> dict[str, list[str]]:
    """Return the ids of the jobs whose runs hold GPUs of each worker, the run that was leased first at the front."""
    led = Run.objects.filter(worker__in=workers, status__in=RUN_HOLDING_LEASE)
    joined = RunMember.objects.filter(worker__in=workers, run__status__in=RUN_HOLDING_LEASE, left_at=None)
    found: dict[str, list[str]] = defaultdict(list)
    for _, worker_id, job_id in sorted(
        [
            *led.values_list(Coalesce("leased_at", "created_at"), "worker_id", "job_id"),
            *joined.values_list(Coalesce("run__leased_at", "run__created_at"), "worker_id", "run__job_id"),
        ]
    ):
        found[str(worker_id)].append(str(job_id))
    return found


def is_leased(*, worker: Worker) -> bool:
    """Return whether a run holds GPUs of this worker."""
    return bool(leased_gpus(workers=[worker.pk]))


def at_idle_work(*, workers: Collection[str], now: datetime.datetime) -> set[str]:
    """Return the workers that make a conversion or examine an adapter, as idle trainers do."""
    converting = Conversion.objects.filter(worker__in=workers, status=ConversionStatus.RUNNING)
    examining = Examination.objects.filter(worker__in=workers, ended_at=None, taken_at__gte=now - EXAMINED_WITHIN)
    return {str(each) for rows in (converting, examining) for each in rows.values_list("worker_id", flat=True)}


def has_worked(*, worker: Worker) -> bool:
    """Return whether the worker ever had a run, a place in one, a conversion or an examination."""
    idle_work = (Conversion.objects.filter(worker=worker), Examination.objects.filter(worker=worker))
    return any(rows.exists() for rows in (worker.runs, worker.memberships, *idle_work))


def last_work(*, worker: Worker) -> datetime.datetime:
    """Return when the worker's last run, conversion or examination ended, or when it came if none did."""
    ends = [
        worker.runs.aggregate(last=Max("finished_at")),
        worker.memberships.aggregate(last=Max("run__finished_at")),
        Conversion.objects.filter(worker=worker).aggregate(last=Max("ended_at")),
        Examination.objects.filter(worker=worker).aggregate(last=Max("ended_at")),
    ]
    return max([worker.created_at, *(end["last"] for end in ends if end["last"] is not None)])


def whole_days(begin: datetime.datetime, end: datetime.datetime) -> tuple[QuerySet[GpuDay], datetime.datetime]:
    """Return the days that ended by `end`, and the begin of the day that had not, whose runs are counted one by one.

    `begin` is the begin of a UTC day. The days have no time of attempts that go on.
    """
    last = end.astimezone(datetime.UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return GpuDay.objects.filter(day__gte=begin.date(), day__lt=last.date()), last


def held_gpu_seconds(
    *, by: str, begin: datetime.datetime, end: datetime.datetime, organizations: Collection[str] | None = None
) -> dict[str, float]:
    """Return the GPU-seconds that attempts held between two moments, by the field `by`; 0 without attempts.

    `begin` is the begin of a UTC day. A running attempt counts up to `end`. `organizations` None means all of them.
    """
    days, last = whole_days(begin, end)
    going_on = Q(finished_at=None)
    runs = Run.objects.filter(going_on | Q(finished_at__gt=last) if end > last else going_on, leased_at__lt=end)
    if organizations is not None:
        days, runs = days.filter(organization__in=organizations), runs.filter(organization__in=organizations)
    # The days have what an ended attempt held before the last one.
    since = Case(When(finished_at=None, then=Value(begin)), default=Value(last), output_field=models.DateTimeField())
    # By its key: a join would read all jobs ever made as soon as the attempts are a few percent of them.
    gpus = Subquery(FineTuningJob.objects.filter(pk=OuterRef("job")).values("gpu_count"))
    span = ExpressionWrapper((Least("finished_at", end) - Greatest("leased_at", since)) * gpus, models.DurationField())
    sums = defaultdict(
        float,
        {key: int(total) / 1_000_000 for key, total in days.order_by().values_list(by).annotate(Sum("held_gpu_us"))},
    )
    for key, total in runs.order_by().values_list(by).annotate(total=Sum(Greatest(span, datetime.timedelta()))):
        sums[key] += total.total_seconds()
    return sums


def held_hours_by_day(*, first: datetime.date, last: datetime.date) -> dict[str, list[float]]:
    """Return the GPU-hours that ended attempts held on each UTC day, by pool, without pools that have none."""
    days = GpuDay.objects.filter(day__gte=first, day__lte=last).order_by().values_list("pool", "day")
    hours: dict[str, list[float]] = defaultdict(lambda: [0.0] * ((last - first).days + 1))
    for pool, day, held_us in days.annotate(Sum("held_gpu_us")):
        hours[pool][(day - first).days] = int(held_us) / 3_600_000_000
    return dict(hours)


def seconds_between(
    since: datetime.datetime,
    until: datetime.datetime | None,
    *,
    begin: datetime.datetime | None,
    end: datetime.datetime,
) -> float:
    """Return the seconds of a span within two moments; `until` None means that the span is still open."""
    begun = max(since, begin) if begin else since
    return max((min(until or end, end) - begun).total_seconds(), 0.0)
