"""Geometry of the running-error chart: median errors of time and memory over a pool's runs, as shares."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_MAX_LABELS = 6


@dataclass(frozen=True, kw_only=True)
class RunsTick:
    """A labelled count below the chart."""

    x: float
    label: str
    anchor: str


@dataclass(frozen=True, kw_only=True)
class ErrorTick:
    """A labelled error at the side of the chart."""

    y: float
    label: str


@dataclass(frozen=True, kw_only=True)
class ErrorLine:
    """One series. `last` is its newest value; `path` is empty if there are fewer than two values."""

    key: str
    label: str
    path: str
    last: float | None


@dataclass(frozen=True, kw_only=True)
class ErrorChart:
    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    lines: tuple[ErrorLine, ...]
    x_ticks: tuple[RunsTick, ...]
    y_ticks: tuple[ErrorTick, ...]


def error_chart(runs: Sequence[int], series: Sequence[tuple[str, str, Sequence[float | None]]]) -> ErrorChart | None:
    """Draw (key, label, errors) series over counts of runs; return None without two counts and a value."""
    known = [value for _, _, values in series for value in values if value is not None]
    if len(runs) < 2 or not known:
        return None
    width, height, left, top, bottom = 640, 190, 44, 10, 158
    right = width - 12
    step = next((size for size in _STEPS if max(known) / size <= 5), _STEPS[-1])
    steps = max(2, math.ceil(max(known) / step))

    def x_of(count: int) -> float:
        return round(left + (right - left) * (count - runs[0]) / (runs[-1] - runs[0]), 1)

    def y_of(value: float) -> float:
        return round(bottom - (bottom - top) * value / (steps * step), 1)

    every = math.ceil(len(runs) / _MAX_LABELS)
    return ErrorChart(
        width=width, height=height, left=left, right=right, top=top, bottom=bottom,
        lines=tuple(
            _line(key, label, [(x_of(n), y_of(v), v) for n, v in zip(runs, values, strict=True) if v is not None])
            for key, label, values in series
        ),
        x_ticks=tuple(
            RunsTick(x=x_of(count), label=f"{count:,}", anchor="start" if index == 0 else "middle")
            for index, count in enumerate(runs) if index % every == 0 and right - x_of(count) > 8
        ),
        y_ticks=tuple(ErrorTick(y=y_of(index * step), label=f"{index * step:.0%}") for index in range(steps + 1)),
    )  # fmt: skip


def _line(key: str, label: str, places: Sequence[tuple[float, float, float]]) -> ErrorLine:
    path = "M" + " L".join(f"{x},{y}" for x, y, _ in places) if len(places) > 1 else ""
    return ErrorLine(key=key, label=label, path=path, last=places[-1][2] if places else None)
