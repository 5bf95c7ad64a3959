"""Seconds of one micro-step and one optimizer step, from the shapes of the model and the data sheet of the GPU.

Matrix products run at a share of the GPU's speed on its best shape, less on narrow models. The operations between them
move bytes. The host launches kernels; its time counts if the GPU is faster than the launches. Several GPUs exchange
bytes, partly while they compute. All stacks and GPU types share the constants.
"""

import msgspec

from apps.contracts.hyperparameters import Method
from apps.estimates.models.shapes import Shape
from apps.estimates.physics.gpus import Gpu
from apps.estimates.physics.lengths import RowLayout
from apps.estimates.physics.plans import Parallelism, TrainingPlan
from apps.estimates.physics.stacks import StackProfile
from apps.estimates.physics.states import DTYPE_BYTES, computed_weight_bytes, quantized_linear


class Constants(msgspec.Struct, frozen=True, kw_only=True):
    """Constants of the time model.

    They are fitted on published rows by `python -m tests.bench.estimates.fit_timing`, which prints them. Each is a
    ratio to physics or a host's time; none is specific to one GPU or publisher.
    """

    gemm: float = 0.85  # share of the best measured matrix product that a training job's products reach
    narrow: float = 170.0  # the hidden size that halves this share
    attention: float = 0.78  # the same share for FlashAttention-2's products
    elementwise: float = 1.39  # bytes moved between products, as a multiple of those counted below
    adapter: float = 0.70  # bytes an unfused adapter moves, as a multiple of those counted below
    dequantization: float = 0.63  # share of the bandwidth that dequantisation kernels reach
    launch_seconds: float = 15.6e-6  # of one operator, in eager PyTorch
    exposed: float = 0.56  # share of communication that computation does not hide, even if it could
    link: float = 0.60  # share of a link's rate that collectives reach
    micro_step_seconds: float = 0.005  # data loading, bookkeeping; assumed, not fitted


CONSTANTS = Constants()

# One matrix product of n weights costs 2n operations per token: n multiplications and n additions.
_PRODUCT = 2.0
# FlashAttention's backward pass has 5 matrix products, the forward pass 2 (arXiv 2205.14135, appendix B.5).
_ATTENTION_BACKWARD = 2.5
# Bytes moved for each value of the hidden state in one layer's forward pass: two norms through fp32 (12 each), rotary
# and transposes (10), two residual sums (6 each); and for each intermediate value: activation and product (10).
_HIDDEN_BYTES, _FF_BYTES = 46.0, 10.0
# Fused kernels read and write each tensor once.
_FUSED_SHARE = 0.5
# An unfused adapter reads its input three times and casts it (2 + 4 + 4 + 2 + 2), and adds to the output (6).
_ADAPTER_INPUT_BYTES, _ADAPTER_OUTPUT_BYTES = 14.0, 10.0
# DoRA computes the norm of the merged weight: two reads and two writes of every adapted weight at each pass, and scales
# the outputs.
_DORA_WEIGHT_BYTES, _DORA_OUTPUT_BYTES = 8.0, 10.0
# Small products (rank 8 to 64) reach this share of the large ones' speed (tile of 128 x 128 mostly empty).
_LOW_RANK_SHARE = 0.2
# The loss: fp32 copy, softmax, its gradient, casts (stock); tiles stay in the cache and are computed twice.
_LOSS_BYTES, _TILED_LOSS_BYTES = 40.0, 8.0
# Bytes moved per quantised weight when it is converted back to 16 bits: NF4 reads 0.5 and writes 2, and the product
# reads them again; GPTQ without a fused kernel unpacks through int32 (AutoGPTQ QuantLinear: shift, mask, scale).
_DEQUANTIZED_BYTES = {"nf4": 4.5, "gptq_int4": 16.0, "gptq_int8": 16.0, "int8": 5.0}
# Operators launched for one layer's forward pass (transformers Llama: 2 norms x 6, rotary 10, projections 7, attention
# 4, activation 2, sums 2, casts) and for each adapted module (PEFT: cast, dropout, A, B, scale, add).
_LAYER_OPERATORS, _ADAPTER_OPERATORS, _DORA_OPERATORS = 40.0, 9.0, 14.0
# The gradient of an operator takes about two operators.
_BACKWARD_OPERATORS = 2.0
# Speed of fp8 products, with the casts and scales around them, relative to 16-bit ones (Transformer Engine user guide:
# 1.3-1.5x).
_FP8_GAIN = 1.4
# Per trained parameter: the fused kernel reads and writes states and weights once; foreach AdamW runs eight operators
# over all of them (torch/optim/adamw.py _multi_tensor_adamw), and computes the norm of the gradients.
_OPTIMIZER_BYTES = {"mixed": 28.0, "pure": 14.0}
_FOREACH_OPTIMIZER_BYTES = {"mixed": 96.0, "pure": 48.0}
# PCIe without peer-to-peer goes through the host, so each byte crosses it twice.
_HOST_PCIE_SHARE = 0.5
# A CPU has no data sheet here. Only the ratio of two jobs on it matters, together with a probe. The values are those of
# a pair of server cores.
_CPU_FLOPS, _CPU_BYTES_PER_SECOND = 4e11, 20_000_000_000
_SHARPNESS = 4.0  # how closely the time follows the slower of launches and computation


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one micro-step by purpose, and of the optimizer step. `flops` counts useful ones."""

    compute: float
    attention: float
    head: float
    memory: float
    adapters: float
    dequantization: float
    fixed: float
    communication: float
    optimizer: float
    micro_step: float
    flops: float

    def forward(self, plan: TrainingPlan) -> float:
        """Return the seconds of one pass.

        A micro-step is worth one forward pass, one backward pass (two with full training), and one more pass with
        checkpointing.
        """
        passes = 2 + (1 if plan.method == Method.FULL else 0) + (1 if plan.gradient_checkpointing else 0)
        return self.micro_step / passes

    def reference(self, plan: TrainingPlan) -> float:
        """Return the seconds of a forward pass without adapters: the time of a preference's reference."""
        return max(self.forward(plan) * (1 - self.adapters / self.micro_step), 0.0)

    @property
    def bottleneck(self) -> str:
        groups = {
            "compute": self.compute + self.attention + self.head,
            "memory_bandwidth": self.memory + self.adapters + self.dequantization,
            "fixed_cost": self.fixed,
            "interconnect": self.communication,
        }
        return max(groups, key=lambda key: groups[key])


