"""Forms for the criteria that grade answers: one for each criterion, with only the fields of its kind."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec
from django import forms
from django.core.validators import ProhibitNullCharactersValidator
from django.http import QueryDict
from django.utils.translation import gettext

from apps.contracts.evaluation.graders import MAX_CHARACTERS, SimilarityGrader, StringCheckGrader
from apps.core.errors import DomainError
from apps.core.http.forms import with_plain_breaks
from apps.core.messages.translation import later
from apps.interfaces.web.evals.models_offered import ModelChoices, offer_models
from apps.serving.evals.criteria import (
    MAX_CRITERIA,
    LabelModelCriterion,
    PairwiseCriterion,
    ScoreModelCriterion,
    SentCriterion,
)

_ANSWER, _REFERENCE = "{{sample.output_text}}", "{{item.reference}}"
_QUESTION = f"Correct answer: {_REFERENCE}\nAnswer to grade: {_ANSWER}"
_AS_JSON = "json"
_PAIRWISE = "pairwise_model"
_KINDS = {
    "string_check": later("Comparing texts"),
    "text_similarity": later("Similarity of texts"),
    "score_model": later("A model that gives a score"),
    "label_model": later("A model that gives a label"),
    _PAIRWISE: later("A model that compares with another's answer"),
    _AS_JSON: later("As JSON"),
}
_TEMPLATED = ("input", "reference")
_ASKED = ("model", "system", "question")
_FIELDS_OF = {
    "string_check": ("input", "operation", "reference"),
    "text_similarity": ("evaluation_metric", "pass_threshold", *_TEMPLATED),
    "score_model": (*_ASKED, "lowest", "highest", "pass_threshold"),
    "label_model": (*_ASKED, "labels", "passing_labels"),
    _PAIRWISE: ("model", "baseline_model", "instructions"),
    _AS_JSON: ("definition",),
}
_MODELS = ("model", "baseline_model")
_OPTIONAL = {"score_model": ("system", "pass_threshold"), "label_model": ("system",)}
_METRICS = (
    ("fuzzy_match", later("Same characters in the same order")), ("bleu", "BLEU"), ("gleu", "GLEU"),
    ("rouge_1", "ROUGE-1"), ("rouge_2", "ROUGE-2"), ("rouge_3", "ROUGE-3"), ("rouge_4", "ROUGE-4"),
    ("rouge_5", "ROUGE-5"), ("rouge_l", "ROUGE-L"),
)  # fmt: skip
_PLAIN = {"autocomplete": "off", "autocapitalize": "off", "spellcheck": "false"}
_ANY_NUMBER = forms.NumberInput(attrs={"step": "any"})
# Fields of the API that the form calls otherwise, by the last part of an error's place.
_FIELD_OF = {"input": ("input", "question"), "range": ("highest",), "type": ("kind",)}
_PLACE = re.compile(r"testing_criteria\[(\d{1,3})\]\.?(\w*)")


def _template(label: str, initial: str, help_text: str = "") -> forms.CharField:
    return forms.CharField(
        max_length=MAX_CHARACTERS,
        initial=initial,
        label=label,
        help_text=help_text,
        widget=forms.TextInput(attrs=_PLAIN | {"class": "mono"}),
    )


class CriterionForm(forms.Form):
    """One criterion. A checked form has `criterion`. It has only the fields of its kind."""

    kind = forms.ChoiceField(label=later("Graded by"))
    name = forms.CharField(max_length=64, label=later("Name"))
    input = _template(later("Text"), _ANSWER)
    operation = forms.ChoiceField(
        label=later("Passes if it"),
        choices=(
            ("eq", later("is equal to")), ("ne", later("is not equal to")), ("like", later("contains")),
            ("ilike", later("contains, ignoring case")),
        ),
    )  # fmt: skip
    evaluation_metric = forms.ChoiceField(label=later("Similarity"), choices=_METRICS)
    reference = _template(
        later("Reference"), _REFERENCE, later("The row's own answer, another value of it, or a text.")
    )
    model = forms.ChoiceField(label=later("Model that grades"))
    baseline_model = forms.ChoiceField(
        label=later("Compared with the answer of"),
        help_text=later("Passes if it is not worse. The model compares both orders."),
    )
    instructions = forms.CharField(
        required=False,
        max_length=2_000,
        label=later("What it looks for"),
        help_text=later("Default: which answer is more helpful and more correct."),
        widget=forms.Textarea(attrs={"rows": 3}),
    )
    system = forms.CharField(
        max_length=MAX_CHARACTERS,
        label=later("Instructions"),
        widget=forms.Textarea(attrs={"rows": 3}),
    )
    question = forms.CharField(
        max_length=MAX_CHARACTERS,
        initial=_QUESTION,
        label=later("Message"),
        help_text=later("With values of the row and of the answer in double braces."),
        widget=forms.Textarea(attrs=_PLAIN | {"class": "mono", "rows": 3}),
    )
    lowest = forms.FloatField(initial=0, label=later("Lowest score"), widget=_ANY_NUMBER)
    highest = forms.FloatField(initial=1, label=later("Highest score"), widget=_ANY_NUMBER)
    labels = forms.CharField(
        max_length=2_000, label=later("Labels"), help_text=later("With commas between, such as good, bad.")
    )
    passing_labels = forms.CharField(max_length=2_000, label=later("Labels that pass"))
    pass_threshold = forms.FloatField(
        initial=0.5, label=later("Passes with at least"), widget=forms.NumberInput(attrs={"step": "any"})
    )
    definition = forms.CharField(
        label=later("Criterion"),
        help_text=later("A testing_criteria object, as in the API."),
        widget=forms.Textarea(attrs=_PLAIN | {"class": "mono", "rows": 8}),
    )

    def __init__(
        self,
        data: Mapping[str, object] | None = None,
        *,
        kind: str,
        kinds: Sequence[str],
        models: ModelChoices,
        prefix: str | None = None,
        initial: Mapping[str, object] | None = None,
    ) -> None:
        """Create the form of a criterion of this kind. `models` are the choices of a grading model."""
        super().__init__(data, prefix=prefix, initial={**(initial or {}), "kind": kind})
        self.criterion: SentCriterion | None = None
        own = _FIELDS_OF[kind]
        self.fields = {name: field for name, field in self.fields.items() if name in ("kind", "name", *own)}
        if kind == _AS_JSON:
            del self.fields["name"]
        for name in _OPTIONAL.get(kind, ()):
            self.fields[name].required = False
        self.fields["kind"].choices = [(each, _KINDS[each]) for each in kinds]  # type: ignore[attr-defined]
        for name in self.fields.keys() & {*_MODELS}:
            chosen = str((data or {}).get(self.add_prefix(name)) or self.initial.get(name) or "")
            self.fields[name].choices = offer_models(models, chosen)  # type: ignore[attr-defined]
        self.order_fields(["kind", "name", *own])

    def clean(self) -> dict[str, object]:
        """Make the criterion from the fields. The domain checks the rest when it uses the criterion."""
        cleaned = with_plain_breaks(super().clean() or self.cleaned_data)
        if self.errors:
            return cleaned
        try:
            self.criterion = _criterion_of(cleaned)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            text = gettext("This is no criterion: %(error)s") % {"error": str(error)[:300]}
            self.add_error("definition" if "definition" in self.fields else None, text)
            return cleaned
        if "definition" in self.fields and rb"\u0000" in msgspec.json.encode(self.criterion):  # jsonb takes none
            self.add_error("definition", ProhibitNullCharactersValidator.message)
        return cleaned


def _criterion_of(values: Mapping[str, object]) -> SentCriterion:
    """Return the criterion that the values make. Raises MsgspecError, ValueError and RecursionError."""
    kind = str(values["kind"])
    if kind == _AS_JSON:
        return msgspec.json.decode(str(values["definition"]).encode(), type=SentCriterion)
    sent: dict[str, object] = {"type": kind, "name": values["name"]}
    if kind == "score_model":
        sent |= {"range": [values["lowest"], values["highest"]], "pass_threshold": values["pass_threshold"]}
    elif kind == "label_model":
        sent |= {name: _split(str(values[name])) for name in ("labels", "passing_labels")}
    else:
        sent |= {name: values[name] for name in _FIELDS_OF[kind]}
    return msgspec.convert(sent | (_asked_of(values) if "question" in values else {}), SentCriterion)


def _asked_of(values: Mapping[str, object]) -> dict[str, object]:
    messages = [("system", values["system"]), ("user", values["question"])]
    return {"model": values["model"], "input": [{"role": role, "content": text} for role, text in messages if text]}


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def values_of(criterion: SentCriterion) -> dict[str, object]:
    """Return the form values that make this same criterion. If no other kind can, they hold it as JSON."""
    values = _simple_values(criterion)
    if values is not None:
        kind = str(values["kind"])
        form = CriterionForm(values, kind=kind, kinds=(kind,), models=())
        if form.is_valid() and form.criterion is not None and _whole(form.criterion) == _whole(criterion):
            return values
    definition = json.dumps(msgspec.to_builtins(criterion), ensure_ascii=False, indent=2)
    return {"kind": _AS_JSON, "definition": definition}


def _whole(criterion: SentCriterion) -> SentCriterion:
    """Return the criterion with its open fields filled in."""
    if not isinstance(criterion, ScoreModelCriterion):
        return criterion
    return msgspec.structs.replace(criterion, range=list(criterion.bounds), pass_threshold=criterion.threshold)


def _simple_values(criterion: SentCriterion) -> dict[str, object] | None:
    own: dict[str, object]
    match criterion:
        case StringCheckGrader() | SimilarityGrader() | PairwiseCriterion():
            sent = msgspec.to_builtins(criterion)
            return {"kind": sent.pop("type")} | sent
        case ScoreModelCriterion():
            low, high = criterion.bounds
            own = {"lowest": low, "highest": high, "pass_threshold": criterion.pass_threshold}
        case LabelModelCriterion():
            own = {name: ", ".join(getattr(criterion, name)) for name in ("labels", "passing_labels")}
        case _:
            return None
    texts: dict[str, object] = {
        "system" if one.role == "system" else "question": one.content for one in criterion.input
    }
    kind = "score_model" if isinstance(criterion, ScoreModelCriterion) else "label_model"
    return {"kind": kind, "name": criterion.name, "model": criterion.model} | texts | own


class CriteriaForms:
    """One to MAX_CRITERIA forms of criteria, as part of a larger form.

    With `data`, the forms are those that were sent. If their number or a kind changed (`is_changed_by`), they are shown
    again with their values and without errors.
    """

    def __init__(
        self,
        data: QueryDict | None,
        *,
        models: ModelChoices,
        initial: Sequence[Mapping[str, object]],
        is_pairwise_offered: bool = True,
    ) -> None:
        self._models = models
        self._kinds = tuple(kind for kind in _KINDS if kind != _PAIRWISE or is_pairwise_offered)
        self.most = MAX_CRITERIA
        if data is None:
            self.forms = [self._form(number, None, values) for number, values in enumerate(initial or [{}])]
        elif self.is_changed_by(data):
            self.forms = [self._form(number, None, values) for number, values in enumerate(self._after_change(data))]
        else:
            self.forms = [self._form(number, data, {}) for number in range(_count_of(data))]

    @staticmethod
    def is_changed_by(data: QueryDict) -> bool:
        """Return whether a criterion is added or removed or its kind changed. Then nothing is checked yet."""
        return any(name in data for name in ("add", "remove", "shape"))

    @property
    def can_grow(self) -> bool:
        return len(self.forms) < self.most

    @property
    def errors(self) -> bool:
        return any(form.errors for form in self.forms)

    def is_valid(self) -> bool:
        return all(form.is_valid() for form in self.forms)

    @property
    def criteria(self) -> list[SentCriterion]:
        """Return the criteria of checked forms."""
        return [form.criterion for form in self.forms if form.criterion is not None]

    @contextmanager
    def errors_placed(self) -> Iterator[None]:
        """Put a DomainError of the block on the criterion that it names. If it names none, raise it."""
        try:
            yield
        except DomainError as error:
            if not self.place_error(error):
                raise

    def place_error(self, error: DomainError) -> bool:
        """Put the error on the field of the criterion that it names; return whether it names one."""
        found = _PLACE.match(error.param or "")
        if found is None or int(found[1]) >= len(self.forms):
            return False
        form = self.forms[int(found[1])]
        named = _FIELD_OF.get(found[2], (found[2],))
        field = next((name for name in ("definition", *named) if name in form.fields), None)
        form.add_error(field, error.message)
        return True

    def _form(self, number: int, data: QueryDict | None, values: Mapping[str, object]) -> CriterionForm:
        prefix = _prefix(number)
        kind = str((data.get(f"{prefix}-kind") if data else values.get("kind")) or "")
        kind = kind if kind in self._kinds else self._kinds[0]
        initial = {**({} if data else {"name": gettext("Criterion %(number)s") % {"number": number + 1}}), **values}
        return CriterionForm(data, kind=kind, kinds=self._kinds, models=self._models, prefix=prefix, initial=initial)

    def _after_change(self, data: QueryDict) -> list[dict[str, object]]:
        removed = data.get("remove")
        sent = [values for number, values in enumerate(_sent_in(data)) if str(number) != removed]
        if "add" in data and len(sent) < self.most:
            sent.append({})
        return sent or [{}]


def criteria_in(query: QueryDict, *, otherwise: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Return the form values of the criteria in an address; `otherwise` if it has none.

    An address leaves out texts that are too long for it. Those come from the criterion of `otherwise` with the same
    kind and name, if there is one such.
    """
    given = _sent_in(query)
    if not any(given):
        return [*otherwise]
    named = [(each.get("kind"), each.get("name")) for each in otherwise]
    known = {key: each for key, each in zip(named, otherwise, strict=True) if key[1] and named.count(key) == 1}
    return [{**known.get((each.get("kind"), each.get("name")), {}), **each} for each in given]


def _sent_in(data: QueryDict) -> list[dict[str, object]]:
    """Return the values of each criterion that was sent, by the names of its fields."""
    starts = [f"{_prefix(number)}-" for number in range(_count_of(data))]
    return [{name.removeprefix(start): data[name] for name in data if name.startswith(start)} for start in starts]


def _prefix(number: int) -> str:
    return f"criterion-{number}"


def _count_of(data: QueryDict) -> int:
    """Return how many criteria were sent, at least one."""
    count = 1
    while count < MAX_CRITERIA and f"{_prefix(count)}-kind" in data:
        count += 1
    return count
