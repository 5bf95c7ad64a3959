"""Seconds of a whole job on its GPUs.

They are the sum of micro-steps over the dataset's real lengths, optimizer steps, evaluations and checkpoints, scaled by
a probe of the pool if there is one.
"""

import math

import msgspec

from apps.contracts.hyperparameters import Method
from apps.estimates.models.architectures import active_linear_parameter_count
from apps.estimates.models.shapes import shape_of
from apps.estimates.physics.gpus import Gpu
from apps.estimates.physics.lengths import RowLayout, equal_rows
from apps.estimates.physics.plans import TrainingPlan
from apps.estimates.physics.stacks import ANNEAL
from apps.estimates.physics.throughput import ProbeRow
from apps.estimates.physics.timing import StepTime, step_time, timed
from apps.estimates.placement import Task, row_layout, shuffled_rows
from apps.estimates.requests import PoolFacts, QuoteRequest

# Packed rows are filled to this share on average (best-fit decreasing: Fewer Truncations Improve Language Modeling,
# arXiv 2404.10830, table 1: above 99.9 % for documents of web length). Chat rows are longer relative to the limit.
_PACKING_SHARE = 0.97
# Writing a checkpoint: serialise, hash and store, as bytes per second and a fixed part. Assumed, and shown as assumed.
_CHECKPOINT_BYTES_PER_SECOND, _CHECKPOINT_SECONDS = 500e6, 1.0
# Our workers save five times per job, but not more often than every _MIN_SECONDS_APART, and with at most this share of
# the time (apps/finetuning/runs/specs.py checkpoint_interval, gpu_workers/train/loop/rehearsal.py).
_SAVES_A_JOB, _MIN_SECONDS_APART, _MAX_SAVING_SHARE = 5, 15.0, 0.02
# The reference for "cost per A100-hour": NVIDIA A100 80GB SXM data sheet, best measured product (gpus.json).
A100 = Gpu(
    key="a100-sxm-80",
    name="A100 SXM 80GB",
    memory_bytes=85_899_345_920,
    bf16_flops=312e12,
    measured_gemm_flops=271.2e12,
    memory_bandwidth_bytes_per_second=2_039_000_000_000,
)


class Duration(msgspec.Struct, frozen=True, kw_only=True):
    """The times of a job.

    `train_seconds` is the billed time: the trainer's clock stops while it evaluates and saves. `a100_seconds` is the
    same work on one A100.
    """

    train_seconds: float
    tokens_per_second: float
    evaluation_seconds: float
    checkpoint_seconds: float
    reference_seconds: float  # DPO: the reference's pass over every row, if it runs before training
    step: StepTime
    optimizer_steps: int
    utilisation: float | None
    bottleneck: str
    a100_seconds: float
    probe_factor: float = 1.0
    probe_distance: float = 0.0  # doublings between the probe's work and this job's; 1 for another method


def duration(task: Task, plan: TrainingPlan, pool: PoolFacts) -> Duration | None:
    """Return the times of the job; None if neither a data sheet nor a probe gives the processor's speed."""
    gpu = timed(pool.gpu)
    if pool.probe is None and not pool.gpu.reachable_flops:
        return None
    request, layout = task.request, row_layout(task, plan, pool.gpu)
    step = _step(task, plan, pool, layout)
    factor = probe_factor(pool.probe, gpu) if pool.probe else 1.0
    micro_steps = _micro_steps(request, plan)
    steps = step_count(rows=math.ceil(_rows(request)), batch_size=request.batch_size, epochs=request.epochs)
    beside = step.reference(plan) if _refers(request) and not task.stack.reference_ahead else 0.0
    trained = _epoch_seconds(task, plan, pool, step) * request.epochs
    computing = factor * (trained + micro_steps * beside + steps * step.optimizer)
    evaluation = factor * _evaluation_seconds(task, plan, pool)
    checkpoints = _checkpoints(request, computing, _checkpoint_seconds(task), pool) * _checkpoint_seconds(task)
    peak, alone = pool.gpu.bf16_flops or pool.gpu.fp16_flops, _alone_on_a100(task, plan, pool)
    return Duration(
        train_seconds=computing,
        tokens_per_second=request.tokens * request.epochs / computing,
        evaluation_seconds=evaluation,
        checkpoint_seconds=checkpoints,
        reference_seconds=factor * _reference_seconds(task, plan, pool),
        step=step,
        optimizer_steps=steps,
        utilisation=micro_steps * alone.flops / (computing * peak) if peak else None,
        bottleneck="host_link" if plan.cpu_offload and step.bottleneck == "interconnect" else step.bottleneck,
        a100_seconds=micro_steps * plan.gpu_count * alone.micro_step,
        probe_factor=factor,
        probe_distance=_probe_distance(pool.probe, task, plan, layout.tokens) if pool.probe else 0.0,
    )


