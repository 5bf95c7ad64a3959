"""The form of the recipe: how to train."""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import msgspec
from django import forms
from django.utils.translation import gettext

from apps.catalog.models import BaseModel
from apps.contracts.chat import TrainOn
from apps.contracts.hyperparameters import Hyperparameters, Method, Objective
from apps.core.errors import InvalidValue
from apps.core.messages.translation import later, translated
from apps.finetuning.recipes import completion
from apps.finetuning.recipes.limits import NOT_OFFERED, RecipeLimits, TrainingKind, get_limits, require

RECIPE_FIELDS = (
    "epochs", "learning_rate", "batch_size", "max_length", "lora_rank", "use_rslora", "lora_alpha", "cpu_offload",
    "train_on", "validation_share", "seed",
)  # fmt: skip
ADAPTER_FIELDS = ("lora_rank", "use_rslora", "lora_alpha")
# The fields that other values depend on. Changing one of these changes every value the user has not set.
_READ: dict[str, Callable[[str], Any]] = {"lora_rank": int, "use_rslora": lambda text: text == "True"}
_DECISIVE = tuple(_READ)
_ADVANCED = ("use_rslora", "lora_alpha", "cpu_offload", "validation_share", "seed")  # shown on request
_Setting = bool | int | float | str | list[str] | None
_OURS = later("Our choice: ")
_OBJECTIVES = {
    Objective.DPO: later("DPO: against the starting model"),
    Objective.ORPO: later("ORPO: also learns the better one"),
}
TRAINED = (
    (TrainOn.ASSISTANT.value, later("Answers")),
    (TrainOn.ALL.value, later("Answers and inputs")),
)
_NO_SHAPE: Mapping[str, object] = {}
_NUMBER = {"inputmode": "numeric", "autocomplete": "off"}
_DECIMAL = {"step": "any", "inputmode": "decimal", "autocomplete": "off"}


