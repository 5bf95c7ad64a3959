"""Peak memory of a training job on one GPU: the largest of four moments, each the sum of named parts.

Loading; computing the loss (every saved activation alive, plus the logits); the backward pass (checkpoints, one
layer's recomputed activations and their gradients); the optimizer step. The parts returned are those of the peak
moment, so they always add up to it.
"""

import msgspec

from apps.estimates.architectures import (
    Architecture,
    head_parameter_count,
    linear_layers,
    linear_parameter_count,
    lora_parameter_count,
    other_parameter_count,
    parameter_count,
    target_layers,
)
from apps.estimates.gpus import GIB, MIB, Gpu
from apps.estimates.plans import Method, TrainingPlan
from apps.estimates.stacks import ANNEAL

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# NF4: 4 bits a weight, and one scale per block of 64 weights: fp32, or with double quantisation uint8 plus one fp32
# per 256 scales (QLoRA, arXiv 2305.14314, section 3; bitsandbytes blocksize=64).
_NF4_BYTES = 0.5 + 4 / 64
_NF4_DOUBLE_QUANT_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)

# Adam keeps two moments per trained parameter; 8-bit Adam one byte each plus one fp32 scale per 256
# (bitsandbytes blockwise quantisation, blocksize=256).
_ADAM_MOMENTS = 2
_ADAM_8BIT_BYTES = _ADAM_MOMENTS * (1 + 4 / 256)
_FP32_MASTER_BYTES = 4  # full fine-tuning keeps fp32 weights beside the bf16 ones (mixed precision, 16 bytes in all)

# One torch process on a GPU before any tensor: CUDA context and kernels 0.5-2 GiB by driver and GPU (gpus.json _about;
# the lower half is seen on single-GPU jobs), and cuBLAS's workspace, 32 MiB on Hopper (PyTorch CUDA semantics notes).
_CUDA_CONTEXT_BYTES = 1 * GIB + 32 * MIB
# Resident set after importing torch, transformers, peft, trl and bitsandbytes on a CPU machine: measured 575,276 kB
# (torch 2.13, transformers 5.19, trl 1.16); rounded up for the data loader and the tokenizer.
_CPU_PROCESS_BYTES = 640 * MIB

# Memory that the caching allocator reserves beyond what is alive: blocks are rounded up to 2 MiB and batches of varying
# length fragment them. 10 % of what each micro-step allocates and frees; tests/bench/estimate_error.py compares the sum
# with published *reserved* peaks.
_ALLOCATOR_SHARE = 0.10
# glibc keeps most of what a training step frees: the peak resident set of four LoRA jobs (42 M and 67 M parameters,
# 512 to 2,048 tokens a micro-step, fp32, with and without checkpointing) was 1.44 to 1.88 times what was alive.
_CPU_ALLOCATOR_SHARE = 0.75

# LoRA's dropout saves a byte mask on a GPU (native_dropout); on a CPU the mask has the type of its input.
_GPU_DROPOUT_MASK_BYTES = 1

# TRL 1.16 scores hidden states in tiles of this many tokens by this many vocabulary entries
# (trl/kernels/chunked_logprob.py TOKEN_CHUNK_SIZE, trl/trainer/utils.py _CHUNKED_LOGPROB_CHUNK_SIZE).
_TILE_TOKENS = 4096
_TILE_VOCABULARY = 32768
# Without Triton (CPU) torch operators fold the tile: y, z, log p, p, the gradient and three temporaries are alive at
# once in fp32, and one boolean mask (trl/kernels/chunked_logprob.py _backward_tile).
_TORCH_TILE_BYTES = 8 * 4 + 1

# Eager attention keeps softmax in fp32 and its bf16 copy for the backward pass (transformers eager_attention_forward).
_EAGER_BYTES_PER_SCORE = 4 + 2
# A padded batch needs a mask of length x length per row: boolean, and expanded to bf16 by the kernel.
_MASK_BYTES_PER_SCORE = 1 + 2


class MemoryPart(msgspec.Struct, frozen=True):
    key: str
    label: str
    bytes: int


class MemoryEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """`parts` are what is alive at the peak and sum to `peak_bytes`; `phase` names that moment."""

    peak_bytes: int
    phase: str
    parts: tuple[MemoryPart, ...]
    phase_bytes: dict[str, int]


LABELS = {
    "weights": "Base model weights",
    "adapter": "Adapter weights",
    "gradients": "Gradients",
    "optimizer": "Optimizer state",
    "activations": "Activations",
    "logits": "Logits and loss",
    "dequantization": "Dequantisation workspace",
    "allocator": "Allocator reserve",
    "framework": "Framework and CUDA",
}


