"""The data for a tracker: the points of a chart, and the outcome of the attempt."""

from collections.abc import Sequence
from enum import StrEnum

from apps.contracts.runs import EvaluationCompleted, StepCompleted, Struct
from gpu_workers.common.events import ChildEvent


class FinalStatus(StrEnum):
    """The outcome of an attempt, in the words of trackers."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    PAUSED = "paused"
    PREEMPTED = "preempted"


class MetricPoint(Struct, frozen=True, kw_only=True):
    """The values of one step, by the tracker's names for them."""

    step: int
    values: dict[str, float]


def points_of(events: Sequence[ChildEvent]) -> list[MetricPoint]:
    """Return the events' points for a chart."""
    points = []
    for event in events:
        match event:
            case StepCompleted():
                values = {
                    "train/loss": event.train_loss,
                    "train/learning_rate": event.learning_rate,
                    "train/grad_norm": event.grad_norm,
                    "train/token_accuracy": event.train_mean_token_accuracy,
                    "train/tokens_per_second": event.tokens_per_second,
                    "train/epoch": event.epoch,
                    "system/memory_bytes": event.memory_bytes,
                    "system/gpu_utilization": event.gpu_utilization,
                    "system/gpu_celsius": event.gpu_celsius,
                    "system/gpu_watts": event.gpu_watts,
                }
            case EvaluationCompleted():
                values = {"eval/loss": event.valid_loss, "eval/token_accuracy": event.valid_mean_token_accuracy}
            case _:
                continue
        known = {name: float(value) for name, value in values.items() if value is not None}
        points.append(MetricPoint(step=event.step, values=known))
    return points
