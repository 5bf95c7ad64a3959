"""Fit a job onto one GPU: micro-batch, accumulation, checkpointing; and if it does not fit, what would."""

import msgspec

from apps.estimates.architectures import Architecture
from apps.estimates.gpus import GIB, Gpu
from apps.estimates.memory import MemoryEstimate, peak_memory
from apps.estimates.plans import DEFAULT_TARGET_MODULES, Method, TrainingPlan, divisors

# Recomputing every layer costs a third more arithmetic; it is worth it only when the batch would otherwise be cut into
# micro-steps so small that their fixed time dominates.
_ENOUGH_ROWS = 4
_ENOUGH_TOKENS = 4096
_LENGTH_STEP = 64  # suggested lengths are round numbers


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The plan chosen and its memory; when `fits` is false it is the smallest plan there is."""

    fits: bool
    plan: TrainingPlan
    memory: MemoryEstimate


class Fix(msgspec.Struct, frozen=True, kw_only=True):
    """One change that makes the job fit, and what it then costs. `key`: "micro_batch", "checkpointing", "method",
    "max_length", "gpu_count", "offload", "gpu" (another type) or "none" (nothing offered holds it)."""

    key: str
    text: str
    peak_bytes: int
    method: str | None = None
    max_length: int | None = None
    gpu_key: str | None = None
    gpu_count: int | None = None
    micro_batch_size: int | None = None
    cpu_offload: bool = False
    train_seconds_p50: float | None = None
    cost_nano_p50: int | None = None


def choose_plan(
    *,
    architecture: Architecture,
    method: str,
    gpu: Gpu,
    max_length: int,
    batch_size: int,
    lora_rank: int = 16,
    target_modules: tuple[str, ...] = DEFAULT_TARGET_MODULES,
) -> Placement:
    """The largest micro-batch that fits and accumulates to exactly `batch_size`, without checkpointing if it can."""
    base = TrainingPlan(
        method=method,
        max_length=max_length,
        lora_rank=lora_rank,
        target_modules=target_modules,
        compute_dtype=compute_dtype(gpu),
    )
    plain = _largest(architecture, base, gpu, batch_size, gradient_checkpointing=False)
    if plain.fits and _is_large_enough(plain.plan):
        return plain
    checkpointed = _largest(architecture, base, gpu, batch_size, gradient_checkpointing=True)
    return checkpointed if checkpointed.fits or not plain.fits else plain


def compute_dtype(gpu: Gpu) -> str:
    """bf16 where the GPU multiplies it, fp16 on older ones, fp32 on a CPU (as the trainer does)."""
    if gpu.is_cpu:
        return "float32"
    return "bfloat16" if gpu.bf16_flops else "float16"


def ways_to_fit(
    *, architecture: Architecture, plan: TrainingPlan, gpu: Gpu, other_gpus: tuple[Gpu, ...] = ()
) -> tuple[Fix, ...]:
    """Concrete changes that make a job fit, each enough by itself; a last resort says that none is."""
    fixes = (
        *_method_fixes(architecture, plan, gpu),
        *_length_fixes(architecture, plan, gpu),
        *_gpu_fixes(architecture, plan, other_gpus),
    )
    return fixes or _combined_fixes(architecture, plan, other_gpus)


def _largest(
    architecture: Architecture, base: TrainingPlan, gpu: Gpu, batch_size: int, *, gradient_checkpointing: bool
) -> Placement:
    placement = None
    for micro_batch_size in divisors(batch_size):
        plan = msgspec.structs.replace(
            base,
            micro_batch_size=micro_batch_size,
            gradient_accumulation_steps=batch_size // micro_batch_size,
            gradient_checkpointing=gradient_checkpointing,
        )
        placement = _place(architecture, plan, gpu)
        if placement.fits:
            return placement
    if placement is None:
        raise ValueError("batch_size must be at least 1")
    return placement


def _place(architecture: Architecture, plan: TrainingPlan, gpu: Gpu) -> Placement:
    memory = peak_memory(architecture=architecture, plan=plan, gpu=gpu)
    return Placement(fits=memory.peak_bytes <= gpu.memory_bytes, plan=plan, memory=memory)


def _is_large_enough(plan: TrainingPlan) -> bool:
    enough_rows = plan.micro_batch_size >= min(_ENOUGH_ROWS, plan.batch_size)
    return enough_rows or plan.tokens_per_micro_step >= _ENOUGH_TOKENS


def _smallest(plan: TrainingPlan, **changes: object) -> TrainingPlan:
    """The same batch in single rows with checkpointing: the least memory this job can take."""
    least = {
        "micro_batch_size": 1,
        "gradient_accumulation_steps": plan.batch_size,
        "gradient_checkpointing": True,
    }
    return msgspec.structs.replace(plan, **(least | changes))


def _method_fixes(architecture: Architecture, plan: TrainingPlan, gpu: Gpu) -> tuple[Fix, ...]:
    lighter = {Method.FULL: (Method.LORA, Method.QLORA), Method.LORA: (Method.QLORA,)}.get(Method(plan.method), ())
    for method in lighter:
        placement = _place(architecture, _smallest(plan, method=method.value), gpu)
        if placement.fits:
            peak = placement.memory.peak_bytes
            name = {"lora": "LoRA", "qlora": "QLoRA"}[method.value]
            text = f"Use {name}: it needs {_gib(peak)} of {gpu.name}'s {_gib(gpu.memory_bytes)}."
            return (Fix(key="method", text=text, peak_bytes=peak, method=method.value),)
    return ()


def _length_fixes(architecture: Architecture, plan: TrainingPlan, gpu: Gpu) -> tuple[Fix, ...]:
    """The longest round length that fits, found by halving: memory never falls with length."""
    fitting, too_long = 0, -(-plan.max_length // _LENGTH_STEP)
    while too_long - fitting > 1:
        middle = (fitting + too_long) // 2
        shorter = _smallest(plan, max_length=middle * _LENGTH_STEP)
        fitting, too_long = (middle, too_long) if _place(architecture, shorter, gpu).fits else (fitting, middle)
    if fitting == 0:
        return ()
    length = fitting * _LENGTH_STEP
    peak = _place(architecture, _smallest(plan, max_length=length), gpu).memory.peak_bytes
    text = f"Set max_length to {length:,} tokens or fewer: that needs {_gib(peak)}."
    return (Fix(key="max_length", text=text, peak_bytes=peak, max_length=length),)


def _gpu_fixes(architecture: Architecture, plan: TrainingPlan, other_gpus: tuple[Gpu, ...]) -> tuple[Fix, ...]:
    """The smallest other GPU type that holds the job as asked."""
    for gpu in sorted(other_gpus, key=lambda gpu: gpu.memory_bytes):
        placement = _place(architecture, _smallest(plan, compute_dtype=compute_dtype(gpu)), gpu)
        if placement.fits:
            peak = placement.memory.peak_bytes
            text = f"Use {gpu.name}: the job needs {_gib(peak)} and it holds {_gib(gpu.memory_bytes)}."
            return (Fix(key="gpu", text=text, peak_bytes=peak, gpu_key=gpu.key),)
    return ()


def _combined_fixes(architecture: Architecture, plan: TrainingPlan, other_gpus: tuple[Gpu, ...]) -> tuple[Fix, ...]:
    """When no single change is enough: QLoRA on a larger type, or the truth that one GPU cannot hold it."""
    quantized = _smallest(plan, method=Method.QLORA.value)
    for fix in _gpu_fixes(architecture, quantized, other_gpus):
        return (msgspec.structs.replace(fix, text=f"Use QLoRA on a larger type. {fix.text}", method=quantized.method),)
    gpus = sorted(other_gpus, key=lambda gpu: gpu.memory_bytes)
    if gpus:
        for fix in _length_fixes(architecture, quantized, gpus[-1]):
            text = f"Use QLoRA on {gpus[-1].name} with max_length {fix.max_length:,} or fewer: {_gib(fix.peak_bytes)}."
            return (msgspec.structs.replace(fix, text=text, method=quantized.method, gpu_key=gpus[-1].key),)
    peak = _place(architecture, quantized, gpus[-1]).memory.peak_bytes if gpus else 0
    text = (
        f"No single GPU offered holds this job: even QLoRA with one row at a time needs {_gib(peak)}." if gpus else ""
    )
    text = text or "Choose a smaller base model."
    return (Fix(key="none", text=text, peak_bytes=peak),)


def _gib(amount: int) -> str:
    return f"{amount / GIB:,.1f} GiB"
