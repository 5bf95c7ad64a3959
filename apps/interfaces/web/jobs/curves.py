"""A job's metrics for its charts and figures: the last attempt's values of each step, thinned for a chart."""

from collections.abc import Iterable
from typing import Any

from django.db.models import Count, F, FloatField, IntegerField, Q, QuerySet, Window
from django.db.models.fields.json import KeyTextTransform
from django.db.models.functions import Cast, DenseRank, Mod, RowNumber

from apps.finetuning import queries
from apps.finetuning.models import FineTuningJob, JobEvent
from apps.interfaces.web.shell.live import with_units

_MAX_POINTS = 500  # more points cost more and show nothing new
_CURVES = (
    "train_loss",
    "valid_loss",
    "learning_rate",
    "grad_norm",
    "train_mean_token_accuracy",
    "valid_mean_token_accuracy",
    "tokens_per_second",
    "memory_gib",
    "gpu_percent",
    "gpu_celsius",
    "gpu_watts",
)


def metrics_of(job: FineTuningJob) -> QuerySet[JobEvent]:
    return job.events.filter(type="metrics")


def with_number(job: FineTuningJob, name: str) -> QuerySet[Any]:
    """Return the events that report this metric, with its value as `number`."""
    number = Cast(KeyTextTransform(name, "data"), FloatField())
    return metrics_of(job).annotate(number=number).filter(number__isnull=False)


def thinned(job: FineTuningJob) -> list[dict[str, Any]]:
    """Return the data of evenly spread steps and evaluations, with the last of each, as many as a chart can show."""
    step = Cast(KeyTextTransform("step", "data"), IntegerField())
    steps = metrics_of(job).annotate(step=step).annotate(place=Window(DenseRank(), order_by=F("step").asc()))
    evaluated = with_number(job, "valid_loss").annotate(place=Window(RowNumber(), order_by=F("sequence").asc()))
    kept = dict(_every_nth(steps, steps.aggregate(count=Count("step", distinct=True))["count"]))
    return [data for _, data in sorted((kept | dict(_every_nth(evaluated, evaluated.count()))).items())]


def _every_nth(rows: QuerySet[JobEvent], count: int) -> Iterable[tuple[int, dict[str, Any]]]:
    stride = -(-count // _MAX_POINTS) or 1
    chosen = rows.annotate(rest=Mod(F("place") - 1, stride)).filter(Q(rest=0) | Q(place=count))
    return chosen.values_list("sequence", "data")


def curves_of(job: FineTuningJob) -> dict[str, object]:
    """Return the curves. For each step the last attempt's values win, because a resumed attempt repeats lost steps."""
    by_step: dict[int, dict[str, object]] = {}
    for data in thinned(job):
        shown = {name: value for name, value in with_units(data).items() if value is not None}
        by_step.setdefault(data["step"], {}).update(shown)
    kept = sorted(by_step)
    checkpoints = list(queries.list_checkpoints(job=job))
    best = queries.best_of(checkpoints)
    steps, epochs = job.total_steps, job.hyperparameters["epochs"]
    return {
        "x": kept,
        "series": {name: [by_step[step].get(name) for step in kept] for name in _CURVES},
        "total": job.total_steps,
        "epochs": [round(steps * epoch / epochs) for epoch in range(1, epochs)] if steps else [],
        "checkpoints": sorted(each.step for each in checkpoints),
        "best": best.step if best else None,
    }
