"""Placement of a job on the GPUs of a pool: sharing, micro-batch, accumulation, checkpointing."""

from collections.abc import Mapping
from functools import cached_property

import msgspec

from apps.contracts.hyperparameters import Method
from apps.estimates.errors import EstimateError
from apps.estimates.models.shapes import Shape, shape_of
from apps.estimates.physics.gpus import Gpu
from apps.estimates.physics.lengths import RowLayout, RowLengths, equal_rows
from apps.estimates.physics.memory import MemoryEstimate, MemoryModel
from apps.estimates.physics.plans import Parallelism, TrainingPlan, divisors
from apps.estimates.physics.stacks import ANNEAL, STACKS, StackProfile, held_by
from apps.estimates.physics.states import publishing_bytes
from apps.estimates.physics.timing import step_time, timed
from apps.estimates.requests import QuoteRequest

# Factors on the memory that must fit: one on the whole, one on all parts except weights.
Margin = tuple[float, float]
NO_MARGIN: Margin = (1.0, 1.0)
# Sorting the whole set by length (PEFT's method comparison) leaves this much padding on skewed lengths.
_SORTED_PADDING = 1.03
# The number of batches our trainer sorts together when it pads (gpu_workers/train/data/encoding.py
# LengthGroupedSampler).
_BATCHES_PER_POOL = 4
# The fields of a request that the sums over its model depend on.
_SHAPING = frozenset({"architecture", "lora_rank", "stack", "target_modules", "use_dora"})


class ChosenPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen plan and its memory.

    If `fits` is false, it is the smallest plan, or a plan that needs too much of the host's memory. `host_bytes` are
    needed of a GPU machine's own memory, by what rests there or by publishing.
    """

    fits: bool
    plan: TrainingPlan
    memory: MemoryEstimate
    host_bytes: int


class Task(msgspec.Struct, frozen=True, dict=True):
    """A request with the sums over its model, computed once for all placements.

    `placements`, `layouts` and `variants` cache earlier results: pools of equal cards have the same placement.
    """

    request: QuoteRequest
    shape: Shape
    stack: StackProfile
    placements: dict[tuple[object, ...], ChosenPlan] = msgspec.field(default_factory=dict)
    layouts: dict[tuple[int, int, int, bool, bool], RowLayout] = msgspec.field(default_factory=dict)
    variants: dict[tuple[object, ...], "Task"] = msgspec.field(default_factory=dict)

    @cached_property
    def lengths(self) -> RowLengths:
        """Return the lengths of the rows. A pair's is the longer answer's, to which both are padded."""
        request = self.request
        return RowLengths(
            request.row_lengths,
            mean=request.mean_tokens,
            longest=float(padded_length(request)),
            is_lower_bound=request.is_preference,
        )

    def changed(self, changes: Mapping[str, object]) -> "Task":
        """Return the task of the request with these fields changed."""
        key = tuple(changes.items())
        if key not in self.variants:
            request = msgspec.structs.replace(self.request, **changes)
            is_same_shape = _SHAPING.isdisjoint(changes)
            self.variants[key] = Task(request, self.shape, self.stack) if is_same_shape else task_of(request)
        return self.variants[key]


def task_of(request: QuoteRequest) -> Task:
    stack = STACKS[request.stack]
    shape = shape_of(
        held_by(stack, request.architecture),
        rank=request.lora_rank,
        target_modules=request.target_modules,
        use_dora=request.use_dora,
    )
    return Task(request, shape, stack)


def choose_plan(
    task: Task,
    gpu: Gpu,
    *,
    gpu_count: int = 1,
    margin: Margin = NO_MARGIN,
    node_bytes_per_second: float = 50e9,
    host_memory_bytes: int | None = None,
) -> ChosenPlan:
    """Return the fastest plan that fits and accumulates to exactly the batch; if none fits, the smallest one.

    The candidates are each way to share the model among the GPUs, with and without recomputed activations, each with
    the largest micro-batch that fits.
    """
    key = (gpu, gpu_count, margin, node_bytes_per_second, host_memory_bytes)
    if key not in task.placements:
        task.placements[key] = _choose_plan(task, gpu, gpu_count, margin, node_bytes_per_second, host_memory_bytes)
    return task.placements[key]


def _choose_plan(
    task: Task,
    gpu: Gpu,
    gpu_count: int,
    margin: Margin,
    node_bytes_per_second: float,
    host_memory_bytes: int | None,
) -> ChosenPlan:
    sizes, asked = _micro_batch_sizes(task.request, gpu_count), task.request.gradient_checkpointing
    found: list[tuple[TrainingPlan, MemoryModel]] = []
    smallest: tuple[float, TrainingPlan, MemoryModel] | None = None
    for parallelism, copies in _sharings(task.request, gpu, gpu_count):
        base = _with_rows(_base_plan(task.request, gpu, gpu_count, parallelism, copies), task.request, sizes[0], True)
        shared = _model(task, base, gpu)
        for checkpointing in (False, True) if asked is None else (asked,):
            plan, model, needed = _largest(task, base, shared, sizes, margin, checkpointing)
            if needed <= gpu.memory_bytes:
                found.append((plan, model))
                if plan.micro_batch_size == sizes[-1]:
                    break  # the same rows at once with recomputed activations take longer
            elif smallest is None or needed < smallest[0]:
                smallest = (needed, plan, model)
    if not found:
        assert smallest is not None  # there is always one way to share and one to checkpoint
        return _chosen(task, gpu, smallest[1], smallest[2], fits=False)
    plan, model = found[0]
    if len(found) > 1:
        plan, model = min(found, key=lambda option: _seconds_per_row(task, option[0], gpu, node_bytes_per_second))
    chosen = _chosen(task, gpu, plan, model, fits=True)
    is_enough = host_memory_bytes is None or chosen.host_bytes <= host_memory_bytes
    return chosen if is_enough else msgspec.structs.replace(chosen, fits=False)


def _chosen(task: Task, gpu: Gpu, plan: TrainingPlan, model: MemoryModel, *, fits: bool) -> ChosenPlan:
    memory = model.estimate(plan)
    host_bytes = max(memory.host_bytes, least_host_bytes(task, gpu))
    return ChosenPlan(fits=fits, plan=plan, memory=memory, host_bytes=host_bytes)


def least_host_bytes(task: Task, gpu: Gpu) -> int:
    """Return what this model needs of a machine's own memory by any plan; 0 on a CPU, whose memory is the plan's."""
    return 0 if gpu.is_cpu else publishing_bytes(task.shape)


def smallest_plan(task: Task, gpu: Gpu) -> ChosenPlan:
    """Return the placement with the least memory on one GPU: single rows, everything recomputed."""
    plan, model = _smallest(task, gpu, 1)
    return _chosen(task, gpu, plan, model, fits=model.needed(1, plan.max_length, True, NO_MARGIN) <= gpu.memory_bytes)


def longest_length(task: Task, gpu: Gpu, *, gpu_count: int, margin: Margin, step: int) -> int:
    """Return the longest multiple of `step` that fits below the request's own length, 0 if none does.

    Bisection works, because memory never decreases with length.
    """
    plan, model = _smallest(task, gpu, gpu_count)
    fitting, too_long = 0, -(-plan.max_length // step)
    while too_long - fitting > 1:
        middle = (fitting + too_long) // 2
        is_enough = model.needed(1, middle * step, True, margin) <= gpu.memory_bytes
        fitting, too_long = (middle, too_long) if is_enough else (fitting, middle)
    return fitting * step


def _smallest(task: Task, gpu: Gpu, gpu_count: int) -> tuple[TrainingPlan, MemoryModel]:
    parallelism, copies = _sharings(task.request, gpu, gpu_count)[-1]
    plan = _with_rows(_base_plan(task.request, gpu, gpu_count, parallelism, copies), task.request, 1, True)
    return plan, _model(task, plan, gpu)


def compute_dtype(gpu: Gpu) -> str:
    """Return bf16 if the GPU multiplies it, fp16 for older ones, fp32 for a CPU, as the trainer does."""
    if gpu.is_cpu:
        return "float32"
    return "bfloat16" if gpu.bf16_flops else "float16"


def padded_length(request: QuoteRequest) -> int:
    """Return the tokens of the longest row that the trainer processes.

    A batch is padded to its own longest row, not to the limit.
    """
    return request.max_length if request.packing else min(request.max_length, request.longest_row_tokens)


def shuffled_rows(task: Task, plan: TrainingPlan) -> RowLayout:
    """Return the rows of micro-batches that are padded to their longest, in random order."""
    knows_pairs = bool(task.request.row_lengths)  # the longer answer of each
    return task.lengths.shuffled(plan.micro_batch_size if knows_pairs else plan.sequences)


def row_layout(task: Task, plan: TrainingPlan, gpu: Gpu) -> RowLayout:
    """Return the rows as the trainer computes them, on the GPU that the others of the plan wait for."""
    kind = (_is_padded(task.request, gpu), gpu.is_cpu)
    key = (plan.micro_batch_size, plan.gradient_accumulation_steps, plan.gpu_count, *kind)
    if key not in task.layouts:
        layout, a = _row_layout(task, plan, is_padded=kind[0]), task.request.architecture
        # With a mask, as over padded rows and on a CPU, torch's kernels compute the scores outside of the window too.
        has_windows = a.windowed_layers and task.stack.packs_micro_batches and not any(kind)
        task.layouts[key] = layout.windowed(a.sliding_window, a.windowed_layers / a.n_layers) if has_windows else layout
    return task.layouts[key]


def _row_layout(task: Task, plan: TrainingPlan, *, is_padded: bool) -> RowLayout:
    request, stack, rows = task.request, task.stack, plan.micro_batch_size
    if request.packing:
        return equal_rows(float(min(request.max_length, request.tokens)))
    if stack.groups_lengths:
        return task.lengths.unpadded() if rows == 1 else task.lengths.unpadded().stretched(_SORTED_PADDING)
    if not stack.packs_micro_batches:
        return shuffled_rows(task, plan)
    if is_padded:
        pool = min(request.rows, _BATCHES_PER_POOL * request.batch_size)
        return task.lengths.grouped(rows * plan.gpu_count, pool=pool)
    micro_batches = plan.gradient_accumulation_steps * plan.gpu_count
    return task.lengths.balanced(rows, micro_batches=micro_batches, gpu_count=plan.gpu_count)


def _is_padded(request: QuoteRequest, gpu: Gpu) -> bool:
    """Return whether our trainer pads: preference pairs, on request, model-specific attention, and cards before Ampere.

    The conditions follow gpu_workers/train/model/hardware.py.
    """
    is_asked = request.is_preference or request.pads_rows
    return is_asked or request.architecture.has_own_attention or bool(gpu.fp16_flops and not gpu.bf16_flops)


def _sharings(request: QuoteRequest, gpu: Gpu, gpu_count: int) -> tuple[tuple[Parallelism, int], ...]:
    """Return the ways to share the model with the copies of a sharded one; the last one needs the least memory."""
    if request.batch_size % gpu_count:
        raise EstimateError("batch_size", f"{gpu_count} GPUs cannot share a batch of {request.batch_size} rows evenly")
    whole, sharded = (Parallelism.DDP, 1), (Parallelism.ZERO3, 1)
    if request.cpu_offload and not gpu.is_cpu:
        return (sharded,)
    if gpu_count == 1:
        return ((Parallelism.SINGLE, 1),)
    if 1 < request.node_count < gpu_count:  # a copy in each machine: only gradients cross the network
        return (whole, (Parallelism.ZERO3, request.node_count), sharded)
    if request.method == Method.FULL and request.stack != ANNEAL.key:  # our trainer shards everything or nothing
        return (whole, (Parallelism.ZERO2, 1), sharded)
    return (whole, sharded)


def _base_plan(request: QuoteRequest, gpu: Gpu, gpu_count: int, parallelism: str, copies: int) -> TrainingPlan:
    return TrainingPlan(
        method=request.method,
        max_length=padded_length(request),
        lora_rank=request.lora_rank,
        target_modules=request.target_modules,
        optimizer=request.optimizer,
        compute_dtype=compute_dtype(gpu),
        lora_dropout=request.lora_dropout,
        use_dora=request.use_dora,
        use_rslora=request.use_rslora,
        is_packed=request.packing,
        attention="eager" if request.stack == ANNEAL.key and request.architecture.has_own_attention else "flash",
        gpu_count=gpu_count,
        parallelism=parallelism,
        copies=copies,
        cpu_offload=request.cpu_offload and not gpu.is_cpu,  # a CPU's memory is the host's
        is_preference=request.is_preference,
        has_reference=request.has_reference,
    )


def _micro_batch_sizes(request: QuoteRequest, gpu_count: int) -> tuple[int, ...]:
    """Return the candidate micro-batch sizes, smallest first."""
    if request.micro_batch_size is not None:
        return (request.micro_batch_size,)
    return divisors(request.batch_size // gpu_count)[::-1]


def _largest(
    task: Task,
    base: TrainingPlan,
    model: MemoryModel,
    sizes: tuple[int, ...],
    margin: Margin,
    checkpointing: bool,
) -> tuple[TrainingPlan, MemoryModel, float]:
    """Return the plan with the largest micro-batch that fits, its model, and its need with the margin.

    `model` is that of `base`. Bisection works, because memory never decreases with the micro-batch.
    """
    request, gpu = task.request, model.gpu
    low, high, needed = 0, len(sizes), 0.0
    while low < high:
        middle = (low + high) // 2
        needs = model.needed(sizes[middle], base.max_length, checkpointing, margin)
        if needs <= gpu.memory_bytes:
            low, needed = middle + 1, needs
        else:
            high = middle
            needed = needed if low else needs
    plan = _with_rows(base, request, sizes[max(low - 1, 0)], checkpointing)
    if plan.gradient_accumulation_steps == 1 and request.method == Method.FULL:
        model = _model(task, plan, gpu)  # gradients need not outlive the micro-step
    return plan, model, needed


def _seconds_per_row(task: Task, plan: TrainingPlan, gpu: Gpu, node_bytes_per_second: float) -> float:
    step = step_time(
        shape=task.shape,
        plan=plan,
        gpu=timed(gpu),
        stack=task.stack,
        layout=row_layout(task, plan, gpu),
        rows=plan.sequences,
        node_bytes_per_second=node_bytes_per_second,
        gpus_per_node=max(plan.gpu_count // task.request.node_count, 1),
        trained_share=task.request.trained_share,
    )
    return (step.micro_step + step.optimizer / plan.gradient_accumulation_steps) / plan.micro_batch_size


def _model(task: Task, plan: TrainingPlan, gpu: Gpu) -> MemoryModel:
    return MemoryModel(task.shape, plan, gpu, task.stack)


def _with_rows(plan: TrainingPlan, request: QuoteRequest, rows: int, checkpointing: bool) -> TrainingPlan:
    accumulation = request.batch_size // plan.gpu_count // rows
    if accumulation * rows * plan.gpu_count != request.batch_size:
        raise EstimateError(
            "micro_batch_size",
            f"{plan.gpu_count} GPUs with {rows} rows each do not divide a batch of {request.batch_size}",
        )
    return msgspec.structs.replace(
        plan,
        micro_batch_size=rows,
        gradient_accumulation_steps=accumulation,
        gradient_checkpointing=checkpointing,
    )