def peak_memory(*, architecture: Architecture, plan: TrainingPlan, gpu: Gpu) -> MemoryEstimate:
    """Predict the most memory one GPU holds at any moment of this job, and what it is made of."""
    phases = _phases(architecture, plan, gpu)
    totals = {phase: sum(parts.values()) for phase, parts in phases.items()}
    peak = max(totals, key=lambda phase: totals[phase])
    parts = tuple(MemoryPart(key, label, phases[peak].get(key, 0)) for key, label in LABELS.items())
    return MemoryEstimate(peak_bytes=totals[peak], phase=peak, parts=parts, phase_bytes=totals)


def weight_bytes(*, architecture: Architecture, plan: TrainingPlan) -> int:
    """Base model weights as this method stores them."""
    width = DTYPE_BYTES[plan.compute_dtype]
    if plan.method != Method.QLORA:
        return parameter_count(architecture) * width
    per_weight = _NF4_DOUBLE_QUANT_BYTES if ANNEAL.double_quantization else _NF4_BYTES
    other_width = 4 if ANNEAL.upcasts_unquantized else width
    quantized = round(linear_parameter_count(architecture) * per_weight)
    return quantized + other_parameter_count(architecture) * other_width


def trained_parameter_count(*, architecture: Architecture, plan: TrainingPlan) -> int:
    """Parameters that get gradients."""
    if plan.method == Method.FULL:
        return parameter_count(architecture)
    return lora_parameter_count(architecture, rank=plan.lora_rank, target_modules=plan.target_modules)


def _phases(architecture: Architecture, plan: TrainingPlan, gpu: Gpu) -> dict[str, dict[str, int]]:
    resident = _resident(architecture, plan, gpu)
    trained = resident | _training_state(architecture, plan)
    saved, working = _activations(architecture, plan, gpu)
    workspace = {"dequantization": _dequantization_bytes(architecture, plan)}
    loss = trained | {"activations": saved, "logits": _loss_bytes(architecture, plan, gpu)}
    backward = trained | workspace | {"activations": saved + working, "logits": _kept_logits_bytes(architecture, plan)}
    return {
        "load": resident | {"dequantization": _load_bytes(architecture, plan)},
        "loss": _with_reserve(loss, gpu),
        "backward": _with_reserve(backward, gpu),
        "optimizer_step": trained,
    }


def _resident(architecture: Architecture, plan: TrainingPlan, gpu: Gpu) -> dict[str, int]:
    framework = _CPU_PROCESS_BYTES if gpu.is_cpu else _CUDA_CONTEXT_BYTES
    return {"weights": weight_bytes(architecture=architecture, plan=plan), "framework": framework}


def _training_state(architecture: Architecture, plan: TrainingPlan) -> dict[str, int]:
    trained = trained_parameter_count(architecture=architecture, plan=plan)
    if plan.method == Method.FULL:
        width = DTYPE_BYTES[plan.compute_dtype]
        has_master = ANNEAL.master_weights and width < _FP32_MASTER_BYTES
        state = _FP32_MASTER_BYTES + _moment_bytes(plan, 4) if has_master else _moment_bytes(plan, width)
        return {"gradients": trained * width, "optimizer": round(trained * state)}
    # PEFT keeps adapters of a 16-bit base in fp32 (autocast_adapter_dtype); TRL casts those of a 4-bit base to bf16.
    width = 2 if plan.method == Method.QLORA and plan.compute_dtype != "float32" else 4
    optimizer = round(trained * _moment_bytes(plan, width))
    return {"adapter": trained * width, "gradients": trained * width, "optimizer": optimizer}


def _moment_bytes(plan: TrainingPlan, width: int) -> float:
    return _ADAM_8BIT_BYTES if "8bit" in plan.optimizer else _ADAM_MOMENTS * width


def _load_bytes(architecture: Architecture, plan: TrainingPlan) -> int:
    """While loading, the largest tensor exists twice: as read and as placed (quantised, for QLoRA)."""
    largest = max(head_parameter_count(architecture), max(layer.weights for layer in linear_layers(architecture)))
    return largest * DTYPE_BYTES[plan.compute_dtype]


def _dequantization_bytes(architecture: Architecture, plan: TrainingPlan) -> int:
    """bitsandbytes turns one weight matrix at a time back to the compute type for its matrix product."""
    if plan.method != Method.QLORA:
        return 0
    return max(layer.weights for layer in linear_layers(architecture)) * DTYPE_BYTES[plan.compute_dtype]


