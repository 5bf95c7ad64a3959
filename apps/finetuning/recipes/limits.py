"""Limits of a recipe, per base model: the one table that forms, the API and its documentation read."""

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import TypeGuard

import msgspec
from django.utils.translation import gettext

from apps.catalog.models import BaseModel
from apps.contracts.adapter_files import TARGET_MODULES, adapted_modules, find_support
from apps.contracts.hyperparameters import Hyperparameters, Method, Objective
from apps.contracts.splits.split import MAX_SHARE
from apps.core.errors import InvalidValue

# accepted by every replica; an adapter of another rank could be trained but not served
SERVABLE_RANKS = (8, 16, 32, 64)
MIN_LEARNING_RATE = 1e-8
TRAIN_ON = ("assistant", "all")
# Known methods that are not offered, each with its reason; docs/training.md has more.
NOT_OFFERED = {
    "kto": (
        "KTO is not offered: its reference term pairs each prompt with its neighbour's answer in a micro-batch, so "
        "the loss of one recipe would depend on the machine that trains it. Train pairs of answers by 'dpo' or 'orpo'."
    )
}
SCHEDULERS = ("cosine", "linear", "constant", "constant_with_warmup")


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """The limit of one hyperparameter: a range, a list of options, or (`is_list`) several of them."""

    name: str
    text: str
    minimum: float | None = None
    maximum: float | None = None
    is_whole: bool = False
    options: tuple[bool | int | str, ...] = ()
    is_list: bool = False
    is_nullable: bool = False


class TrainingKind(msgspec.Struct, frozen=True, kw_only=True):
    """One way to train, and how its result is delivered. `key` names it in forms and URLs."""

    key: str
    method: Method
    use_dora: bool
    name: str
    delivered_as: str  # "adapter": served here; "model": whole weights to download
    note: str = ""  # how it differs for this base model


class RecipeLimits(msgspec.Struct, frozen=True, kw_only=True):
    objectives: tuple[Objective, ...]
    kinds: tuple[TrainingKind, ...]
    hyperparameters: tuple[Limit, ...]

    def of(self, name: str) -> Limit | None:
        return next((limit for limit in self.hyperparameters if limit.name == name), None)


def get_limits(*, base_model: BaseModel) -> RecipeLimits:
    """Return the limits of this model."""
    modules, _ = target_modules(base_model=base_model)
    return RecipeLimits(
        objectives=tuple(Objective),
        kinds=_kinds(base_model),
        hyperparameters=(
            *(
                msgspec.structs.replace(limit, options=modules) if limit.name == "target_modules" else limit
                for limit in LIMITS_OF_EVERY_MODEL
            ),
            Limit(
                name="max_length",
                text="Tokens of a row; what is longer is cut, running text into pieces that are all trained.",
                minimum=8,
                maximum=base_model.context_length,
                is_whole=True,
            ),
        ),
    )


def target_modules(*, base_model: BaseModel) -> tuple[tuple[str, ...], str]:
    """Return the layers that LoRA can adapt, all of them by default, and why these."""
    support = find_support(base_model.config)
    return adapted_modules(base_model.config), support.modules_reason if support else "All linear layers of a block."


def why_no_adapter(*, base_model: BaseModel) -> str:
    """Return why no engine serves adapters of the model, "" if engines do.

    A seeded row of an unknown type counts as servable until its installation shows otherwise.
    """
    if "architectures" not in base_model.config or find_support(base_model.config):
        return ""
    return "The serving engine cannot load adapters of this architecture."


def kind_of(*, base_model: BaseModel, recipe: Hyperparameters) -> TrainingKind:
    """Return the model's kind of training that the recipe uses."""
    return next(kind for kind in _kinds(base_model) if (kind.method, kind.use_dora) == (recipe.method, recipe.use_dora))


def require_within(limits: RecipeLimits, values: Mapping[str, object]) -> None:
    """Raise InvalidValue for the first value outside its limit."""
    for limit in limits.hyperparameters:
        if limit.name in values:
            require(limit, values[limit.name])


def _kinds(base_model: BaseModel) -> tuple[TrainingKind, ...]:
    adapter = "model" if why_no_adapter(base_model=base_model) else "adapter"
    support = find_support(base_model.config)
    note = support.qlora_note if support else ""
    return (
        TrainingKind(key="lora", method=Method.LORA, use_dora=False, name="LoRA", delivered_as=adapter),
        TrainingKind(key="qlora", method=Method.QLORA, use_dora=False, name="QLoRA", delivered_as=adapter, note=note),
        TrainingKind(key="dora", method=Method.LORA, use_dora=True, name="DoRA", delivered_as="model"),
        TrainingKind(key="qdora", method=Method.QLORA, use_dora=True, name="QDoRA", delivered_as="model", note=note),
        TrainingKind(key="full", method=Method.FULL, use_dora=False, name="Full fine-tuning", delivered_as="model"),
    )


