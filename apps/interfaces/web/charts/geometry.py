"""Geometry of the static charts: functions from numbers to frozen shapes, which templates draw with attributes only."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Above this share of a card's memory, a job has little headroom. The compute step explains the same limit.
TIGHT_SHARE = 0.88
SEGMENT_GAP = 0.5
CHAR_PX = 6.2  # mean width of a character of Geist 500 at 11 px, for keeping labels apart
LABEL_HEIGHT_PX = 12


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A part of a bar. `tone` is 1-6, one of the data colours."""

    label: str
    value: float
    tone: int
    x: float = 0
    width: float = 0


@dataclass(frozen=True, kw_only=True)
class MemoryBar:
    """Memory of one card as segments of a 100-wide bar."""

    segments: tuple[Segment, ...]
    need: float
    capacity: float
    share: float
    fits: bool
    tight: bool

    @property
    def percent(self) -> int:
        return round(self.share * 100)


def memory_bar(parts: Iterable[tuple[str, float]], capacity: float, *, usable: float | None = None) -> MemoryBar:
    """Lay out memory parts on one card. `usable` is the part of the capacity that may be filled; the default is all."""
    listed = list(parts)
    need = sum(value for _, value in listed)
    fits = need <= (capacity if usable is None else usable)
    scale = 100 / max(capacity, need)
    segments = _laid_out(listed, scale, gap=SEGMENT_GAP)
    share = need / capacity
    return MemoryBar(
        segments=segments, need=need, capacity=capacity, share=share, fits=fits, tight=fits and share > TIGHT_SHARE
    )


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A labelled line across a chart. `state` is "", "on" (chosen) or "no" (does not fit)."""

    x: float
    label: str
    state: str = ""
    anchor: str = "middle"


@dataclass(frozen=True, kw_only=True)
class MemoryLines:
    """The memory needed, against the capacities of the cards on offer."""

    width: int
    height: int
    segments: tuple[Segment, ...]
    ticks: tuple[Tick, ...]


def memory_lines(
    parts: Iterable[tuple[str, float]], capacities: Sequence[float], *, chosen: float | None = None, unit: str = "GiB"
) -> MemoryLines:
    """Lay out memory parts against capacity lines. A line whose label would touch its neighbour gets no label."""
    width, listed = 408, list(parts)
    need = sum(value for _, value in listed)
    top = 1.06 * max([need, *capacities])
    lines = [
        Tick(
            x=round(width * capacity / top, 1),
            label=f"{capacity:g} {unit}",
            state="no" if capacity < need else "on" if capacity == chosen else "",
        )
        for capacity in sorted(set(capacities))
    ]
    return MemoryLines(
        width=width, height=54, segments=_laid_out(listed, width / top, gap=1.5), ticks=_spaced(lines, width)
    )


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option with a finish time and a cost. A muted one is shown but cannot be chosen."""

    key: str
    label: str
    seconds: float
    cost: float
    title: str = ""
    muted: bool = False


@dataclass(frozen=True, kw_only=True)
class Point:
    """A drawn option. `label` is empty if it would cover something else; the title still names the point."""

    option: Option
    label: str
    x: float
    y: float
    chosen: bool
    label_x: float
    label_y: float
    anchor: str


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A labelled value on the vertical axis."""

    y: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """Cost against finish time. `front` joins the available options that no other option beats."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    points: tuple[Point, ...]
    front: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Mark, ...]
    deadline_x: float | None

    @property
    def deadline_width(self) -> float:
        return round(self.right - (self.deadline_x or self.right), 1)

    @property
    def plot_height(self) -> int:
        return self.bottom - self.top


def scatter(options: Sequence[Option], *, chosen: str = "", deadline_seconds: float | None = None) -> Scatter:
    """Place options by finish time and cost. Raises ValueError without options."""
    if not options:
        raise ValueError("a scatter needs at least one option")
    width, height, left, right, top, bottom = 372, 190, 42, 362, 18, 164
    x_steps = _steps(0, max([option.seconds for option in options] + [deadline_seconds or 0]), _TIME_STEPS)
    costs = [option.cost for option in options]
    y_steps = _steps(min(costs) * 0.9, max(costs) * 1.05, _decimal_steps(max(costs) - min(costs) * 0.9))

    def x_of(seconds: float) -> float:
        return round(left + (right - left) * seconds / x_steps[-1], 1)

    def y_of(cost: float) -> float:
        return round(bottom - (bottom - top) * (cost - y_steps[0]) / (y_steps[-1] - y_steps[0]), 1)

    dots = [(option, x_of(option.seconds), y_of(option.cost)) for option in options]
    takeable = [option for option in options if not option.muted]
    front = [(x_of(option.seconds), y_of(option.cost)) for option in pareto_front(takeable)]
    decimals = max(2, -math.floor(math.log10(y_steps[1] - y_steps[0]) + 1e-9))
    return Scatter(
        width=width, height=height, left=left, right=right, top=top, bottom=bottom,
        points=_labelled(dots, chosen=chosen, left=left, right=right, top=top, bottom=bottom,
                         rules=() if deadline_seconds is None else (x_of(deadline_seconds),)),
        front=_path(front) if front else "",
        x_ticks=tuple(
            Tick(x=x_of(step), label=_time_label(step), anchor=_edge_anchor(index, len(x_steps)))
            for index, step in enumerate(x_steps)
        ),
        y_ticks=tuple(Mark(y=y_of(step), label=f"${step:,.{decimals}f}") for step in y_steps),
        deadline_x=None if deadline_seconds is None else x_of(deadline_seconds),
    )  # fmt: skip