def step_time(
    *,
    shape: Shape,
    plan: TrainingPlan,
    gpu: Gpu,
    stack: StackProfile,
    layout: RowLayout,
    rows: int,
    precision: str = "bf16",
    node_bytes_per_second: float = 50e9,
    gpus_per_node: int = 8,
    trained_share: float = 1.0,
    constants: Constants = CONSTANTS,
) -> StepTime:
    """Return the mean time of a micro-step of `rows` rows on each of the plan's GPUs.

    `trained_share` of the tokens are trained: stacks that compute the head only for these take less time.
    """
    k, tokens = constants, rows * layout.tokens
    peak = gpu.reachable_flops
    bandwidth = float(gpu.memory_bandwidth_bytes_per_second or 0)
    is_full = plan.method == Method.FULL
    width = shape.hidden / (shape.hidden + k.narrow)
    rate = peak * k.gemm * width * (_FP8_GAIN if precision == "fp8" else 1.0)
    scores = _PRODUCT * layout.attended * shape.query * shape.n_layers * tokens  # causal: half of the square
    moves = 3 + (1 if plan.gradient_checkpointing else 0)
    fused = _FUSED_SHARE if stack.fused_kernels or stack.launch_share < 1 else 1.0
    products = moves - 1 + (1 if is_full else 0)  # of the blocks: forward, backward and recomputed
    touched = _touched(shape, tokens)
    reads = products * 2.0 * (shape.linear - shape.experts * (1 - touched)) / bandwidth
    attention = stack.attention_cost * _attention(shape, plan, gpu, k, scores)
    moving = k.elementwise * fused * moves / bandwidth
    memory, scored = moving * _moved_bytes(shape, tokens), moving * _score_bytes(shape, plan, tokens * layout.attended)
    headed = tokens * (trained_share if stack.heads_trained_only else 1.0)
    head = _head(shape, plan, stack, k, headed, peak, bandwidth)
    adapters, merged = (fused * seconds for seconds in _adapters(shape, plan, k, tokens, moves, rate, bandwidth))
    dequantization = _dequantization(shape, plan, stack, k, bandwidth)
    compute = products * _PRODUCT * shape.active_linear * tokens / rate
    resting, growing, squared = reads + merged + dequantization, compute + memory + head + adapters, attention + scored
    launches = _launches(shape, plan, stack, k, touched)
    exchange = _exchange(shape, plan, gpu, stack, k, node_bytes_per_second, gpus_per_node)
    computing, uncovered = _over_kinds(layout, resting, growing, squared, launches, hidden=(1 - k.exposed) * exchange)
    communication = k.exposed * exchange + uncovered
    fixed = computing - resting - growing - squared + k.micro_step_seconds
    useful = (3 if is_full else 2) * _PRODUCT * (shape.active_linear * tokens + shape.head * headed)
    return StepTime(
        compute=compute + reads,
        attention=attention,
        head=head,
        memory=memory + scored,
        adapters=adapters + merged,
        dequantization=dequantization,
        fixed=fixed,
        communication=communication,
        optimizer=_optimizer(shape, plan, stack, gpu),
        micro_step=computing + k.micro_step_seconds + communication,
        flops=useful + scores * (1 + _ATTENTION_BACKWARD),
    )


