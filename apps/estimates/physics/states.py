"""Memory that a job keeps from step to step.

It consists of the stored weights, adapters, gradients and optimizer state, divided among GPUs, partly in the host's
memory.
"""

import msgspec

from apps.contracts.hyperparameters import Method
from apps.estimates.models.architectures import target_layers
from apps.estimates.models.shapes import Shape
from apps.estimates.physics.gpus import GIB, MIB
from apps.estimates.physics.plans import Parallelism, TrainingPlan
from apps.estimates.physics.stacks import ANNEAL, StackProfile

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Bytes of a quantised weight. NF4: 4 bits and one scale per block of 64: fp32, or with double quantisation uint8 plus
# one fp32 per 256 scales (QLoRA, arXiv 2305.14314, section 3; bitsandbytes blocksize=64). GPTQ: groups of 128 with an
# fp16 scale and a zero point of the weights' width (AutoGPTQ group_size=128).
_WEIGHT_BYTES = {
    "nf4": 0.5 + 4 / 64,
    "nf4_double": 0.5 + 1 / 64 + 4 / (64 * 256),
    "gptq_int4": 0.5 + (2 + 0.5) / 128,
    "gptq_int8": 1 + (2 + 1) / 128,
    "int8": 1.0,
}
# bitsandbytes blockwise 8-bit Adam: one byte for each moment and one fp32 scale per 256 values.
_MOMENT_BYTES_8BIT = 1 + 4 / 256
# Adafactor stores row and column sums instead of the second moment: below a thousandth of the weights for any matrix of
# LLM size (arXiv 1804.04235), counted as 1 %.
_ADAFACTOR_BYTES = 0.04
_FP32 = 4
# Resident set after importing torch, transformers, peft, trl and bitsandbytes on a CPU machine: measured 575,276 kB
# (torch 2.13, transformers 5.19, trl 1.16); rounded up for the data loader and the tokenizer.
CPU_PROCESS_BYTES = 640 * MIB
GPU_PROCESS_BYTES = 3 * GIB  # in the host's memory: the interpreter, torch's libraries and the driver's context
MERGE_BYTES = 32 * MIB  # rows that are merged at a time, in float32
# DeepSpeed's reduce and all-gather buckets: 2e8 elements each in the configuration of transformers' DeepSpeed guide,
# two of the first (overlap_comm). ZeRO-3 steps its optimizer over 1e9 parameters at a time (sub_group_size).
_BUCKETS, _BUCKET_ELEMENTS = 3, 2e8
_STEP_GROUP = 1e9
# ZeRO-3 keeps up to this many gathered parameters (stage3_max_live_parameters; DeepSpeed config docs).
_LIVE_PARAMETERS = 1e9


class Shards:
    """The number of GPUs that share weights, gradients and optimizer state."""

    def __init__(self, plan: TrainingPlan) -> None:
        n, kind = plan.shards, plan.parallelism
        self.optimizer = n if kind in (Parallelism.ZERO1, Parallelism.ZERO2, Parallelism.ZERO3) else 1
        self.gradients = n if kind in (Parallelism.ZERO2, Parallelism.ZERO3) else 1
        self.weights = n if kind == Parallelism.ZERO3 else 1


class TrainingState(msgspec.Struct):
    adapter: float
    gradients: float
    optimizer: float
    step_copy: float
    trained: float = 0.0


def keeps_fp32_weights(plan: TrainingPlan, stack: StackProfile) -> bool:
    """Return whether full training keeps weights and gradients in fp32, and computes with 16-bit copies of them.

    ZeRO 1 and 2 keep 16 bits instead, and divide the fp32 copy with the optimizer's state.
    """
    is_cast = plan.method == Method.FULL and stack.casts_trained_weights and plan.compute_dtype != "float32"
    return is_cast and plan.parallelism not in (Parallelism.ZERO1, Parallelism.ZERO2)


def is_autocast_of_fp32(plan: TrainingPlan, stack: StackProfile) -> bool:
    """Return whether autocast makes these copies. FSDP converts the weights it gathers instead."""
    return keeps_fp32_weights(plan, stack) and plan.parallelism != Parallelism.ZERO3


def stored_weight_bytes(shape: Shape, plan: TrainingPlan, stack: StackProfile) -> float:
    """Return the bytes of all base weights, as this method stores them."""
    return shape.total * _FP32 if keeps_fp32_weights(plan, stack) else computed_weight_bytes(shape, plan, stack)