def pareto_front(options: Iterable[Option]) -> list[Option]:
    """Return the options for which no other is both as fast and as cheap, from fast to slow."""
    front: list[Option] = []
    for option in sorted(options, key=lambda item: (item.seconds, item.cost)):
        if not front or option.cost < front[-1].cost:
            front.append(option)
    return front


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


def histogram(bounds: Sequence[tuple[int, int]], *, limit: int | None = None, unit: str = "tokens") -> Histogram:
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
        title = f"{low:,} to {high:,} {unit}: {count:,}"
        bars.append(_bar(index * step, base_y, max(1.0, step - 2), tall, title, over=over))
        low = high
    limit_x = _limit_position(bounds, limit, step)
    label_x, anchor = _inside(limit_x or 0, half=44, width=width)
    return Histogram(
        width=width, height=height, base_y=base_y, bars=tuple(bars),
        limit_x=limit_x, limit_label_x=label_x, limit_anchor=anchor,
    )  # fmt: skip


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
    line = _path(places)
    return Sparkline(
        width=width, height=height, line=line, area=f"{line} L{width},{height} L0,{height} Z", last=values[-1]
    )


@dataclass(frozen=True, kw_only=True)
class Column:
    """One day: a hover target over the full height, and the rectangles stacked in it."""

    label: str
    title: str
    x: float
    width: float
    parts: tuple["Block", ...]
    total: float
    label_x: float
    show_label: bool


@dataclass(frozen=True, kw_only=True)
class Block:
    y: float
    height: float
    tone: int
    title: str


@dataclass(frozen=True, kw_only=True)
class Days:
    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    columns: tuple[Column, ...]
    y_ticks: tuple[Mark, ...]
    series: tuple[Segment, ...]

    @property
    def plot_height(self) -> int:
        return self.bottom - self.top


def stacked_days(
    days: Sequence[tuple[str, dict[str, float]]], *, series: Sequence[str], prefix: str = "$", suffix: str = ""
) -> Days:
    """Stack each day's amounts in the order of `series`. Series after the sixth share the last colour."""
    width, height, left, top, bottom = 1080, 220, 52, 12, 192
    right = width - 4
    peak = max([sum(amounts.get(name, 0) for name in series) for _, amounts in days], default=0)
    steps = _steps(0, peak or 1, _decimal_steps(peak or 1))
    tones = {name: min(index, 5) + 1 for index, name in enumerate(series)}
    slot = (right - left) / max(1, len(days))
    every = math.ceil(56 / slot) if days else 1
    scale = (bottom - top) / steps[-1]
    decimals = max(0, -math.floor(math.log10(steps[1]) + 1e-9))
    columns = tuple(
        _column(label, amounts, tones, x=left + index * slot, slot=slot, bottom=bottom, scale=scale,
                show_label=index % every == 0, money=(prefix, suffix))
        for index, (label, amounts) in enumerate(days)
    )  # fmt: skip
    totals = tuple(
        Segment(label=name, tone=tones[name], value=sum(amounts.get(name, 0) for _, amounts in days)) for name in series
    )
    marks = tuple(
        Mark(y=round(bottom - step * scale, 1), label=f"{prefix}{step:,.{decimals}f}{suffix}") for step in steps
    )
    return Days(
        width=width, height=height, left=left, right=right, top=top, bottom=bottom,
        columns=columns, y_ticks=marks, series=totals,
    )  # fmt: skip


_TIME_STEPS = (10, 30, 60, 300, 600, 900, 1_800, 3_600, 7_200, 14_400, 21_600, 43_200, 86_400, 172_800, 604_800)


def _column(
    label: str, amounts: dict[str, float], tones: dict[str, int], *, x: float, slot: float, bottom: float, scale: float,
    show_label: bool, money: tuple[str, str],
) -> Column:  # fmt: skip
    y, parts = bottom, []
    for name, tone in tones.items():
        amount = amounts.get(name, 0)
        if amount <= 0:
            continue
        tall = amount * scale
        y -= tall
        parts.append(Block(y=round(y, 2), height=round(tall, 2), tone=tone, title=f"{name}: {_amount(amount, money)}"))
    total = sum(amounts.get(name, 0) for name in tones)
    title = f"{label}: {_amount(total, money)}"
    gap = min(6.0, slot * 0.25)
    return Column(
        label=label, title=title, x=round(x + gap / 2, 1), width=round(slot - gap, 1), parts=tuple(parts),
        total=total, label_x=round(x + slot / 2, 1), show_label=show_label,
    )  # fmt: skip


