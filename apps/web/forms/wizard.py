"""Forms of the new fine-tune wizard."""

import datetime
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from django import forms

from apps.catalog.models import BaseModel
from apps.contracts.runs import Hyperparameters, Method, Objective
from apps.core.clock import db_now
from apps.core.errors import InvalidValue
from apps.core.money import usd_to_nano
from apps.finetuning import recipes
from apps.finetuning.limits import Limits, get_limits
from apps.finetuning.operations import SUFFIX

RECIPE_FIELDS = (
    "epochs", "learning_rate", "batch_size", "max_length", "lora_rank", "lora_alpha", "validation_share", "seed",
)  # fmt: skip
METHOD_NAMES = {Method.LORA: "LoRA", Method.QLORA: "QLoRA", Method.FULL: "Full"}
_NUMBER = {"inputmode": "numeric", "autocomplete": "off"}
_DECIMAL = {"step": "any", "inputmode": "decimal", "autocomplete": "off"}


class RecipeForm(forms.Form):
    """How to train: what is left out, or not yet asked, is chosen for the model, the method and the rows.

    Each field says why its value was chosen. Valid, the form has `recipe`, complete, and `changed`, the fields that
    differ from the choice.
    """

    method = forms.ChoiceField(label="Method", choices=[(method.value, name) for method, name in METHOD_NAMES.items()])
    epochs = forms.IntegerField(
        label="Epochs",
        help_text="How often each row is seen.",
        widget=forms.NumberInput(attrs=_NUMBER),
    )
    learning_rate = forms.FloatField(
        label="Learning rate",
        help_text="At its highest; it falls to zero by the end.",
        widget=forms.NumberInput(attrs=_DECIMAL),
    )
    batch_size = forms.IntegerField(
        label="Batch", help_text="Rows per optimizer step.", widget=forms.NumberInput(attrs=_NUMBER)
    )
    max_length = forms.IntegerField(
        label="Longest row",
        help_text="Tokens; what is longer is cut.",
        widget=forms.NumberInput(attrs=_NUMBER),
    )
    lora_rank = forms.TypedChoiceField(
        coerce=int,
        choices=[(rank, str(rank)) for rank in recipes.SERVABLE_RANKS],
        label="Rank",
        help_text="Size of the adapter.",
    )
    lora_alpha = forms.IntegerField(
        label="Alpha",
        help_text="Strength of the adapter; often twice the rank.",
        widget=forms.NumberInput(attrs=_NUMBER),
    )
    validation_share = forms.FloatField(
        label="Held out",
        help_text="Share of the rows kept for validation, 0 to 0.5; equal rows stay together.",
        widget=forms.NumberInput(attrs=_DECIMAL),
    )
    seed = forms.IntegerField(
        label="Seed",
        help_text="Decides which rows are held out and their order.",
        widget=forms.NumberInput(attrs=_NUMBER),
    )
    suffix = forms.RegexField(
        SUFFIX,
        required=False,
        label="Name",
        help_text="Becomes a part of the model's name. Lower-case letters, digits and hyphens.",
        error_messages={"invalid": "Use up to 64 of a-z, 0-9 and -, with a letter or digit first and last."},
        widget=forms.TextInput(attrs={"autocomplete": "off", "autocapitalize": "off", "spellcheck": "false"}),
    )

    def __init__(
        self,
        given: Mapping[str, str],
        *,
        base_model: BaseModel,
        objective: Objective = Objective.SUPERVISED,
        data: recipes.DataFacts | None = None,
    ) -> None:
        self._choose = partial(recipes.choose, base_model=base_model, objective=objective, data=data)
        method = given.get("method", Method.LORA.value)
        chosen = self._choose(method=Method(method if method in list(Method) else Method.LORA), asked={})
        self.defaults = {choice.name: choice.value for choice in chosen.choices if choice.name in RECIPE_FIELDS}
        shown = {name: _written(self.defaults[name]) for name in RECIPE_FIELDS} | {"method": method}
        super().__init__(shown | {name: value for name, value in given.items() if value and name in self.base_fields})
        self._explain(chosen.choices, get_limits(base_model=base_model))
        self.recipe: Hyperparameters | None = None
        self.changed: dict[str, Any] = {}

    def _explain(self, choices: Iterable[recipes.Choice], limits: Limits) -> None:
        for choice in choices:
            limit = limits.of(choice.name)
            if choice.name not in self.fields or limit is None:
                continue
            self.fields[choice.name].help_text = choice.reason
            if limit.is_whole:
                self.fields[choice.name].widget.attrs |= {"min": f"{limit.minimum:g}", "max": f"{limit.maximum:g}"}

    def clean(self) -> dict[str, Any]:
        cleaned: dict[str, Any] = super().clean() or self.cleaned_data
        if self.errors:
            return cleaned
        asked = {name: cleaned[name] for name in RECIPE_FIELDS if cleaned.get(name) is not None}
        self.changed = {name: value for name, value in asked.items() if value != self.defaults[name]}
        try:
            self.recipe = self._choose(method=Method(cleaned["method"]), asked=self.changed).hyperparameters
        except InvalidValue as error:
            name = (error.param or "").removeprefix("hyperparameters.")
            self.add_error(name if name in self.fields else None, error.message)
        return cleaned


class CapForm(forms.Form):
    """The most a run may cost; empty means the suggested cap."""

    cap = forms.DecimalField(
        required=False,
        label="Spend cap",
        max_digits=16,
        decimal_places=9,
        widget=forms.TextInput(attrs={"inputmode": "decimal", "autocomplete": "off", "class": "num"}),
    )

    def __init__(self, given: Mapping[str, str]) -> None:
        super().__init__({name: given[name] for name in self.base_fields if given.get(name)})

    def clean_cap(self) -> Any:
        cap = self.cleaned_data["cap"]
        if cap is not None and cap <= 0:
            raise forms.ValidationError("The spend cap must be above zero.")
        return cap

    @property
    def cap_nano(self) -> int | None:
        """Return the cap of a form that was checked, None when it was left empty or is wrong."""
        cap = self.cleaned_data.get("cap")
        return None if cap is None else usd_to_nano(cap)


class ComputeForm(CapForm):
    """When the adapter is needed, and the most a run may cost; empty means any time, and the suggested cap."""

    needed_by = forms.CharField(
        required=False,
        label="Needed by",
        widget=forms.DateTimeInput(attrs={"type": "datetime-local", "autocomplete": "off", "data-utc": ""}),
    )

    def __init__(self, given: Mapping[str, str]) -> None:
        moment = given.get("needed_by", "").removesuffix("Z")  # as the control wants it
        super().__init__({"cap": given.get("cap", ""), "needed_by": moment})

    def clean_needed_by(self) -> datetime.datetime | None:
        """Read a moment without a zone as UTC: the page's script sends nothing else."""
        text = self.cleaned_data["needed_by"]
        if not text:
            return None
        try:
            moment = datetime.datetime.fromisoformat(text)
        except ValueError as error:
            raise forms.ValidationError("Enter a date and a time.") from error
        moment = moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
        if moment <= db_now():
            raise forms.ValidationError("This moment has passed.")
        return moment

    @property
    def deadline(self) -> datetime.datetime | None:
        """Return the deadline of a form that was checked, None when there is none or it is wrong."""
        moment: datetime.datetime | None = self.cleaned_data.get("needed_by")
        return moment


def _written(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)
