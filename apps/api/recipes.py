"""How programs name a method and an adapter, in jobs and in estimates alike."""

from typing import Any

import msgspec

from apps.contracts.runs import Method
from apps.core.errors import InvalidValue


class LoraChoice(msgspec.Struct, forbid_unknown_fields=True):
    rank: int | None = None
    alpha: int | None = None
    dropout: float | None = None
    target_modules: tuple[str, ...] | None = None


def parse_method(quantization: str | None) -> Method:
    """Return the method that a quantization stands for. Raises InvalidValue."""
    if quantization not in (None, "none", "nf4"):
        raise InvalidValue("quantization must be 'nf4' (QLoRA) or left out (LoRA).", param="quantization")
    return Method.QLORA if quantization == "nf4" else Method.LORA


def adapter_fields(lora: LoraChoice | None) -> dict[str, Any]:
    """Return the recipe's fields that describe the adapter; None where nothing was asked."""
    chosen = lora or LoraChoice()
    return {
        "lora_rank": chosen.rank,
        "lora_alpha": chosen.alpha,
        "lora_dropout": chosen.dropout,
        "target_modules": chosen.target_modules,
    }