def _over_kinds(
    layout: RowLayout, resting: float, growing: float, squared: float, launches: float, *, hidden: float
) -> tuple[float, float]:
    """Return the mean seconds of the micro-batches, and those of the `hidden` exchange that they cannot hide.

    Of the mean micro-batch, `resting` seconds do not depend on its tokens, `growing` do, and `squared` on their square.

    A part of the exchange never overlaps (first layer, last gradients). The rest is hidden by computation and by
    launches, as far as these last: with what computation alone cannot hide, a longer row would take less time while
    launches are slower.
    """
    computing = uncovered = 0.0
    for kind in layout.kinds:
        size = kind.tokens / layout.tokens
        busy = resting + size * (growing + squared * kind.attended / layout.attended)
        slower = (busy**_SHARPNESS + launches**_SHARPNESS) ** (1 / _SHARPNESS)
        computing += kind.share * slower
        uncovered += kind.share * max(0.0, hidden - slower)
    return computing, uncovered


def _touched(shape: Shape, tokens: float) -> float:
    """Return the share of a mixture's experts that at least one of the tokens visits."""
    a = shape.architecture
    return 1 - (1 - (a.experts_per_token or 0) / a.n_experts) ** tokens if a.n_experts else 1.0


def _attention(shape: Shape, plan: TrainingPlan, gpu: Gpu, k: Constants, scores: float) -> float:
    """Return the seconds of attention: `scores` operations a pass, and one exponential for each score."""
    passes = 1 + _ATTENTION_BACKWARD + (1 if plan.gradient_checkpointing else 0)
    pairs = scores / (2 * _PRODUCT * shape.architecture.head_dim)
    products = scores / (gpu.attention_flops * k.attention)
    seconds = passes * (products + pairs / gpu.exponentials_per_second)
    return seconds * 2 if plan.attention == "eager" else seconds


def _moved_bytes(shape: Shape, tokens: float) -> float:
    """Return the bytes that the operations between the matrix products move in one forward pass."""
    return tokens * shape.n_layers * (_HIDDEN_BYTES * shape.hidden + _FF_BYTES * shape.active_ff)


def _score_bytes(shape: Shape, plan: TrainingPlan, pairs: float) -> float:
    """Return the bytes that attention moves which keeps the score of each pair of tokens."""
    return pairs * shape.architecture.n_heads * shape.n_layers * 16.0 if plan.attention == "eager" else 0.0


def _head(
    shape: Shape, plan: TrainingPlan, stack: StackProfile, k: Constants, tokens: float, peak: float, bandwidth: float
) -> float:
    """Return the seconds of the output head and the loss over `tokens` tokens."""
    products = 2 + (1 if plan.method == Method.FULL else 0) + (1 if stack.is_tiled_loss else 0)
    loss_bytes = _TILED_LOSS_BYTES if stack.is_tiled_loss else _LOSS_BYTES
    seconds = products * _PRODUCT * shape.head * tokens / (peak * k.gemm)
    return seconds + tokens * shape.vocabulary * loss_bytes / bandwidth


def _dequantization(shape: Shape, plan: TrainingPlan, stack: StackProfile, k: Constants, bandwidth: float) -> float:
    if plan.method != Method.QLORA:
        return 0.0
    moved = _DEQUANTIZED_BYTES[plan.quantization] * quantized_linear(shape, stack)
    return (2 + (1 if plan.gradient_checkpointing else 0)) * moved / (bandwidth * k.dequantization)


def _adapters(
    shape: Shape, plan: TrainingPlan, k: Constants, tokens: float, moves: int, rate: float, bandwidth: float
) -> tuple[float, float]:
    """Return the seconds of the adapters: those that grow with the tokens, and those of DoRA's merged weights."""
    if plan.method == Method.FULL:
        return 0.0, 0.0
    moved = _ADAPTER_INPUT_BYTES * shape.adapted_inputs + _ADAPTER_OUTPUT_BYTES * shape.adapted_outputs
    if plan.use_dora:
        moved += _DORA_OUTPUT_BYTES * shape.adapted_outputs
    seconds = k.adapter * moves * tokens * shape.n_layers * moved / bandwidth
    seconds += moves * _PRODUCT * shape.active_adapter * tokens / (rate * _LOW_RANK_SHARE)
    return seconds, moves * _DORA_WEIGHT_BYTES * shape.adapted_weights / bandwidth if plan.use_dora else 0.0


