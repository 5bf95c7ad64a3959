"""Peak memory of a training job on one GPU: the largest of seven moments, each the sum of named parts.

The moments are: loading; the loss (every saved activation alive, plus the logits); the backward pass of a layer
(checkpoints, one layer's recomputed activations and their gradients); the gradient of tied weights; the optimizer step;
evaluation; saving a checkpoint. The returned parts are those of the peak moment, so they always add up to it.
Preferences have one additional moment: the reference.
"""

from typing import NamedTuple

import msgspec

from apps.contracts.runs import Method
from apps.estimates.models.architectures import Architecture
from apps.estimates.models.shapes import Shape, shape_of
from apps.estimates.physics.activations import TokenBytes
from apps.estimates.physics.gpus import GIB, MIB, Gpu
from apps.estimates.physics.plans import Parallelism, TrainingPlan
from apps.estimates.physics.stacks import ANNEAL, StackProfile
from apps.estimates.physics.states import (
    CPU_PROCESS_BYTES,
    DTYPE_BYTES,
    Shards,
    buckets,
    dora_scratch,
    host_bytes,
    passing_gradients,
    root_unit,
    step_copy,
    stored_weight_bytes,
    tied_gradients,
    training_state,
)

# One torch process on a GPU before any tensor: CUDA context and kernels 0.5-2 GiB by driver and GPU (gpus.json _about;
# single-GPU jobs are in the lower half), and cuBLAS's workspace, 32 MiB on Hopper (PyTorch CUDA semantics notes).
CONTEXT_BYTES = 1 * GIB
_CUBLAS_BYTES = 32 * MIB
# NCCL's channels: 2 rings or trees x 8 to 16 channels x 4 MiB and their proxies (NCCL_BUFFSIZE, NCCL user guide).
NCCL_BYTES = 256 * MIB

# The caching allocator's reserve beyond live memory, as a share of the memory each micro-step allocates and frees:
# blocks are rounded up to 2 MiB and split. With equal lengths 10 %.
_RESERVE_SHARE = 0.10
# If lengths vary, blocks cached for shorter rows are too small for a longer one. They pile up until the card is full
# and the cache is dropped. Replaying a training step's allocations with lengths of mean 3,234 and deviation 2,547
# against torch's best-fit rules gives 1.9 to 4.7 times the live memory after 60 rows, median 2.6
# (tests/bench/estimates/allocator.py).
_VARIED_RESERVE_SHARE = 1.6
# glibc keeps most of the memory that a training step frees. The peak resident set of four LoRA jobs (42 M and 67 M
# parameters, 512 to 2,048 tokens per micro-step, fp32, with and without checkpointing) was 1.44 to 1.88 times the live
# memory.
_CPU_ALLOCATOR_SHARE = 0.75

# ZeRO-3 keeps up to this many gathered parameters (stage3_max_live_parameters; DeepSpeed config docs).
_LIVE_PARAMETERS = 1e9


class MemoryPart(msgspec.Struct, frozen=True):
    key: str
    label: str
    bytes: int


class MemoryEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Peak memory with its parts.

    `parts` are alive at the peak and sum to `peak_bytes`; `phase` names that moment. `peak_bytes` is the job's need.
    `reserved_bytes` is the figure the allocator will show, which may be larger while memory is free.
    """

    peak_bytes: int
    phase: str
    parts: tuple[MemoryPart, ...]
    phase_bytes: dict[str, int]
    reserved_bytes: int = 0
    allocated_bytes: int = 0
    host_bytes: int = 0  # of the machine's own memory, for all GPUs of the job together; 0 without offloading


LABELS = {
    "weights": "Base model weights",
    "adapter": "Adapter weights",
    "gradients": "Gradients",
    "optimizer": "Optimizer state",
    "activations": "Activations",
    "logits": "Logits and loss",
    "dequantization": "Dequantisation workspace",
    "communication": "Gathered layers and buckets",
    "allocator": "Allocator reserve",
    "framework": "Framework and CUDA",
}


def peak_memory(
    *, architecture: Architecture, plan: TrainingPlan, gpu: Gpu, stack: StackProfile = ANNEAL
) -> MemoryEstimate:
    """Predict the peak memory of one GPU in this job, with its parts."""
    return MemoryModel(shape_of_plan(architecture, plan), plan, gpu, stack).estimate(plan)


def device_bytes(*, allocated: int, resting: int, gpu_count: int = 1, is_cpu: bool = False) -> int:
    """Return what a device shows for so many bytes of tensors: with the allocator's reserve and the framework's own."""
    varying = allocated - resting
    if is_cpu:
        return round(allocated + _CPU_ALLOCATOR_SHARE * varying + CPU_PROCESS_BYTES)
    shared = NCCL_BYTES if gpu_count > 1 else 0
    return round(allocated + _RESERVE_SHARE * varying + CONTEXT_BYTES + _CUBLAS_BYTES + shared)


def weight_bytes(*, architecture: Architecture, plan: TrainingPlan, stack: StackProfile = ANNEAL) -> int:
    """Return the bytes of all base model weights, as this method stores them."""
    return round(stored_weight_bytes(shape_of_plan(architecture, plan), plan, stack))


class MemoryModel:
    """The parts of a job's memory that do not depend on its micro-batch and checkpointing, summed once."""

    def __init__(self, shape: Shape, plan: TrainingPlan, gpu: Gpu, stack: StackProfile) -> None:
        self.shape, self.plan, self.stack, self.gpu = shape, plan, stack, gpu
        self.sequences = 2 if plan.is_preference else 1
        self.width = DTYPE_BYTES[plan.compute_dtype]
        shards = Shards(plan)
        weights = stored_weight_bytes(shape, plan, stack)
        state = training_state(shape, plan, stack)
        self.refers = plan.is_preference and plan.has_reference
        self.scores = stack.evaluates or self.refers  # a forward pass without gradients
        self.keeps_reference = self.refers and not stack.reference_ahead
        if self.keeps_reference and plan.method == Method.FULL:
            weights *= 2  # the original model; with an adapter, the base itself is the reference
        self.weights = weights / shards.weights * (0 if plan.cpu_offload else 1)
        self.adapter = state.adapter / shards.weights
        self.gradients = state.gradients / shards.gradients
        if plan.cpu_offload and not plan.is_deepspeed:
            self.gradients = min(self.gradients, passing_gradients(shape, self.width, stack))
        if plan.steps_in_backward:
            self.gradients = min(self.gradients, max(shape.head, shape.largest_linear) * self.width)
        self.host = host_bytes(shape, plan, weights, state) if plan.cpu_offload else 0.0
        self.optimizer = 0.0 if plan.cpu_offload else state.optimizer / shards.optimizer
        self.step_copy = 0.0 if plan.cpu_offload else step_copy(state, plan, shards.optimizer)
        self.buckets = buckets(plan, state)
        self.gathered = self.buckets + _gathered(shape, plan, stack, weights)
        self.root = root_unit(shape, plan)
        self.root_gradients = self.root if plan.method == Method.FULL else 0.0
        self.tied = tied_gradients(shape, plan, stack)
        self.framework = CPU_PROCESS_BYTES if gpu.is_cpu else CONTEXT_BYTES + _CUBLAS_BYTES
        self.framework += NCCL_BYTES if plan.gpu_count > 1 else 0
        self.load = max(shape.head, shape.largest_linear) * self.width
        # Of one weight matrix: quantised bases are converted back to the compute type one matrix at a time; DoRA adds
        # B x A to each.
        quantized = shape.largest_linear * self.width if plan.method == Method.QLORA else 0
        dora = dora_scratch(shape, plan, self.width) if plan.use_dora else 0
        self.workspace = quantized + dora
        self.per_token = TokenBytes(shape, plan, gpu, stack, self.width)
        self.reserve_share = _CPU_ALLOCATOR_SHARE if gpu.is_cpu else _RESERVE_SHARE
        is_kept = plan.gradient_accumulation_steps > 1 or plan.parallelism == Parallelism.DDP
        self.keeps_gradients = is_kept and not plan.steps_in_backward
        self.copies = _autocast_copies(shape, plan, stack) if self.keeps_gradients else 0.0

    def estimate(self, plan: TrainingPlan) -> MemoryEstimate:
        moments = self._moments(plan.micro_batch_size, plan.max_length, plan.gradient_checkpointing)
        alive = [self._alive(moment) for moment in moments]
        varying = [moment.varying for moment in moments]
        totals = [held + self.reserve_share * share for held, share in zip(alive, varying, strict=True)]
        highest = max(totals)
        is_even = self.gpu.is_cpu or plan.is_packed or self.stack.frees_cache
        varied = self.reserve_share if is_even else _VARIED_RESERVE_SHARE
        reserved = max(held + varied * share for held, share in zip(alive, varying, strict=True))
        if self.gpu.memory_bytes:
            reserved = min(reserved, max(self.gpu.memory_bytes, highest))
        peak = moments[totals.index(highest)]
        amounts = {
            "weights": self.weights,
            "adapter": self.adapter,
            "gradients": peak.gradients,
            "optimizer": peak.optimizer,
            "activations": peak.activations + peak.copies,
            "logits": peak.logits,
            "dequantization": peak.dequantization,
            "communication": peak.communication,
            "allocator": self.reserve_share * peak.varying,
            "framework": self.framework,
        }
        listed = tuple(MemoryPart(key, label, round(amounts[key])) for key, label in LABELS.items())
        rounded = sum(part.bytes for part in listed)
        return MemoryEstimate(
            peak_bytes=rounded,
            phase=peak.phase,
            parts=listed,
            phase_bytes={
                moment.phase: min(round(total), rounded) if moment is not peak else rounded
                for moment, total in zip(moments, totals, strict=True)
            },
            reserved_bytes=round(reserved - self.framework + _CUBLAS_BYTES),
            allocated_bytes=round(max(alive) - self.framework),
            host_bytes=round(self.host),
        )

    def peak(self, rows: int, length: int, checkpointing: bool) -> float:
        """Return the peak of `estimate` without its parts, for searches."""
        rows *= self.sequences
        t, tokens, widened = self.per_token, rows * length, 1 + self.reserve_share
        saved, working = t.activations(rows, length, checkpointing)
        at_rest = self.weights + self.adapter + self.framework
        held = at_rest + self.optimizer + self.gathered
        kept = self.gradients if self.keeps_gradients else 0.0
        beside = saved + t.loss(tokens) if self.keeps_reference else 0.0
        return max(
            at_rest + widened * self.load,
            held + kept + self.copies + widened * (saved + t.loss(tokens)),
            held
            + (self.gradients if checkpointing else kept + self.copies)
            + self.root_gradients
            + widened * (saved + working + self.workspace),
            held + kept + max(0, 2 - self.stack.fsdp_root_copies) * self.root,
            at_rest + self.gradients + self.optimizer + self.step_copy + self.buckets,
            at_rest + self.gradients + self.tied + self.buckets + 2 * self.root_gradients + self.optimizer,
            held + widened * (beside + working + t.evaluation(tokens) + self.workspace) if self.scores else 0.0,
        )

    def needed(self, rows: int, length: int, checkpointing: bool, margin: tuple[float, float]) -> float:
        """Return the peak with a margin on the whole and on all parts except weights."""
        whole, rest = margin
        return whole * (self.weights + rest * (self.peak(rows, length, checkpointing) - self.weights))

    def _moments(self, rows: int, length: int, checkpointing: bool) -> tuple["_Moment", ...]:
        rows *= self.sequences
        tokens, t = rows * length, self.per_token
        saved, working = t.activations(rows, length, checkpointing)
        kept = self.gradients if self.keeps_gradients else 0.0
        optimizer, gathered, workspace, copies = self.optimizer, self.gathered, self.workspace, self.copies
        reference: tuple[_Moment, ...] = ()
        if self.refers:
            first, logits = (saved, t.loss(tokens)) if self.keeps_reference else (0.0, 0.0)
            state = optimizer if self.keeps_reference else 0.0
            judged = (first + working, logits + t.evaluation(tokens))
            reference = (_Moment("reference", 0.0, state, *judged, workspace, gathered),)
        scored = (working, t.evaluation(tokens), workspace, gathered)
        evaluation = (_Moment("evaluation", 0.0, optimizer, *scored),) if self.stack.evaluates else ()
        whole = gathered + (2 - self.stack.fsdp_root_copies) * self.root
        shared = self.buckets + 2 * self.root_gradients  # at the end of the backward pass
        gather = (_Moment("gather", kept, optimizer, 0.0, 0.0, 0.0, whole),) if self.root else ()
        return (
            _Moment("load", 0.0, 0.0, 0.0, 0.0, self.load, 0.0),
            _Moment("loss", kept, optimizer, saved, t.loss(tokens), 0.0, gathered, copies),
            _Moment(
                "backward",
                self.gradients if checkpointing else kept,
                optimizer,
                saved + working,
                0.0,
                workspace,
                gathered + self.root_gradients,
                0.0 if checkpointing else copies,
            ),
            *gather,
            _Moment("tied_weights", self.gradients + self.tied, optimizer, 0.0, 0.0, 0.0, shared),
            _Moment("optimizer_step", self.gradients, optimizer + self.step_copy, 0.0, 0.0, 0.0, self.buckets),
            *evaluation,
            _Moment("checkpoint", 0.0, optimizer, 0.0, 0.0, 0.0, gathered),
            *reference,
        )

    def _alive(self, moment: "_Moment") -> float:
        held = moment.gradients + moment.optimizer + moment.communication + moment.copies + moment.varying
        return self.weights + self.adapter + self.framework + held


