"""How far predictions were from measurements: the figures that every published accuracy is made of."""

from collections.abc import Iterable, Sequence
from statistics import mean, median

import msgspec

_CARD_RANGE = 0.5  # cards whose memory is within this share of a measured peak are the ones a user would weigh


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One row's prediction beside its measurement, in the same unit."""

    id: str
    source: str
    method: str
    gpu: str
    predicted: float
    measured: float
    p10: float | None = None
    p90: float | None = None

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Shares and errors as fractions. `false_fits`: of all (row, card) pairs with a card's memory within half of the
    measured peak, how often the verdict was "fits" where the job would not have: what must fit is the P90, where
    there is one, and `false_fits_p50` says the same of the prediction itself."""

    n: int
    median_ape: float | None = None
    mape: float | None = None
    p90_ape: float | None = None
    share_5: float | None = None
    share_10: float | None = None
    share_15: float | None = None
    bias: float | None = None
    false_fits: float | None = None
    coverage_p10_p90: float | None = None
    false_fits_p50: float | None = None


def accuracy(points: Sequence[Point], *, cards: Sequence[int] = ()) -> Accuracy:
    """`cards` are usable memories in bytes; without any, nothing is said of fits."""
    if not points:
        return Accuracy(n=0)
    errors = sorted(abs(point.error) for point in points)
    held = [p.p10 <= p.measured <= p.p90 for p in points if p.p10 is not None and p.p90 is not None]
    return Accuracy(
        n=len(points),
        median_ape=round(median(errors), 4),
        mape=round(mean(errors), 4),
        p90_ape=round(_quantile(errors, 0.9), 4),
        share_5=_share(error <= 0.05 for error in errors),
        share_10=_share(error <= 0.10 for error in errors),
        share_15=_share(error <= 0.15 for error in errors),
        bias=round(median(point.error for point in points), 4),
        false_fits=_false_fits([(p.predicted if p.p90 is None else p.p90, p.measured) for p in points], cards),
        coverage_p10_p90=_share(held) if held else None,
        false_fits_p50=_false_fits([(p.predicted, p.measured) for p in points], cards),
    )


def _false_fits(pairs: Sequence[tuple[float, float]], cards: Sequence[int]) -> float | None:
    weighed = wrong = 0
    for predicted, measured in pairs:
        for usable in cards:
            if abs(usable / measured - 1) <= _CARD_RANGE:
                weighed += 1
                wrong += predicted <= usable < measured
    return round(wrong / weighed, 4) if weighed else None


def _share(flags: Iterable[bool]) -> float:
    return round(mean(1.0 if flag else 0.0 for flag in flags), 4)


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between order statistics."""
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