class RecipeForm(forms.Form):
    """How to train. A field that is left out or not yet shown gets a value for the model, the method and the rows.

    Each field's help text gives the reason for its value. `shown` names the state the values were shown for: a value
    shown for another method and left unchanged is chosen again. `renewed` names the fields whose shown values no longer
    hold.

    `settings` holds, as JSON, settings without a field that the customer set in an earlier job. `dropped` names those
    that this model does not take.

    A valid form has `recipe`, which is complete, `choices`, each value with its reason, and `changed`, the settings
    that differ from the choice.
    """

    method = forms.ChoiceField(label=later("Method"))
    objective = forms.ChoiceField(
        label=later("Preference method"),
        help_text=later("How training uses the preferred and rejected answers."),
    )
    train_on = forms.ChoiceField(
        label=later("Trained"), choices=TRAINED, help_text=later("Which tokens of a conversation count.")
    )
    epochs = forms.IntegerField(
        label=later("Epochs"),
        help_text=later("How many times each row is used."),
        widget=forms.NumberInput(attrs=_NUMBER),
    )
    learning_rate = forms.FloatField(
        label=later("Learning rate"),
        help_text=later("The highest value. It falls to zero by the end."),
        widget=forms.NumberInput(attrs=_DECIMAL),
    )
    batch_size = forms.IntegerField(
        label=later("Batch"), help_text=later("Rows per training step."), widget=forms.NumberInput(attrs=_NUMBER)
    )
    max_length = forms.IntegerField(
        label=later("Longest row"),
        help_text=later("In tokens. Longer rows are cut."),
        widget=forms.NumberInput(attrs=_NUMBER),
    )
    lora_rank = forms.TypedChoiceField(
        coerce=int,
        choices=[(rank, str(rank)) for rank in completion.SERVABLE_RANKS],
        label=later("Rank"),
        help_text=later("Size of the adapter."),
    )
    use_rslora = forms.TypedChoiceField(
        coerce=_READ["use_rslora"],
        choices=[("False", "alpha / rank"), ("True", "alpha / √rank: rsLoRA")],
        label=later("Scaling"),
        help_text=later("How the adapter's strength depends on its rank."),
    )
    lora_alpha = forms.IntegerField(
        label=later("Alpha"),
        help_text=later("Strength of the adapter; often twice the rank."),
        widget=forms.NumberInput(attrs=_NUMBER),
    )
    cpu_offload = forms.TypedChoiceField(
        coerce=lambda text: text == "True",
        choices=[("False", later("On the GPU")), ("True", later("In the host's memory"))],
        label=later("Weight offloading"),
        help_text=later("Host memory fits larger models but training is slower."),
    )
    validation_share = forms.FloatField(
        label=later("Held-out share"),
        help_text=later("Share of rows kept for validation, 0 to 0.5. Equal rows stay together."),
        widget=forms.NumberInput(attrs=_DECIMAL),
    )
    seed = forms.IntegerField(
        label=later("Seed"),
        help_text=later("Determines the order of rows and which rows are held out."),
        widget=forms.NumberInput(attrs=_NUMBER),
    )
    suffix = forms.RegexField(
        r"^[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?$",
        required=False,
        label=later("Name"),
        help_text=later("Becomes part of the model name. Lower-case letters, digits and hyphens."),
        error_messages={"invalid": later("Use up to 64 of a-z, 0-9 and -, with a letter or digit first and last.")},
        widget=forms.TextInput(attrs={"autocomplete": "off", "autocapitalize": "off", "spellcheck": "false"}),
    )

    def __init__(
        self,
        given: Mapping[str, str],
        *,
        base_model: BaseModel,
        objectives: tuple[Objective, ...] = (Objective.SUPERVISED,),
        data: completion.DataFacts | None = None,
        shape: Mapping[str, object] = _NO_SHAPE,
        preferred: str = "",
    ) -> None:
        """Create the form from the values in `given`.

        `objectives` are those the rows allow, the usual one first. `shape` holds the values fixed by the adapter that
        this job continues; it is {} for a new adapter. `preferred` is the method if `given` names none.
        """
        self._shape = shape
        given = {name: text for name, text in given.items() if name not in shape}
        self._asked = [given[name].lower() for name in ("method", "objective") if name in given]
        self._choose_any = partial(completion.choose, base_model=base_model, data=data)
        self._objectives = {objective.value: objective for objective in objectives}
        self.chosen_objective = self._objectives.get(given.get("objective", ""), objectives[0])
        limits = get_limits(base_model=base_model)
        kept, self.dropped = _settings_of(given.get("settings", ""), limits)
        self.kept = {name: value for name, value in kept.items() if name not in shape}
        if self.chosen_objective.is_preference and self.kept.pop("lora_dropout", 0):
            self.dropped.append("lora_dropout")
        # An adapter is trained further with the same shape, and never by training the whole model.
        self.kinds = [
            kind
            for kind in limits.kinds
            if not shape or (kind.method is not Method.FULL and kind.use_dora == bool(shape.get("use_dora")))
        ]
        self._kinds = {kind.key: kind for kind in self.kinds}
        key = given.get("method", "") if given.get("method", "") in self._kinds or not shape else ""
        self.kind = self._kinds.get(key or preferred) or self.kinds[0]
        own = self._chosen(self.kind.key)
        decisive = [given.get(name) or _written(own[name].value) for name in _DECISIVE]
        self.shown = f"{self.chosen_objective}/{'.'.join([self.kind.key, *decisive])}"
        chosen, before = self._chosen(self.shown), self._chosen(given.get("shown", ""))
        written = {name: _written(choice.value) for name, choice in chosen.items()}
        self.renewed = [
            name
            for name, choice in before.items()
            if name not in _DECISIVE and given.get(name) == _written(choice.value) != written[name]
        ]
        kept = {name: value for name, value in given.items() if value and name not in self.renewed}
        self.defaults = {name: choice.value for name, choice in chosen.items()}
        shown = written | kept | {"method": key or self.kind.key, "objective": self.chosen_objective.value}
        super().__init__({name: value for name, value in shown.items() if name in self.base_fields})
        self.fields["method"].choices = [(kind.key, gettext(kind.name)) for kind in self.kinds]  # type: ignore[attr-defined]
        self._offer_objectives()
        self._explain(chosen.values(), limits, changed={name for name in written if shown.get(name) != written[name]})
        for name in set(shape) & set(self.fields):
            self.fields[name].help_text = gettext("The same as in the model that this job continues.")
            self.fields[name].widget.attrs["readonly"] = True
            if isinstance(self.fields[name], forms.TypedChoiceField):
                self.fields[name].choices = [(written[name], written[name])]  # type: ignore[attr-defined]
        self.recipe: Hyperparameters | None = None
        self.choices: tuple[completion.RecipeChoice, ...] = ()
        self.changed: dict[str, object] = {}

    def _offer_objectives(self) -> None:
        """Remove the fields in which these rows leave no choice."""
        if len(self._objectives) == 1:
            del self.fields["objective"]
        else:
            named = [(name, _OBJECTIVES[objective]) for name, objective in self._objectives.items()]
            self.fields["objective"].choices = named  # type: ignore[attr-defined]
        if self.chosen_objective is not Objective.SUPERVISED:
            del self.fields["train_on"]

    @property
    def objective_field(self) -> forms.BoundField | None:
        return self["objective"] if "objective" in self.fields else None

    @property
    def train_on_field(self) -> forms.BoundField | None:
        return self["train_on"] if "train_on" in self.fields else None

    @property
    def is_advanced(self) -> bool:
        """Return whether an advanced setting has an error or a value that the customer set."""
        return bool({*self.errors, *self.changed} & set(_ADVANCED))

    @property
    def renewed_fields(self) -> list[forms.BoundField]:
        return [self[name] for name in self.renewed]

    def recipe_of(self, kind: TrainingKind) -> Hyperparameters:
        """Return the recipe of a checked form for another method. Raises InvalidValue."""
        return self._recipe_of(kind).hyperparameters

    def _recipe_of(self, kind: TrainingKind) -> completion.Recipe:
        asked = {name: value for name, value in self.changed.items() if _belongs(name, kind)}
        return self._choose(self.chosen_objective, method=kind.method, asked=asked | _flags(kind))

    def _choose(self, objective: Objective, *, method: Method, asked: Mapping[str, object]) -> completion.Recipe:
        return self._choose_any(objective=objective, method=method, asked={**self.kept, **asked, **self._shape})

    def _chosen(self, state: str) -> dict[str, completion.RecipeChoice]:
        """Return the choice for each field in a state such as `dpo/lora.64.True`.

        A state is the objective, the method, and the values of the fields that others depend on.
        """
        name, _, rest = state.rpartition("/")
        objective = self._objectives.get(name, self.chosen_objective)
        key, *decisive = rest.split(".")
        kind = self._kinds.get(key)
        if kind is None:
            return {}
        own = self._fields_of(objective, kind, {})
        given = dict(zip(_DECISIVE, decisive, strict=False))
        asked = {name: text for name, text in given.items() if text != _written(own[name].value)}
        try:
            followed = self._fields_of(objective, kind, {name: _READ[name](text) for name, text in asked.items()})
        except (InvalidValue, ValueError):
            return own  # the field itself reports its error
        return followed | {name: own[name] for name in _DECISIVE}

    def _fields_of(
        self, objective: Objective, kind: TrainingKind, asked: Mapping[str, object]
    ) -> dict[str, completion.RecipeChoice]:
        named = {name: value for name, value in asked.items() if _belongs(name, kind)} | _flags(kind)
        chosen = self._choose(objective, method=kind.method, asked=named).choices
        return {choice.name: choice for choice in chosen if choice.name in RECIPE_FIELDS}

    def _explain(
        self, choices: Iterable[completion.RecipeChoice], limits: RecipeLimits, *, changed: Collection[str]
    ) -> None:
        """Write the reason for each value into its help text. A changed field shows the reason for our own choice."""
        for choice in choices:
            limit = limits.of(choice.name)
            if choice.name not in self.fields or limit is None:
                continue
            self.fields[choice.name].help_text = f"{_OURS if choice.name in changed else ''}{translated(choice.reason)}"
            if limit.is_whole:
                self.fields[choice.name].widget.attrs |= {"min": f"{limit.minimum:g}", "max": f"{limit.maximum:g}"}

    def clean(self) -> dict[str, object]:
        cleaned: dict[str, object] = super().clean() or self.cleaned_data
        for reason in filter(None, map(NOT_OFFERED.get, self._asked)):
            self.add_error(None, reason)
        if self.errors:
            return cleaned
        asked = {name: cleaned[name] for name in RECIPE_FIELDS if cleaned.get(name) is not None}
        self.changed = {
            name: value for name, value in asked.items() if value != self.defaults[name] and _belongs(name, self.kind)
        } | self.kept
        try:
            chosen = self._recipe_of(self.kind)
            self.recipe, self.choices = chosen.hyperparameters, chosen.choices
        except InvalidValue as error:
            name = (error.param or "").removeprefix("hyperparameters.")
            self.add_error(name if name in self.fields else None, error.message)
        return cleaned


def _settings_of(text: str, limits: RecipeLimits) -> tuple[dict[str, object], list[str]]:
    """Return the settings in a draft's JSON that this model takes, and the names of the others."""
    try:
        given = msgspec.json.decode(text or "{}", type=dict[str, _Setting])
    except msgspec.DecodeError:
        return {}, []
    kept, dropped = dict[str, object](), list[str]()
    for limit in limits.hyperparameters:
        if limit.name in given and limit.name not in {*RECIPE_FIELDS, "use_dora"}:
            try:
                require(limit, given[limit.name])
                kept[limit.name] = given[limit.name]
            except InvalidValue:
                dropped.append(limit.name)
    return kept, dropped


def _belongs(name: str, kind: TrainingKind) -> bool:
    if name == "cpu_offload":
        return kind.method is not Method.QLORA
    return kind.method is not Method.FULL or name not in ADAPTER_FIELDS


def _flags(kind: TrainingKind) -> dict[str, object]:
    return {"use_dora": True} if kind.use_dora else {}


def _written(value: object) -> str:
    return repr(value) if isinstance(value, float) else str(value)
