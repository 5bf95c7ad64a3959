"""Spend in nano-USD, or counts, of each day or hour, stacked by series."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from apps.core.money import NANO_PER_USD
from apps.core.templatetags.ui import number, tokens, usd
from apps.interfaces.web.charts.axes import CHAR_PX, YTick, decimal_steps, round_steps
from apps.interfaces.web.charts.memory_charts import BarSegment


@dataclass(frozen=True, kw_only=True)
class Column:
    """One day or hour: a hover target over the full height, and the rectangles stacked in it."""

    label: str
    title: str
    x: float
    width: float
    parts: tuple["Block", ...]
    total: int
    label_x: float
    show_label: bool


@dataclass(frozen=True, kw_only=True)
class Block:
    y: float
    height: float
    tone: int
    title: str


@dataclass(frozen=True, kw_only=True)
class OverlaidLine:
    """A line over the columns."""

    key: str
    label: str
    path: str


@dataclass(frozen=True, kw_only=True)
class Days:
    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    columns: tuple[Column, ...]
    y_ticks: tuple[YTick, ...]
    series: tuple[BarSegment, ...] = ()
    lines: tuple[OverlaidLine, ...] = ()

    @property
    def plot_height(self) -> int:
        return self.bottom - self.top


def stacked_days(days: Sequence[tuple[str, dict[str, int]]], *, series: Sequence[str], is_money: bool = True) -> Days:
    """Stack each day's amounts in the order of `series`. Series after the sixth share the last colour."""
    unit, words = (NANO_PER_USD, usd) if is_money else (1, number)
    width, height, left, top, bottom = 1080, 220, 52, 12, 192
    right = width - 4
    peak = max([sum(amounts.get(name, 0) for name in series) for _, amounts in days], default=0) / unit
    peak = peak or 1 if is_money else max(peak, 4)  # an axis of counts has whole steps
    steps = round_steps(0, peak, [size for size in decimal_steps(peak) if is_money or (size >= 1 and size % 1 == 0)])
    tones = {name: min(index, 5) + 1 for index, name in enumerate(series)}
    scale = (bottom - top) / steps[-1] / unit
    decimals = max(0, -math.floor(math.log10(steps[1]) + 1e-9))
    contents = [
        (label, sum(amounts.get(name, 0) for name in tones), _parts(amounts, tones, bottom, scale, words))
        for label, amounts in days
    ]
    columns = lay_out([(label, f"{label}: {words(total)}", total, parts) for label, total, parts in contents],
                      left=left, right=right)  # fmt: skip
    totals = tuple(
        BarSegment(label=name, tone=tones[name], value=sum(amounts.get(name, 0) for _, amounts in days))
        for name in series
    )
    marks = tuple(
        YTick(
            y=round(bottom - step * unit * scale, 1),
            label=f"${step:,.{decimals}f}" if is_money else tokens(round(step)),
        )
        for step in steps
    )
    return Days(
        width=width, height=height, left=left, right=right, top=top, bottom=bottom,
        columns=columns, y_ticks=marks, series=totals,
    )  # fmt: skip


def lay_out(
    contents: Sequence[tuple[str, str, int, tuple[Block, ...]]], *, left: float, right: float
) -> tuple[Column, ...]:
    """Return columns of equal width for (label, title, total, parts), with as many labels as fit."""
    slot = (right - left) / max(1, len(contents))
    gap = min(6.0, slot * 0.25)
    longest = max([len(label) for label, *_ in contents], default=0)
    every = math.ceil(max(56, longest * CHAR_PX + 8) / slot)
    return tuple(
        Column(
            label=label, title=title, x=round(left + index * slot + gap / 2, 1), width=round(slot - gap, 1),
            parts=parts, total=total, label_x=round(left + (index + 0.5) * slot, 1), show_label=index % every == 0,
        )
        for index, (label, title, total, parts) in enumerate(contents)
    )  # fmt: skip


def _parts(
    amounts: dict[str, int], tones: dict[str, int], bottom: float, scale: float, words: Callable[[int], str]
) -> tuple[Block, ...]:
    y, parts = bottom, []
    for name, tone in tones.items():
        amount = amounts.get(name, 0)
        if amount <= 0:
            continue
        tall = amount * scale
        y -= tall
        parts.append(Block(y=round(y, 2), height=round(tall, 2), tone=tone, title=f"{name}: {words(amount)}"))
    return tuple(parts)
