"""Seconds of a whole job on its GPUs.

They are the sum of micro-steps over the dataset's real lengths, optimizer steps, evaluations and checkpoints, scaled by
a probe of the pool if there is one.
"""

import math

import msgspec

from apps.contracts.runs import Method
from apps.estimates.models.architectures import active_linear_parameter_count
from apps.estimates.models.shapes import shape_of
from apps.estimates.physics.gpus import Gpu
from apps.estimates.physics.plans import TrainingPlan
from apps.estimates.physics.stacks import ANNEAL
from apps.estimates.physics.throughput import ProbeRow
from apps.estimates.physics.timing import StepTime, step_time, timed
from apps.estimates.placement import Task, padded_length
from apps.estimates.requests import PoolFacts, QuoteRequest

# Packed rows are filled to this share on average (best-fit decreasing: Fewer Truncations Improve Language Modeling,
# arXiv 2404.10830, table 1: above 99.9 % for documents of web length). Chat rows are longer relative to the limit.
_PACKING_SHARE = 0.97
# Sorting the whole set by length (PEFT's method comparison) leaves this much padding on skewed lengths.
_SORTED_PADDING = 1.03
# The number of batches our trainer sorts together when it pads (gpu_workers/train/data/encoding.py
# LengthGroupedSampler).
_BATCHES_PER_POOL = 4
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
    micro_steps: float
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
    request, rows = task.request, _rows(task.request)
    length = _row_length(task, plan, pool.gpu)
    step = step_time(
        shape=task.shape,
        plan=plan,
        gpu=gpu,
        stack=task.stack,
        row_tokens=length,
        rows=plan.sequences,
        node_bytes_per_second=pool.node_bytes_per_second,
        gpus_per_node=max(pool.gpus_per_worker, 1) if pool.max_gpu_count else max(plan.gpu_count, 1),
        trained_share=request.trained_share,
    )
    factor = probe_factor(pool.probe, gpu) if pool.probe else 1.0
    micro_steps = rows * request.epochs / (plan.micro_batch_size * plan.gpu_count)
    steps = step_count(rows=math.ceil(rows), batch_size=request.batch_size, epochs=request.epochs)
    beside = step.reference(plan) if _refers(request) and not task.stack.reference_ahead else 0.0
    computing = factor * (micro_steps * (step.micro_step + beside) + steps * step.optimizer)
    evaluation = factor * _evaluation_seconds(request, plan, step, length)
    checkpoints = _checkpoints(request, computing, _checkpoint_seconds(task), pool) * _checkpoint_seconds(task)
    peak = pool.gpu.bf16_flops or pool.gpu.fp16_flops
    return Duration(
        train_seconds=computing,
        tokens_per_second=request.tokens * request.epochs / computing,
        evaluation_seconds=evaluation,
        checkpoint_seconds=checkpoints,
        reference_seconds=factor * _reference_seconds(task, plan, step),
        step=step,
        micro_steps=micro_steps,
        optimizer_steps=steps,
        utilisation=micro_steps * step.flops / (computing * peak) if peak else None,
        bottleneck="host_link" if plan.cpu_offload and step.bottleneck == "interconnect" else step.bottleneck,
        a100_seconds=_a100_seconds(task, plan, length, micro_steps * plan.gpu_count),
        probe_factor=factor,
        probe_distance=_probe_distance(pool.probe, task, plan, length) if pool.probe else 0.0,
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
        row_tokens=probe.tokens_per_micro_step / rows,
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


def padded_mean(request: QuoteRequest, rows: int) -> float:
    """Return the mean length of micro-batches of `rows` random rows, each padded to its longest."""
    rows *= request.sequences_per_row
    return min(request.mean_tokens, float(padded_length(request))) if rows == 1 else longest_of(request, rows)


def longest_of(request: QuoteRequest, rows: int) -> float:
    """Return the expected length in tokens of the longest of `rows` random rows.

    Lengths come from the histogram if there is one. Otherwise they are assumed exponential with their mean; the largest
    of n is then the mean times 1 + 1/2 + ... + 1/n, at most the longest row.
    """
    longest = float(padded_length(request))
    if not request.row_lengths:
        return min(longest, request.mean_tokens * sum(1 / n for n in range(1, rows + 1)))
    total = sum(count for _, count in request.row_lengths)
    seen, expected, before = 0, 0.0, 0.0
    for length, count in sorted(request.row_lengths):
        seen += count
        share = (seen / total) ** rows
        expected += min(length, longest) * (share - before)
        before = share
    return expected


def _rows(request: QuoteRequest) -> float:
    """Return the rows the trainer sees in an epoch; packed rows are fewer and full."""
    if not request.packing:
        return float(request.rows)
    return max(1.0, request.tokens / (request.max_length * _PACKING_SHARE))


def _row_length(task: Task, plan: TrainingPlan, gpu: Gpu) -> float:
    request = task.request
    if request.packing:
        return float(min(request.max_length, request.tokens))
    # Both answers of a pair are padded to the longer one; the histogram holds its lengths.
    mean = max(request.mean_tokens, _mean_of_bars(request) if request.is_preference else 0.0)
    longest = float(padded_length(request))
    if task.stack.packs_micro_batches:
        return min(longest, mean * (pooled_padding(request, plan) if _is_padded(request, gpu) else 1.0))
    if task.stack.groups_lengths:
        return min(longest, mean * (_SORTED_PADDING if plan.micro_batch_size > 1 else 1.0))
    return padded_mean(request, plan.micro_batch_size)


def _is_padded(request: QuoteRequest, gpu: Gpu) -> bool:
    """Return whether our trainer pads: preference pairs, on request, model-specific attention, and cards before Ampere.

    The conditions follow gpu_workers/train/model/hardware.py.
    """
    is_asked = request.is_preference or request.pads_rows
    return is_asked or request.architecture.has_own_attention or bool(gpu.fp16_flops and not gpu.bf16_flops)


def pooled_padding(request: QuoteRequest, plan: TrainingPlan) -> float:
    """Return computed tokens per real token, if a few batches of rows are sorted by length together.

    When the sorted pool is cut into micro-batches, their longest rows are at evenly spaced quantiles, and the last one
    at the expected longest. Lengths come from the histogram, or are exponential with their mean, as in `longest_of`.
    """
    if plan.micro_batch_size == 1:
        return 1.0
    pool = min(request.rows, _BATCHES_PER_POOL * request.batch_size)
    cuts = max(1, pool // plan.micro_batch_size)
    ends = [_quantile(request, (cut * plan.micro_batch_size) / (pool + 1)) for cut in range(1, cuts)]
    ends.append(longest_of(request, pool))
    return max(1.0, (sum(ends) / cuts) / (_mean_of_bars(request) or request.mean_tokens))


def _quantile(request: QuoteRequest, share: float) -> float:
    """Return the length in tokens of a row longer than this share of all; lengths are uniform within a bar."""
    longest = float(padded_length(request))
    if not request.row_lengths:
        return min(longest, -request.mean_tokens * math.log1p(-share))
    total, before, seen = sum(count for _, count in request.row_lengths), 0, 0
    for bound, count in sorted(request.row_lengths):
        if seen + count >= share * total:
            return min(longest, before + (bound - before) * (share * total - seen) / count)
        before, seen = bound, seen + count
    return longest


def _mean_of_bars(request: QuoteRequest) -> float:
    """Return the mean length in tokens from the histogram, bars at their middle; 0 without one."""
    longest = padded_length(request)
    total, weighted, before = 0, 0.0, 0
    for bound, rows in sorted(request.row_lengths):
        weighted += rows * min((before + bound) / 2, longest)
        total, before = total + rows, bound
    return weighted / max(total, 1)


def _evaluation_seconds(request: QuoteRequest, plan: TrainingPlan, step: StepTime, length: float) -> float:
    if not request.evaluations or not request.evaluation_tokens:
        return 0.0
    per_token = step.forward(plan) / (length * plan.sequences * plan.gpu_count)
    return request.evaluations * request.evaluation_tokens * per_token


def _refers(request: QuoteRequest) -> bool:
    return request.is_preference and request.has_reference


def _reference_seconds(task: Task, plan: TrainingPlan, step: StepTime) -> float:
    """Return the seconds of the reference's one pass over the training and held-out rows, in micro-batches.

    Every process reads all rows (gpu_workers/train/loop/dpo.py). An adapter is disabled during the pass.
    """
    request = task.request
    if not _refers(request) or not task.stack.reference_ahead:
        return 0.0
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


def _a100_seconds(task: Task, plan: TrainingPlan, length: float, micro_steps: float) -> float:
    alone = msgspec.structs.replace(plan, gpu_count=1, parallelism="single", copies=1, cpu_offload=False)
    step = step_time(
        shape=task.shape,
        plan=alone,
        gpu=A100,
        stack=task.stack,
        row_tokens=length,
        rows=plan.sequences,
        trained_share=task.request.trained_share,
    )
    return micro_steps * step.micro_step
