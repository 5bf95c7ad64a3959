"""A finished job's estimates beside its actual figures, as rows for its page."""

from collections.abc import Callable
from dataclasses import dataclass

from django.utils.translation import gettext

from apps.core.templatetags.ui import duration, memory, number, usd
from apps.finetuning.lifecycle import CalibrationOutcome
from apps.finetuning.models import CalibrationPoint, FineTuningJob


@dataclass(frozen=True, kw_only=True)
class OutcomeRow:
    """One quantity. `difference` is estimate / actual - 1. `is_within` is None if the estimate had no range."""

    name: str
    estimate: str
    low: str
    high: str
    actual: str
    difference: float | None
    is_within: bool | None


def find_outcome(job: FineTuningJob) -> CalibrationPoint | None:
    """Return the actual figures of a job that succeeded; return None for any other."""
    points = CalibrationPoint.objects.for_organization(job.organization_id)
    return points.filter(run__job=job, outcome=CalibrationOutcome.SUCCEEDED).first()


def outcome_rows(point: CalibrationPoint | None) -> list[OutcomeRow]:
    """Return memory, speed, time and cost beside their estimates; return no rows without an outcome."""
    if point is None:
        return []
    seconds = (point.estimated_seconds, point.estimated_seconds_p10, point.estimated_seconds_p90)
    peak = (point.estimated_peak_bytes, point.estimated_peak_bytes_p10, point.estimated_peak_bytes_p90)
    cost = (point.estimated_cost_nano, point.estimated_cost_nano_p10, point.estimated_cost_nano_p90)
    return [
        _row(gettext("Peak memory"), peak, point.actual_peak_bytes, memory),
        _row(
            gettext("Throughput, mean tokens/s"),
            (point.estimated_tokens_per_second, None, None),
            point.actual_tokens_per_second,
            _speed,
        ),
        _row(gettext("Training time"), seconds, point.actual_seconds, duration),
        _row(gettext("Cost"), cost, point.actual_cost_nano, usd),
    ]


def _row(
    name: str,
    estimate: tuple[float | None, float | None, float | None],
    actual: float | None,
    write: Callable[..., str],
) -> OutcomeRow:
    middle, low, high = estimate
    is_ranged = low is not None and high is not None
    return OutcomeRow(
        name=name,
        estimate=write(middle),
        low=write(low) if is_ranged else "",
        high=write(high) if is_ranged else "",
        actual=write(actual),
        difference=middle / actual - 1 if middle is not None and actual else None,
        is_within=low <= actual <= high if low is not None and high is not None and actual is not None else None,
    )


def _speed(tokens_per_second: float | None) -> str:
    return number(None if tokens_per_second is None else round(tokens_per_second))
