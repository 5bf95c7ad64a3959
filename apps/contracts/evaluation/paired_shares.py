"""The shares of rows that two models pass: Wilson's interval of one, and Newcombe's of their difference on one set."""

import math

from apps.contracts.evaluation import ConfidenceInterval
from apps.contracts.struct import Struct

_Z = 1.959963984540054


class PairedShares(Struct, frozen=True, kw_only=True):
    """How many of the same rows a new and an old model pass. `difference` is new minus old, as shares."""

    rows: int
    new_passed: int
    old_passed: int
    only_new: int
    only_old: int
    difference: ConfidenceInterval


def wilson(hits: int, trials: int) -> ConfidenceInterval:
    """Return Wilson's score interval of a share (Wilson 1927)."""
    share = hits / trials
    scale = 1 + _Z**2 / trials
    center = (share + _Z**2 / (2 * trials)) / scale
    half = _Z * math.sqrt(share * (1 - share) / trials + _Z**2 / (4 * trials**2)) / scale
    return ConfidenceInterval(
        value=share, low=max(min(center - half, share), 0.0), high=min(max(center + half, share), 1.0)
    )


def compare_pairs(*, both: int, only_new: int, only_old: int, neither: int) -> PairedShares:
    """Compare two models by the rows that both, one or none of them passes. Raises ValueError without rows.

    The interval of the difference is Newcombe's square-and-add interval for pairs (Newcombe 1998, method 10).
    """
    rows = both + only_new + only_old + neither
    if not rows:
        raise ValueError("there are no rows to compare")
    new, old = wilson(both + only_new, rows), wilson(both + only_old, rows)
    value = new.value - old.value
    correlation = _correlation(both, only_new, only_old, neither)
    below = _added(new.value - new.low, old.high - old.value, correlation)
    above = _added(new.high - new.value, old.value - old.low, correlation)
    return PairedShares(
        rows=rows,
        new_passed=both + only_new,
        old_passed=both + only_old,
        only_new=only_new,
        only_old=only_old,
        difference=ConfidenceInterval(value=value, low=value - below, high=value + above),
    )


def is_surely_above(new: ConfidenceInterval, old: ConfidenceInterval) -> bool:
    """Return whether the interval of new minus old is above 0, as far as their own intervals show.

    The two are taken as independent, which makes the interval wider than one over pairs of the same rows.
    """
    return new.value - old.value > _added(new.value - new.low, old.high - old.value, 0.0)


def _added(one: float, other: float, correlation: float) -> float:
    return math.sqrt(max(one**2 - 2 * correlation * one * other + other**2, 0.0))


def _correlation(both: int, only_new: int, only_old: int, neither: int) -> float:
    """Return the correlation of the two outcomes, corrected for continuity as Newcombe does."""
    margins = (both + only_new) * (only_old + neither) * (both + only_old) * (only_new + neither)
    if not margins:
        return 0.0
    product = float(both * neither - only_new * only_old)
    if product > 0:
        product = max(product - (both + only_new + only_old + neither) / 2, 0.0)
    return product / math.sqrt(margins)
