"""Peak memory of a training job on one GPU: the largest of seven moments, each the sum of named parts.

The moments are: loading; the loss (every saved activation alive, plus the logits); the backward pass of a layer
(checkpoints, one layer's recomputed activations and their gradients); the gradient of tied weights; the optimizer step;
evaluation; saving a checkpoint. The returned parts are those of the peak moment, so they always add up to it.
Preferences have one additional moment: the reference.
"""

from typing import NamedTuple

import msgspec

from apps.contracts.hyperparameters import Method
from apps.estimates.models.architectures import Architecture
from apps.estimates.models.shapes import Shape, shape_of
from apps.estimates.physics.activations import TokenBytes
from apps.estimates.physics.gpus import GIB, MIB, Gpu
from apps.estimates.physics.plans import TrainingPlan
from apps.estimates.physics.stacks import ANNEAL, StackProfile
from apps.estimates.physics.states import (
    CPU_PROCESS_BYTES,
    DTYPE_BYTES,
    Shards,
    buckets,
    computed_weight_bytes,
    converted_weights,
    dora_scratch,
    gathered_bytes,
    host_bytes,
    is_autocast_of_fp32,
    keeps_fp32_weights,
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
    """Return the bytes of all base model weights, without the fp32 copies of full training."""
    return round(computed_weight_bytes(shape_of_plan(architecture, plan), plan, stack))


class MemoryModel:
    """The parts of a job's memory that do not depend on its micro-batch and checkpointing, summed once."""

    def __init__(self, shape: Shape, plan: TrainingPlan, gpu: Gpu, stack: StackProfile) -> None:
        self.shape, self.plan, self.stack, self.gpu = shape, plan, stack, gpu
        self.sequences = 2 if plan.is_preference else 1
        self.width = DTYPE_BYTES[plan.compute_dtype]
        shards = Shards(plan)
        weights, computed = stored_weight_bytes(shape, plan, stack), computed_weight_bytes(shape, plan, stack)
        state = training_state(shape, plan, stack)
        self.refers = plan.is_preference and plan.has_reference
        self.scores = stack.evaluates or self.refers  # a forward pass without gradients
        self.keeps_reference = self.refers and not stack.reference_ahead
        if self.keeps_reference and plan.method == Method.FULL:
            weights, computed = 2 * weights, 2 * computed  # the original; with an adapter, the base is the reference
        here = 0.0 if plan.cpu_offload else 1 / shards.weights
        self.weights, self.known = weights * here, computed * here
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
        self.gathered = self.buckets + gathered_bytes(shape, plan, stack, computed)
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
        keeps_gradients = plan.gradient_accumulation_steps > 1 and not plan.steps_in_backward
        self.kept = self.gradients if keeps_gradients else 0.0
        self.copies, self.layer_copies = converted_weights(shape, plan, stack)
        self.cached = self.copies if is_autocast_of_fp32(plan, stack) else 0.0  # by torch.amp, until the forward ends
        self.trains_all = plan.method == Method.FULL
        self.last_gradients, self.first_gradients = self._passing_gradients()
        self.at_rest = self.weights + self.adapter + self.framework
        self.held = self.at_rest + self.optimizer + self.gathered
        self.least = self._least()

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
        # Listed as in ZeRO's paper (arXiv 1910.02054, section 3.1): weights and gradients of 16 bits, and an optimizer
        # state with the fp32 copy. Weights and gradients in fp32 have the same sum.
        is_wide = keeps_fp32_weights(plan, self.stack)
        half_weights, half_gradients = (self.weights / 2, peak.gradients / 2) if is_wide else (0.0, 0.0)
        amounts = {
            "weights": self.weights - half_weights,
            "adapter": self.adapter,
            "gradients": peak.gradients - half_gradients,
            "optimizer": peak.optimizer + half_weights + half_gradients,
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
                moment.phase: rounded if moment.phase == peak.phase else round(total)
                for total, moment in sorted(zip(totals, moments, strict=True), key=lambda each: each[0])
            },
            reserved_bytes=round(reserved - self.framework + _CUBLAS_BYTES),
            allocated_bytes=round(max(alive) - self.framework),
            host_bytes=round(self.host),
        )

    def peak(self, rows: int, length: int, checkpointing: bool) -> float:
        """Return the peak of `estimate` without its parts, for searches."""
        rows *= self.sequences
        t, tokens, widened = self.per_token, rows * length, 1 + self.reserve_share
        saved, saved_first, working = t.activations(rows, length, checkpointing)
        working, loss = working + self.workspace, t.loss(tokens)
        copies, own_copies = (0.0, self.layer_copies) if checkpointing else (self.copies, 0.0)
        held, returning = self.held, self.held + self.root_gradients
        peak = max(
            self.least,
            held + self.kept + copies + widened * (saved + loss),
            returning + self.last_gradients + copies + own_copies + widened * (saved + working),
        )
        if self.cached:
            peak = max(peak, held + self.kept + self.cached + widened * (saved + tokens * t.forward))
        if self.trains_all:
            peak = max(peak, returning + self.first_gradients + self.layer_copies + widened * (saved_first + working))
        if self.scores:
            beside = saved + loss if self.keeps_reference else 0.0
            peak = max(peak, held + widened * (beside + working + t.evaluation(tokens, loss)))
        return peak

    def _passing_gradients(self) -> tuple[float, float]:
        """Return the gradients alive in the backward pass of the last layer, which comes first, and of the first one.

        With full training, the last layer's pass has only the head's gradient beside it, and the checkpoints of all
        layers. The first layer's has all other gradients, and one checkpoint.
        """
        shape, plan, whole = self.shape, self.plan, self.gradients
        if not self.trains_all or plan.steps_in_backward or plan.cpu_offload:
            return whole, whole
        if self.root:  # the root's gradients are counted apart
            return self.kept, whole
        head = shape.head / shape.total * whole
        return self.kept + head, whole if shape.architecture.tie_word_embeddings else whole - head

    def _least(self) -> float:
        """Return the largest of the moments that do not depend on the micro-batch."""
        stepping = self.at_rest + self.gradients + self.optimizer + self.buckets
        return max(
            self.at_rest + (1 + self.reserve_share) * self.load,
            self.held + self.kept + max(0, 2 - self.stack.fsdp_root_copies) * self.root,
            stepping + self.step_copy,
            stepping + self.tied + 2 * self.root_gradients,
        )

    def needed(self, rows: int, length: int, checkpointing: bool, margin: tuple[float, float]) -> float:
        """Return the peak with a margin on the whole and on all parts except weights."""
        whole, rest = margin
        return whole * (self.known + rest * (self.peak(rows, length, checkpointing) - self.known))

    def _moments(self, rows: int, length: int, checkpointing: bool) -> tuple["_Moment", ...]:
        rows *= self.sequences
        tokens, t = rows * length, self.per_token
        saved, saved_first, working = t.activations(rows, length, checkpointing)
        loss = t.loss(tokens)
        kept, optimizer, gathered, workspace = self.kept, self.optimizer, self.gathered, self.workspace
        copies, own_copies = (0.0, self.layer_copies) if checkpointing else (self.copies, 0.0)
        reference: tuple[_Moment, ...] = ()
        if self.refers:
            trained, logits = (saved, loss) if self.keeps_reference else (0.0, 0.0)
            state = optimizer if self.keeps_reference else 0.0
            judged = (trained + working, logits + t.evaluation(tokens, loss))
            reference = (_Moment("reference", 0.0, state, *judged, workspace, gathered),)
        scored = (working, t.evaluation(tokens, loss), workspace, gathered)
        evaluation = (_Moment("evaluation", 0.0, optimizer, *scored),) if self.stack.evaluates else ()
        whole = gathered + (2 - self.stack.fsdp_root_copies) * self.root
        shared = self.buckets + 2 * self.root_gradients  # at the end of the backward pass
        within = (optimizer, saved + tokens * t.forward, 0.0, 0.0, gathered, self.cached)
        forward = (_Moment("forward", kept, *within),) if self.cached else ()
        last, first, beside = saved + working, saved_first + working, (workspace, gathered + self.root_gradients)
        gather = (_Moment("gather", kept, optimizer, 0.0, 0.0, 0.0, whole),) if self.root else ()
        return (
            _Moment("load", 0.0, 0.0, 0.0, 0.0, self.load, 0.0),
            *forward,
            _Moment("loss", kept, optimizer, saved, loss, 0.0, gathered, copies),
            _Moment("backward", self.last_gradients, optimizer, last, 0.0, *beside, copies + own_copies),
            _Moment("backward", self.first_gradients, optimizer, first, 0.0, *beside, self.layer_copies),
            *gather,
            _Moment("tied_weights", self.gradients + self.tied, optimizer, 0.0, 0.0, 0.0, shared),
            _Moment("optimizer_step", self.gradients, optimizer + self.step_copy, 0.0, 0.0, 0.0, self.buckets),
            *evaluation,
            _Moment("checkpoint", 0.0, optimizer, 0.0, 0.0, 0.0, gathered),
            *reference,
        )

    def _alive(self, moment: "_Moment") -> float:
        held = moment.gradients + moment.optimizer + moment.communication + moment.copies + moment.varying
        return self.at_rest + held


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
