"""Median and 95th percentile of latencies by hour or day, as two lines over the axes of the stacked columns."""

from collections.abc import Iterator, Sequence

from django.utils.translation import gettext

from apps.core.templatetags.ui import milliseconds
from apps.interfaces.web.charts.axes import YTick, decimal_steps, path, round_steps
from apps.interfaces.web.charts.day_charts import Block, Days, OverlaidLine, lay_out

_SECOND_MS = 1000


def latency_chart(times: Sequence[str], values: Sequence[tuple[int | None, int | None]]) -> Days | None:
    """Draw (median, 95th percentile) in milliseconds at each time, with gaps; return None if there are none."""
    peak = max([value for pair in values for value in pair if value is not None], default=None)
    if peak is None:
        return None
    width, height, left, top, bottom = 1080, 220, 60, 12, 192
    right = width - 4
    steps = round_steps(0, peak or 1, decimal_steps(peak or 1))
    contents: list[tuple[str, str, int, tuple[Block, ...]]] = [
        (
            time,
            gettext("%(time)s: median %(median)s, 95th percentile %(high)s")
            % {"time": time, "median": milliseconds(median), "high": milliseconds(high)},
            0,
            (),
        )
        for time, (median, high) in zip(times, values, strict=True)
    ]
    columns = lay_out(contents, left=left, right=right)

    def y_of(value: float) -> float:
        return round(bottom - (bottom - top) * value / steps[-1], 1)

    def line(key: str, label: str, column: Sequence[int | None]) -> OverlaidLine:
        places = [
            None if value is None else (each.label_x, y_of(value)) for each, value in zip(columns, column, strict=True)
        ]
        # A single value is a dash.
        drawn = [path(run) if len(run) > 1 else f"{path(run)} h2" for run in _runs(places)]
        return OverlaidLine(key=key, label=label, path=" ".join(drawn))

    in_seconds = steps[-1] >= _SECOND_MS
    medians, highs = zip(*values, strict=True)
    return Days(
        width=width, height=height, left=left, right=right, top=top, bottom=bottom,
        columns=columns,
        y_ticks=tuple(
            YTick(y=y_of(step), label=f"{step / _SECOND_MS:g} s" if in_seconds else f"{step:g} ms") for step in steps
        ),
        lines=(line("one", gettext("Median"), medians), line("two", gettext("95th percentile"), highs)),
    )  # fmt: skip


def _runs(places: Sequence[tuple[float, float] | None]) -> Iterator[list[tuple[float, float]]]:
    """Yield each run of values without a gap."""
    run: list[tuple[float, float]] = []
    for each in (*places, None):
        if each is not None:
            run.append(each)
        elif run:
            yield run
            run = []
