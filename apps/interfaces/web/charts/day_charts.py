"""Spend of each day in nano-USD, stacked by series."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from apps.core.money import NANO_PER_USD
from apps.core.templatetags.ui import usd
from apps.interfaces.web.charts.axes import YTick, decimal_steps, round_steps
from apps.interfaces.web.charts.memory_charts import BarSegment


@dataclass(frozen=True, kw_only=True)
class Column:
    """One day: a hover target over the full height, and the rectangles stacked in it."""

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
class Days:
    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    columns: tuple[Column, ...]
    y_ticks: tuple[YTick, ...]
    series: tuple[BarSegment, ...]

    @property
    def plot_height(self) -> int:
        return self.bottom - self.top


def stacked_days(days: Sequence[tuple[str, dict[str, int]]], *, series: Sequence[str]) -> Days:
    """Stack each day's amounts in the order of `series`. Series after the sixth share the last colour."""
    width, height, left, top, bottom = 1080, 220, 52, 12, 192
    right = width - 4
    peak = max([sum(amounts.get(name, 0) for name in series) for _, amounts in days], default=0) / NANO_PER_USD
    steps = round_steps(0, peak or 1, decimal_steps(peak or 1))
    tones = {name: min(index, 5) + 1 for index, name in enumerate(series)}
    slot = (right - left) / max(1, len(days))
    every = math.ceil(56 / slot) if days else 1
    scale = (bottom - top) / steps[-1]
    decimals = max(0, -math.floor(math.log10(steps[1]) + 1e-9))
    columns = tuple(
        _column(label, amounts, tones, x=left + index * slot, slot=slot, bottom=bottom, scale=scale,
                show_label=index % every == 0)
        for index, (label, amounts) in enumerate(days)
    )  # fmt: skip
    totals = tuple(
        BarSegment(label=name, tone=tones[name], value=sum(amounts.get(name, 0) for _, amounts in days))
        for name in series
    )
    marks = tuple(YTick(y=round(bottom - step * scale, 1), label=f"${step:,.{decimals}f}") for step in steps)
    return Days(
        width=width, height=height, left=left, right=right, top=top, bottom=bottom,
        columns=columns, y_ticks=marks, series=totals,
    )  # fmt: skip


def _column(
    label: str, amounts: dict[str, int], tones: dict[str, int], *, x: float, slot: float, bottom: float, scale: float,
    show_label: bool,
) -> Column:  # fmt: skip
    y, parts = bottom, []
    for name, tone in tones.items():
        amount = amounts.get(name, 0)
        if amount <= 0:
            continue
        tall = amount / NANO_PER_USD * scale
        y -= tall
        parts.append(Block(y=round(y, 2), height=round(tall, 2), tone=tone, title=f"{name}: {usd(amount)}"))
    total = sum(amounts.get(name, 0) for name in tones)
    title = f"{label}: {usd(total)}"
    gap = min(6.0, slot * 0.25)
    return Column(
        label=label, title=title, x=round(x + gap / 2, 1), width=round(slot - gap, 1), parts=tuple(parts),
        total=total, label_x=round(x + slot / 2, 1), show_label=show_label,
    )  # fmt: skip
