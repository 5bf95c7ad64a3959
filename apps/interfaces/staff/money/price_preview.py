"""The effect of a new price: on last month's usage, and on jobs whose price is already fixed."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from django.db.models import Q, QuerySet, Sum

from apps.accounts.models import Organization
from apps.billing.models import UsageSeries
from apps.catalog.models import PriceRule
from apps.catalog.pricing import Tier, tiered_nano
from apps.catalog.queries import list_all_active_prices
from apps.core.database.clock import begin_of_day
from apps.core.money import rated
from apps.finetuning.lifecycle import JOB_OPEN
from apps.finetuning.models import FineTuningJob


@dataclass(frozen=True)
class Affected:
    """One organization's last calendar month: the actual charge, and the charge at the new price."""

    organization: Organization
    quantity: int
    charged_nano: int
    would_be_nano: int

    @property
    def change_nano(self) -> int:
        return self.would_be_nano - self.charged_nano


@dataclass(frozen=True)
class PricePreview:
    """What a new price changes. `kept` jobs are quoted and keep their price; `waiting` jobs get the new one."""

    month: datetime.date
    affected: list[Affected]
    kept_jobs: int
    kept_nano: int
    kept_would_be_nano: int
    waiting_jobs: int

    @property
    def charged_nano(self) -> int:
        return sum(row.charged_nano for row in self.affected)

    @property
    def would_be_nano(self) -> int:
        return sum(row.would_be_nano for row in self.affected)


def preview_price(
    *,
    sku: str,
    price_nano: int,
    per: int,
    tiers: Sequence[Tier],
    organization: Organization | None,
    now: datetime.datetime,
) -> PricePreview:
    """Return the effect of the price on last month's charges and on unfinished jobs."""
    first = (now.astimezone(datetime.UTC).date().replace(day=1) - datetime.timedelta(days=1)).replace(day=1)
    after = now.astimezone(datetime.UTC).date().replace(day=1)
    used = _used_training(sku, first, after) if sku.startswith("training:") else _used_metered(sku, first, after)
    own = list_all_active_prices(prefix=sku).filter(sku=sku).exclude(organization=None)
    others = set(own.values_list("organization_id", flat=True)) if organization is None else set()
    owners = Organization.objects.in_bulk(used)
    affected = [
        Affected(
            owners[owner],
            quantity,
            charged,
            tiered_nano(quantity=quantity, price_nano=price_nano, per=per, tiers=tiers),
        )
        for owner, (quantity, charged) in used.items()
        if owner not in others and (organization is None or owner == organization.pk)
    ]
    affected.sort(key=lambda row: (-abs(row.change_nano), row.organization.name))
    return PricePreview(first, affected, *_jobs_under_way(sku, price_nano, per, organization))


def _used_metered(sku: str, first: datetime.date, after: datetime.date) -> dict[str, tuple[int, int]]:
    rows = UsageSeries.objects.filter(sku=sku, day__gte=first, day__lt=after).values("organization_id")
    return {
        row["organization_id"]: (row["quantity_sum"], row["posted_sum"])
        for row in rows.annotate(quantity_sum=Sum("quantity"), posted_sum=Sum("posted_nano")).order_by()
    }


def _used_training(sku: str, first: datetime.date, after: datetime.date) -> dict[str, tuple[int, int]]:
    ended = FineTuningJob.objects.filter(
        price_rule__sku=sku,
        finished_at__gte=begin_of_day(first),
        finished_at__lt=begin_of_day(after),
        cost_nano__gt=0,
    )
    rows = ended.values("organization_id").annotate(ms=Sum("billed_gpu_ms"), cost=Sum("cost_nano")).order_by()
    return {row["organization_id"]: (row["ms"], row["cost"]) for row in rows}


def _jobs_under_way(
    sku: str, price_nano: int, per: int, organization: Organization | None
) -> tuple[int, int, int, int]:
    if not sku.startswith("training:"):
        return 0, 0, 0, 0
    jobs: QuerySet[FineTuningJob] = FineTuningJob.objects.filter(status__in=JOB_OPEN)
    if organization is not None:
        jobs = jobs.filter(organization=organization)
    kept = list(jobs.filter(price_rule__sku=sku).select_related("price_rule"))
    expected = [(job.estimate.get("cost_nano_p50") or 0, job.price_rule) for job in kept]
    would_be = sum(_at(cost, rule, price_nano, per) for cost, rule in expected if rule)
    waiting = jobs.filter(queued_at=None).filter(
        Q(requested__pool=sku.removeprefix("training:")) | Q(requested__pool=None)
    )
    return len(kept), sum(cost for cost, _ in expected), would_be, waiting.count()


def _at(cost_nano: int, rule: PriceRule, price_nano: int, per: int) -> int:
    """Return an expected cost at another price for the same time."""
    if not rule.price_nano:
        return 0
    return rated(quantity=cost_nano * rule.per * price_nano, price_nano=1, per=rule.price_nano * per)
