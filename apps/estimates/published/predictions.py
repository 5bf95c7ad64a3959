"""Predictions of published rows: the figures that their publishers' counters would show."""

import msgspec

from apps.estimates.models.architectures import active_linear_parameter_count
from apps.estimates.models.shapes import Shape, shape_of
from apps.estimates.physics.gpus import Gpu
from apps.estimates.physics.lengths import equal_rows
from apps.estimates.physics.memory import CONTEXT_BYTES, MemoryModel
from apps.estimates.physics.plans import Parallelism
from apps.estimates.physics.stacks import STACKS, held_by
from apps.estimates.physics.states import DTYPE_BYTES
from apps.estimates.physics.timing import CONSTANTS, Constants, step_time
from apps.estimates.published.rows import MEMORY, TIME, Job

# Lengths of instruction data are skewed. If a row states only the limit of its rows' lengths, their mean is assumed to
# be a third of it (MetaMathQA, cap 768: mean about 250; Alpaca, cap 512: about 130; Dolly similar).
_MEAN_OF_CAP = 1 / 3
_LEAST_FLOPS = 4  # for each token and weight: a product forward, and one for the gradient of the input


class Prepared(msgspec.Struct, frozen=True):
    """A job with its sums and GPU, so that fits need not compute them again."""

    job: Job
    shape: Shape
    gpu: Gpu


def prepare(job: Job, gpus: dict[str, Gpu]) -> Prepared:
    """Return the job with its sums and GPU.

    An unknown GPU raises no error: it has no speed, and no capacity that a cache could fill.
    """
    plan, architecture = job.plan, held_by(STACKS[job.stack], job.architecture)
    shape = shape_of(architecture, rank=plan.lora_rank, target_modules=plan.target_modules, use_dora=plan.use_dora)
    found = gpus.get(job.gpu_key) or gpus.get(ALIASES.get(job.gpu_key, ""))
    gpu = found or Gpu(key=job.gpu_key, name=job.gpu_key, memory_bytes=0)
    if _is_of_all_gpus(job, gpu):
        job = msgspec.structs.replace(job, measured=job.measured * plan.gpu_count)
    return Prepared(job, shape, gpu)


def _is_of_all_gpus(job: Job, gpu: Gpu) -> bool:
    """Return whether a rate that was read as that of one GPU is more than the GPU can compute."""
    if job.kind != TIME or job.plan.gpu_count == 1:
        return False
    most_flops = (gpu.bf16_flops or gpu.fp16_flops or float("inf")) * (2 if job.precision == "fp8" else 1)
    return _LEAST_FLOPS * active_linear_parameter_count(job.architecture) / job.measured > most_flops


def predict(prepared: Prepared, constants: Constants = CONSTANTS) -> float | None:
    """Return bytes of one GPU or seconds per token of one GPU; None if the GPU's speed is unknown."""
    return memory_bytes(prepared) if prepared.job.kind == MEMORY else seconds_per_token(prepared, constants)


def memory_bytes(prepared: Prepared) -> float:
    """Return the predicted bytes of one GPU.

    torch's counters exclude the CUDA context; a figure without a counter's name counts as the device's.
    """
    job, loading = prepared.job, _loading_bytes(prepared)
    estimate = MemoryModel(prepared.shape, job.plan, prepared.gpu, STACKS[job.stack]).estimate(job.plan)
    if job.counter == "allocated":
        return max(float(estimate.allocated_bytes), loading)
    shown = max(estimate.reserved_bytes, loading)
    return float(shown if job.counter.startswith("reserved") else shown + CONTEXT_BYTES)


def _loading_bytes(prepared: Prepared) -> float:
    """Return the bytes of the weights while a stack that gathers them all loads its checkpoint: a shard and the whole.

    0 for other stacks.
    """
    plan = prepared.job.plan
    if not STACKS[prepared.job.stack].gathers_to_load or plan.parallelism != Parallelism.ZERO3 or plan.shards == 1:
        return 0.0
    return prepared.shape.total * DTYPE_BYTES[plan.compute_dtype] * (1 + 1 / plan.shards)


def known_bytes(prepared: Prepared) -> float:
    """Return the certain part of the figure: the weights on one GPU."""
    plan, stack = prepared.job.plan, STACKS[prepared.job.stack]
    return MemoryModel(prepared.shape, plan, prepared.gpu, stack).weights


def seconds_per_token(prepared: Prepared, constants: Constants = CONSTANTS) -> float | None:
    job, plan = prepared.job, prepared.job.plan
    if not prepared.gpu.reachable_flops:
        return None
    length = plan.max_length * (1.0 if plan.is_packed else _MEAN_OF_CAP)
    times = step_time(
        shape=prepared.shape,
        plan=plan,
        gpu=prepared.gpu,
        stack=STACKS[job.stack],
        layout=equal_rows(length),
        rows=plan.micro_batch_size,
        precision=job.precision,
        node_bytes_per_second=25e9 if prepared.gpu.key.startswith("a100") else 50e9,
        constants=constants,
    )
    seconds = times.micro_step + times.optimizer / plan.gradient_accumulation_steps
    return seconds / (length * plan.micro_batch_size)


# A row that names an A100 without its form or memory: their matrix units are the same.
ALIASES = {
    "a100-80": "a100-sxm-80", "a800-80": "a100-sxm-80", "a100-40": "a100-sxm-40", "a100": "a100-sxm-80",
}  # fmt: skip
