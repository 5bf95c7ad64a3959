"""The wizard's form for what happens after training: the grader of the answers and the exports of the result."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

from django import forms
from django.utils.text import format_lazy
from django.utils.translation import gettext

from apps.contracts.evaluation import (
    MAX_PATTERN_CHARACTERS,
    MAX_SCHEMA_DEPTH,
    EvaluationPlan,
    Grader,
    GraderKind,
    problem_of,
)
from apps.core.messages.translation import later, translated
from apps.finetuning.quotes.delivery import GGUF, MERGED_16BIT
from apps.finetuning.recipes.stored_requests import StoredRequest

GRADER_NAMES = {
    GraderKind.EXACT_MATCH: later("Exact match"),
    GraderKind.STRING_CHECK: later("String check"),
    GraderKind.REGEX: later("Regular expression"),
    GraderKind.JSON_SCHEMA: later("JSON schema"),
    GraderKind.ROUGE_L: "ROUGE-L",
    GraderKind.JUDGE: later("A judge model"),
}
_OPERATIONS = (
    ("eq", later("is equal to")),
    ("ne", later("is not equal to")),
    ("like", later("contains")),
    ("ilike", later("contains, ignoring case")),
)
# All choices are kept in the address, which front doors cut at 8 KB. A schema grows when it is URL-encoded.
MAX_SCHEMA_CHARACTERS = 3_000
MAX_CRITERION_CHARACTERS = 1_000
_PLAIN = {"autocomplete": "off", "autocapitalize": "off", "spellcheck": "false"}
# Each grader's fields, with the name that each has in the grader. Other fields are ignored.
_FIELDS_OF = {
    GraderKind.STRING_CHECK: {"operation": "operation", "reference": "reference"},
    GraderKind.REGEX: {"pattern": "pattern"},
    GraderKind.JSON_SCHEMA: {"schema": "schema"},
    GraderKind.JUDGE: {"judge": "model", "criterion": "instructions"},
}


class AfterTrainingForm(forms.Form):
    """The grader of the comparison with the base model, and the exports. A valid form has `graded_by` and `exports`."""

    grader = forms.ChoiceField(
        label=later("Grade answers by"),
        choices=[(kind.value, name) for kind, name in GRADER_NAMES.items()],
        help_text=later("We run both models on the validation rows and score each answer from 0 to 1."),
    )
    operation = forms.ChoiceField(label=later("The answer"), choices=_OPERATIONS)
    reference = forms.CharField(
        required=False,
        max_length=1_000,
        label=later("Text"),
        help_text=later("Defaults to the row's own answer."),
        widget=forms.TextInput(attrs=_PLAIN),
    )
    pattern = forms.CharField(
        required=False,
        max_length=MAX_PATTERN_CHARACTERS,
        label=later("Pattern"),
        help_text=later("Scores 1 if the answer matches. Use ^ and $ to match the whole answer."),
        widget=forms.TextInput(attrs=_PLAIN | {"class": "mono"}),
    )
    schema = forms.CharField(
        required=False,
        max_length=MAX_SCHEMA_CHARACTERS,
        label=later("JSON schema"),
        help_text=format_lazy(
            later(
                "Scores 1 if the answer is JSON that matches the schema. "
                "Up to {characters} characters here, 16 KiB through the API."
            ),
            characters=f"{MAX_SCHEMA_CHARACTERS:,}",
        ),
        widget=forms.Textarea(attrs=_PLAIN | {"class": "mono", "rows": 6}),
    )
    judge = forms.ChoiceField(
        required=False,
        label=later("Judge"),
        help_text=later("Sees the question, the answer and the row's own answer, for both models."),
    )
    criterion = forms.CharField(
        required=False,
        max_length=MAX_CRITERION_CHARACTERS,
        label=later("What it looks for"),
        help_text=later("Default: how well the answer matches the row's own answer."),
        widget=forms.Textarea(attrs={"rows": 3}),
    )
    merged = forms.BooleanField(
        required=False,
        label=later("Merged model, 16 bits"),
        help_text=later(
            "The whole model with the adapter merged in, as safetensors. For engines without adapter support."
        ),
    )

    gguf = forms.BooleanField(
        required=False,
        label=later("GGUF, 16 bits"),
        help_text=later("The merged model as one file for llama.cpp. Not available for every architecture."),
    )

    def __init__(
        self,
        given: Mapping[str, str],
        *,
        judges: Callable[[], Sequence[tuple[str, str]]] = tuple,
        why_no_gguf: str = "",
    ) -> None:
        """Create the form from the values in `given`.

        `judges` returns the (name, label) pairs of the models that may judge. It is called only when they are shown or
        one is named. `why_no_gguf` disables the GGUF export and is its help text.
        """
        shown = {"grader": GraderKind.EXACT_MATCH.value, "operation": "eq"}
        super().__init__(shown | {name: value for name, value in given.items() if value and name in self.base_fields})
        cast(forms.ChoiceField, self.fields["judge"]).choices = judges
        if why_no_gguf:
            self.fields["gguf"].disabled = True
            self.fields["gguf"].help_text = translated(why_no_gguf)
        self.graded_by = Grader()

    @property
    def exports(self) -> tuple[str, ...]:
        """Return the exports chosen in a checked form."""
        chosen = ((MERGED_16BIT, "merged"), (GGUF, "gguf"))
        return tuple(kind for kind, field in chosen if self.cleaned_data.get(field))

    @property
    def changed(self) -> dict[str, object]:
        """Return `grader_field` of the chosen grader."""
        return grader_field(self.graded_by)

    @property
    def plan(self) -> EvaluationPlan | None:
        """Return the evaluation plan that the job asks for; return None for the default."""
        return EvaluationPlan(grader=self.graded_by) if self.changed else None

    def words(self) -> str:
        """Return the grader in one line of text."""
        by = self.graded_by
        match by.kind:
            case GraderKind.STRING_CHECK:
                what = gettext("the row's own answer") if by.reference is None else repr(by.reference)
                return gettext("the answer %(operation)s %(what)s") % {
                    "operation": dict(_OPERATIONS)[by.operation],
                    "what": what,
                }
            case GraderKind.REGEX:
                return gettext("%(pattern)s is found") % {"pattern": by.pattern}
            case GraderKind.JSON_SCHEMA:
                return gettext("valid against your JSON schema")
            case GraderKind.JUDGE:
                return gettext("judged by %(model)s") % {"model": by.model}
        return GRADER_NAMES[by.kind]

    def clean(self) -> dict[str, Any]:
        cleaned: dict[str, Any] = super().clean() or self.cleaned_data
        if self.errors:
            return cleaned
        kind = GraderKind(cleaned["grader"])
        own = _FIELDS_OF.get(kind, {})
        asked = {name: cleaned[field] for field, name in own.items() if cleaned[field]}
        try:
            if "schema" in asked:
                asked["schema"] = _schema_of(asked["schema"])
        except ValueError as error:
            self.add_error("schema", str(error))
            return cleaned
        grader = Grader(kind=kind, **asked)
        if problem := problem_of(grader):
            self.add_error(next(iter(own), "grader"), translated(problem[0].upper() + problem[1:]))
        else:
            self.graded_by = grader
        return cleaned


def grader_field(grader: Grader) -> dict[str, object]:
    """Return the grader as the API's field, without default values; return {} for the default grader."""
    names = _FIELDS_OF.get(grader.kind, {}).values()
    named = {name: getattr(grader, name) for name in names if getattr(grader, name)}
    return {} if grader.kind is GraderKind.EXACT_MATCH else {"type": grader.kind.value} | named


