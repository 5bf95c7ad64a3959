"""Completion of a request to a full recipe.

The customer's values come first, then the model's own, then values for the method and the rows. Each value has a
sentence that gives its reason.
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from django.utils.translation import gettext, gettext_noop

from apps.catalog.models import BaseModel
from apps.contracts.adapter_files import MAX_SCALE, get_scale
from apps.contracts.hyperparameters import Hyperparameters, Method, Objective
from apps.core.errors import InvalidValue
from apps.datasets.token_counts import LIMITS
from apps.estimates.durations import step_count
from apps.finetuning.recipes.limits import (
    SCHEDULERS,
    SERVABLE_RANKS,
    Limit,
    RecipeLimits,
    get_limits,
    is_number,
    require,
    require_within,
    target_modules,
)

__all__ = ["SCHEDULERS", "SERVABLE_RANKS", "DataFacts", "Recipe", "RecipeChoice", "choose", "resolve"]

CHOSEN_BY_US = (
    "method", "quantization", "objective", "gradient_accumulation_steps", "gradient_checkpointing", "eval_steps",
)  # fmt: skip
_FEWEST_TO_HOLD_OUT = 500  # rows, of which 25 are held out
_MOST_FOR_LARGE_SHARE = 10_000  # rows, of which 500 are held out: as many as an evaluation reads
_PATIENCE = 2  # evaluations without a better loss
_EVALUATIONS = 6  # per run: enough to find the best one, to wait for `_PATIENCE` more, and to save steps
_MAX_EVALUATIONS = 20
_MAX_EPOCHS = 1_000  # a higher number is refused later, with the limit
_AUTO = (None, "auto")
_MAX_SHOWN = 60  # characters of a client's own name in a message
_MULTIPLIERS = (1e-3, 1e3)
_MAX_ROW = 2**24  # tokens; a longer value is a typing error, and is refused instead of cut to the context
# Parts of the model's own recipe that apply to every way of training. The recipe was found with supervised adapters.
_ALWAYS_OF_THE_MODEL = ("lora_rank", "target_modules", "max_length", "seed")


class DataFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Known facts about the training file; None if unknown."""

    rows: int | None = None
    longest_row_tokens: int | None = None
    has_validation: bool = False


class RecipeChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One value of the recipe, its origin and its reason."""

    name: str
    value: Any
    is_auto: bool
    reason: str


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    hyperparameters: Hyperparameters
    choices: tuple[RecipeChoice, ...]

    def summary(self) -> str:
        """Return the reasons for the chosen epochs and learning rate in one line."""
        shown = [choice for choice in self.choices if choice.is_auto and choice.name in ("epochs", "learning_rate")]
        return " ".join(choice.reason for choice in shown)


def resolve(*, base_model: BaseModel, method: Method, asked: Mapping[str, object]) -> Hyperparameters:
    """Return only the recipe of `choose`, without facts about the rows. Raises InvalidValue."""
    return choose(base_model=base_model, method=method, asked=asked).hyperparameters


def choose(
    *,
    base_model: BaseModel,
    method: Method,
    asked: Mapping[str, object],
    objective: Objective = Objective.SUPERVISED,
    data: DataFacts | None = None,
    keeps_rank: bool = False,
) -> Recipe:
    """Return the full recipe with a reason for each value.

    Values None and "auto" are chosen here. `learning_rate_multiplier` scales the chosen learning rate. With
    `keeps_rank`, the rank is that of an existing adapter, and need not be one of those for new adapters. Raises
    InvalidValue.
    """
    limits = get_limits(base_model=base_model)
    wanted = {name: value for name, value in asked.items() if value not in _AUTO}
    multiplier = wanted.pop("learning_rate_multiplier", 1.0)
    _require_settable(wanted, limits)
    rules = _Rules(base_model, method, objective, data or DataFacts(), wanted)
    choices = tuple(_scaled(_choice(name, wanted, rules), multiplier, limits) for name in _ORDER)
    values = {choice.name: choice.value for choice in choices}
    require_within(limits, {name: value for name, value in values.items() if name != "lora_rank" or not keeps_rank})
    _require_sensible(values, method, objective)
    quantization = "nf4" if method is Method.QLORA else None
    fixed = {"method": method, "objective": objective, "quantization": quantization}
    recipe = msgspec.convert(values | fixed, Hyperparameters, strict=False)
    return Recipe(hyperparameters=recipe, choices=choices)


def choose_longest_row(base_model: BaseModel, longest_row_tokens: int | None, *, is_text: bool) -> tuple[int, str]:
    """Return the default for the longest row, in tokens, and its reason; it cuts no row if the model's context allows.

    It is the smallest step that holds every row, and not below the model's own recipe if that names one. Running text
    is cut into pieces that are all trained, so it gets the length of the model's own recipe.
    """
    context, longest = base_model.context_length, longest_row_tokens
    own = base_model.default_recipe.get("max_length")
    usual = min(own or context, context)
    if longest is not None and not is_text:
        least = usual if own else 0
        limit = next((step for step in sorted({usual, *LIMITS, context}) if max(least, longest) <= step), context)
        if longest <= limit <= context:
            return limit, f"{limit:,} tokens: your longest row has {longest:,}, so none is cut."
        return context, f"{context:,} tokens: the model's context length; your longest row has {longest:,}."
    whose = "the model's context length" if usual == context else "the tested default of this model"
    return usual, f"{usual:,} tokens: {whose}."


def choose_validation_share(rows: int | None, *, is_text: bool) -> tuple[float, str]:
    """Return the default for the share of rows that are held out, 0 to 1, and its reason, without a validation file."""
    if is_text:
        return 0.0, "0: running text is read once, so it isn't memorized."
    if rows is None or rows < _FEWEST_TO_HOLD_OUT:
        return 0.0, f"0: below {_FEWEST_TO_HOLD_OUT} rows, the held-out rows would be too few to judge by."
    share = 0.05 if rows <= _MOST_FOR_LARGE_SHARE else 0.01
    return share, f"{share:.0%} of {rows:,} rows: for evaluation, early stopping and the comparison with the base."


def _choice(name: str, wanted: Mapping[str, object], rules: "_Rules") -> RecipeChoice:
    is_idle = name == "early_stopping_patience" and not rules.has_validation
    if name in wanted and not is_idle:
        value = wanted[name]
        if name == "max_length" and is_number(value) and value <= _MAX_ROW:
            value = min(value, rules.context)
        reason = "You set it." if value == wanted[name] else "Your value, limited to the model's context length."
        return RecipeChoice(name=name, value=value, is_auto=False, reason=reason)
    value, reason = rules.of(name)
    return RecipeChoice(name=name, value=value, is_auto=True, reason=reason)


def _scaled(choice: RecipeChoice, multiplier: Any, limits: RecipeLimits) -> RecipeChoice:
    """Return the choice with the learning rate times the multiplier. Raises InvalidValue that names the multiplier."""
    if choice.name != "learning_rate":
        return choice
    least, most = _MULTIPLIERS
    if choice.is_auto and (rates := limits.of("learning_rate")):  # rounded, so that both bounds work as they are shown
        least = max(least, math.ceil((rates.minimum or 0.0) / choice.value * 1e6) / 1e6)
        most = min(most, math.floor((rates.maximum or 1.0) / choice.value * 1e3) / 1e3)
    require(Limit(name="learning_rate_multiplier", text="", minimum=least, maximum=most), multiplier)
    if multiplier == 1.0 or not choice.is_auto:
        return choice
    reason = f"{choice.reason} Times your multiplier of {multiplier:g}."
    return msgspec.structs.replace(choice, value=choice.value * multiplier, reason=reason)


def _require_settable(wanted: Mapping[str, object], limits: RecipeLimits) -> None:
    for name in wanted:
        if name in CHOSEN_BY_US or limits.of(name) is None:
            settable = ", ".join(limit.name for limit in limits.hyperparameters)
            message = gettext("%(name)s is not a hyperparameter you can set: use %(settable)s.") % {
                "name": repr(name[:_MAX_SHOWN]),
                "settable": settable,
            }
            raise InvalidValue(message, param=f"hyperparameters.{name}")


def _require_sensible(values: Mapping[str, object], method: Method, objective: Objective) -> None:
    if method is Method.QLORA and values["cpu_offload"]:
        message = gettext("cpu_offload is for LoRA and full fine-tuning: 4-bit weights stay on the GPU.")
        raise InvalidValue(message, param="hyperparameters.cpu_offload")
    if method is Method.FULL:
        for name in ("use_dora", "use_rslora"):
            if values[name]:
                message = gettext("%(name)s belongs to an adapter; full fine-tuning has none. Leave it out.") % {
                    "name": name
                }
                raise InvalidValue(message, param=f"hyperparameters.{name}")
        return
    if objective.is_preference and values["lora_dropout"]:
        message = gettext("lora_dropout must be 0 for preferences: both answers must be judged by the same model.")
        raise InvalidValue(message, param="hyperparameters.lora_dropout")
    config = {"r": values["lora_rank"], "lora_alpha": values["lora_alpha"], "use_rslora": values["use_rslora"]}
    if get_scale(config) > MAX_SCALE:
        message = gettext(
            "lora_alpha by the rank is %(scale)s; no replica serves an adapter above %(max_scale)s. Give a smaller "
            "lora_alpha."
        )
        if values["use_rslora"]:
            message = gettext(
                "lora_alpha by the rank's root is %(scale)s; no replica serves an adapter above %(max_scale)s. Give a "
                "smaller lora_alpha."
            )
        message %= {"scale": f"{get_scale(config):g}", "max_scale": f"{MAX_SCALE:g}"}
        raise InvalidValue(message, param="hyperparameters.lora_alpha")


class _Rules:
    """Rules for the values that the customer did not set."""

    def __init__(
        self, base_model: BaseModel, method: Method, objective: Objective, data: DataFacts, wanted: Mapping[str, object]
    ) -> None:
        self._base_model = base_model
        self._method = method
        self._objective = objective
        self._data = data
        self.context = base_model.context_length
        is_as_measured = method is not Method.FULL and objective is Objective.SUPERVISED
        own = base_model.default_recipe
        self._own = {name: value for name, value in own.items() if is_as_measured or name in _ALWAYS_OF_THE_MODEL}
        self._wanted = wanted

    def of(self, name: str) -> tuple[object, str]:
        """Return a value and its reason."""
        if name == "max_length":
            is_text = self._objective is Objective.TEXT
            return choose_longest_row(self._base_model, self._data.longest_row_tokens, is_text=is_text)
        if name in self._own:
            return self._own[name], "Tested default of this model."
        rule = getattr(self, f"_{name}", None)
        return rule() if rule is not None else _PLAIN[name]

    def _value(self, name: str) -> object:
        return self._wanted[name] if name in self._wanted else self.of(name)[0]

    def _epochs(self) -> tuple[int, str]:
        rows = self._data.rows
        if self._objective is Objective.TEXT:
            return 1, "1 epoch: more would memorize running text."
        if self._objective.is_preference:
            return 1, "1 epoch: preferences overfit quickly."
        if rows is None:
            return 3, "3 epochs: the usual choice for adapters."
        for most, epochs in ((100, 5), (10_000, 3), (100_000, 2)):
            if rows <= most:
                return epochs, f"{rows:,} rows: {epochs} epochs."
        return 1, f"{rows:,} rows: 1 epoch, because new rows teach more than repeated ones."

    def _learning_rate(self) -> tuple[float, str]:
        is_full = self._method is Method.FULL
        rate = {
            Objective.SUPERVISED: 2e-5 if is_full else 2e-4,
            Objective.TEXT: 1e-5 if is_full else 1e-4,
            Objective.DPO: 1e-6 if is_full else 1e-5,
            Objective.ORPO: 8e-6 if is_full else 1e-5,  # from the paper (arXiv 2403.07691)
        }[self._objective]
        what = {
            Objective.SUPERVISED: "",
            Objective.TEXT: gettext_noop("and running text moves it far"),
            Objective.DPO: gettext_noop("and preferences need small steps"),
            Objective.ORPO: gettext_noop("and preferences need small steps"),
        }[self._objective]
        why, shown = f" {what}".rstrip(), f"{rate:.0e}".replace("e-0", "e-")
        reason = f"{shown} because an adapter starts from nothing{why}."
        return rate, f"{shown} because every weight moves{why}." if is_full else reason

    def _batch_size(self) -> tuple[int, str]:
        rows = self._data.rows
        if rows is not None and rows < 256:
            return 8, f"8 rows a step: with {rows} rows, 16 would leave too few steps."
        return 16, "16 rows per step: stable gradients and enough steps."

    def _lora_rank(self) -> tuple[int, str]:
        return 16, "16: enough for most tasks, and fast to serve."

    def _target_modules(self) -> tuple[tuple[str, ...], str]:
        modules, reason = target_modules(base_model=self._base_model)
        return modules, f"{reason} Training fewer costs quality."

    def _lora_alpha(self) -> tuple[int, str]:
        rank = self._value("lora_rank")
        if not is_number(rank) or not 0 < 2 * rank < math.inf:
            return 32, "Twice the usual rank."
        if self._value("use_rslora") is True:
            alpha = max(1, round(2 * math.sqrt(rank)))
            return alpha, f"{alpha}: twice the rank's root, because rsLoRA divides by the root."
        return int(2 * rank), f"{int(2 * rank)}: twice the rank."

    def _lora_dropout(self) -> tuple[float, str]:
        if self._objective.is_preference:
            return 0.0, "0: both answers must be judged by the same model."
        return 0.05, "0.05: a little, to avoid memorizing rows."

    @property
    def has_validation(self) -> bool:
        """Return whether rows are held out for evaluation."""
        return self._data.has_validation or bool(self._value("validation_share"))

    def _validation_share(self) -> tuple[float, str]:
        if self._data.has_validation:
            return 0.0, "0: the validation file is evaluated."
        return choose_validation_share(self._data.rows, is_text=self._objective is Objective.TEXT)

    def _early_stopping_patience(self) -> tuple[int | None, str]:
        if not self.has_validation:
            return None, "Early stopping off: no rows are held out."
        steps, every = self._steps(), self._eval_steps()[0]
        evaluations = -(-steps // every) if steps and every else self._epochs_to_train()
        if evaluations < _PATIENCE + 2:
            return None, "Early stopping off: too few evaluations to wait for."
        return _PATIENCE, f"Early stopping on: {evaluations} evaluations on held-out rows; unused steps are not billed."

    def _eval_steps(self) -> tuple[int | None, str]:
        steps, epochs = self._steps(), self._epochs_to_train()
        if not self.has_validation:
            return None, "No evaluation: no rows are held out."
        patience = self._wanted.get("early_stopping_patience")
        wanted = max(_EVALUATIONS, patience + 2 if is_number(patience) else 0)
        evaluations = int(min(wanted, _MAX_EVALUATIONS))
        if steps is None or epochs >= evaluations:
            return None, "At the end of each epoch."
        every = -(-steps // evaluations)  # rounded up, or the last two would be a few steps apart
        apart = f"{every:,} step{'s' if every > 1 else ''} apart"
        return every, f"{apart}: {-(-steps // every)} evaluations on the held-out rows."

    def _steps(self) -> int | None:
        """Return the optimizer steps of the run; None if the number of rows or pieces is unknown."""
        rows, batch_size, share = self._data.rows, self._value("batch_size"), self._value("validation_share")
        if rows is None or self._objective is Objective.TEXT or not is_number(batch_size) or batch_size < 1:
            return None
        trained = round(rows * (1 - share)) if is_number(share) and 0 < share < 1 else rows
        return step_count(rows=trained, batch_size=int(batch_size), epochs=self._epochs_to_train())

    def _epochs_to_train(self) -> int:
        epochs = self._value("epochs")
        return int(epochs) if is_number(epochs) and 0 < epochs < _MAX_EPOCHS else 1


_PLAIN: dict[str, tuple[object, str]] = {
    "warmup_ratio": (0.03, "3% of the steps, because the first steps are the least stable."),
    "lr_scheduler": ("cosine", "Cosine: falls smoothly to zero."),
    "weight_decay": (0.0, "0: small adapters don't need it."),
    "max_grad_norm": (1.0, "1: limits the effect of outlier examples."),
    "use_dora": (False, "Off. It is slower, and its result is a whole model, not an adapter."),
    "use_rslora": (False, "Off (alpha / rank). rsLoRA helps at rank 64 and above."),
    "cpu_offload": (False, "On the GPU. Offloading saves GPU memory but is slow."),
    "packing": (None, "Where the attention kernel keeps rows apart."),
    "dpo_beta": (0.1, "0.1: usual."),
    "orpo_beta": (0.1, "0.1: usual."),
    "train_on": ("assistant", "Trains on assistant replies only."),
    "seed": (42, "42: the same in each run."),
}
_ORDER = (
    "epochs", "learning_rate", "batch_size", "max_length", "early_stopping_patience", "eval_steps", "warmup_ratio",
    "lr_scheduler", "weight_decay", "max_grad_norm", "lora_rank", "use_dora", "use_rslora", "lora_alpha",
    "lora_dropout", "target_modules", "cpu_offload", "packing", "dpo_beta", "orpo_beta", "train_on",
    "validation_share", "seed",
)  # fmt: skip
