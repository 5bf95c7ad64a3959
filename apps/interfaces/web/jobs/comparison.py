"""The comparison of two to eight jobs: curves, results, and the settings that differ."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from django.http import HttpResponse
from django.shortcuts import render
from django.utils.cache import patch_vary_headers
from django.utils.http import urlencode
from django.utils.translation import gettext
from django.views.decorators.http import require_safe

from apps.accounts.roles import Permission
from apps.core.database.clock import db_now
from apps.core.errors import NotFound
from apps.core.messages.translation import later, translated
from apps.core.templatetags.ui import NONE, duration, number, usd
from apps.finetuning.jobs.progress import list_progress
from apps.finetuning.lifecycle import JOB_ACTIVE
from apps.finetuning.models import FineTuningJob
from apps.finetuning.queries import list_jobs, report_of
from apps.finetuning.recipes.stored_requests import recipe_of
from apps.finetuning.results.provenance import label_of
from apps.interfaces.web.charts.curve_overlays import MAX_CURVES, Points, draw_overlay, smoothed, tone_of
from apps.interfaces.web.jobs.curves import curves_of
from apps.interfaces.web.jobs.outcome import find_outcome
from apps.interfaces.web.jobs.recipe import method_words
from apps.interfaces.web.jobs.views import title_of
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view
from apps.interfaces.web.wizard.recipe_words import NAMES, value_in_words

MIN_JOBS = 2
# The curves to choose from: their name in a job's metrics, their label, and whether they are smoothed.
_METRICS = (
    ("train_loss", later("Training loss"), True),
    ("valid_loss", later("Evaluation loss"), False),
    ("train_mean_token_accuracy", later("Training accuracy"), True),
    ("valid_mean_token_accuracy", later("Evaluation accuracy"), False),
    ("learning_rate", later("Learning rate"), False),
    ("tokens_per_second", later("Speed, tokens/s"), True),
)


@dataclass(frozen=True)
class ComparedJob:
    """One job of the comparison."""

    job: FineTuningJob
    tone: str
    spent_nano: int

    @property
    def title(self) -> str:
        return title_of(self.job)

    @cached_property
    def curves(self) -> dict[str, Any]:
        return curves_of(self.job)

    def points(self, metric: str) -> Points:
        values = self.curves["series"].get(metric, ())
        return [(step, value) for step, value in zip(self.curves["x"], values, strict=True) if value is not None]

    @cached_property
    def best_loss(self) -> float | None:
        """Return the lowest loss on held-out rows."""
        return min((value for _, value in self.points("valid_loss")), default=None)

    def settings(self) -> dict[str, str]:
        """Return every setting in words, by its name."""
        recipe = recipe_of(self.job)
        objectives = {"supervised": gettext("supervised"), "text": gettext("text")}
        trained, validation = self.job.training_file, self.job.validation_file
        values = {label: (name, getattr(recipe, name)) for name, label in NAMES.items()}
        return {
            gettext("Base model"): self.job.base_model.display_name,
            gettext("Dataset"): f"{trained.dataset.name}, {translated(f'version {trained.number}')}",
            gettext("Validation file"): validation.filename if validation else NONE,
            gettext("Method"): method_words(self.job),
            gettext("Objective"): objectives.get(recipe.objective.value, recipe.objective.value),
            gettext("Pool"): self.job.pool.name if self.job.pool else NONE,
            "GPUs": number(self.job.gpu_count),
            gettext("Machines"): number(self.job.node_count),
        } | {label: NONE if value is None else value_in_words(name, value) for label, (name, value) in values.items()}

    def results(self) -> dict[str, str]:
        """Return the figures to compare, by their label."""
        outcome = find_outcome(self.job)
        speed = outcome.actual_tokens_per_second if outcome else None
        trained = self.points("train_loss")
        report = report_of(self.job.adapter_version) if self.job.adapter_version else None
        comparisons = report.comparisons if report else ()
        graded = {
            gettext("{measure}, tuned").format(measure=translated(label_of(each.name))): f"{each.tuned.value:.3f}"
            for each in comparisons
        }
        return {
            gettext("Train loss at the end, smoothed"): _loss(smoothed(trained)[-1][1] if trained else None),
            gettext("Eval loss, best"): _loss(self.best_loss),
            **graded,
            gettext("Steps"): gettext("{step} of {steps}").format(
                step=number(self.job.step), steps=number(self.job.total_steps)
            ),
            gettext("Throughput, mean tokens/s"): number(round(speed)) if speed else NONE,
            gettext("GPU time billed"): duration(self.job.billed_gpu_ms / 1000) if self.job.billed_gpu_ms else NONE,
            gettext("Cost"): usd(self.spent_nano),
        }


@require_safe
@organization_view(Permission.VIEW)
def show(request: OrganizationRequest) -> HttpResponse:
    """Compare the jobs that `?job=` names, by the curves of `?metric=`. htmx reloads the curves and the results.

    Raises NotFound for a foreign id.
    """
    asked = dict.fromkeys(request.GET.getlist("job"))
    wanted = list(asked)[:MAX_CURVES]
    known = {job.pk: job for job in list_jobs(organization=request.organization).filter(pk__in=wanted)}
    if len(known) < len(wanted):
        raise NotFound(gettext("No such job."))
    progress = list_progress(jobs=list(known.values()), now=db_now())
    compared = [ComparedJob(known[pk], tone_of(index), progress[pk].spent_nano) for index, pk in enumerate(wanted)]
    metric = next((each for each in _METRICS if each[0] == request.GET.get("metric")), _METRICS[0])
    name, label, is_noisy = metric
    lines = ((each.title, smoothed(each.points(name)) if is_noisy else each.points(name)) for each in compared)
    is_enough = len(compared) >= MIN_JOBS
    settings = _table([each.settings() for each in compared])
    context = {
        "compared": compared,
        "asked_count": len(asked),
        "is_enough": is_enough,
        "chart": draw_overlay(lines) if is_enough else None,
        "metric": label,
        "is_smoothed": is_noisy,
        "tabs": [
            {"label": words, "url": f"?{urlencode({'job': wanted, 'metric': key}, doseq=True)}", "current": key == name}
            for key, words, _ in _METRICS
        ],
        "results": _of_jobs(compared, _table([each.results() for each in compared])),
        "settings": _of_jobs(compared, (row for row in settings if row[2])),
        "same": [row for row in settings if not row[2]],
        "best": _best(compared),
        "is_live": any(each.job.status in JOB_ACTIVE for each in compared),
    }
    response = render(request, f"jobs/comparison.html{'#live' if request.htmx and is_enough else ''}", context)
    patch_vary_headers(response, ["HX-Request"])
    return response


def _best(compared: list[ComparedJob]) -> ComparedJob | None:
    """Return the job with the lowest loss on held-out rows; return None unless all jobs used the same rows."""
    rows = {
        (
            each.job.training_file_id,
            each.job.validation_file_id,
            each.job.hyperparameters.get("validation_share"),
            each.job.hyperparameters.get("seed"),
        )
        for each in compared
    }
    measured = [each for each in compared if each.best_loss is not None]
    if len(measured) < MIN_JOBS or len(rows) > 1:
        return None
    return min(measured, key=lambda each: each.best_loss or 0.0)


def _table(columns: list[dict[str, str]]) -> list[tuple[str, list[str], bool]]:
    """Return (name, value of each job, whether they differ) rows."""
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, [column.get(name, NONE) for column in columns]) for name in names]
    return [(name, values, len(set(values)) > 1) for name, values in rows]


def _of_jobs(
    compared: list[ComparedJob], rows: Iterable[tuple[str, list[str], bool]]
) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return (name, (title, value) of each job) rows: where a table has no head, each value names its job."""
    titles = [each.title for each in compared]
    return [(name, list(zip(titles, values, strict=True))) for name, values, _ in rows]


def _loss(value: float | None) -> str:
    return NONE if value is None else f"{value:.4f}"
