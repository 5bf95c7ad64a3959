"""The plan of a job: the objects that a draft names, and their quotes on each pool."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from django.conf import settings
from django.utils.translation import gettext

from apps.accounts.models import Organization, Project
from apps.catalog.models import BaseModel
from apps.core.database.clock import db_now
from apps.core.errors import DomainError
from apps.datasets.inspection.comparisons import find_comparison
from apps.datasets.models import DatasetVersion, TokenCount, VersionComparison
from apps.datasets.queries import find_token_count, get_version
from apps.finetuning.jobs.files import data_facts, objectives_of, require_ready
from apps.finetuning.jobs.requests import unmarked
from apps.finetuning.models import FineTuningJob
from apps.finetuning.queries import list_jobs
from apps.finetuning.quotes.delivery import Delivery, deliver, why_no_gguf
from apps.finetuning.quotes.options import PoolQuote
from apps.finetuning.quotes.queries import count_files, counting_model, quote_counted
from apps.finetuning.recipes.limits import TrainingKind
from apps.finetuning.recipes.start_points import StartPoint, find_start_point, project_ids_of_start
from apps.finetuning.recipes.stored_requests import stored_request
from apps.finetuning.runs.judges import list_judges
from apps.finetuning.runs.trackers import list_tracker_keys
from apps.interfaces.web.datasets.preparation import is_ready, is_uncompared, is_uncounted
from apps.interfaces.web.wizard.after_training_forms import AfterTrainingForm
from apps.interfaces.web.wizard.compute_forms import ComputeForm
from apps.interfaces.web.wizard.draft import Draft
from apps.interfaces.web.wizard.forms import RecipeForm
from apps.interfaces.web.wizard.tracking_form import TrackingForm


@dataclass(frozen=True)
class StepContext:
    """What a step's page shows, with the quote of its price panel, and the error that prevents a quote."""

    values: dict[str, object]
    quote: PoolQuote | None = None
    problem: DomainError | None = None


