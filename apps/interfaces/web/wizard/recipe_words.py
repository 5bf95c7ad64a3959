"""The values of a recipe in words, each with the reason it was chosen, and the machines that train it."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext, ngettext

from apps.contracts.hyperparameters import Hyperparameters, Method
from apps.core.messages.translation import later, translated
from apps.core.templatetags.ui import percent
from apps.estimates.machines import network_share
from apps.finetuning.recipes.completion import RecipeChoice
from apps.interfaces.web.wizard.forms import RECIPE_FIELDS, TRAINED

# The settings of a recipe as pages name them.
NAMES = {
    "epochs": later("Epochs"),
    "learning_rate": later("Learning rate"),
    "batch_size": later("Batch"),
    "max_length": later("Longest row"),
    "early_stopping_patience": later("Early stopping"),
    "eval_steps": later("Evaluations"),
    "warmup_ratio": later("Warm-up"),
    "lr_scheduler": later("Schedule"),
    "weight_decay": later("Weight decay"),
    "max_grad_norm": later("Gradient norm limit"),
    "lora_rank": later("Rank"),
    "use_dora": "DoRA",
    "use_rslora": "rsLoRA",
    "lora_alpha": later("Alpha"),
    "lora_dropout": later("Adapter dropout"),
    "target_modules": later("Adapted layers"),
    "cpu_offload": later("In host memory"),
    "packing": later("Packing"),
    "dpo_beta": later("Beta"),
    "orpo_beta": later("Beta"),
    "train_on": later("Trained"),
    "validation_share": later("Held-out share"),
    "seed": later("Seed"),
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


def on_machines(node_count: int) -> str:
    return gettext("on %(node_count)s machines") % {"node_count": node_count}


def machine_words(node_count: int, parts: Iterable[tuple[str, float]]) -> str:
    """Return the number of machines, and the share of time and cost that their network takes.

    `parts` are the keys and seconds of an estimate's `time_parts`.
    """
    share = network_share(parts)
    if share is None:
        return str(node_count)
    return gettext("%(node_count)s, their network takes %(share)s of the billed time") % {
        "node_count": node_count,
        "share": percent(share),
    }


def _in_words(choice: RecipeChoice) -> ChosenValue:
    value = value_in_words(choice.name, choice.value)
    reason = translated(choice.reason)
    is_said = _plain(reason).startswith(_plain(value))
    return ChosenValue(NAMES[choice.name], "" if is_said else value, reason)


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
    return gettext("on") if value else gettext("off")


_WORDS: dict[str, Callable[[Any], str]] = {
    "learning_rate": "{:g}".format,
    "batch_size": lambda rows: (
        ngettext("%(batch_size)s row per step", "%(batch_size)s rows per step", rows) % {"batch_size": rows}
    ),
    "max_length": lambda count: gettext("%(max_length)s tokens") % {"max_length": f"{count:,}"},
    "early_stopping_patience": lambda count: (
        gettext("off")
        if count is None
        else gettext("after %(count)s evaluations without a lower loss") % {"count": count}
    ),
    "eval_steps": lambda steps: (
        ngettext("%(steps)s step apart", "%(steps)s steps apart", steps) % {"steps": f"{steps:,}"}
    ),
    "warmup_ratio": lambda ratio: gettext("%(warmup_ratio)s of the steps") % {"warmup_ratio": f"{ratio:.0%}"},
    "weight_decay": "{:g}".format,
    "max_grad_norm": "{:g}".format,
    "lora_dropout": "{:g}".format,
    "target_modules": lambda names: ", ".join(name.removesuffix("_proj") for name in names),
    "packing": lambda value: gettext("where the machine can") if value is None else _switch(value),
    "use_dora": _switch,
    "use_rslora": _switch,
    "cpu_offload": _switch,
    "train_on": lambda value: dict(TRAINED).get(value, value),
    "validation_share": "{:.0%}".format,
}
