"""Training plans: the settings of a job that memory and speed depend on."""

import math
from enum import StrEnum

import msgspec

from apps.contracts.hyperparameters import Method
from apps.estimates.errors import EstimateError

DEFAULT_TARGET_MODULES = ("all-linear",)


class Optimizer(StrEnum):
    """Names of transformers' `optim`. "adamw" is the fused or foreach AdamW: same state, different temporaries."""

    ADAMW = "adamw"
    ADAMW_FUSED = "adamw_fused"
    ADAMW_8BIT = "adamw_8bit"
    PAGED_ADAMW = "paged_adamw"
    PAGED_ADAMW_8BIT = "paged_adamw_8bit"
    ADAFACTOR = "adafactor"
    SGD = "sgd"


class Parallelism(StrEnum):
    """Ways for several GPUs to share one job. ZERO3 also stands for FSDP full shard: the arithmetic is the same."""

    SINGLE = "single"
    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"


# The common name of a method -> the method, use_dora, use_rslora.
_METHOD_NAMES = {
    "lora": (Method.LORA, False, False),
    "rslora": (Method.LORA, False, True),
    "dora": (Method.LORA, True, False),
    "qlora": (Method.QLORA, False, False),
    "qdora": (Method.QLORA, True, False),
    "full": (Method.FULL, False, False),
}


class NamedMethod(msgspec.Struct, frozen=True):
    method: str
    use_dora: bool
    use_rslora: bool


def parse_method(name: str) -> NamedMethod:
    """Parse "lora", "rslora", "dora", "qlora", "qdora" or "full". Raises EstimateError("method")."""
    found = _METHOD_NAMES.get(name.lower())
    if found is None:
        raise EstimateError("method", f"method {name!r} is not known; use one of {', '.join(_METHOD_NAMES)}")
    return NamedMethod(found[0].value, found[1], found[2])


class TrainingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one job.

    `max_length` is the padded length of the longest row, in tokens; all sizes are per GPU. One optimizer step trains
    micro_batch_size x gradient_accumulation_steps x gpu_count rows. `is_packed`: every micro-step is full; otherwise
    rows are padded to the longest of their micro-batch (or not at all, if single).
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
    use_dora: bool = False
    use_rslora: bool = False
    is_packed: bool = False
    gpu_count: int = 1
    parallelism: str = "single"
    copies: int = 1  # of a sharded model: several are equal, each is spread over as many GPUs (HSDP)
    quantization: str = "nf4"  # QLoRA's base: nf4, gptq_int4, gptq_int8 or int8
    attention: str = "flash"  # "flash" and SDPA grow with length, "eager" with its square
    trains_embeddings: bool = False  # LoRA with embedding and head in modules_to_save
    is_deepspeed: bool = False
    cpu_offload: bool = False  # weights, gradients and optimizer state stay in the host's memory (FSDP, ZeRO-3)
    splits_root: bool = False  # FSDP: embedding and head are units of their own, and not one that stays gathered
    is_compiled: bool = False  # torch.compile: norms and activations are recomputed, not saved
    steps_in_backward: bool = False  # each weight is stepped as its gradient is ready: one gradient at a time
    offloads_activations: bool = False  # saved activations wait in the host's memory
    is_preference: bool = False  # a row is a pair of answers: two sequences
    has_reference: bool = True  # of preferences: DPO compares with the original model

    @property
    def batch_size(self) -> int:
        return self.micro_batch_size * self.gradient_accumulation_steps * self.gpu_count

    @property
    def shards(self) -> int:
        """Return the number of GPUs that hold one sharded model together."""
        return self.gpu_count // self.copies

    @property
    def sequences(self) -> int:
        """Return the number of sequences of one micro-step on one GPU."""
        return self.micro_batch_size * (2 if self.is_preference else 1)

    @property
    def tokens_per_micro_step(self) -> int:
        return self.sequences * self.max_length


def divisors(number: int) -> tuple[int, ...]:
    """Return the micro-batch sizes that accumulate to exactly this batch, largest first."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}, reverse=True))
