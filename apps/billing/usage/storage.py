"""Charges other than requests: storage sampled hourly, and rebates for a month's volume."""

import datetime

from django.db import transaction
from django.db.models import Sum
from django.db.models.functions import TruncMonth

from apps.accounts.models import Organization, key_of
from apps.billing.ledger import account, lock_wallet, post
from apps.billing.lots import returns_for_usage
from apps.billing.models import AccountKind, PostingKind, StorageSample, UsageSeries, VolumeRebate
from apps.billing.tenant_batches import for_each
from apps.billing.usage.metering import record_quantity
from apps.catalog.models import PriceRule
from apps.catalog.pricing import STORAGE_SKU, tiered_nano, tiers_of
from apps.catalog.queries import active_price
from apps.core.database.clock import db_now
from apps.core.money import rated

STORED = "Storage"
_REBATED_FOR = datetime.timedelta(days=70)  # late usage may still reach these months


@transaction.atomic
def record_storage(*, organization: Organization | str, byte_count: int, at: datetime.datetime) -> bool:
    """Add one hour of storage to the organization's series, once an hour; return whether it was added.

    Nothing is added while storage has no price, or nothing is stored.
    """
    hour_at = at.astimezone(datetime.UTC).replace(minute=0, second=0, microsecond=0)
    price = active_price(sku=STORAGE_SKU, organization=organization, now=at)
    if price is None or byte_count <= 0:
        return False
    organization_id = key_of(organization)
    lock_wallet(organization=organization_id)
    _, is_new = StorageSample.objects.get_or_create(
        organization_id=organization_id, hour_at=hour_at, defaults={"bytes": byte_count}
    )
    if is_new:
        record_quantity(
            organization_id=organization_id, price=price, subject=STORED, day=hour_at.date(), quantity=byte_count
        )
    return is_new


def post_rebates(*, now: datetime.datetime) -> int:
    """Post the rebates that tiers give on each month's charged volume; return the nano posted.

    A month's volume is that of the SKU at all its prices: what was used at an earlier price counts for the tiers of the
    next one. Only the difference to earlier rebates of the month is posted.
    """
    tiered = PriceRule.objects.exclude(tiers=[])
    since = (now - _REBATED_FOR).date().replace(day=1)
    months = (
        UsageSeries.objects.filter(price_rule__in=tiered, day__gte=since)
        .annotate(month=TruncMonth("day"))
        .values_list("organization_id", "price_rule_id", "month")
        .distinct()
        .order_by("organization_id", "price_rule_id", "month")
    )
    return for_each(months, _rebate, name="rebates of volume are posted", now=now)


@transaction.atomic
def _rebate(of: tuple[str, str, datetime.date]) -> int:
    organization_id, price_rule_id, month = of
    wallet = lock_wallet(organization=organization_id)
    rule = PriceRule.objects.get(pk=price_rule_id)
    of_sku = UsageSeries.objects.filter(
        organization_id=organization_id, sku=rule.sku, day__year=month.year, day__month=month.month
    )
    before = of_sku.filter(price_rule__effective_from__lt=rule.effective_from).aggregate(sum=Sum("rated_quantity"))
    series = of_sku.filter(price_rule=rule)
    quantity = series.aggregate(sum=Sum("rated_quantity"))["sum"] or 0
    row, _ = VolumeRebate.objects.get_or_create(organization_id=organization_id, price_rule=rule, month=month)
    full = rated(quantity=quantity, price_nano=rule.price_nano, per=rule.per)
    less = tiered_nano(
        quantity=quantity, price_nano=rule.price_nano, per=rule.per, tiers=tiers_of(rule), after=before["sum"] or 0
    )
    due = full - less - row.posted_nano
    if due <= 0:
        return 0
    charged = [f"usage:{pk}" for pk in series.values_list("pk", flat=True)]
    source = f"rebate:{row.pk}"
    post(
        organization=wallet.owner_id,
        kind=PostingKind.REBATE,
        legs={account(organization=None, kind=AccountKind.REVENUE): -due, wallet: due},
        by="system",
        source=source,
        idempotency_key=f"{source}:{row.posted_nano + due}",
        request={"rebate": row.pk, "posted_nano": row.posted_nano + due},
        reason=f"Volume in {row.month:%B %Y}: {row.price_rule.sku}",
        lots=returns_for_usage(
            organization_id=wallet.owner_id, sources=[*charged, source], amount_nano=due, now=db_now()
        ),
    )
    row.quantity, row.posted_nano = quantity, row.posted_nano + due
    row.save(update_fields=["quantity", "posted_nano"])
    return due
