"""Row lengths as bars, and a series of values as a sparkline."""

from collections.abc import Sequence
from dataclasses import dataclass

from apps.interfaces.web.charts.axes import path


@dataclass(frozen=True, kw_only=True)
class Bar:
    x: float
    y: float
    width: float
    height: float
    title: str
    over: bool = False


@dataclass(frozen=True, kw_only=True)
class Histogram:
    width: int
    height: int
    base_y: int
    bars: tuple[Bar, ...]
    limit_x: float | None
    limit_label_x: float
    limit_anchor: str


def histogram(bounds: Sequence[tuple[int, int]], *, limit: int | None = None) -> Histogram:
    """Draw ascending (upper bound, rows) pairs as equal bars; those wholly beyond `limit` are marked `over`.

    A bucket with few rows keeps a visible sliver, because the rare long rows matter most.
    """
    width, height, base_y, top = 268, 96, 78, 8
    step = width / max(1, len(bounds))
    peak = max([count for _, count in bounds], default=0)
    bars, low = [], 0
    for index, (high, count) in enumerate(bounds):
        tall = max(1.2, (base_y - top) * count / peak) if count else 0
        over = limit is not None and low >= limit
        title = f"{low:,} to {high:,} tokens: {count:,}"
        x, y, tall = round(index * step, 1), round(base_y - tall, 1), round(tall, 1)
        bars.append(Bar(x=x, y=y, width=round(max(1.0, step - 2), 1), height=tall, title=title, over=over))
        low = high
    limit_x = _limit_position(bounds, limit, step)
    label_x, anchor = _inside(limit_x or 0, half=44, width=width)
    return Histogram(
        width=width, height=height, base_y=base_y, bars=tuple(bars),
        limit_x=limit_x, limit_label_x=label_x, limit_anchor=anchor,
    )  # fmt: skip


def _inside(x: float, *, half: float, width: float) -> tuple[float, str]:
    """Return the position and anchor of a label at x that keep it between 0 and width."""
    if x < half:
        return 0, "start"
    return (width, "end") if x > width - half else (x, "middle")


def _limit_position(bounds: Sequence[tuple[int, int]], limit: int | None, step: float) -> float | None:
    """Return where the limit crosses the row of buckets; return None if it lies outside them."""
    low = 0
    for index, (high, _) in enumerate(bounds):
        if limit is not None and low <= limit < high:
            return round((index + (limit - low) / (high - low)) * step, 1)
        low = high
    return None


@dataclass(frozen=True, kw_only=True)
class Sparkline:
    width: int
    height: int
    line: str
    area: str
    last: float | None


def sparkline(values: Sequence[float], *, low: float | None = None, high: float | None = None) -> Sparkline:
    """Draw values evenly over 200 by 28 units.

    The default range is that of the values. One value becomes a level line.
    """
    width, height, pad = 200, 28, 1.5
    if not values:
        return Sparkline(width=width, height=height, line="", area="", last=None)
    points = list(values) if len(values) > 1 else [values[0], values[0]]
    floor = min(points) if low is None else low
    span = (max(points) if high is None else high) - floor or 1
    places = [
        (
            round(index * width / (len(points) - 1), 1),
            round(height - pad - (height - 2 * pad) * min(1.0, max(0.0, (value - floor) / span)), 1),
        )
        for index, value in enumerate(points)
    ]
    line = path(places)
    return Sparkline(
        width=width, height=height, line=line, area=f"{line} L{width},{height} L0,{height} Z", last=values[-1]
    )
