"""Geometry of the static charts."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apps.interfaces.web.charts import day_charts, histograms, latency_charts, memory_charts, scatter_charts

PARTS = [("Weights", 29.6), ("Activations", 9.1), ("Other", 5.6)]


def test_a_memory_bar_says_what_fits_and_what_is_tight() -> None:
    assert memory_charts.memory_bar(PARTS, 80).percent == 55
    assert memory_charts.memory_bar(PARTS, 80).fits
    assert memory_charts.memory_bar(PARTS, 48).tight
    assert not memory_charts.memory_bar(PARTS, 24).fits
    assert not memory_charts.memory_bar(PARTS, 48, usable=44).fits


@given(st.lists(st.floats(0.01, 500), min_size=1, max_size=8), st.floats(1, 1000))
def test_segments_never_leave_the_bar_nor_overlap(values: list[float], capacity: float) -> None:
    bar = memory_charts.memory_bar([(f"part {index}", value) for index, value in enumerate(values)], capacity)

    assert all(part.x >= 0 and part.x + part.width <= 100.3 for part in bar.segments)
    assert all(one.x <= other.x for one, other in pairwise(bar.segments))


def test_capacity_lines_mark_the_chosen_card_and_those_too_small() -> None:
    lines = memory_charts.memory_lines(PARTS, [24, 48, 80, 141], chosen=80)

    assert [tick.state for tick in lines.ticks] == ["no", "", "on", ""]
    assert all(0 <= tick.x <= lines.width for tick in lines.ticks)


def test_capacity_labels_that_would_touch_are_left_out_but_never_the_chosen_one() -> None:
    lines = memory_charts.memory_lines(PARTS, [78, 80, 82], chosen=80)

    assert [tick.label for tick in lines.ticks] == ["", "80 GiB", ""]


OPTIONS = [
    scatter_charts.Option(key="h100", label="H100", seconds=3_000, cost=1.88),
    scatter_charts.Option(key="b200", label="B200", seconds=1_620, cost=2.18),
    scatter_charts.Option(key="h200", label="H200", seconds=2_700, cost=2.25),
    scatter_charts.Option(key="l40s", label="L40S", seconds=9_240, cost=2.81),
]


def test_the_front_holds_the_options_nothing_else_beats() -> None:
    assert [option.key for option in scatter_charts.pareto_front(OPTIONS)] == ["b200", "h100"]


def test_a_scatter_puts_faster_left_and_cheaper_low() -> None:
    plot = scatter_charts.scatter(OPTIONS, chosen="h100", deadline_seconds=5_460)
    points = {point.option.key: point for point in plot.points}

    assert points["b200"].x < points["h100"].x < points["l40s"].x
    assert points["h100"].y > points["b200"].y > points["l40s"].y
    assert [key for key, point in points.items() if point.chosen] == ["h100"]
    assert plot.x_ticks[0].label == "now"
    assert plot.deadline_x is not None and points["h100"].x < plot.deadline_x < points["l40s"].x


@pytest.mark.parametrize("cost", [0.0000004, 0.004, 3, 41_000])
def test_a_scatter_of_one_option_still_has_axes(cost: float) -> None:
    plot = scatter_charts.scatter([scatter_charts.Option(key="a", label="A", seconds=40, cost=cost)])

    assert len({mark.label for mark in plot.y_ticks}) == len(plot.y_ticks) >= 2
    assert plot.top <= plot.points[0].y <= plot.bottom
    assert plot.left <= plot.points[0].x <= plot.right


def test_a_scatter_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        scatter_charts.scatter([])


def test_a_histogram_marks_what_lies_past_the_limit_and_keeps_rare_rows_visible() -> None:
    plot = histograms.histogram([(256, 9_000), (512, 4_000), (768, 0), (1_024, 1)], limit=700)

    assert [bar.over for bar in plot.bars] == [False, False, False, True]
    assert plot.bars[2].height == 0
    assert plot.bars[3].height > 1
    assert plot.limit_x == pytest.approx(2 * 67 + 67 * (700 - 512) / 256, abs=0.1)


def test_a_histogram_of_nothing_is_empty() -> None:
    assert histograms.histogram([], limit=10).bars == ()


def test_a_sparkline_spans_its_box_and_survives_one_value_and_none() -> None:
    assert histograms.sparkline([1, 2, 3]).line.startswith("M0.0,26.5 ")
    assert histograms.sparkline([5]).line.count("L") == 1
    assert histograms.sparkline([]).line == ""


def test_stacked_days_add_up_and_name_their_amounts() -> None:
    plot = day_charts.stacked_days(
        [("8 Nov", {"Training": 3 * 10**9, "Inference": 10**9}), ("9 Nov", {"Training": 4_600})],
        series=["Training", "Inference"],
    )
    first, second = plot.columns

    assert first.total == 4 * 10**9
    assert [block.tone for block in first.parts] == [1, 2]
    assert first.parts[0].y + first.parts[0].height == pytest.approx(plot.bottom)
    assert first.parts[1].y + first.parts[1].height == pytest.approx(first.parts[0].y)
    assert len(second.parts) == 1
    assert (first.title, second.title) == ("8 Nov: $4.00", "9 Nov: 0.00046¢")
    assert [item.value for item in plot.series] == [3 * 10**9 + 4_600, 10**9]


def test_days_without_spending_still_have_an_axis() -> None:
    plot = day_charts.stacked_days([("8 Nov", {}), ("9 Nov", {})], series=["Training"])

    assert [column.parts for column in plot.columns] == [(), ()]
    assert len(plot.y_ticks) >= 2


def test_counts_have_whole_steps_and_no_currency() -> None:
    plot = day_charts.stacked_days([("8 Nov", {"Answered": 12}), ("9 Nov", {})], series=["Answered"], is_money=False)

    assert plot.columns[0].title == "8 Nov: 12"
    assert [tick.label for tick in plot.y_ticks] == ["0", "5", "10", "15"]
    assert plot.columns[0].parts[0].height == pytest.approx((plot.bottom - plot.top) * 12 / 15, abs=0.1)


def test_latency_lines_have_gaps_and_name_their_unit() -> None:
    plot = latency_charts.latency_chart(
        ["1 Nov", "2 Nov", "3 Nov", "4 Nov"], [(100, 200), (120, 900), (None, None), (50, 60)]
    )

    assert plot is not None
    assert [line.path.count("M") for line in plot.lines] == [2, 2]
    assert plot.y_ticks[-1].label == "1 s"
    assert latency_charts.latency_chart(["1 Nov"], [(None, None)]) is None
