"""What can have a price here, by SKU: the time of each pool, the tokens and warm time of each model, storage and
conversions.
"""

import datetime
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from django.db.models import Q
from django.utils.translation import gettext, gettext_noop

from apps.accounts.models import Organization
from apps.catalog.models import BaseModel, PriceRequest, PriceRule
from apps.catalog.operations import set_price
from apps.catalog.price_requests import is_gift, request_price
from apps.catalog.pricing import CONVERSION_SKU, STORAGE_SKU, Tier, batch_sku, unit_of, usual_per
from apps.catalog.queries import inference_sku, warm_sku
from apps.core.errors import InvalidValue
from apps.core.messages.translation import later
from apps.finetuning.models import GpuPool
from apps.finetuning.quotes.pool_facts import training_sku

_PER = {
    "gpu_ms": later("GPU-hour"),
    "tokens": later("million"),
    "warm_ms": later("hour"),
    "byte_hours": later("GB-month"),
    "bytes": "GB",
}
_TOKENS = {"input": gettext_noop("{model}: input tokens"), "output": gettext_noop("{model}: output tokens")}
_LATER_TOKENS = {
    "input": gettext_noop("{model}: input tokens in batches and evals"),
    "output": gettext_noop("{model}: output tokens in batches and evals"),
}


@dataclass(frozen=True)
class Sku:
    """A SKU of this installation. Customers read its `name`."""

    code: str
    group: str
    name: str

    def __str__(self) -> str:
        return gettext("{name}, per {unit}").format(name=self.name, unit=_PER[unit_of(self.code)])


def list_skus(*, only_installed: bool = False) -> dict[str, Sku]:
    """Return every SKU by its code; with `only_installed`, without those of models that cannot be used here."""
    models = BaseModel.objects.order_by("name").only("name", "display_name")
    if only_installed:
        models = models.filter(Q(is_installed=True) | Q(install_requested_at__isnull=False))
    ways = ("input", "output")
    skus = [
        *_training_skus(),
        *(
            Sku(inference_sku(each, direction=way), gettext("Tokens"), gettext(_TOKENS[way]).format(model=each))
            for each in models
            for way in ways
        ),
        *(
            Sku(
                batch_sku(inference_sku(each, direction=way)),
                gettext("Tokens"),
                gettext(_LATER_TOKENS[way]).format(model=each),
            )
            for each in models
            for way in ways
        ),
        *(
            Sku(warm_sku(each), gettext("Kept warm"), gettext("{model}: time kept warm").format(model=each))
            for each in models
        ),
        Sku(STORAGE_SKU, gettext("Storage"), gettext("Storage of files, checkpoints and adapters")),
        Sku(CONVERSION_SKU, gettext("Conversion"), gettext("Merging or converting a finished model")),
    ]
    return {sku.code: sku for sku in skus}


def name_skus(codes: Iterable[str]) -> dict[str, Sku]:
    """Return the SKU of each code. One whose pool is gone has its code for a name."""
    known = list_skus()
    return {code: known.get(code) or Sku(code, "", code) for code in codes}


def _training_skus() -> list[Sku]:
    """Return the SKU of each pool. Its name has the pool's name only where pools share a GPU type."""
    pools = GpuPool.objects.select_related("gpu_type").order_by("name")
    count = Counter(pool.gpu_type_id for pool in pools)
    names = [
        gettext("{gpu_type}, pool {pool}").format(gpu_type=pool.gpu_type, pool=pool)
        if count[pool.gpu_type_id] > 1
        else str(pool.gpu_type)
        for pool in pools
    ]
    return [
        Sku(training_sku(pool), gettext("GPU time"), gettext("Training on {name}").format(name=name))
        for pool, name in zip(pools, names, strict=True)
    ]


def price_sku(
    *,
    sku: str,
    price_nano: int,
    organization: Organization | None,
    tiers: Sequence[Tier],
    effective_from: datetime.datetime | None,
    by: str,
    now: datetime.datetime,
) -> PriceRule | PriceRequest:
    """Set the price of the SKU's usual quantity; request it from a second operator if it gives something away.

    Raises InvalidValue, also for a SKU that this installation does not have.
    """
    if sku not in list_skus(only_installed=True):
        raise InvalidValue(
            gettext("%(sku)s is not a SKU of this installation: add its pool or install its model first.")
            % {"sku": sku},
            param="sku",
        )
    unit = unit_of(sku)
    per = usual_per(unit)
    if is_gift(
        organization=organization, sku=sku, price_nano=price_nano, per=per, tiers=tiers,
        effective_from=effective_from, now=now,
    ):  # fmt: skip
        return request_price(
            organization=organization, sku=sku, price_nano=price_nano, per=per, tiers=tiers,
            effective_from=effective_from, by=by, now=now,
        )  # fmt: skip
    return set_price(
        sku=sku, unit=unit, price_nano=price_nano, per=per, tiers=tiers, effective_from=effective_from, by=by, now=now
    )
