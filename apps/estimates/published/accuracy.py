"""Accuracy of predictions against measurements: the figures behind every published accuracy."""

from collections.abc import Iterable, Sequence
from statistics import mean, median

import msgspec

# Only cards whose memory is within this share of a measured peak count: a user would compare only those.
_CARD_RANGE = 0.5


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """One row's prediction and measurement, in the same unit."""

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
    """Accuracy of a set of predictions; shares and errors are fractions.

    `false_fits` is the share of (row, card) pairs that are judged "fits" although the job would not fit. Only pairs
    with a card's memory within half of the measured peak count. The P90 must fit, if there is one; `false_fits_p50`
    uses the prediction itself.
    """

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


def accuracy(points: Sequence[Prediction], *, cards: Sequence[int] = ()) -> Accuracy:
    """Return the accuracy of the points.

    `cards` are usable memories in bytes; without them, the shares of fits are None.
    """
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
    """Return the quantile, linear between order statistics."""
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
