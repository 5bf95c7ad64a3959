"""The memory of a job: segments of a bar, and lines for the cards on offer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from apps.interfaces.web.charts.axes import CHAR_PX, XTick

# Above this share of a card's memory, a job has little headroom. The compute step explains the same limit.
TIGHT_SHARE = 0.88
SEGMENT_GAP = 0.5


@dataclass(frozen=True, kw_only=True)
class BarSegment:
    """A part of a bar. `tone` is 1-6, one of the data colours."""

    label: str
    value: float
    tone: int
    x: float = 0
    width: float = 0


@dataclass(frozen=True, kw_only=True)
class MemoryBar:
    """Memory of one card as segments of a 100-wide bar."""

    segments: tuple[BarSegment, ...]
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
class MemoryLines:
    """The memory that a job needs, drawn against the capacities of the cards on offer."""

    width: int
    height: int
    segments: tuple[BarSegment, ...]
    ticks: tuple[XTick, ...]


def memory_lines(
    parts: Iterable[tuple[str, float]], capacities: Sequence[float], *, chosen: float | None = None
) -> MemoryLines:
    """Lay out memory parts against capacity lines. A line whose label would touch its neighbour gets no label."""
    width, listed = 408, list(parts)
    need = sum(value for _, value in listed)
    top = 1.06 * max([need, *capacities])
    lines = [
        XTick(
            x=round(width * capacity / top, 1),
            label=f"{capacity:g} GiB",
            state="no" if capacity < need else "on" if capacity == chosen else "",
        )
        for capacity in sorted(set(capacities))
    ]
    return MemoryLines(
        width=width, height=54, segments=_laid_out(listed, width / top, gap=1.5), ticks=_spaced(lines, width)
    )


def _laid_out(parts: Sequence[tuple[str, float]], scale: float, *, gap: float) -> tuple[BarSegment, ...]:
    """Place parts one after another, each shortened by the gap to the next."""
    x, segments = 0.0, []
    for index, (label, value) in enumerate(parts):
        width = value * scale
        shown = round(max(width - gap, 0.2), 2)
        segments.append(BarSegment(label=label, value=value, tone=min(index, 5) + 1, x=round(x, 2), width=shown))
        x += width
    return tuple(segments)


def _spaced(ticks: Sequence[XTick], width: int) -> tuple[XTick, ...]:
    """Blank the labels that would touch a placed one. The chosen line's label is placed first."""
    taken: list[tuple[float, float]] = []
    shown: dict[float, XTick] = {}
    for tick in sorted(ticks, key=lambda item: item.state != "on"):
        half = len(tick.label) * CHAR_PX / 2
        x = min(max(tick.x, half), width - half)
        free = all(x + half + 6 < low or x - half - 6 > high for low, high in taken)
        if free:
            taken.append((x - half, x + half))
        anchor = "end" if tick.x > width - half else "start" if tick.x < half else "middle"
        shown[tick.x] = XTick(x=tick.x, label=tick.label if free else "", state=tick.state, anchor=anchor)
    return tuple(shown[tick.x] for tick in ticks)
