"""Parts that several charts share: ticks, round steps of an axis, and paths."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CHAR_PX = 6.2  # mean width of a character of Geist 500 at 11 px, for keeping labels apart


@dataclass(frozen=True, kw_only=True)
class XTick:
    """A labelled line across a chart. `state` is "", "on" (chosen) or "no" (does not fit)."""

    x: float
    label: str
    state: str = ""
    anchor: str = "middle"


@dataclass(frozen=True, kw_only=True)
class YTick:
    """A labelled value on the vertical axis."""

    y: float
    label: str


def round_steps(low: float, high: float, sizes: Sequence[float]) -> list[float]:
    """Return three to six round values covering low..high, with the smallest step size that needs no more."""
    for size in sizes:
        start = math.floor(low / size + 1e-9)
        count = math.ceil(high / size - 1e-9) - start
        if count <= 5:
            return [round((start + index) * size, 9) for index in range(max(2, count) + 1)]
    size = high / 4
    return [round(index * size, 9) for index in range(5)]


def decimal_steps(span: float) -> list[float]:
    """Return the step sizes 1, 2, 2.5 and 5 times powers of ten around a fifth of the span."""
    power = 10.0 ** math.floor(math.log10(max(span, 1e-9) / 5))
    return [round(factor * power, 12) for factor in (1, 2, 2.5, 5, 10, 20, 25, 50)]


def path(points: Iterable[tuple[float, float]]) -> str:
    return "M" + " L".join(f"{x},{y}" for x, y in points)