def _amount(value: float, money: tuple[str, str]) -> str:
    prefix, suffix = money
    return f"{prefix}{value:,.2f}{suffix}" if prefix == "$" else f"{prefix}{value:,g}{suffix}"


def _bar(x: float, base_y: float, width: float, height: float, title: str, *, over: bool) -> Bar:
    y = round(base_y - height, 1)
    return Bar(x=round(x, 1), y=y, width=round(width, 1), height=round(height, 1), title=title, over=over)


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


def _laid_out(parts: Sequence[tuple[str, float]], scale: float, *, gap: float) -> tuple[Segment, ...]:
    """Place parts one after another, each shortened by the gap to the next."""
    x, segments = 0.0, []
    for index, (label, value) in enumerate(parts):
        width = value * scale
        shown = round(max(width - gap, 0.2), 2)
        segments.append(Segment(label=label, value=value, tone=min(index, 5) + 1, x=round(x, 2), width=shown))
        x += width
    return tuple(segments)


def _spaced(ticks: Sequence[Tick], width: int) -> tuple[Tick, ...]:
    """Blank the labels that would touch a placed one. The chosen line's label is placed first."""
    taken: list[tuple[float, float]] = []
    shown: dict[float, Tick] = {}
    for tick in sorted(ticks, key=lambda item: item.state != "on"):
        half = len(tick.label) * CHAR_PX / 2
        x = min(max(tick.x, half), width - half)
        free = all(x + half + 6 < low or x - half - 6 > high for low, high in taken)
        if free:
            taken.append((x - half, x + half))
        anchor = "end" if tick.x > width - half else "start" if tick.x < half else "middle"
        shown[tick.x] = Tick(x=tick.x, label=tick.label if free else "", state=tick.state, anchor=anchor)
    return tuple(shown[tick.x] for tick in ticks)


def _labelled(
    dots: Sequence[tuple[Option, float, float]],
    *,
    chosen: str,
    left: int,
    right: int,
    top: int,
    bottom: int,
    rules: Sequence[float],
) -> tuple[Point, ...]:
    """Place each label above, below, right or left of its dot, at the first position that touches nothing.

    A label without such a position is left out, except that of the chosen dot.
    """
    taken = [(x - 6, y - 6, x + 6, y + 6) for _, x, y in dots] + [(rule - 1, top, rule + 1, bottom) for rule in rules]
    points: dict[str, Point] = {}
    for option, x, y in sorted(dots, key=lambda dot: dot[0].key != chosen):
        width = len(option.label) * CHAR_PX
        places = (
            (x, y - 10, "middle", x - width / 2), (x, y + 20, "middle", x - width / 2),
            (x + 10, y + 4, "start", x + 10), (x - 10, y + 4, "end", x - 10 - width),
        )  # fmt: skip
        boxes = [(low, text_y - 9, low + width, text_y + 3) for _, text_y, _, low in places]
        fits = [
            index for index, box in enumerate(boxes)
            if box[0] >= left and box[2] <= right and box[1] >= top - LABEL_HEIGHT_PX and box[3] <= bottom
            and not any(_touch(box, other) for other in taken)
        ]  # fmt: skip
        best, is_chosen = fits[0] if fits else 0, option.key == chosen
        label_x, label_y, anchor, _ = places[best]
        label = option.label if fits or is_chosen else ""
        taken += [boxes[best]] if label else []
        points[option.key] = Point(
            option=option, label=label, x=x, y=y, chosen=is_chosen,
            label_x=round(label_x, 1), label_y=round(label_y, 1), anchor=anchor,
        )  # fmt: skip
    return tuple(points[option.key] for option, _, _ in dots)


def _touch(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _steps(low: float, high: float, sizes: Sequence[float]) -> list[float]:
    """Return three to six round values covering low..high, with the smallest step size that needs no more."""
    for size in sizes:
        start = math.floor(low / size + 1e-9)
        count = math.ceil(high / size - 1e-9) - start
        if count <= 5:
            return [round((start + index) * size, 9) for index in range(max(2, count) + 1)]
    size = high / 4
    return [round(index * size, 9) for index in range(5)]


def _decimal_steps(span: float) -> list[float]:
    """Return the step sizes 1, 2, 2.5 and 5 times powers of ten around a fifth of the span."""
    power = 10.0 ** math.floor(math.log10(max(span, 1e-9) / 5))
    return [round(factor * power, 12) for factor in (1, 2, 2.5, 5, 10, 20, 25, 50)]


def _time_label(seconds: float) -> str:
    if seconds == 0:
        return "now"
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


def _edge_anchor(index: int, count: int) -> str:
    return "start" if index == 0 else "end" if index == count - 1 else "middle"


def _path(points: Iterable[tuple[float, float]]) -> str:
    return "M" + " L".join(f"{x},{y}" for x, y in points)
