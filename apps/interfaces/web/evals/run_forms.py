"""The form of a run: which models answer which rows, and how. A new eval has a name as well."""

from collections.abc import Iterator

import msgspec
from django import forms
from django.http import QueryDict
from django.utils.translation import gettext

from apps.accounts.models import Organization
from apps.contracts.evaluation.graders import MAX_CHARACTERS
from apps.core.errors import DomainError
from apps.core.http.forms import with_plain_breaks
from apps.core.messages.translation import later
from apps.datasets.lifecycle import DatasetVersionStatus
from apps.datasets.models import DatasetVersion
from apps.datasets.queries import list_versions
from apps.interfaces.web.evals.models_offered import ModelChoices, offer_models
from apps.serving.evals.criteria import TemplateMessage
from apps.serving.evals.models import EvalRun
from apps.serving.evals.sources import (
    MAX_ANSWER_TOKENS,
    MAX_ITEMS,
    CompletionsSource,
    DataSource,
    FileId,
    InputTemplate,
    ItemReference,
    SamplingParams,
)

_MOST_FILES = 200
_PROMPT = "item.input"
_MODELS = ("model", "other_model")
# Fields by the beginning of an error's place, the longest first.
_FIELD_OF = (
    ("data_source.input_messages", "question"),
    ("data_source.sampling_params", "max_completion_tokens"),
    ("data_source.source", "dataset"),
    ("name", "name"),
)


class RunForm(forms.Form):
    """One or two runs. If `again` is given, the form uses its rows and settings and asks only for models."""

    model = forms.ChoiceField(label=later("Model"))
    other_model = forms.ChoiceField(
        required=False, label=later("Second model"), help_text=later("A separate run on the same rows.")
    )
    dataset = forms.ChoiceField(label=later("Dataset"))
    question = forms.CharField(
        required=False,
        max_length=MAX_CHARACTERS,
        label=later("What the model is asked"),
        help_text=later(
            "Leave empty for conversations: it gets the messages before the answer. For other rows, write a message "
            "with their values, such as {{item.question}}."
        ),
        widget=forms.Textarea(attrs={"rows": 3, "class": "mono", "autocomplete": "off", "spellcheck": "false"}),
    )
    max_completion_tokens = forms.IntegerField(
        required=False,
        min_value=1,
        max_value=MAX_ANSWER_TOKENS,
        label=later("Longest answer"),
        help_text=later("By default 1,024 tokens, or half of a shorter context."),
    )
    temperature = forms.FloatField(
        initial=0,
        min_value=0,
        max_value=2,
        label=later("Temperature"),
        help_text=later("With 0, runs are easier to compare."),
        widget=forms.NumberInput(attrs={"step": "any"}),
    )

    def __init__(
        self,
        data: QueryDict | None = None,
        *,
        organization: Organization,
        models: ModelChoices,
        again: EvalRun | None = None,
        initial: dict[str, str] | None = None,
    ) -> None:
        super().__init__(data, initial=initial)
        self._again = again
        for name in _MODELS:
            chosen = str((data.get(name) if data else "") or self.initial.get(name) or "")
            empty = gettext("None") if name == "other_model" else ""
            self.fields[name].choices = offer_models(models, chosen, empty=empty)  # type: ignore[attr-defined]
        if again is not None:
            self.fields = {name: field for name, field in self.fields.items() if name in _MODELS}
        else:
            self.fields["dataset"].choices = _files(organization)  # type: ignore[attr-defined]

    @property
    def is_filled_in(self) -> bool:
        """Return whether the form's first values choose a model and rows, so that it has a price before any change."""
        return not self.is_bound and all(self.initial.get(name) for name in ("model", "dataset") if name in self.fields)

    def clean(self) -> dict[str, object]:
        """Refuse the same model twice."""
        cleaned = with_plain_breaks(super().clean() or self.cleaned_data)
        if cleaned.get("model") and cleaned.get("model") == cleaned.get("other_model"):
            self.add_error("other_model", gettext("Choose a model other than the first."))
        return cleaned

    def sources(self) -> Iterator[tuple[str, CompletionsSource]]:
        """Yield each field that names a model, with the request of its run."""
        for field in _MODELS:
            if name := self.cleaned_data[field]:
                yield field, self._source(name)

    def _source(self, model_name: str) -> CompletionsSource:
        if self._again is not None:
            source = msgspec.convert(self._again.data_source, DataSource)
            assert isinstance(source, CompletionsSource)
            return msgspec.structs.replace(source, model=model_name)
        data = self.cleaned_data
        messages: InputTemplate | ItemReference = ItemReference(item_reference=_PROMPT)
        if data["question"]:
            messages = InputTemplate(template=[TemplateMessage(role="user", content=data["question"])])
        params = SamplingParams(
            max_completion_tokens=data["max_completion_tokens"], temperature=data["temperature"], seed=1
        )
        return CompletionsSource(
            source=FileId(id=data["dataset"]), input_messages=messages, model=model_name, sampling_params=params
        )

    def place_error(self, error: DomainError, *, model_field: str) -> None:
        """Put the error on the field that it names, or else above the form. `model_field` names the run's model."""
        param = error.param or ""
        found = next((field for place, field in _FIELD_OF if param.startswith(place)), None)
        field = model_field if param == "data_source.model" else found
        self.add_error(field if field in self.fields else None, error.message)


class EvalForm(RunForm):
    """A new eval and its first runs."""

    field_order = ("name",)
    name = forms.CharField(max_length=200, label=later("Name"))


def can_run_again(run: EvalRun) -> bool:
    """Return whether another model can answer the same rows as this run."""
    return bool(run.model_name)


def _files(organization: Organization) -> list[tuple[str, object]]:
    """Return the files that are ready, in groups: those that a fine-tune held out first."""
    versions = list_versions(organization=organization).filter(status=DatasetVersionStatus.READY)
    newest = list(versions.defer("line_offsets", "errors", "layout")[:_MOST_FILES])
    held = DatasetVersion.objects.filter(pk__in=[each.pk for each in newest], validating_jobs__isnull=False)
    held_ids = set(held.values_list("pk", flat=True))
    groups: dict[str, list[tuple[str, str]]] = {gettext("Held-out rows of fine-tunes"): [], gettext("Datasets"): []}
    held_out, others = groups.values()
    for version in newest:
        (held_out if version.pk in held_ids else others).append((version.pk, _name_of(version)))
    return [("", gettext("Choose one")), *((title, files) for title, files in groups.items() if files)]


def _name_of(version: DatasetVersion) -> str:
    words = gettext("%(name)s, version %(number)s: %(rows)s rows") % {
        "name": version.dataset.name, "number": version.number, "rows": f"{version.rows or 0:,}",
    }  # fmt: skip
    if (version.rows or 0) > MAX_ITEMS:
        return gettext("%(words)s (too many: at most %(most)s)") % {"words": words, "most": f"{MAX_ITEMS:,}"}
    return words