@dataclass(frozen=True)
class Plan:
    """The objects chosen so far, and their quotes on each pool.

    The project's defaults fill in what the draft leaves out.
    """

    organization: Organization
    draft: Draft
    project: Project | None = None
    gone: Mapping[str, str] = field(default_factory=dict)  # choices dropped from the draft, each with a sentence

    @cached_property
    def version(self) -> DatasetVersion | None:
        """The training file. Raises UnknownFile for a file that is not the organization's."""
        file_id = self.draft.get("dataset")
        return get_version(organization=self.organization, id=file_id) if file_id else None

    @cached_property
    def validation(self) -> DatasetVersion | None:
        file_id = self.draft.get("validation")
        return get_version(organization=self.organization, id=file_id) if file_id else None

    @cached_property
    def start(self) -> StartPoint | None:
        """The start point of the weights: a base model, or the adapter or checkpoint to continue. Raises NotFound."""
        name = self.draft.get("model")
        return find_start_point(organization=self.organization, model=name) if name else None

    @property
    def base_model(self) -> BaseModel | None:
        """The base model of the start point. Raises NotFound."""
        return self.start.base_model if self.start else None

    @cached_property
    def form(self) -> RecipeForm | None:
        if self.base_model is None:
            return None
        facts = data_facts(version=self.version, validation=self.validation, count=self.count)
        # The method step asks for a suffix, so the project's default counts only until it was sent.
        is_asked = "shown" in self.draft.choices or "suffix" in self.draft.choices
        suffix = self.project.default_suffix if self.project and not is_asked else ""
        form = RecipeForm(
            {"suffix": suffix} | dict(self.draft.choices),
            base_model=self.base_model,
            objectives=objectives_of(self.version),
            data=facts,
            shape=self.start.shape if self.start else {},
            preferred=self.project.default_method if self.project else "",
        )
        if suffix:
            words = gettext("Chosen by the project %(name)s.") % {"name": self.project}
            form.fields["suffix"].help_text = f"{form.fields['suffix'].help_text} {words}"
        return form

    @property
    def is_method_of_project(self) -> bool:
        """Whether the method is the project's default, because the draft names none."""
        if self.form is None or self.project is None or "method" in self.draft.choices:
            return False
        return self.form.kind.key == self.project.default_method

    @cached_property
    def after(self) -> AfterTrainingForm:
        """The grader and the exports, already checked."""
        form = AfterTrainingForm(
            self.draft.choices,
            judges=partial(list_judges, organization=self.organization),
            why_no_gguf=why_no_gguf(),
        )
        form.is_valid()
        return form

    @cached_property
    def tracking(self) -> TrackingForm:
        """The external trackers the job reports to, already checked."""
        stored = {row.kind for row in list_tracker_keys(organization=self.organization)}
        of_source = stored_request(self.source).integrations if self.source else ()
        form = TrackingForm(self.draft.choices, stored=stored, of_source=of_source)
        form.is_valid()
        return form

    @cached_property
    def source(self) -> FineTuningJob | None:
        """The job that the draft repeats or changes, if the person sees it."""
        job_id = self.draft.get("source")
        return list_jobs(organization=self.organization).filter(pk=job_id).first() if job_id else None

    @property
    def labels(self) -> dict[str, str]:
        """The metadata of the source, which the new job gets too, unless the draft leaves it out."""
        is_kept = self.source is not None and self.draft.get("labels") != "none"
        return unmarked(self.source.metadata) if self.source and is_kept else {}

    @cached_property
    def is_opened_up(self) -> bool:
        """Whether the project is open to the whole organization, and a file or the start point is of a private one."""
        if self.project is None or self.project.is_private:
            return False
        used = {version.dataset.project_id for version in (self.version, self.validation) if version}
        used |= project_ids_of_start(self.start) if self.start else set()
        used -= {self.project.pk}
        private = Project.objects.for_organization(self.organization).filter(is_private=True)
        return bool(used) and private.filter(pk__in=used).exists()

    @cached_property
    def comparison(self) -> VersionComparison | None:
        """The training rows that repeat the validation file; None without one, or while they are unknown."""
        if self.version is None or self.validation is None:
            return None
        return find_comparison(version=self.version, other=self.validation)

    @cached_property
    def is_uncounted(self) -> bool:
        """Whether the tokens of the training file are still to be counted."""
        return is_uncounted(version=self.version, base_model=self.counting, count=self.count)

    @property
    def is_uncompared(self) -> bool:
        """Whether the training file is still to be compared with the validation file."""
        return is_uncompared(version=self.version, other=self.validation, comparison=self.comparison)

    @property
    def has_held_out_rows(self) -> bool:
        """Whether the recipe leaves rows to compare the base and the tuned model on."""
        recipe = self.form.recipe if self.form and self.form.is_valid() else None
        return self.validation is not None or bool(recipe and recipe.validation_share)

    @cached_property
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
        """The deadline, the number of machines and the spend cap, already checked."""
        form = ComputeForm(self.draft.choices)
        form.is_valid()
        return form

    def quotes(self) -> list[PoolQuote]:
        """Return the quotes of the recipe, with remedies for those that do not fit. Raises the errors of get_quotes."""
        return self._quotes([self.form.kind])[0] if self._can_be_quoted and self.form else []

    def quotes_of_kinds(self, kinds: Sequence[TrainingKind]) -> dict[str, list[PoolQuote]]:
        """Return the quotes of the same recipe for each method, by its key. Raises the errors of get_quotes."""
        if not self._can_be_quoted:
            return {kind.key: [] for kind in kinds}
        return dict(zip((kind.key for kind in kinds), self._quotes(kinds, with_ways=False), strict=True))

    def shown_at_field(self, problem: DomainError) -> bool:
        """Return whether one of the recipe's fields caused the problem and now shows it."""
        name = (problem.param or "").removeprefix("hyperparameters.")
        if self.form is None or name not in self.form.fields:
            return False
        self.form.add_error(name, problem.message)
        return True

    @property
    def _can_be_quoted(self) -> bool:
        return bool(self.version and self.base_model and self.form and self.form.is_valid() and self.form.recipe)

    def _quotes(self, kinds: Sequence[TrainingKind], *, with_ways: bool = True) -> list[list[PoolQuote]]:
        form, version, counting = self.form, self.version, self.counting
        assert form is not None and form.recipe is not None and version is not None
        assert self.base_model is not None and counting is not None
        validation = self.validation if is_ready(self.validation) else None
        counted = count_files(version=version, count=self.count, validation=validation, counting=counting)
        recipes = [form.recipe if kind is form.kind else form.recipe_of(kind) for kind in kinds]
        return quote_counted(
            base_model=self.base_model,
            counted=counted,
            recipes=recipes,
            now=self.now,
            with_ways=with_ways,
            max_age_seconds=settings.ESTIMATE_FACTS_SECONDS,
            node_count=self.compute_form.nodes,
        )

    @cached_property
    def now(self) -> datetime.datetime:
        """The time for which prices, queues and the deadline are calculated."""
        return db_now()

    @cached_property
    def refusal(self) -> DomainError | None:
        """Return why the chosen files cannot be trained on; return None if they can."""
        try:
            for version, param in ((self.version, "training_file"), (self.validation, "validation_file")):
                if version is not None:
                    require_ready(version, param)
        except DomainError as error:
            return error
        return None
