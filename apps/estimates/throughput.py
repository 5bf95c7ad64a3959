"""Tokens per second of a job, scaled by arithmetic from a measured row; without a measurement there is no figure.

A micro-step takes a fixed time plus its floating-point operations divided by a rate. The rate comes from the probe
row, the operations from the shapes of both models: 4P a token for adapters, 6P for full training, 2P more with
gradient checkpointing, plus attention and the output head (P counts the weights a token passes through).
"""

import hashlib

import msgspec

from apps.estimates.architectures import (
    Architecture,
    active_linear_parameter_count,
    head_parameter_count,
    target_layers,
)
from apps.estimates.gpus import Gpu
from apps.estimates.plans import DEFAULT_TARGET_MODULES, Method, TrainingPlan

# One matrix product of n weights costs 2n operations a token: one multiplication and one addition each.
_FORWARD = 2.0
# Gradient of the input costs as much as the forward pass, that of the weights the same again.
_INPUT_GRADIENT = 2.0
_WEIGHT_GRADIENT = 2.0
# FlashAttention's backward pass does 5 matrix products for the forward's 2 (arXiv 2205.14135, appendix B.5).
_ATTENTION_BACKWARD = 2.5
# Whatever a probe row says of fixed time, at least this share of its micro-step was arithmetic.
_LEAST_ARITHMETIC_SHARE = 0.1


class SpeedSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where a speed comes from, to be shown beside it. `kind` is "probe", "published" or "none"."""

    kind: str
    text: str
    url: str | None = None
    measured_at: str | None = None


class ProbeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One measured training speed: by a pool's own probe, or published by someone else with a URL.

    `tokens_per_second` counts real tokens of the whole micro-step, `tokens_per_micro_step` those in one.
    `fixed_seconds_per_micro_step` is the part of its time that does not grow with tokens, when measured.
    """

    gpu_key: str
    architecture: Architecture
    method: str
    tokens_per_second: float
    tokens_per_micro_step: int
    sequence_length: int
    source: SpeedSource
    tokens_per_second_low: float | None = None
    tokens_per_second_high: float | None = None
    lora_rank: int = 16
    target_modules: tuple[str, ...] = DEFAULT_TARGET_MODULES
    gradient_checkpointing: bool = False
    fixed_seconds_per_micro_step: float = 0.0
    gpu_count: int = 1
    conditions: str = ""


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted speed of one GPU, fixed time included, and the row it was scaled from."""

    tokens_per_second: float
    flops_per_token: float
    probe_flops_per_token: float
    tokens_per_micro_step: float
    fixed_seconds_per_micro_step: float
    source: SpeedSource


class Unmeasured(msgspec.Struct, frozen=True):
    """Nobody measured this GPU: a quote says so instead of naming a time."""

    reason: str


def tokens_per_second(
    *, architecture: Architecture, plan: TrainingPlan, gpu: Gpu, probe: ProbeRow | None, mean_row_tokens: float = 0.0
) -> Throughput | Unmeasured:
    """Scale the probe's speed to this job. `mean_row_tokens` is the mean real length of a row (default: full rows)."""
    if probe is None:
        return Unmeasured(f"no measurement for {gpu.name} yet")
    if probe.gpu_key != gpu.key:
        raise ValueError(f"a probe of {probe.gpu_key} says nothing about {gpu.key}")
    row_tokens = min(mean_row_tokens or plan.max_length, plan.max_length)
    flops = plan_flops_per_token(architecture=architecture, plan=plan, row_tokens=row_tokens)
    probe_flops = probe_flops_per_token(probe)
    rate, probe_fixed = _probe_rate(probe, probe_flops)
    # Fixed time is launches and dequantisations, so it grows with the number of layers.
    fixed = probe_fixed * architecture.n_layers / probe.architecture.n_layers
    tokens = row_tokens * plan.micro_batch_size
    return Throughput(
        tokens_per_second=tokens / (fixed + tokens * flops / rate),
        flops_per_token=flops,
        probe_flops_per_token=probe_flops,
        tokens_per_micro_step=tokens,
        fixed_seconds_per_micro_step=fixed,
        source=probe.source,
    )


def plan_flops_per_token(*, architecture: Architecture, plan: TrainingPlan, row_tokens: float) -> float:
    """Floating-point operations one trained token costs under this plan."""
    return training_flops_per_token(
        architecture=architecture,
        method=plan.method,
        lora_rank=plan.lora_rank,
        target_modules=plan.target_modules,
        gradient_checkpointing=plan.gradient_checkpointing,
        row_tokens=row_tokens,
    )


def probe_flops_per_token(probe: ProbeRow) -> float:
    """Floating-point operations one token of the probe's own loop cost."""
    return training_flops_per_token(
        architecture=probe.architecture,
        method=probe.method,
        lora_rank=probe.lora_rank,
        target_modules=probe.target_modules,
        gradient_checkpointing=probe.gradient_checkpointing,
        row_tokens=probe.sequence_length,
    )


def training_flops_per_token(
    *,
    architecture: Architecture,
    method: str,
    lora_rank: int,
    target_modules: tuple[str, ...],
    gradient_checkpointing: bool,
    row_tokens: float,
) -> float:
    """Operations per token: 4P (adapters) or 6P (full), +2P with checkpointing, plus attention, head and adapter."""
    passes = _FORWARD * (2 if gradient_checkpointing else 1) + _INPUT_GRADIENT
    blocks = active_linear_parameter_count(architecture)
    head = head_parameter_count(architecture) * (_FORWARD + _INPUT_GRADIENT)  # outside the checkpointed blocks
    attention = _attention_flops(architecture, row_tokens)
    attention *= _ATTENTION_BACKWARD + (2 if gradient_checkpointing else 1)
    if method == Method.FULL:
        full_head = head + head_parameter_count(architecture) * _WEIGHT_GRADIENT
        return blocks * (passes + _WEIGHT_GRADIENT) + full_head + attention
    adapter = _active_adapter_parameters(architecture, lora_rank, target_modules)
    return blocks * passes + head + attention + adapter * (passes + _WEIGHT_GRADIENT)


def architecture_hash(architecture: Architecture) -> str:
    """A short stable name for a shape, to tell whether two measurements are of the same one."""
    return hashlib.sha256(msgspec.json.encode(architecture)).hexdigest()[:16]


def _attention_flops(architecture: Architecture, row_tokens: float) -> float:
    """Forward scores and weighted sum: 2 products over half the row (causal), for each layer and head."""
    return 2 * 2 * (row_tokens / 2) * architecture.query_size * architecture.n_layers


def _active_adapter_parameters(architecture: Architecture, rank: int, target_modules: tuple[str, ...]) -> int:
    layers = target_layers(architecture, target_modules)
    return sum(rank * (layer.in_features + layer.out_features) * layer.active_copies for layer in layers)


def _probe_rate(probe: ProbeRow, flops_per_token: float) -> tuple[float, float]:
    """Operations per second of the probe's arithmetic, and its fixed seconds per micro-step."""
    seconds = probe.tokens_per_micro_step / probe.tokens_per_second
    fixed = min(probe.fixed_seconds_per_micro_step, seconds * (1 - _LEAST_ARITHMETIC_SHARE))
    return probe.tokens_per_micro_step * flops_per_token / (seconds - fixed), fixed
