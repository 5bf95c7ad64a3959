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
from apps.finetuning.usage.occupancy import held_gpu_seconds, seconds_between

_HOUR_SECONDS = 3600
_LOSSES_SHOWN = 50


@dataclass(frozen=True)
class Margin:
    """A pool's month. `cost_nano` is None until an operator sets the GPU cost. Idle hours cost as much as busy ones.

    `estimate_loss_nano` is the list price of the time above firm prices. The GPU cost includes that time, so the margin
    does not subtract it again.
    """

    pool: GpuPool
    revenue_nano: int
    estimate_loss_nano: int
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
    busy = held_gpu_seconds(Run.objects.all(), by="pool_id", begin=begin, end=end)
    revenue, lost = _revenue(begin, end), _losses(begin, end, by="pool")
    return [
        Margin(
            pool, revenue[pool.pk], lost.get(pool.pk, 0), online[pool.pk], busy[pool.pk], billed[pool.pk],
            cost_of_hour.get(pool.name),
        )
        for pool in GpuPool.objects.order_by("name")
    ]  # fmt: skip


def list_estimate_losses(*, month: datetime.date, now: datetime.datetime) -> list[EstimateLoss]:
    """Return the month's largest estimate losses, at most `_LOSSES_SHOWN`, with their jobs."""
    lost = _losses(*_span(month, now), by="pk")
    largest = sorted((pk for pk, nano in lost.items() if nano), key=lambda pk: -lost[pk])[:_LOSSES_SHOWN]
    jobs = FineTuningJob.objects.select_related("organization", "pool").in_bulk(largest)
    return [EstimateLoss(jobs[pk], lost[pk]) for pk in largest if pk in jobs]


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


def _losses(begin: datetime.datetime, end: datetime.datetime, *, by: str) -> dict[str, int]:
    """Return the estimate losses posted in this time by a field of their job."""
    entries: QuerySet[LedgerEntry] = LedgerEntry.objects.filter(
        account__kind=AccountKind.ESTIMATE_LOSS,
        transaction__kind=PostingKind.ESTIMATE_LOSS,
        transaction__created_at__gte=begin,
        transaction__created_at__lt=end,
    )
    of_job = FineTuningJob.objects.filter(pk=OuterRef("transaction__source")).values(by)
    sums = entries.annotate(of=Subquery(of_job)).values("of").annotate(nano=-Sum("amount_nano"))
    return dict(sums.order_by().values_list("of", "nano"))


def _online(begin: datetime.datetime, end: datetime.datetime) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    workers = Worker.objects.filter(kind=WorkerKind.TRAINER, created_at__lt=end, last_seen_at__gte=begin)
    for worker in workers:
        seconds = seconds_between(worker.created_at, worker.last_seen_at, begin=begin, end=end)
        sums[worker.pool_id] += worker.gpu_count * seconds
    return sums


def _billed(begin: datetime.datetime, end: datetime.datetime) -> dict[str, float]:
    rows = Run.objects.filter(finished_at__gte=begin, finished_at__lt=end).values("pool_id")
    sums: dict[str, float] = defaultdict(float)
    for row in rows.annotate(ms=Sum("billed_gpu_ms")).order_by():
        sums[row["pool_id"]] = row["ms"] / 1000
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
