"""The wizard's state: the choices in the address, and the objects they name."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from urllib.parse import urlencode

from django.http import QueryDict
from django.urls import reverse

from apps.accounts.models import Organization
from apps.catalog.models import BaseModel
from apps.core.database.clock import db_now
from apps.core.errors import DomainError
from apps.datasets.inspection.comparisons import find_or_compare
from apps.datasets.models import DatasetVersion, TokenCount, VersionComparison
from apps.datasets.queries import find_token_count, get_version
from apps.finetuning.jobs.files import data_facts, objectives_of, require_ready
from apps.finetuning.quotes.delivery import Delivery, deliver, why_no_gguf
from apps.finetuning.quotes.options import PoolQuote
from apps.finetuning.quotes.queries import count_files, counting_model, is_still_counting, quote_counted
from apps.finetuning.recipes.limits import TrainingKind
from apps.finetuning.recipes.start_points import StartPoint, find_start_point
from apps.finetuning.runs.judges import list_judges
from apps.finetuning.runs.trackers import list_tracker_keys
from apps.interfaces.web.account.tracker_forms import TrackingForm
from apps.interfaces.web.wizard.after_training_forms import AfterTrainingForm
from apps.interfaces.web.wizard.forms import RECIPE_FIELDS, ComputeForm, RecipeForm

STEPS = ("dataset", "model", "method", "compute", "review")
_PROVIDES = {"dataset": "dataset", "model": "model", "method": "method", "compute": "pool"}
_AFTER = tuple(AfterTrainingForm.base_fields)
_METHOD = ("method", "objective", "shown", *RECIPE_FIELDS, "suffix", *_AFTER, *TrackingForm.base_fields)
_NAMES = ("dataset", "validation", "model", *_METHOD, "pool", "cap", "needed_by")
# The recipe fields that can be changed beside the compute step's table.
LIVE_FIELDS = ("epochs", "batch_size", "max_length", "lora_rank")
# The fields that each step's own form sends; the rest travels in hidden fields. A new recipe drops the pool and the
# cap.
_OWN = {
    "dataset": ("dataset", "validation", "pool", "cap"),
    "model": ("model", "pool", "cap"),
    "method": (*_METHOD, "pool", "cap"),
    "compute": ("method", *LIVE_FIELDS, "pool", "cap", "needed_by"),
    "review": (),
}


@dataclass(frozen=True)
class Choices:
    """The choices made so far, keyed by their names in the address."""

    values: Mapping[str, str]

    @classmethod
    def of(cls, query: QueryDict) -> "Choices":
        given = ((name, str(query.get(name, "")).strip()) for name in _NAMES)
        return cls({name: value for name, value in given if value})

    def get(self, name: str) -> str:
        return self.values.get(name, "")

    def url(self, *, step: str = "", **changes: str) -> str:
        shown = {name: value for name, value in (dict(self.values) | changes).items() if value}
        address = reverse("web:job_new")
        query = urlencode(shown | ({"step": step} if step else {}))
        return f"{address}?{query}" if query else address

    def hidden(self, step: str) -> list[tuple[str, str]]:
        return [(name, value) for name, value in self.values.items() if name not in _OWN[step]]

    def reachable(self) -> list[str]:
        """Return the steps that can be opened: each one whose earlier steps are all answered."""
        steps = []
        for step in STEPS:
            steps.append(step)
            if step in _PROVIDES and not self.get(_PROVIDES[step]):
                break
        return steps


@dataclass(frozen=True)
class Plan:
    """The objects chosen so far, and their quotes on each pool."""

    organization: Organization
    choices: Choices

    @cached_property
    def version(self) -> DatasetVersion | None:
        """The training file. Raises UnknownFile for a file that is not the organization's."""
        file_id = self.choices.get("dataset")
        return get_version(organization=self.organization, id=file_id) if file_id else None

    @cached_property
    def validation(self) -> DatasetVersion | None:
        file_id = self.choices.get("validation")
        return get_version(organization=self.organization, id=file_id) if file_id else None

    @cached_property
    def beginning(self) -> StartPoint | None:
        """Where the weights begin: a base model, or the adapter or checkpoint to continue. Raises NotFound."""
        name = self.choices.get("model")
        return find_start_point(organization=self.organization, model=name) if name else None

    @property
    def base_model(self) -> BaseModel | None:
        """The base model of the beginning. Raises NotFound."""
        return self.beginning.base_model if self.beginning else None

    @cached_property
    def form(self) -> RecipeForm | None:
        if self.base_model is None:
            return None
        facts = data_facts(version=self.version, validation=self.validation, count=self.count)
        return RecipeForm(
            self.choices.values,
            base_model=self.base_model,
            objectives=objectives_of(self.version),
            data=facts,
            shape=self.beginning.shape if self.beginning else {},
        )

    @cached_property
    def after(self) -> AfterTrainingForm:
        """The grader and the exports, already checked."""
        form = AfterTrainingForm(
            self.choices.values,
            judges=partial(list_judges, organization=self.organization),
            why_no_gguf=why_no_gguf(),
        )
        form.is_valid()
        return form

    @cached_property
    def tracking(self) -> TrackingForm:
        """The external trackers the job reports to, already checked."""
        stored = {row.kind for row in list_tracker_keys(organization=self.organization)}
        form = TrackingForm(self.choices.values, stored=stored)
        form.is_valid()
        return form

    @cached_property
    def comparison(self) -> VersionComparison | None:
        """Which training rows repeat the validation file; None without a validation file, or while it is unknown."""
        if self.version is None or self.validation is None:
            return None
        return find_or_compare(version=self.version, other=self.validation)

    @property
    def is_comparing(self) -> bool:
        """Whether a task is comparing the training file with the validation file."""
        files = (self.version, self.validation)
        return self.comparison is None and all(file is not None and file.status == "ready" for file in files)

    @property
    def has_held_out_rows(self) -> bool:
        """Whether the recipe leaves rows to compare the base and the tuned model on."""
        recipe = self.form.recipe if self.form and self.form.is_valid() else None
        return self.validation is not None or bool(recipe and recipe.validation_share)

    @property
    def delivery(self) -> Delivery | None:
        """What the job delivers; None while its recipe is incomplete."""
        if self.base_model is None or self.form is None or not self.form.is_valid() or self.form.recipe is None:
            return None
        return deliver(
            organization=self.organization,
            base_model=self.base_model,
            recipe=self.form.recipe,
            exports=self.after.exports,
        )

    @cached_property
    def counting(self) -> BaseModel | None:
        """The model whose tokenizer counts the tokens."""
        return counting_model(self.base_model) if self.base_model else None

    @cached_property
    def count(self) -> TokenCount | None:
        """The token count of the training file, None until it has been counted."""
        if self.version is None or self.counting is None:
            return None
        return find_token_count(version=self.version, base_model=self.counting)

    @cached_property
    def compute_form(self) -> ComputeForm:
        """The deadline and the spend cap, already checked."""
        form = ComputeForm(self.choices.values)
        form.is_valid()
        return form

    @cached_property
    def is_counting(self) -> bool:
        """Whether a task is counting a file too large to be counted within a request."""
        if self.version is None or self.counting is None or self.version.status != "ready":
            return False
        return is_still_counting(version=self.version, count=self.count, base_model=self.counting)

    def quotes(self) -> list[PoolQuote]:
        """Return the quotes of the recipe, with remedies for those that do not fit. Raises what get_quotes raises."""
        return self._quotes([self.form.kind])[0] if self._can_be_quoted and self.form else []

    def quotes_of_kinds(self, kinds: Sequence[TrainingKind]) -> dict[str, list[PoolQuote]]:
        """Return the quotes of the same recipe for each way to train, by its key. Raises what get_quotes raises."""
        if not self._can_be_quoted:
            return {kind.key: [] for kind in kinds}
        return dict(zip((kind.key for kind in kinds), self._quotes(kinds, with_ways=False), strict=True))

    @property
    def _can_be_quoted(self) -> bool:
        return bool(self.version and self.base_model and self.form and self.form.is_valid() and self.form.recipe)

    def _quotes(self, kinds: Sequence[TrainingKind], *, with_ways: bool = True) -> list[list[PoolQuote]]:
        form, version, counting = self.form, self.version, self.counting
        assert form is not None and form.recipe is not None and version is not None
        assert self.base_model is not None and counting is not None
        validation = self.validation if self.validation and self.validation.status == "ready" else None
        counted = count_files(version=version, count=self.count, validation=validation, counting=counting)
        self.__dict__["count"] = counted.count  # the file may have been counted only now
        recipes = [form.recipe if kind is form.kind else form.recipe_of(kind) for kind in kinds]
        return quote_counted(
            base_model=self.base_model, counted=counted, recipes=recipes, now=self.now, with_ways=with_ways
        )

    @cached_property
    def now(self) -> datetime.datetime:
        """The moment that prices, queues and the deadline are calculated for."""
        return db_now()

    def refusal(self) -> DomainError | None:
        """Return why the chosen files cannot be trained on; return None if they can."""
        try:
            for version, param in ((self.version, "training_file"), (self.validation, "validation_file")):
                if version is not None:
                    require_ready(version, param)
        except DomainError as error:
            return error
        return None
