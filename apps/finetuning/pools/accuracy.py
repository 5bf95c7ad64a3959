"""Errors of estimates against finished runs: complete for operators, above a floor for the public.

The public sees a pool once it has MIN_RUNS runs of MIN_ORGANIZATIONS organizations. Its figures change after every
STEP_RUNS further runs, never by date. So the page reveals neither a single run nor the time at which an organization
trained.
"""

import datetime
from collections.abc import Sequence
from statistics import median

import msgspec
from django.db import transaction
from django.db.models import QuerySet

from apps.finetuning.lifecycle import CalibrationOutcome
from apps.finetuning.models import CalibrationPoint, GpuPool, PoolAccuracy
from apps.finetuning.pools.calibrations import list_points
from apps.finetuning.pools.error_chart import ErrorChart, error_chart

MIN_RUNS = 20
MIN_ORGANIZATIONS = 2
STEP_RUNS = 10
WINDOW_RUNS = 20  # in the window of the running error
_MAX_RUNS = 500


class Error(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of one quantity, |estimate / actual - 1|.

    `bias` is the median with its sign; above zero, estimates were too high. `coverage` is the share of runs that ended
    within P10 to P90 of their estimate; 0.8 is the target. It is None unless most runs had such a range.
    """

    runs: int
    median: float
    p90: float
    bias: float
    coverage: float | None


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """Median errors of the WINDOW_RUNS runs up to this one."""

    runs: int
    time: float | None
    memory: float | None


class AccuracyReport(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of a pool's estimates. `out_of_memory` counts runs that were quoted to fit and did not."""

    runs: int
    out_of_memory: int
    time: Error | None
    memory: Error | None
    tokens_per_second: Error | None
    cost: Error | None
    running: tuple[Moment, ...]


def refresh_public_reports(*, now: datetime.datetime) -> None:
    """Write the public report of each pool, and delete those below the floor."""
    for pool in GpuPool.objects.all():
        _refresh(pool, now)


@transaction.atomic
def _refresh(pool: GpuPool, now: datetime.datetime) -> None:
    points, total = list_points(pool=pool), CalibrationPoint.objects.filter(pool=pool).count()
    shown = points[: len(points) - total % STEP_RUNS][-_MAX_RUNS:]  # without the newest, until a step is full
    if not (len(shown) >= MIN_RUNS and len({point.organization_id for point in shown}) >= MIN_ORGANIZATIONS):
        PoolAccuracy.objects.filter(pool=pool).delete()
        return
    report = msgspec.to_builtins(measure(shown))
    if PoolAccuracy.objects.filter(pool=pool, report=report).exists():
        return
    PoolAccuracy.objects.update_or_create(pool=pool, defaults={"report": report, "updated_at": now})


def list_public_reports() -> QuerySet[PoolAccuracy]:
    """Return the public reports by pool name, closed pools included."""
    return PoolAccuracy.objects.select_related("pool__gpu_type").order_by("pool__name")


def measure(points: Sequence[CalibrationPoint]) -> AccuracyReport:
    """Return the errors over these points, which come oldest first. No floor applies."""
    return AccuracyReport(
        runs=len(points),
        out_of_memory=sum(point.outcome == CalibrationOutcome.OUT_OF_MEMORY for point in points),
        time=_error([_seconds(point) for point in points]),
        memory=_error([_peak(point) for point in points]),
        tokens_per_second=_error(
            [(p.estimated_tokens_per_second, p.actual_tokens_per_second, None, None) for p in points]
        ),
        cost=_error(
            [
                (p.estimated_cost_nano, p.actual_cost_nano, p.estimated_cost_nano_p10, p.estimated_cost_nano_p90)
                for p in points
            ]
        ),
        running=_running(points),
    )


def list_errors(report: AccuracyReport) -> list[tuple[str, Error]]:
    """Return the errors with labels for pages."""
    named = (
        ("Training time", report.time),
        ("Peak memory", report.memory),
        ("Tokens per second", report.tokens_per_second),
        ("Cost", report.cost),
    )
    return [(name, error) for name, error in named if error]


def draw_running_error(report: AccuracyReport) -> ErrorChart | None:
    """Return the chart of the running error; None if there is nothing to draw."""
    return error_chart(
        [moment.runs for moment in report.running],
        [
            ("one", "Training time", [moment.time for moment in report.running]),
            ("two", "Peak memory", [moment.memory for moment in report.running]),
        ],
    )


# estimate, actual, P10 and P90 of the estimate
Pair = tuple[float | None, float | None, float | None, float | None]


def _seconds(point: CalibrationPoint) -> Pair:
    low, high = point.estimated_seconds_p10, point.estimated_seconds_p90
    return point.estimated_seconds, point.actual_seconds, low, high


def _peak(point: CalibrationPoint) -> Pair:
    low, high = point.estimated_peak_bytes_p10, point.estimated_peak_bytes_p90
    return point.estimated_peak_bytes, point.actual_peak_bytes, low, high


def _error(pairs: Sequence[Pair]) -> Error | None:
    known = [(estimate, actual, low, high) for estimate, actual, low, high in pairs if estimate and actual]
    if not known:
        return None
    signed = [estimate / actual - 1 for estimate, actual, _, _ in known]
    sizes = sorted(abs(value) for value in signed)
    ranged = [low <= actual <= high for _, actual, low, high in known if low is not None and high is not None]
    return Error(
        runs=len(known),
        median=median(sizes),
        p90=sizes[-(-9 * len(sizes) // 10) - 1],
        bias=median(signed),
        coverage=sum(ranged) / len(ranged) if 2 * len(ranged) > len(known) else None,
    )


def _running(points: Sequence[CalibrationPoint]) -> tuple[Moment, ...]:
    moments = []
    for end in range(WINDOW_RUNS, len(points) + 1, STEP_RUNS):
        window = points[end - WINDOW_RUNS : end]
        time, memory = _error([_seconds(point) for point in window]), _error([_peak(point) for point in window])
        medians = {"time": time.median if time else None, "memory": memory.median if memory else None}
        moments.append(Moment(runs=end, **medians))
    return tuple(moments)