def step_count(*, rows: int, batch_size: int, epochs: int) -> int:
    """Return the number of optimizer steps; a smaller last batch of an epoch is a step as well."""
    return -(-rows // batch_size) * epochs


def probe_factor(probe: ProbeRow, gpu: Gpu) -> float:
    """Return measured / computed time of the probe's own micro-step."""
    if probe.gpu_key != gpu.key:
        raise ValueError(f"a probe of {probe.gpu_key} says nothing about {gpu.key}")
    rows = max(1, round(probe.tokens_per_micro_step / probe.sequence_length))
    plan = TrainingPlan(
        method=probe.method,
        max_length=probe.sequence_length,
        micro_batch_size=rows,
        lora_rank=probe.lora_rank,
        target_modules=probe.target_modules,
        gradient_checkpointing=probe.gradient_checkpointing,
        compute_dtype="float32" if gpu.is_cpu else "bfloat16",
        is_packed=True,
    )
    shape = shape_of(probe.architecture, rank=probe.lora_rank, target_modules=probe.target_modules, use_dora=False)
    step = step_time(
        shape=shape,
        plan=plan,
        gpu=gpu,
        stack=ANNEAL,
        layout=equal_rows(probe.tokens_per_micro_step / rows),
        rows=rows,
        trained_share=probe.trained_share,
    )
    return probe.tokens_per_micro_step / probe.tokens_per_second / (step.micro_step + step.optimizer)


def _probe_distance(probe: ProbeRow, task: Task, plan: TrainingPlan, length: float) -> float:
    if probe.method != task.request.method:
        return 1.0
    work = abs(math.log2(task.shape.active_linear / active_linear_parameter_count(probe.architecture)))
    tokens = abs(math.log2(length * plan.sequences / probe.tokens_per_micro_step)) / 2
    return round(max(work, tokens), 3) if max(work, tokens) > 0.1 else 0.0


def _rows(request: QuoteRequest) -> float:
    """Return the rows the trainer sees in an epoch; packed rows are fewer and full."""
    if not request.packing:
        return float(request.rows)
    return max(1.0, request.tokens / (request.max_length * _PACKING_SHARE))


def _micro_steps(request: QuoteRequest, plan: TrainingPlan) -> float:
    """Return the micro-steps of a GPU in the whole job, a short one as a part of one."""
    return _rows(request) * request.epochs / (plan.micro_batch_size * plan.gpu_count)


def _epoch_seconds(task: Task, plan: TrainingPlan, pool: PoolFacts, step: StepTime) -> float:
    """Return the seconds of an epoch's micro-steps. Every GPU has whole rows; its last micro-batch may be short."""
    request = task.request
    if request.packing:
        return _micro_steps(request, plan) / request.epochs * step.micro_step
    whole, left = divmod(-(-request.rows // plan.gpu_count), plan.micro_batch_size)
    if not left:
        return whole * step.micro_step
    last = _step(task, plan, pool, row_layout(task, plan, pool.gpu), left * request.sequences_per_row)
    return whole * step.micro_step + last.micro_step


def _step(task: Task, plan: TrainingPlan, pool: PoolFacts, layout: RowLayout, sequences: int | None = None) -> StepTime:
    """Return the time of a micro-step of so many sequences, the plan's if None."""
    return step_time(
        shape=task.shape,
        plan=plan,
        gpu=timed(pool.gpu),
        stack=task.stack,
        layout=layout,
        rows=sequences or plan.sequences,
        node_bytes_per_second=pool.node_bytes_per_second,
        gpus_per_node=max(pool.gpus_per_worker, 1) if pool.max_gpu_count else max(plan.gpu_count, 1),
        trained_share=task.request.trained_share,
    )


def _evaluation_seconds(task: Task, plan: TrainingPlan, pool: PoolFacts) -> float:
    """Return the seconds of all evaluations. Every process reads all of their rows, which are sorted by length."""
    request = task.request
    if not request.evaluations or not request.evaluation_tokens:
        return 0.0
    layout = task.lengths.unpadded()
    per_token = _step(task, plan, pool, layout).forward(plan) / (layout.tokens * plan.sequences)
    return request.evaluations * request.evaluation_tokens * per_token


def _refers(request: QuoteRequest) -> bool:
    return request.is_preference and request.has_reference


def _reference_seconds(task: Task, plan: TrainingPlan, pool: PoolFacts) -> float:
    """Return the seconds of the reference's one pass over the training and held-out rows, in the files' order.

    Every process reads all rows (gpu_workers/train/loop/dpo.py). An adapter is disabled during the pass.
    """
    request = task.request
    if not _refers(request) or not task.stack.reference_ahead:
        return 0.0
    step = _step(task, plan, pool, shuffled_rows(task, plan))
    return (request.rows + request.held_out_rows) / plan.micro_batch_size * step.reference(plan)


def _checkpoints(request: QuoteRequest, computing: float, save_seconds: float, pool: PoolFacts) -> int:
    if request.checkpoints is not None:
        return request.checkpoints
    apart = min(max(computing / _SAVES_A_JOB, _MIN_SECONDS_APART), pool.checkpoint_seconds_apart)
    return int(computing / max(apart, save_seconds / _MAX_SAVING_SHARE)) + 1  # the last checkpoint is the result


def _checkpoint_seconds(task: Task) -> float:
    """Return the seconds to save an adapter or whole model with its optimizer state: 12 bytes per trained parameter."""
    trained = task.shape.total if task.request.method == Method.FULL else task.shape.adapter
    return _CHECKPOINT_SECONDS + 12 * trained / _CHECKPOINT_BYTES_PER_SECOND


def _alone_on_a100(task: Task, plan: TrainingPlan, pool: PoolFacts) -> StepTime:
    """Return the time of the plan's micro-step on one A100, which waits for no other GPU."""
    alone = msgspec.structs.replace(plan, gpu_count=1, parallelism="single", copies=1, cpu_offload=False)
    return step_time(
        shape=task.shape,
        plan=alone,
        gpu=A100,
        stack=task.stack,
        layout=row_layout(task, alone, pool.gpu),
        rows=plan.sequences,
        trained_share=task.request.trained_share,
    )
