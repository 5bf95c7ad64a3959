"""Names of methods and adapter settings in the API, shared by jobs and estimates."""

import msgspec

from apps.contracts.runs import Method, Objective
from apps.core.errors import InvalidValue
from apps.finetuning.recipes.limits import NOT_OFFERED


class LoraChoice(msgspec.Struct, forbid_unknown_fields=True):
    rank: int | None = None
    alpha: int | None = None
    dropout: float | None = None
    target_modules: tuple[str, ...] | None = None
    use_dora: bool | None = None
    use_rslora: bool | None = None


def parse_method(quantization: str | None, method: object = None) -> Method:
    """Return the training method: the recipe's `method` or the one implied by the quantization. Raises InvalidValue."""
    if quantization not in (None, "none", "nf4"):
        raise InvalidValue("quantization must be 'nf4' (QLoRA) or left out (LoRA).", param="quantization")
    if method is None:
        return Method.QLORA if quantization == "nf4" else Method.LORA
    _require_offered(method, param="recipe.method")
    if method not in list(Method):
        raise InvalidValue(f"method must be one of {', '.join(Method)}.", param="recipe.method")
    if quantization == "nf4" and method != Method.QLORA:
        text = f"quantization 'nf4' is QLoRA, and recipe.method is '{method}': leave one of them out."
        raise InvalidValue(text, param="quantization")
    return Method(str(method))


def parse_objective(kind: str | None) -> Objective | None:
    """Return the objective that `method.type` asks for; None if the rows decide. Raises InvalidValue."""
    if kind is None:
        return None
    _require_offered(kind, param="method.type")
    if kind not in list(Objective):
        offered = ", ".join(repr(objective.value) for objective in Objective)
        raise InvalidValue(f"method.type {kind!r} is not offered here: use {offered}.", param="method.type")
    return Objective(kind)


def _require_offered(name: object, *, param: str) -> None:
    if isinstance(name, str) and (reason := NOT_OFFERED.get(name.lower())):
        raise InvalidValue(reason, param=param)


def adapter_fields(lora: LoraChoice | None) -> dict[str, object]:
    """Return the recipe's fields that describe the adapter; None for those not requested."""
    chosen = lora or LoraChoice()
    return {
        "lora_rank": chosen.rank,
        "lora_alpha": chosen.alpha,
        "lora_dropout": chosen.dropout,
        "target_modules": chosen.target_modules,
        "use_dora": chosen.use_dora,
        "use_rslora": chosen.use_rslora,
    }
