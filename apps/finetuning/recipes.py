"""From what a customer asked to a complete recipe: OpenAI's fields, ours, the model's defaults, then the field's."""

from collections.abc import Mapping
from typing import Any

import msgspec

from apps.catalog.models import BaseModel
from apps.contracts.runs import Hyperparameters, Method
from apps.contracts.split import MAX_SHARE
from apps.core.errors import InvalidValue

_BOUNDS: dict[str, tuple[float, float]] = {
    "epochs": (1, 100),
    "batch_size": (1, 1024),
    "learning_rate": (1e-8, 1.0),
    "warmup_ratio": (0.0, 0.5),
    "weight_decay": (0.0, 1.0),
    "max_grad_norm": (0.0, 100.0),
    "max_length": (8, 1_048_576),
    "lora_alpha": (1, 1024),
    "lora_dropout": (0.0, 0.9),
    "seed": (0, 2**31 - 1),
    "validation_share": (0.0, MAX_SHARE),
}
SERVABLE_RANKS = (8, 16, 32, 64)  # what every replica accepts: others would train and then not answer
TRAIN_ON = ("assistant", "all")
SCHEDULERS = ("cosine", "linear", "constant", "constant_with_warmup")
_CHOSEN_BY_US = ("method", "quantization", "gradient_accumulation_steps", "gradient_checkpointing", "packing")


def resolve(*, base_model: BaseModel, method: Method, asked: Mapping[str, Any]) -> Hyperparameters:
    """Return the full recipe: `asked` over the model's own recipe over the defaults. Raises InvalidValue.

    Values None and "auto" mean "choose for me". `learning_rate_multiplier` scales the chosen learning rate.
    """
    chosen = {name: value for name, value in asked.items() if value is not None and value != "auto"}
    multiplier = float(_number("learning_rate_multiplier", chosen.pop("learning_rate_multiplier", 1.0), 1e-3, 1e3))
    known = {field.name for field in msgspec.structs.fields(Hyperparameters)}
    for name in chosen:
        if name not in known or name in _CHOSEN_BY_US:
            raise InvalidValue(f"{name!r} is not a hyperparameter you can set.", param=f"hyperparameters.{name}")
    defaults = {name: value for name, value in base_model.default_recipe.items() if name in known}
    merged = defaults | chosen | {"method": method, "quantization": "nf4" if method == Method.QLORA else None}
    merged["max_length"] = min(merged.get("max_length", base_model.context_length), base_model.context_length)
    if "learning_rate" not in chosen and multiplier != 1.0:
        merged["learning_rate"] = merged.get("learning_rate", Hyperparameters().learning_rate) * multiplier
    _check(merged)
    try:
        return msgspec.convert(merged, Hyperparameters, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidValue(str(error), param="hyperparameters") from error


def _check(merged: Mapping[str, Any]) -> None:
    for name, (low, high) in _BOUNDS.items():
        if name in merged:
            _number(name, merged[name], low, high)
    if merged.get("lora_rank", 16) not in SERVABLE_RANKS:
        raise InvalidValue(f"lora_rank must be one of {SERVABLE_RANKS}.", param="hyperparameters.lora_rank")
    if merged.get("lr_scheduler", "cosine") not in SCHEDULERS:
        raise InvalidValue(f"lr_scheduler must be one of {SCHEDULERS}.", param="hyperparameters.lr_scheduler")
    if merged.get("train_on", "assistant") not in TRAIN_ON:
        raise InvalidValue(f"train_on must be one of {TRAIN_ON}.", param="hyperparameters.train_on")
    allowed = set(Hyperparameters().target_modules)
    if not set(merged.get("target_modules", allowed)) <= allowed:
        raise InvalidValue(f"target_modules must be among {sorted(allowed)}.", param="hyperparameters.target_modules")


def _number(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InvalidValue(f"{name} must be a number from {low:g} to {high:g}.", param=f"hyperparameters.{name}")
    return value
