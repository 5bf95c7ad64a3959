"""The values of a recipe in words, each with the reason it was chosen."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from apps.contracts.runs import Hyperparameters, Method
from apps.finetuning.recipes.completion import RecipeChoice
from apps.interfaces.web.wizard.forms import RECIPE_FIELDS, TRAINED

# The settings of a recipe as pages name them.
NAMES = {
    "epochs": "Epochs",
    "learning_rate": "Learning rate",
    "batch_size": "Batch",
    "max_length": "Longest row",
    "early_stopping_patience": "Early stopping",
    "eval_steps": "Evaluations",
    "warmup_ratio": "Warm-up",
    "lr_scheduler": "Schedule",
    "weight_decay": "Weight decay",
    "max_grad_norm": "Gradient norm limit",
    "lora_rank": "Rank",
    "use_dora": "DoRA",
    "use_rslora": "rsLoRA",
    "lora_alpha": "Alpha",
    "lora_dropout": "Adapter dropout",
    "target_modules": "Adapted layers",
    "cpu_offload": "In host memory",
    "packing": "Packing",
    "dpo_beta": "Beta",
    "orpo_beta": "Beta",
    "train_on": "Trained",
    "validation_share": "Held-out share",
    "seed": "Seed",
}
_OF_ADAPTER = frozenset({"lora_rank", "use_dora", "use_rslora", "lora_alpha", "lora_dropout", "target_modules"})


@dataclass(frozen=True)
class ChosenValue:
    """A value and the reason it was chosen. `value` is "" if the reason begins with it."""

    name: str
    value: str
    reason: str


def other_values(choices: Iterable[RecipeChoice], recipe: Hyperparameters) -> list[ChosenValue]:
    """Return the values for which the wizard has no field."""
    return values_in_words(choices, recipe, leave_out={*RECIPE_FIELDS, "use_dora"})


def values_in_words(
    choices: Iterable[RecipeChoice], recipe: Hyperparameters, *, leave_out: Collection[str] = ()
) -> list[ChosenValue]:
    """Return the choices that apply to this recipe."""
    hidden = {*leave_out, *_without_effect(recipe)}
    return [_in_words(choice) for choice in choices if choice.name in NAMES and choice.name not in hidden]


def value_in_words(name: str, value: object) -> str:
    return _WORDS[name](value) if name in _WORDS else str(value)


def _in_words(choice: RecipeChoice) -> ChosenValue:
    value = value_in_words(choice.name, choice.value)
    is_said = _plain(choice.reason).startswith(_plain(value))
    return ChosenValue(NAMES[choice.name], "" if is_said else value, choice.reason)


def _plain(text: str) -> str:
    return text.replace(" ", "").lower()


def _without_effect(recipe: Hyperparameters) -> set[str]:
    objective = recipe.objective
    hidden = {f"{name}_beta" for name in ("dpo", "orpo") if name != objective.value}
    hidden |= {"train_on"} if objective.value != "supervised" else set()
    hidden |= {"eval_steps"} if recipe.eval_steps is None else set()
    hidden |= {"packing"} if objective.is_preference else set()
    return hidden | (_OF_ADAPTER if recipe.method is Method.FULL else set())


def _switch(value: bool) -> str:
    return "on" if value else "off"


_WORDS: dict[str, Callable[[Any], str]] = {
    "learning_rate": "{:g}".format,
    "batch_size": "{} rows a step".format,
    "max_length": "{:,} tokens".format,
    "early_stopping_patience": lambda count: (
        "off" if count is None else f"after {count} evaluations without a lower loss"
    ),
    "eval_steps": lambda steps: f"{steps:,} step{'s' if steps > 1 else ''} apart",
    "warmup_ratio": "{:.0%} of the steps".format,
    "weight_decay": "{:g}".format,
    "max_grad_norm": "{:g}".format,
    "lora_dropout": "{:g}".format,
    "target_modules": lambda names: ", ".join(name.removesuffix("_proj") for name in names),
    "packing": lambda value: "where the machine can" if value is None else _switch(value),
    "use_dora": _switch,
    "use_rslora": _switch,
    "cpu_offload": _switch,
    "train_on": lambda value: dict(TRAINED).get(value, value),
    "validation_share": "{:.0%}".format,
}