def computed_weight_bytes(shape: Shape, plan: TrainingPlan, stack: StackProfile) -> float:
    """Return the bytes of all base weights, as they are computed with and gathered from other GPUs."""
    width = DTYPE_BYTES[plan.compute_dtype]
    if plan.method != Method.QLORA:
        return shape.total * width
    kind = plan.quantization
    is_nf4 = kind == "nf4"
    per_weight = _WEIGHT_BYTES["nf4_double" if is_nf4 and stack.double_quantization else kind]
    other_width = 4 if is_nf4 and stack.upcasts_unquantized else width
    head, experts = shape.head if stack.quantizes_head else 0, shape.linear - quantized_linear(shape, stack)
    quantized = (shape.linear - experts + head) * per_weight
    return quantized + experts * max(stack.expert_bytes or 0, width) + (shape.other - head) * other_width


def quantized_linear(shape: Shape, stack: StackProfile) -> int:
    """Return the weights of the block linear layers that a 4-bit base stores in 4 bits."""
    return shape.linear if stack.expert_bytes is None else shape.linear - shape.experts


def training_state(shape: Shape, plan: TrainingPlan, stack: StackProfile) -> TrainingState:
    width = DTYPE_BYTES[plan.compute_dtype]
    is_deepspeed = stack.key != ANNEAL.key and plan.parallelism in (
        Parallelism.ZERO1, Parallelism.ZERO2, Parallelism.ZERO3
    ) and plan.is_deepspeed  # fmt: skip
    if plan.method == Method.FULL:
        if keeps_fp32_weights(plan, stack):
            return _state(shape.total, _FP32, False, plan, stack, False, adapter=0.0)
        trained, is_mixed = shape.total, (stack.full_state == "mixed" or is_deepspeed) and width < _FP32
        return _state(trained, width, is_mixed, plan, stack, is_deepspeed, adapter=0.0)
    adapter_width = stack.quantized_adapter_bytes if plan.method == Method.QLORA else stack.adapter_bytes
    if plan.compute_dtype == "float32":
        adapter_width = 4
    if is_deepspeed:
        return _state(shape.adapter, width, True, plan, stack, True, adapter=float(shape.adapter * width))
    copies = width if stack.is_autocast and adapter_width > width else 0  # autocast's cache of 16-bit adapters
    state = _state(shape.adapter, adapter_width, False, plan, stack, False, shape.adapter * (adapter_width + copies))
    if not plan.trains_embeddings:
        return state
    # PEFT's modules_to_save: copies of embedding and head in the base's type, fully trained.
    more = _state(2 * shape.head, width, False, plan, stack, False, 2.0 * shape.head * width)
    return TrainingState(*(getattr(state, name) + getattr(more, name) for name in TrainingState.__struct_fields__))


def _state(
    trained: int, width: int, is_mixed: bool, plan: TrainingPlan, stack: StackProfile, is_deepspeed: bool,
    adapter: float,
) -> TrainingState:  # fmt: skip
    state_width = _FP32 if is_mixed else width
    moments = _moment_bytes(plan, state_width)
    master = _FP32 if is_mixed else 0
    # DeepSpeed casts the gradients of its partition to fp32 for the step; foreach AdamW copies the second moment.
    is_foreach = stack.has_step_copy and not plan.optimizer.endswith(("8bit", "fused"))
    step = (_FP32 if is_deepspeed else 0) + (state_width if is_foreach else 0)
    return TrainingState(adapter, trained * width, trained * (moments + master), trained * step, trained)


def _moment_bytes(plan: TrainingPlan, width: int) -> float:
    match plan.optimizer:
        case "adamw_8bit":
            return 2 * _MOMENT_BYTES_8BIT
        case "paged_adamw" | "paged_adamw_8bit":
            return 0.0  # in unified memory, moved to the host when the card is full
        case "adafactor":
            return _ADAFACTOR_BYTES
        case "sgd":
            return 0.0
        case _:
            return 2.0 * width


def step_copy(state: TrainingState, plan: TrainingPlan, shards: int) -> float:
    copy = state.step_copy / shards
    if plan.is_deepspeed and plan.parallelism == Parallelism.ZERO3:
        return min(copy, _STEP_GROUP * state.step_copy / max(state.trained, 1.0))
    return copy


def buckets(plan: TrainingPlan, state: TrainingState) -> float:
    """Return the bytes of the permanent flat buffers for gradient exchange."""
    if plan.parallelism == Parallelism.DDP:
        return state.gradients  # in addition to the gradients (DistributedDataParallel without bucket views)
    return _BUCKETS * _BUCKET_ELEMENTS * DTYPE_BYTES[plan.compute_dtype] if plan.is_deepspeed else 0.0


