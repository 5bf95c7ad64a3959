"""The draft of a job: every choice made so far. The address of each step carries it; nothing else stores it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from django.http import QueryDict
from django.urls import reverse
from django.utils.http import urlencode

from apps.contracts.hyperparameters import Hyperparameters, Objective
from apps.core.errors import NotFound
from apps.finetuning.models import FineTuningJob
from apps.finetuning.recipes.limits import kind_of
from apps.finetuning.recipes.start_points import SHAPE, find_start_point
from apps.finetuning.recipes.stored_requests import own_settings, stored_request
from apps.interfaces.web.wizard.after_training_forms import AfterTrainingForm, given_of
from apps.interfaces.web.wizard.forms import RECIPE_FIELDS
from apps.interfaces.web.wizard.tracking_form import TrackingForm, trackers_given

FILE_NAMES = ("dataset", "validation")
METHOD_NAMES = (
    "method", "objective", "shown", *RECIPE_FIELDS, "suffix", *AfterTrainingForm.base_fields,
    *TrackingForm.base_fields,
)  # fmt: skip
NAMES = (
    *FILE_NAMES, "model", *METHOD_NAMES, "settings", "node_count", "pool", "cap", "within", "needed_by", "project",
    "source", "labels",
)  # fmt: skip


@dataclass(frozen=True)
class Draft:
    """The choices by their names in the query string, without empty ones."""

    choices: Mapping[str, str]

    @classmethod
    def of(cls, query: QueryDict) -> "Draft":
        return cls({}).with_changes({name: str(query.get(name, "")).replace("\x00", "").strip() for name in NAMES})

    @classmethod
    def of_job(cls, job: FineTuningJob, *, changes: Mapping[str, Any] | None = None) -> "Draft":
        """Return the draft of a job's own recipe with the given changes, without its pool and cap.

        What no form shows, such as labels, is read from the job again: it is the draft's `source`.
        """
        values, requested = job.hyperparameters | dict(changes or {}), stored_request(job)
        chosen = {
            "dataset": job.training_file_id,
            "validation": job.validation_file_id or "",
            "model": requested.start_from.name or job.base_model.name,
            "method": kind_of(base_model=job.base_model, recipe=msgspec.convert(values, Hyperparameters)).key,
            "objective": values["objective"] if Objective(values["objective"]).is_preference else "",
            "suffix": job.suffix,
            "node_count": str(requested.node_count) if requested.node_count > 1 else "",
        }
        recipe = {name: str(values[name]) for name in RECIPE_FIELDS if name in values}
        fixed = SHAPE if requested.start_from.name else ("use_dora",)
        rest = {name: values[name] for name in own_settings(job) | dict(changes or {}) if name not in {*recipe, *fixed}}
        recipe |= {"settings": msgspec.json.encode(rest).decode()} if rest else {}
        origin = {"project": job.project_id, "source": job.pk}
        return cls({}).with_changes(chosen | recipe | given_of(requested) | trackers_given(requested) | origin)

    def with_changes(self, changes: Mapping[str, str]) -> "Draft":
        """Return the draft with these choices; an empty one is removed."""
        return Draft({name: value for name, value in (dict(self.choices) | dict(changes)).items() if value})

    def get(self, name: str) -> str:
        return self.choices.get(name, "")

    def url(self, step: str = "", **changes: str) -> str:
        """Return the address of a step of the changed draft.

        Without a step, return that of the last step it reaches.
        """
        query = {**self.with_changes(changes).choices} | ({"step": step} if step else {})
        return reverse("web:job_new") + (f"?{urlencode(query)}" if query else "")

    def without(self, names: Collection[str]) -> list[tuple[str, str]]:
        """Return the choices that a form with fields of these names carries in hidden fields."""
        return [(name, value) for name, value in self.choices.items() if name not in names]


def start_of(job: FineTuningJob) -> str:
    """Return the name of the job's start point in a draft; the base model if the start point was deleted."""
    name = stored_request(job).start_from.name
    try:
        return name if name and find_start_point(organization=job.organization_id, model=name) else job.base_model.name
    except NotFound:
        return job.base_model.name
