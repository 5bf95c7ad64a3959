"""The capabilities of this machine, and the training setup that fits them: precision, attention, kernels, optimizer.

Each choice has its reason in one sentence, which the run reports to its owner.
"""

import importlib.util
from enum import StrEnum

import torch

from apps.contracts.hyperparameters import Hyperparameters, Method
from apps.contracts.runs import Struct
from gpu_workers.trainer.children.cpu_threads import count_cores

FLASH_CAPABILITY = (8, 0)  # FlashAttention 2 needs Ampere
_COMPILE_PAYS_STEPS = 1_000  # compiling takes a minute or two, which this many steps save


class Attention(StrEnum):
    """The attention that a model needs (`attention.attention_of` reads it)."""

    PLAIN = "plain"  # softmax of the products, over all earlier tokens or a window of them
    CAPPED = "capped"  # scores limited by a soft cap, as in Gemma 2: flash_attn supports it, torch's kernels do not
    OWN = "own"  # sinks, chunks or states that only the model's code computes


class Hardware(Struct, frozen=True, kw_only=True):
    """The machine's hardware. `capability` is CUDA's compute capability, None without a GPU."""

    name: str
    capability: tuple[int, int] | None = None
    has_bf16: bool = False
    has_flash_attention: bool = False
    has_liger: bool = False
    has_triton: bool = False
    threads: int = 0  # CPU threads that torch computes with
    cores: int = 0

    @property
    def is_gpu(self) -> bool:
        return self.capability is not None

    @property
    def can_keep_rows_apart(self) -> bool:
        """Return whether an attention kernel accepts the borders of packed rows: FlashAttention, its own or torch's."""
        return self.capability is not None and self.capability >= FLASH_CAPABILITY