class _Moment(NamedTuple):
    """Live memory at one moment, besides weights, adapter and framework."""

    phase: str
    gradients: float
    optimizer: float
    activations: float
    logits: float
    dequantization: float
    communication: float
    copies: float = 0.0  # of trained weights; whole matrices of equal size leave no gaps

    @property
    def varying(self) -> float:
        return self.activations + self.logits + self.dequantization


def shape_of_plan(architecture: Architecture, plan: TrainingPlan) -> Shape:
    return shape_of(architecture, rank=plan.lora_rank, target_modules=plan.target_modules, use_dora=plan.use_dora)


def _gathered(shape: Shape, plan: TrainingPlan, stack: StackProfile, weights: float) -> float:
    """Return the bytes of the whole layers gathered from sharded weights while computing."""
    if plan.parallelism != Parallelism.ZERO3:
        return 0.0
    width, outside = DTYPE_BYTES[plan.compute_dtype], shape.total - shape.layer * shape.n_layers
    layer = shape.layer * (weights - outside * width) / (shape.layer * shape.n_layers)
    if plan.is_deepspeed:
        return min(_LIVE_PARAMETERS * width, weights) + shape.head * width
    # The root stays gathered from the forward to the backward pass.
    return stack.fsdp_units * layer + stack.fsdp_root_copies * root_unit(shape, plan)


def _autocast_copies(shape: Shape, plan: TrainingPlan, stack: StackProfile) -> float:
    """Return the 16-bit copies of trained fp32 weights that torch.amp's cache keeps until the forward pass ends.

    While gradients accumulate, they add to 16 bytes per parameter: 4 + 8 + 4. Without accumulation, the count of 2 + 12
    + 2 is right, because copies and gradients are not alive together. FSDP casts the weights it gathers instead.
    """
    is_cast = plan.method == Method.FULL and stack.casts_trained_weights and plan.compute_dtype != "float32"
    if not is_cast or plan.parallelism == Parallelism.ZERO3:
        return 0.0
    return float((shape.linear + shape.head) * DTYPE_BYTES[plan.compute_dtype])
