"""How one job is run on one GPU: the settings that memory and speed depend on."""

import math
from enum import StrEnum

import msgspec

DEFAULT_TARGET_MODULES = ("all-linear",)


class Method(StrEnum):
    LORA = "lora"
    QLORA = "qlora"
    FULL = "full"


class TrainingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """`max_length` is the padded length of the longest micro-batch, in tokens.

    `loss`: "tiled" is TRL >= 1's fused head, which never holds a whole row of logits; "stock" is transformers' own
    loss, which upcasts all logits. `attention`: "sdpa" (linear in length) or "eager" (quadratic).
    """

    method: str
    max_length: int
    lora_rank: int = 16
    target_modules: tuple[str, ...] = DEFAULT_TARGET_MODULES
    micro_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    gradient_checkpointing: bool = True
    optimizer: str = "adamw"
    compute_dtype: str = "bfloat16"
    lora_dropout: float = 0.05
    attention: str = "sdpa"
    loss: str = "tiled"
    double_quantization: bool = True
    upcast_non_quantized: bool = False
    master_weights: bool = True  # full fine-tuning: fp32 weights and moments beside the 16-bit ones

    @property
    def batch_size(self) -> int:
        return self.micro_batch_size * self.gradient_accumulation_steps

    @property
    def tokens_per_micro_step(self) -> int:
        return self.micro_batch_size * self.max_length


def divisors(number: int) -> tuple[int, ...]:
    """The micro-batch sizes that accumulate to exactly this batch, largest first."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}, reverse=True))