def _schema_of(text: str) -> dict[str, object]:
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
        kept = json.dumps(schema, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError(translated(f"Schema must have at most {MAX_SCHEMA_DEPTH} levels.")) from error
    except UnicodeEncodeError as error:
        raise ValueError(gettext("The schema holds half of a surrogate pair. Remove it.")) from error
    except ValueError as error:
        raise ValueError(gettext("This is not JSON: %(error)s.") % {"error": error}) from error
    if rb"\u0000" in kept:
        raise ValueError(gettext("The schema holds a NUL character. Remove it."))
    if not isinstance(schema, dict):
        raise ValueError(gettext('A schema is a JSON object, such as {"type": "object"}.'))
    return schema


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(gettext("%(name)s is not a number of JSON") % {"name": name})


def is_too_long(requested: StoredRequest) -> bool:
    """Return whether the form cannot hold a job's grader."""
    if requested.evaluation is None:
        return False
    grader = requested.evaluation.grader
    return len(_schema_text(grader)) > MAX_SCHEMA_CHARACTERS or len(grader.instructions) > MAX_CRITERION_CHARACTERS


def _schema_text(grader: Grader) -> str:
    return json.dumps(grader.schema) if grader.schema else ""


def given_of(requested: StoredRequest) -> dict[str, str]:
    """Return the form values that reproduce a job's evaluation and exports.

    Of a grader that is too long for the form, they hold the kind alone, which the form refuses.
    """
    made = requested.exports
    exports = {field: "on" for kind, field in ((MERGED_16BIT, "merged"), (GGUF, "gguf")) if kind in made}
    if requested.evaluation is None:
        return exports
    grader = requested.evaluation.grader
    if is_too_long(requested):
        return exports | {"grader": grader.kind.value}
    schema = _schema_text(grader)
    named = {"operation": grader.operation, "reference": grader.reference or "", "pattern": grader.pattern}
    judged = {"judge": grader.model, "criterion": grader.instructions}
    return exports | {"grader": grader.kind.value, "schema": schema} | named | judged
