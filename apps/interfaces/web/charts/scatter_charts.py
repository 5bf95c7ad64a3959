"""Cost against finish time: placed options, their labels and the front that no option beats."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from apps.interfaces.web.charts.axes import CHAR_PX, XTick, YTick, decimal_steps, path, round_steps

LABEL_HEIGHT_PX = 12
_TIME_STEPS = (10, 30, 60, 300, 600, 900, 1_800, 3_600, 7_200, 14_400, 21_600, 43_200, 86_400, 172_800, 604_800)


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
class PlottedOption:
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
class Scatter:
    """Cost against finish time. `front` joins the available options that no other option beats."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    points: tuple[PlottedOption, ...]
    front: str
    x_ticks: tuple[XTick, ...]
    y_ticks: tuple[YTick, ...]
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
    x_steps = round_steps(0, max([option.seconds for option in options] + [deadline_seconds or 0]), _TIME_STEPS)
    costs = [option.cost for option in options]
    y_steps = round_steps(min(costs) * 0.9, max(costs) * 1.05, decimal_steps(max(costs) - min(costs) * 0.9))

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
        front=path(front) if front else "",
        x_ticks=tuple(
            XTick(
                x=x_of(step),
                label=_time_label(step),
                anchor="start" if index == 0 else "end" if index == len(x_steps) - 1 else "middle",
            )
            for index, step in enumerate(x_steps)
        ),
        y_ticks=tuple(YTick(y=y_of(step), label=f"${step:,.{decimals}f}") for step in y_steps),
        deadline_x=None if deadline_seconds is None else x_of(deadline_seconds),
    )  # fmt: skip


def pareto_front(options: Iterable[Option]) -> list[Option]:
    """Return the options for which no other is both as fast and as cheap, from fast to slow."""
    front: list[Option] = []
    for option in sorted(options, key=lambda item: (item.seconds, item.cost)):
        if not front or option.cost < front[-1].cost:
            front.append(option)
    return front


def _labelled(
    dots: Sequence[tuple[Option, float, float]],
    *,
    chosen: str,
    left: int,
    right: int,
    top: int,
    bottom: int,
    rules: Sequence[float],
) -> tuple[PlottedOption, ...]:
    """Place each label above, below, right or left of its dot, at the first position that touches nothing.

    A label without such a position is left out, except that of the chosen dot.
    """
    taken = [(x - 6, y - 6, x + 6, y + 6) for _, x, y in dots] + [(rule - 1, top, rule + 1, bottom) for rule in rules]
    points: dict[str, PlottedOption] = {}
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
        points[option.key] = PlottedOption(
            option=option, label=label, x=x, y=y, chosen=is_chosen,
            label_x=round(label_x, 1), label_y=round(label_y, 1), anchor=anchor,
        )  # fmt: skip
    return tuple(points[option.key] for option, _, _ in dots)


def _touch(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _time_label(seconds: float) -> str:
    if seconds == 0:
        return "now"
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"