def _launches(shape: Shape, plan: TrainingPlan, stack: StackProfile, k: Constants, touched: float) -> float:
    passes = 1 + _BACKWARD_OPERATORS + (1 if plan.gradient_checkpointing else 0)
    operators = _LAYER_OPERATORS * shape.n_layers
    if plan.method != Method.FULL:
        per_module = _ADAPTER_OPERATORS + (_DORA_OPERATORS if plan.use_dora else 0)
        operators += per_module * shape.adapter_modules
    if shape.architecture.n_experts:
        operators += 4.0 * touched * shape.architecture.n_experts * shape.n_layers  # one expert after the other
    if plan.method == Method.QLORA:
        operators += 2.0 * shape.active_modules
    return operators * passes * k.launch_seconds * stack.launch_share


def timed(gpu: Gpu) -> Gpu:
    """Return a GPU unchanged, and a CPU with a nominal speed, which a probe then scales."""
    if gpu.reachable_flops and gpu.memory_bandwidth_bytes_per_second:
        return gpu
    return msgspec.structs.replace(
        gpu, measured_gemm_flops=_CPU_FLOPS, memory_bandwidth_bytes_per_second=_CPU_BYTES_PER_SECOND
    )


def link_bytes_per_second(gpu: Gpu, *, gpu_count: int, gpus_per_node: int, node_bytes_per_second: float) -> float:
    """Return the rate of each GPU in one direction, over the slowest link of a ring through all GPUs."""
    if gpu_count > gpus_per_node:
        # Each GPU of a machine has its own network adapter, so a ring enters and leaves on all of them at once.
        inside = gpu.nvlink_bytes_per_second or 2 * gpu.pcie_bytes_per_second * _HOST_PCIE_SHARE
        return min(node_bytes_per_second * gpus_per_node, inside / 2)
    if gpu.nvlink_bytes_per_second and gpu.has_nvlink_switch:
        return gpu.nvlink_bytes_per_second / 2
    return gpu.pcie_bytes_per_second * _HOST_PCIE_SHARE


def _exchange(
    shape: Shape, plan: TrainingPlan, gpu: Gpu, stack: StackProfile, k: Constants, node_bytes_per_second: float,
    gpus_per_node: int,
) -> float:  # fmt: skip
    """Return the seconds of a micro-step's exchange with other GPUs and the host."""
    n, width = plan.gpu_count, DTYPE_BYTES[plan.compute_dtype]
    if plan.cpu_offload:
        host = (3 if plan.gradient_checkpointing else 2) * computed_weight_bytes(shape, plan, stack) / max(n, 1)
        if plan.method == Method.FULL:
            host += shape.total * DTYPE_BYTES["float32"] / max(n, 1)  # gradients, as they are reduced
    else:
        host = 0.0
    exchanged = between_copies = 0.0
    trained = shape.total if plan.method == Method.FULL else shape.adapter
    if n > 1:
        ring, accumulation = (plan.shards - 1) / plan.shards, plan.gradient_accumulation_steps
        gradients = 2 * ring * trained * width
        if plan.parallelism == Parallelism.ZERO3:
            # FSDP gathers a layer for the forward and for the backward pass; ZeRO-3 gathers it again to recompute it.
            gathers = 3 if plan.is_deepspeed and plan.gradient_checkpointing else 2
            gathered = gathers * ring * computed_weight_bytes(shape, plan, stack)
            exchanged = gathered + ring * trained * width
            between_copies = 2 * (1 - 1 / plan.copies) * trained * width
        else:
            exchanged = gradients / accumulation
    if exchanged == host == 0:
        return 0.0
    link, network = (
        link_bytes_per_second(
            gpu, gpu_count=count, gpus_per_node=gpus_per_node, node_bytes_per_second=node_bytes_per_second
        )
        for count in (plan.shards, n)
    )
    return (exchanged / link + between_copies / network + host / gpu.pcie_bytes_per_second) / k.link


def _optimizer(shape: Shape, plan: TrainingPlan, stack: StackProfile, gpu: Gpu) -> float:
    """Return the seconds of one optimizer step: the time to move states and weights, or each GPU's shard of them."""
    trained = shape.total if plan.method == Method.FULL else shape.adapter
    is_sharded = plan.parallelism in (Parallelism.ZERO1, Parallelism.ZERO2, Parallelism.ZERO3)
    per_parameter = (_FOREACH_OPTIMIZER_BYTES if stack.has_step_copy else _OPTIMIZER_BYTES)[stack.full_state]
    moved = trained * per_parameter / (plan.shards if is_sharded else 1)
    if plan.cpu_offload:
        return moved / gpu.pcie_bytes_per_second
    return moved / float(gpu.memory_bandwidth_bytes_per_second or 1)
