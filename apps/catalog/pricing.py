"""The cost of a quantity under a rule, with its volume tiers. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from apps.core.money import rated

if TYPE_CHECKING:
    from apps.catalog.models import PriceRule

STORAGE_SKU = "storage:bytes"
CONVERSION_SKU = "conversion:bytes"
_OF_TOKENS, _OF_BATCHES = "inference:", ":batch"
# A gigabyte is 1e9 bytes and a month is always 730 hours, so that a gigabyte costs the same every day.
GB_MONTH_BYTE_HOURS = 730 * 10**9
HOUR_MS = 3_600_000
MILLION = 1_000_000
GB_BYTES = 10**9
_UNITS = {
    "training": "gpu_ms",
    "inference": "tokens",
    "warm": "warm_ms",
    "storage": "byte_hours",
    "conversion": "bytes",
}
_PER = {"gpu_ms": HOUR_MS, "tokens": MILLION, "warm_ms": HOUR_MS, "byte_hours": GB_MONTH_BYTE_HOURS, "bytes": GB_BYTES}


@dataclass(frozen=True)
class Tier:
    """From `from_units` of a calendar month on, the rule's `per` units cost `price_nano`."""

    from_units: int
    price_nano: int


def unit_of(sku: str) -> str:
    """Return the unit of a SKU: gpu_ms, tokens, warm_ms, byte_hours or bytes."""
    return _UNITS[sku.partition(":")[0]]


def usual_per(unit: str) -> int:
    """Return the usual number of units of a price: an hour, a million tokens, a gigabyte, or a gigabyte for a month."""
    return _PER[unit]


def batch_sku(sku: str) -> str:
    """Return the SKU of the same tokens in requests of batches and of evals."""
    return sku + _OF_BATCHES


def has_batch_price(sku: str) -> bool:
    """Return whether the SKU is for tokens, which have a separate price in batches."""
    return sku.startswith(_OF_TOKENS) and not sku.endswith(_OF_BATCHES)


def reduced_nano(price_nano: int, *, percent_off: int) -> int:
    """Return the reduced price, rounded half up to the nano. A price above 0 stays above 0."""
    return max(rated(quantity=100 - percent_off, price_nano=price_nano, per=100), min(price_nano, 1))


def tiers_of(rule: "PriceRule") -> list[Tier]:
    return [Tier(int(row["from_units"]), int(row["price_nano"])) for row in rule.tiers]


def tiered_nano(*, quantity: int, price_nano: int, per: int, tiers: Sequence[Tier], after: int = 0) -> int:
    """Return the cost of a calendar month's `quantity`: each tier at its own price, rounded once, half up.

    The month's units before it, `after`, count for the tiers and are not in the cost.
    """
    steps = [Tier(0, price_nano), *tiers]
    ends = [*(tier.from_units for tier in steps[1:]), max(after + quantity, steps[-1].from_units)]
    times_per = sum(
        max(min(after + quantity, end) - max(after, step.from_units), 0) * step.price_nano
        for step, end in zip(steps, ends, strict=True)
    )
    return rated(quantity=times_per, price_nano=1, per=per)
