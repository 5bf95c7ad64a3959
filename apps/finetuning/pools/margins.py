"""Monthly revenue and cost of each pool, with the hours its GPUs were online and the hours they were idle."""

import datetime
from collections import defaultdict
from dataclasses import dataclass

from django.db.models import OuterRef, QuerySet, Subquery, Sum
from django.utils.translation import gettext

from apps.billing.models import AccountKind, Hold, HoldPurpose, HoldStatus, LedgerEntry, PoolCost, PostingKind
from apps.core import audit
from apps.core.database.clock import begin_of_day
from apps.core.errors import InvalidValue
from apps.finetuning.models import FineTuningJob, GpuPool, Run, Worker, WorkerKind
from apps.finetuning.usage.occupancy import held_gpu_seconds, seconds_between, whole_days

_HOUR_SECONDS = 3600
_LOSSES_SHOWN = 50


@dataclass(frozen=True)
class Margin:
    """A pool's month. `cost_nano` is None until an operator sets the GPU cost. Idle hours cost as much as busy ones.

    The time above firm prices is part of the GPU cost, so the margin does not subtract estimate losses again.
    """

    pool: GpuPool
    revenue_nano: int
    online_gpu_seconds: float
    busy_gpu_seconds: float
    billed_gpu_seconds: float
    nano_per_gpu_hour: int | None

    @property
    def idle_gpu_seconds(self) -> float:
        return max(self.online_gpu_seconds - self.busy_gpu_seconds, 0.0)

    @property
    def cost_nano(self) -> int | None:
        return self._costs(self.online_gpu_seconds)

    @property
    def idle_nano(self) -> int | None:
        return self._costs(self.idle_gpu_seconds)

    @property
    def margin_nano(self) -> int | None:
        return None if self.cost_nano is None else self.revenue_nano - self.cost_nano

    def _costs(self, seconds: float) -> int | None:
        if self.nano_per_gpu_hour is None:
            return None
        return round(seconds) * self.nano_per_gpu_hour // _HOUR_SECONDS


@dataclass(frozen=True)
class EstimateLoss:
    """The list price of the time above a job's firm price that a month's settlements left unpaid."""

    job: FineTuningJob
    nano: int


def list_margins(*, month: datetime.date, now: datetime.datetime) -> list[Margin]:
    """Return every pool's month so far. A worker is online from its admission until it was last seen."""
    begin, end = _span(month, now)
    after = (month + datetime.timedelta(32)).replace(day=1)
    # Of each pool the newest cost that starts before the month's end.
    costs = PoolCost.objects.filter(from_day__lt=after).order_by("from_day")
    cost_of_hour = dict(costs.values_list("pool_name", "nano_per_gpu_hour"))
    online, billed = _online(begin, end), _billed(begin, end)
    busy = held_gpu_seconds(by="pool_id", begin=begin, end=end)
    revenue = _revenue(begin, end)
    return [
        Margin(pool, revenue[pool.pk], online[pool.pk], busy[pool.pk], billed[pool.pk], cost_of_hour.get(pool.name))
        for pool in GpuPool.objects.order_by("name")
    ]


def sum_estimate_losses(*, month: datetime.date, now: datetime.datetime) -> dict[str, int]:
    """Return each pool's estimate loss of the month in nano; a pool without any may have no entry."""
    of_job = FineTuningJob.objects.filter(pk=OuterRef("transaction__source")).values("pool")
    rows = _losses(month, now).annotate(of=Subquery(of_job)).values_list("of")
    return {pool_id: int(nano) for pool_id, nano in rows.annotate(nano=-Sum("amount_nano")).order_by()}


def list_estimate_losses(*, month: datetime.date, now: datetime.datetime) -> list[EstimateLoss]:
    """Return the month's largest estimate losses, at most `_LOSSES_SHOWN`, with their jobs."""
    sums = _losses(month, now).values_list("transaction__source").annotate(nano=-Sum("amount_nano"))
    lost = dict(sums.exclude(nano=0).order_by("-nano", "transaction__source")[:_LOSSES_SHOWN])
    jobs = FineTuningJob.objects.select_related("organization", "pool").in_bulk(list(lost))
    return [EstimateLoss(jobs[pk], int(nano)) for pk, nano in lost.items() if pk in jobs]


def set_pool_cost(*, pool: GpuPool, nano_per_gpu_hour: int, from_day: datetime.date, by: str) -> PoolCost:
    """Set our cost of one GPU hour of the pool, from a day on. Raises InvalidValue."""
    if nano_per_gpu_hour < 0:
        raise InvalidValue(gettext("A cost is not negative."), param="cost_usd")
    cost, _ = PoolCost.objects.update_or_create(
        pool_name=pool.name, from_day=from_day, defaults={"nano_per_gpu_hour": nano_per_gpu_hour, "set_by": by}
    )
    audit.record(organization=None, by=by, action="pool.cost_set", target=pool.pk, nano_per_gpu_hour=nano_per_gpu_hour)
    return cost


def _span(month: datetime.date, now: datetime.datetime) -> tuple[datetime.datetime, datetime.datetime]:
    """Return the month's begin and its end, which for the present month is now."""
    after = (month + datetime.timedelta(32)).replace(day=1)
    begin, end = (begin_of_day(day) for day in (month, after))
    return begin, min(end, now)


def _losses(month: datetime.date, now: datetime.datetime) -> QuerySet[LedgerEntry]:
    """Return the entries of the month's estimate losses."""
    begin, end = _span(month, now)
    return LedgerEntry.objects.filter(
        account__kind=AccountKind.ESTIMATE_LOSS,
        transaction__kind=PostingKind.ESTIMATE_LOSS,
        transaction__created_at__gte=begin,
        transaction__created_at__lt=end,
    )


def _online(begin: datetime.datetime, end: datetime.datetime) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    workers = Worker.objects.filter(kind=WorkerKind.TRAINER, created_at__lt=end, last_seen_at__gte=begin)
    for worker in workers:
        seconds = seconds_between(worker.created_at, worker.last_seen_at, begin=begin, end=end)
        sums[worker.pool_id] += worker.gpu_count * seconds
    return sums


def _billed(begin: datetime.datetime, end: datetime.datetime) -> dict[str, float]:
    days, last = whole_days(begin, end)
    sums: dict[str, float] = defaultdict(float)
    for rows in (days, Run.objects.filter(finished_at__gte=last, finished_at__lt=end)):
        for pool_id, ms in rows.values_list("pool_id").annotate(ms=Sum("billed_gpu_ms")).order_by():
            sums[pool_id] += int(ms) / 1000
    return sums


def _revenue(begin: datetime.datetime, end: datetime.datetime) -> dict[str, int]:
    """Return each pool's charges less refunds, by the month in which the hold was closed."""
    pools = {f"training:{name}": pool_id for pool_id, name in GpuPool.objects.values_list("pk", "name")}
    holds = Hold.objects.filter(
        purpose=HoldPurpose.JOB, status=HoldStatus.CLOSED, closed_at__gte=begin, closed_at__lt=end
    )
    sums: dict[str, int] = defaultdict(int)
    rows = holds.values("price_rule__sku").annotate(captured=Sum("captured_nano"), refunded=Sum("refunded_nano"))
    for row in rows.order_by():
        if pool_id := pools.get(row["price_rule__sku"] or ""):
            sums[pool_id] += row["captured"] - row["refunded"]
    return sums
