"""Several runs' curves over one axis of steps, smoothed where they are noisy."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from apps.interfaces.web.charts.axes import XTick, YTick, decimal_steps, path, round_steps

MAX_CURVES = 8
# Six colours of the palette, then the first two with dashes.
_TONES = ("d1", "d2", "d3", "d4", "d5", "d6", "d1 dashed", "d2 dashed")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 1000, 300, 52, 10, 266
_KEEP = 0.9  # of the mean so far, at each point of a smoothed curve

Points = Sequence[tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One run's curve. `path` is empty if it has fewer than two points, `last` is its newest value."""

    tone: str
    label: str
    path: str
    last: float | None


@dataclass(frozen=True, kw_only=True)
class CurveOverlay:
    width: int
    height: int
    left: int
    right: int
    bottom: int
    curves: tuple[Curve, ...]
    x_ticks: tuple[XTick, ...]
    y_ticks: tuple[YTick, ...]


def tone_of(index: int) -> str:
    return _TONES[index % len(_TONES)]


def smoothed(points: Points) -> list[tuple[int, float]]:
    """Return the exponential moving mean of a curve, corrected for its start."""
    result, total, mass = [], 0.0, 0.0
    for step, value in points:
        total, mass = total * _KEEP + value, mass * _KEEP + 1
        result.append((step, total / mass))
    return result


def draw_overlay(curves: Iterable[tuple[str, Points]]) -> CurveOverlay | None:
    """Draw (label, points) curves; return None if none of them has a point."""
    listed = list(curves)
    values = [value for _, points in listed for _, value in points]
    if not values:
        return None
    low, high = min(values), max(values)
    levels = round_steps(low, high, decimal_steps(high - low or abs(high) or 1))
    last_step = max(step for _, points in listed for step, _ in points)
    steps = round_steps(0, last_step, [size for size in decimal_steps(last_step) if size >= 1 and size % 1 == 0])
    right = _WIDTH - 16

    def x_of(step: float) -> float:
        return round(_LEFT + (right - _LEFT) * step / max(last_step, 1), 1)

    def y_of(value: float) -> float:
        return round(_BOTTOM - (_BOTTOM - _TOP) * (value - levels[0]) / ((levels[-1] - levels[0]) or 1), 1)

    return CurveOverlay(
        width=_WIDTH,
        height=_HEIGHT,
        left=_LEFT,
        right=right,
        bottom=_BOTTOM,
        curves=tuple(
            Curve(
                tone=tone_of(index),
                label=label,
                path=path((x_of(step), y_of(value)) for step, value in points) if len(points) > 1 else "",
                last=points[-1][1] if points else None,
            )
            for index, (label, points) in enumerate(listed)
        ),
        x_ticks=tuple(
            XTick(x=x_of(step), label=f"{step:,.0f}", anchor="end" if x_of(step) > right - 20 else "middle")
            for step in steps
            if step <= last_step
        ),
        y_ticks=tuple(YTick(y=y_of(level), label=f"{level:g}") for level in levels),
    )