def require(limit: Limit, value: object) -> None:
    """Raise InvalidValue if the value is outside its limit."""
    param = f"hyperparameters.{limit.name}"
    if value is None and limit.is_nullable:
        return
    if limit.options:
        asked = [value] if not limit.is_list else list(value) if isinstance(value, list | tuple) else []
        if not asked or any(not _is_among(item, limit.options) for item in asked):
            among = as_json(*limit.options)
            is_one = gettext("%(name)s must be one of %(among)s.")
            text = gettext("%(name)s must be a list of %(among)s.") if limit.is_list else is_one
            raise InvalidValue(text % {"name": limit.name, "among": among}, param=param)
        return
    low, high = limit.minimum or 0.0, limit.maximum or 0.0
    if not is_number(value) or not low <= value <= high or (limit.is_whole and value != int(value)):
        text = gettext("%(name)s must be a number from %(low)s to %(high)s.")
        if limit.is_whole:
            text = gettext("%(name)s must be a whole number from %(low)s to %(high)s.")
        raise InvalidValue(text % {"name": limit.name, "low": _plain(low), "high": _plain(high)}, param=param)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether the value is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(number: float) -> str:
    """Return a bound without an exponent."""
    return f"{number:,.0f}" if number == int(number) else f"{Decimal(str(number)):f}"


def as_json(*values: object) -> str:
    """Return values as a client writes them, with commas between."""
    return ", ".join(json.dumps(value) for value in values)


def _is_among(value: object, options: tuple[object, ...]) -> bool:
    return any(value == option and type(value) is type(option) for option in options)


def _number(name: str, low: float, high: float, text: str) -> Limit:
    return Limit(name=name, text=text, minimum=low, maximum=high)


def _whole(name: str, low: float, high: float, text: str, *, is_nullable: bool = False) -> Limit:
    return Limit(name=name, text=text, minimum=low, maximum=high, is_whole=True, is_nullable=is_nullable)


LIMITS_OF_EVERY_MODEL = (
    _whole("epochs", 1, 100, "How many times each row is used."),
    _whole("batch_size", 1, 1024, "Rows per training step."),
    _number("learning_rate", MIN_LEARNING_RATE, 1.0, "At its highest."),
    _number("warmup_ratio", 0.0, 0.5, "Share of the steps in which the learning rate rises."),
    Limit(name="lr_scheduler", text="How the learning rate falls.", options=SCHEDULERS),
    _number("weight_decay", 0.0, 1.0, "Pull of every weight towards zero."),
    _number("max_grad_norm", 0.0, 100.0, "Longer gradients are cut to this; 0 cuts none."),
    Limit(name="lora_rank", text="Size of the adapter.", options=SERVABLE_RANKS),
    _whole("lora_alpha", 1, 1024, "Strength of the adapter; often twice the rank."),
    _number("lora_dropout", 0.0, 0.9, "Share of the adapter's inputs left out at random."),
    Limit(name="target_modules", text="Layers with an adapter.", options=TARGET_MODULES, is_list=True),
    Limit(name="use_dora", text="Trains direction and size of each weight apart.", options=(False, True)),
    Limit(name="use_rslora", text="Divides alpha by the rank's root, for high ranks.", options=(False, True)),
    Limit(
        name="cpu_offload",
        text="Keeps base weights, or all of full fine-tuning, in the host's memory. Fits more, but is slower.",
        options=(False, True),
    ),
    Limit(name="packing", text="Several rows in one sequence.", options=(False, True), is_nullable=True),
    _number("dpo_beta", 0.001, 10.0, "How closely preferences may pull the model from where it began."),
    _number("orpo_beta", 0.0, 10.0, "Weight of the odds of the two answers, compared with learning the preferred one."),
    _whole("early_stopping_patience", 1, 100, "Evaluations without a better loss to wait for.", is_nullable=True),
    Limit(name="train_on", text="Which tokens of a conversation are trained.", options=TRAIN_ON),
    _number("validation_share", 0.0, MAX_SHARE, "Share of the rows held out for validation; equal rows stay together."),
    _whole("seed", 0, 2**31 - 1, "Fixes order and first weights."),
)