class Engine(Struct, frozen=True, kw_only=True):
    """The training setup here. `autocast` is "bf16", "fp16" or None; `reasons` go to the run's log."""

    is_gpu: bool
    dtype: str
    autocast: str | None
    is_packing: bool
    uses_flash_attention: bool
    uses_own_attention: bool
    uses_liger: bool
    is_compiled: bool
    optimizer: str
    reasons: tuple[str, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


def detect() -> Hardware:
    """Return the hardware that torch and the installed packages detect."""
    if not torch.cuda.is_available():
        has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return Hardware(name="the CPU", has_bf16=has_bf16, threads=torch.get_num_threads(), cores=count_cores())
    return Hardware(
        name=torch.cuda.get_device_name(),
        capability=torch.cuda.get_device_capability(),
        has_bf16=torch.cuda.is_bf16_supported(including_emulation=False),
        has_flash_attention=_is_installed("flash_attn"),
        has_liger=_is_installed("liger_kernel"),
        has_triton=_is_installed("triton"),
    )


def choose_engine(
    hardware: Hardware, recipe: Hyperparameters, *, steps: int = 0, attention: Attention = Attention.PLAIN
) -> Engine:
    """Return the fastest engine that the hardware supports for this recipe and model."""
    dtype, autocast, precision = _precision(hardware, recipe)
    flash, why_attention = _attention(hardware, dtype, attention)
    is_own = attention is not Attention.PLAIN and not flash
    is_packing, packing = _packing(hardware, recipe, is_own=is_own)
    is_compiled, compiling = _compiling(hardware, recipe, is_packing=is_packing, steps=steps)
    liger = (
        "Kernels: Liger for norms, rotary embedding and activations."
        if hardware.has_liger
        else "Kernels: the model's own; Liger is not installed."
        if hardware.is_gpu
        else "Kernels: LoRA layers as single products, and the head only where a token is trained."
    )
    return Engine(
        is_gpu=hardware.is_gpu,
        dtype=dtype,
        autocast=autocast,
        is_packing=is_packing,
        uses_flash_attention=flash,
        uses_own_attention=is_own,
        uses_liger=hardware.has_liger,
        is_compiled=is_compiled,
        optimizer="adamw_torch_fused",
        reasons=(
            precision,
            packing,
            why_attention,
            liger,
            compiling,
            "Optimizer: AdamW, fused: one kernel a step.",
            *_threads(hardware),
        ),
    )


def _threads(hardware: Hardware) -> list[str]:
    if hardware.is_gpu:
        return []
    left = hardware.cores - hardware.threads
    kept = f"{left} left to other programs" if left > 0 else "no core left to other programs"
    return [f"Threads: {hardware.threads} of {hardware.cores} cores, {kept}."]


def _precision(hardware: Hardware, recipe: Hyperparameters) -> tuple[str, str | None, str]:
    is_full = recipe.method is Method.FULL
    if is_full and not hardware.is_gpu:
        return "float32", None, "Precision: float32, because every weight is trained and small updates must not vanish."
    if hardware.has_bf16:
        kept = "weights in float32, products in bfloat16" if is_full else "bfloat16, the adapter in float32"
        autocast = "bf16" if hardware.is_gpu else None
        return "float32" if is_full else "bfloat16", autocast, f"Precision: {kept}, which {hardware.name} multiplies."
    if hardware.is_gpu:
        reason = f"Precision: float16 with scaled gradients, because {hardware.name} has no bfloat16."
        return "float32" if is_full else "float16", "fp16", reason
    return "float32", None, f"Precision: float32, because {hardware.name} multiplies nothing shorter."


def _attention(hardware: Hardware, dtype: str, attention: Attention) -> tuple[bool, str]:
    flash, why = _flash_attention(hardware, dtype)
    if attention is Attention.OWN:
        return False, "Attention: the model's own code; no fused kernel computes it."
    if attention is Attention.CAPPED and not flash:
        return False, "Attention: the model's own code; torch's kernels have no soft cap, and flash_attn is not used."
    return flash, why


def _flash_attention(hardware: Hardware, dtype: str) -> tuple[bool, str]:
    if not hardware.is_gpu:
        return False, "Attention: torch's own product, in float32; the CPU has no fast 16-bit backward."
    if not hardware.has_flash_attention:
        return False, "Attention: torch's own fused kernels; flash_attn is not installed."
    if not hardware.can_keep_rows_apart:
        return False, f"Attention: torch's own fused kernels; flash_attn needs a newer GPU than {hardware.name}."
    if dtype == "float32":
        return False, "Attention: torch's own fused kernels; flash_attn takes no weights in float32."
    return True, "Attention: the flash_attn package."


def _packing(hardware: Hardware, recipe: Hyperparameters, *, is_own: bool) -> tuple[bool, str]:
    if recipe.objective.is_preference:
        return False, "Batches: pairs of similar length; preferences are compared row by row."
    if recipe.packing is False:
        return False, "Batches: rows of similar length, padded; packing was turned off."
    if is_own:
        return False, "Batches: rows of similar length, padded; the model's own attention takes no packed rows."
    if hardware.can_keep_rows_apart:
        return True, "Batches: rows at random, packed without padding; FlashAttention keeps them apart."
    if not hardware.is_gpu:
        return True, "Batches: rows at random, packed without padding; attention goes row by row."
    if recipe.packing:
        return True, "Batches: rows at random, packed without padding, as asked; attention goes row by row."
    return False, f"Batches: rows of similar length, padded; {hardware.name} has no attention for packed rows."


def _compiling(hardware: Hardware, recipe: Hyperparameters, *, is_packing: bool, steps: int) -> tuple[bool, str]:
    if not (hardware.is_gpu and hardware.has_triton):
        return False, f"torch.compile: off; {hardware.name} has no Triton."
    if recipe.method is Method.QLORA or is_packing or recipe.gradient_checkpointing:
        return False, "torch.compile: off; 4-bit weights, packed rows and checkpointing break its graphs."
    if steps < _COMPILE_PAYS_STEPS:
        return False, f"torch.compile: off; it pays from {_COMPILE_PAYS_STEPS:,} steps, this run has {steps:,}."
    return True, f"torch.compile: on, for {steps:,} steps."


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