def _activations(architecture: Architecture, plan: TrainingPlan, gpu: Gpu) -> tuple[int, int]:
    """Bytes saved by the forward pass of all layers, and those one layer adds in the backward pass."""
    rows, tokens, width = plan.micro_batch_size, plan.tokens_per_micro_step, DTYPE_BYTES[plan.compute_dtype]
    layer = tokens * _layer_bytes_per_token(architecture, plan, gpu) + rows * _layer_bytes_per_row(architecture, plan)
    gradients = tokens * width * (2 * architecture.hidden_size + 3 * _mlp_width(architecture))
    mask = 0 if rows == 1 else rows * plan.max_length**2 * _MASK_BYTES_PER_SCORE
    if plan.gradient_checkpointing:
        checkpoints = tokens * architecture.n_layers * architecture.hidden_size * width
        return round(checkpoints + mask), round(layer + gradients)
    return round(architecture.n_layers * layer + mask), round(gradients)


def _layer_bytes_per_token(architecture: Architecture, plan: TrainingPlan, gpu: Gpu) -> float:
    """What autograd keeps of one layer, operator by operator, as transformers' modelling code runs it."""
    width = DTYPE_BYTES[plan.compute_dtype]
    norms = architecture.norms_per_layer * 4 * architecture.hidden_size  # RMSNorm works on an fp32 copy
    # Query, key and value (repeated to the number of query heads under a padding mask) and attention's output.
    attention = 4 * width * architecture.query_size
    mlp = (3 if architecture.mlp_gated else 2) * width * _mlp_width(architecture)
    return norms + attention + mlp + _saved_input_bytes_per_token(architecture, plan, gpu)


def _saved_input_bytes_per_token(architecture: Architecture, plan: TrainingPlan, gpu: Gpu) -> float:
    width = DTYPE_BYTES[plan.compute_dtype]
    if plan.method == Method.FULL:  # inputs of the two blocks and of the down projection; shared by their layers
        return width * (2 * architecture.hidden_size + _mlp_width(architecture))
    # Each adapted layer keeps its own dropped-out input and dropout's mask, and A's output of `rank` values.
    mask = (width if gpu.is_cpu else _GPU_DROPOUT_MASK_BYTES) if plan.lora_dropout > 0 else 0
    per_value = width + mask
    layers = target_layers(architecture, plan.target_modules)
    active = sum(layer.active_copies * (layer.in_features * per_value + plan.lora_rank * width) for layer in layers)
    return active / architecture.n_layers


def _layer_bytes_per_row(architecture: Architecture, plan: TrainingPlan) -> int:
    if ANNEAL.attention != "eager":
        return 0
    return architecture.n_heads * plan.max_length**2 * _EAGER_BYTES_PER_SCORE


def _mlp_width(architecture: Architecture) -> int:
    """Intermediate values per token and layer, over all experts that the token visits."""
    if not architecture.n_experts:
        return architecture.intermediate_size
    experts = (architecture.experts_per_token or 0) * (architecture.moe_intermediate_size or 0)
    return max(
        experts + architecture.shared_expert_intermediate_size,
        architecture.intermediate_size if architecture.n_dense_layers else 0,
    )


def _loss_bytes(architecture: Architecture, plan: TrainingPlan, gpu: Gpu) -> int:
    tokens, width = plan.tokens_per_micro_step, DTYPE_BYTES[plan.compute_dtype]
    head_gradient = (
        head_parameter_count(architecture) * 4 if plan.method == Method.FULL and ANNEAL.loss == "tiled" else 0
    )
    if ANNEAL.loss == "tiled":
        tile = min(tokens, _TILE_TOKENS) * min(architecture.vocab_size, _TILE_VOCABULARY)
        per_value = width + (_TORCH_TILE_BYTES if gpu.is_cpu else 0)
        hidden = tokens * architecture.hidden_size * (width + 4)  # selected positions, and their gradient in fp32
        return tile * per_value + hidden + head_gradient
    # Logits, their fp32 copy's log-softmax, and two fp32 gradients of it (nll_loss and log_softmax backward).
    return tokens * architecture.vocab_size * (width + 4 + 4 + 4)


def _kept_logits_bytes(architecture: Architecture, plan: TrainingPlan) -> int:
    """The stock loss returns its logits, which stay alive through the backward pass."""
    if ANNEAL.loss == "tiled":
        return 0
    return plan.tokens_per_micro_step * architecture.vocab_size * DTYPE_BYTES[plan.compute_dtype]


def _with_reserve(parts: dict[str, int], gpu: Gpu) -> dict[str, int]:
    varying = sum(parts.get(key, 0) for key in ("activations", "logits", "dequantization"))
    share = _CPU_ALLOCATOR_SHARE if gpu.is_cpu else _ALLOCATOR_SHARE
    return parts | {"allocator": round(varying * share)}