def passing_gradients(shape: Shape, width: int, stack: StackProfile) -> float:
    """Return the gradients of layers that FSDP holds on their way to the host.

    These are two layers', each as computed and as reduced: in fp32, or in 16 bits if the stack keeps everything so.
    """
    return 2.0 * shape.layer * (width + (_FP32 if stack.full_state == "mixed" else width))


def reading_bytes(largest_tensor_bytes: int) -> int:
    """Return the host memory of a process that reads, merges and writes a model tensor by tensor (publishing).

    Two tensors are there at a time: the one being written and the next one, of which rows are merged in float32.
    """
    return 2 * largest_tensor_bytes + MERGE_BYTES


def publishing_bytes(shape: Shape) -> int:
    """Return the host memory of publishing, evaluating and merging on a GPU machine, however large the model is.

    The largest tensor is an embedding, a matrix, or all experts of a layer in one.
    """
    a = shape.architecture
    experts = (a.n_experts or 0) * 2 * (a.moe_intermediate_size or 0) * a.hidden_size
    return GPU_PROCESS_BYTES + reading_bytes(2 * max(a.vocab_size * a.hidden_size, experts, shape.largest_linear))


def host_bytes(shape: Shape, plan: TrainingPlan, weights: float, state: TrainingState) -> float:
    """Return the job's peak bytes in the host's memory.

    Each process first reads the whole model, in fp32 for full training, and then keeps its shard. Later, all shards are
    there; with full training, so are gradients and optimizer state.
    """
    is_full = plan.method == Method.FULL
    reading = plan.gpu_count * (shape.total * _FP32 if is_full else weights)
    resting = weights + (state.gradients + state.optimizer if is_full else 0.0)
    return max(reading, resting) + plan.gpu_count * CPU_PROCESS_BYTES


def root_unit(shape: Shape, plan: TrainingPlan) -> float:
    """Return the bytes of FSDP's root unit (embedding and head); its gathering needs a buffer of the same size."""
    if plan.parallelism != Parallelism.ZERO3 or plan.is_deepspeed or plan.splits_root:
        return 0.0
    return float((shape.total - shape.layer * shape.n_layers) * DTYPE_BYTES[plan.compute_dtype])


def gathered_bytes(shape: Shape, plan: TrainingPlan, stack: StackProfile, weights: float) -> float:
    """Return the bytes of the whole layers gathered from sharded weights while computing."""
    if plan.parallelism != Parallelism.ZERO3:
        return 0.0
    width, outside = DTYPE_BYTES[plan.compute_dtype], shape.total - shape.layer * shape.n_layers
    layer = shape.layer * (weights - outside * width) / (shape.layer * shape.n_layers)
    if plan.is_deepspeed:
        return min(_LIVE_PARAMETERS * width, weights) + shape.head * width
    # The root stays gathered from the forward to the backward pass.
    return stack.fsdp_units * layer + stack.fsdp_root_copies * root_unit(shape, plan)


def converted_weights(shape: Shape, plan: TrainingPlan, stack: StackProfile) -> tuple[float, float]:
    """Return the bytes of the 16-bit copies of weights that the backward pass needs: of all layers, and of one.

    Full training makes them of its fp32 weights, DoRA of the adapted weights.
    """
    is_full = is_autocast_of_fp32(plan, stack)
    count = shape.linear if is_full else shape.adapted_weights if plan.use_dora and stack.is_autocast else 0
    whole = float(count * DTYPE_BYTES[plan.compute_dtype])
    return whole, whole / shape.n_layers


def dora_scratch(shape: Shape, plan: TrainingPlan, width: int) -> int:
    """Return the bytes while PEFT norms one weight.

    It multiplies B A with a unit matrix in fp32, converted to 16 bits, and then adds the weight to the product in fp32.
    """
    return max(
        max(layer.in_features**2 * (4 + width), layer.in_features**2 * width + layer.weights * (4 + 4))
        + layer.weights * width
        for layer in target_layers(shape.architecture, plan.target_modules)
    )


def tied_gradients(shape: Shape, plan: TrainingPlan, stack: StackProfile) -> float:
    """Return the bytes that a tied embedding's gradient needs beside itself at the end of the backward pass.

    Autograd adds the embedding's gradient to the head's into a third tensor, as Python code of TRL made the head's.
    """
    if plan.method != Method.FULL or not stack.is_tiled_loss or not shape.architecture.tie_word_embeddings:
        return 0.0
    return 2.0 * shape.head * (DTYPE_BYTES[plan.compute_dtype] if plan.parallelism == Parallelism.ZERO3 else _FP32)
