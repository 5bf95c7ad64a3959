"""What a job would take on one pool: memory, time, wait and cost, with the reasons shown."""

import math

import msgspec

from apps.estimates.architectures import Architecture, active_linear_parameter_count
from apps.estimates.calibration import Interval, time_interval
from apps.estimates.gpus import GIB, Gpu
from apps.estimates.memory import MemoryPart
from apps.estimates.placement import Fix, Placement, choose_plan, ways_to_fit
from apps.estimates.plans import TrainingPlan
from apps.estimates.published import nearest
from apps.estimates.requests import Correction, PoolFacts, QuoteRequest
from apps.estimates.throughput import ProbeRow, SpeedSource, Throughput, Unmeasured, tokens_per_second

# A published speed of a model further away in size is not carried over: the fixed cost of a step, which such rows do
# not state, would decide, and a model of a few million parameters be quoted millions of tokens a second.
_COMPARABLE_SIZE = 20.0
_GPU_COUNTS = (1, 2, 4, 8, 16, 32, 64)

__all__ = ["Correction", "Estimate", "PoolFacts", "QuoteRequest", "TimePart", "quote", "quote_placements"]


class TimePart(msgspec.Struct, frozen=True):
    """`key`: compute, attention, head, adapters, dequantization, memory, fixed, communication, optimizer."""

    key: str
    label: str
    seconds: float


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for one pool and number of GPUs. Time and cost are None when the job does not fit or no speed can be
    known (a CPU that nobody measured).

    Memory is of one GPU: `peak_bytes` is the median of `peak_bytes_p10` to `peak_bytes_p90`, and a job fits where the
    p90 does. Times are of the whole job; `queue_seconds` and `finish_seconds_*` are None without live workers: nobody
    knows when one comes. Billing covers training seconds (evaluations and checkpoints are part of them) of all GPUs,
    never queue, start-up or download.
    """

    gpu_key: str
    fits: bool
    reason: str | None
    fixes: tuple[Fix, ...]
    capacity_bytes: int
    peak_bytes: int
    headroom_bytes: int
    phase: str
    parts: tuple[MemoryPart, ...]
    plan: TrainingPlan
    steps: int
    total_tokens: int
    total_trained_tokens: int
    tokens_per_second: float | None  # of all GPUs together
    train_seconds_p10: float | None
    train_seconds_p50: float | None
    train_seconds_p90: float | None
    startup_seconds: float
    queue_seconds: float | None
    billed_seconds_p10: int | None
    billed_seconds_p50: int | None
    billed_seconds_p90: int | None
    cost_nano_p10: int | None
    cost_nano_p50: int | None
    cost_nano_p90: int | None
    interval_origin: str | None
    speed_source: SpeedSource
    gpu_count: int = 1
    parallelism: str = "single"
    stack: str = "anneal"
    peak_bytes_p10: int = 0
    peak_bytes_p90: int = 0
    memory_origin: str = ""
    utilisation: float | None = None  # share of the GPU's dense peak that useful arithmetic reaches
    bottleneck: str | None = None  # "compute" | "memory_bandwidth" | "interconnect" | "fixed_cost"
    time_parts: tuple[TimePart, ...] = ()  # seconds of one optimizer step by what they are spent on
    evaluation_seconds: float | None = None
    checkpoint_seconds: float | None = None
    download_seconds: float = 0.0
    finish_seconds_p10: float | None = None
    finish_seconds_p50: float | None = None
    finish_seconds_p90: float | None = None
    cost_nano_per_million_trained_tokens: int | None = None
    cost_nano_per_a100_hour: int | None = None  # price of the work one A100 80 GB SXM does in an hour
    is_spot: bool = False
    interruptions: float = 0.0  # expected number during the job
    redone_seconds: float = 0.0  # expected work done twice, and restarts, because of them


def quote(
    *,
    request: QuoteRequest,
    pool: PoolFacts,
    published: tuple[ProbeRow, ...] = (),
    other_gpus: tuple[Gpu, ...] = (),
    gpu_count: int = 1,
) -> Estimate:
    """Estimate the job on this pool: from the pool's probe, else from the nearest published row of its GPU type.

    `other_gpus` are the types to suggest when the job does not fit this one.
    """
    placement = _place(request, pool.gpu)
    reason, fixes = _obstacle(request, pool, placement, other_gpus)
    probe = pool.probe or _nearest_published(request, pool, published)
    speed = _speed(request, pool, placement, probe)
    seconds = _train_seconds(request, pool, probe, speed) if reason is None else None
    billed = tuple(math.ceil(value) for value in seconds[:3]) if seconds else (None, None, None)
    costs = tuple(_cost_nano(pool, value) for value in billed)
    return Estimate(
        gpu_key=pool.gpu.key,
        fits=reason is None,
        reason=reason,
        fixes=fixes,
        capacity_bytes=pool.gpu.memory_bytes,
        peak_bytes=placement.memory.peak_bytes,
        headroom_bytes=pool.gpu.memory_bytes - placement.memory.peak_bytes,
        phase=placement.memory.phase,
        parts=placement.memory.parts,
        plan=placement.plan,
        steps=step_count(rows=request.rows, batch_size=request.batch_size, epochs=request.epochs),
        total_tokens=request.tokens * request.epochs,
        total_trained_tokens=request.trained_tokens * request.epochs,
        tokens_per_second=speed.tokens_per_second if isinstance(speed, Throughput) and reason is None else None,
        train_seconds_p10=seconds[0] if seconds else None,
        train_seconds_p50=seconds[1] if seconds else None,
        train_seconds_p90=seconds[2] if seconds else None,
        startup_seconds=pool.startup_seconds,
        queue_seconds=pool.seconds_ahead / pool.live_workers if pool.live_workers else None,
        billed_seconds_p10=billed[0],
        billed_seconds_p50=billed[1],
        billed_seconds_p90=billed[2],
        cost_nano_p10=costs[0],
        cost_nano_p50=costs[1],
        cost_nano_p90=costs[2],
        interval_origin=seconds[3].origin if seconds else None,
        speed_source=_speed_source(speed),
    )


def quote_placements(
    *,
    request: QuoteRequest,
    pool: PoolFacts,
    published: tuple[ProbeRow, ...] = (),
    other_gpus: tuple[Gpu, ...] = (),
    gpu_counts: tuple[int, ...] | None = None,
) -> tuple[Estimate, ...]:
    """One estimate for each sensible number of GPUs of this pool (powers of two up to what it has), fewest first."""
    most = pool.max_gpu_count or pool.gpus_per_worker
    counts = gpu_counts or tuple(count for count in _GPU_COUNTS if count <= most)
    return tuple(
        quote(request=request, pool=pool, published=published, other_gpus=other_gpus, gpu_count=count)
        for count in counts
    )


def step_count(*, rows: int, batch_size: int, epochs: int) -> int:
    """Optimizer steps without packing: the last batch of an epoch may be smaller, and is still a step."""
    return -(-rows // batch_size) * epochs


def cost_nano(*, price_nano: int, price_per_seconds: int, seconds: int) -> int:
    """Price of so many billed seconds in nano-USD, rounded half up."""
    return (2 * price_nano * seconds + price_per_seconds) // (2 * price_per_seconds)


def padded_length(request: QuoteRequest) -> int:
    """Tokens of the longest row the trainer will see: batches are padded to their own longest row, not to the cap."""
    return min(request.max_length, request.longest_row_tokens)


def _place(request: QuoteRequest, gpu: Gpu) -> Placement:
    return choose_plan(
        architecture=request.architecture,
        method=request.method,
        gpu=gpu,
        max_length=padded_length(request),
        batch_size=request.batch_size,
        lora_rank=request.lora_rank,
        target_modules=request.target_modules,
    )


def _obstacle(
    request: QuoteRequest, pool: PoolFacts, placement: Placement, other_gpus: tuple[Gpu, ...]
) -> tuple[str | None, tuple[Fix, ...]]:
    limit = request.architecture.max_position_embeddings
    if limit is not None and padded_length(request) > limit:
        reason = f"The longest row has {padded_length(request):,} tokens; this base model reads at most {limit:,}."
        text = f"Set max_length to {limit:,} tokens or fewer."
        return reason, (Fix(key="max_length", text=text, peak_bytes=placement.memory.peak_bytes, max_length=limit),)
    if placement.fits:
        return None, ()
    needed, held = placement.memory.peak_bytes / GIB, pool.gpu.memory_bytes / GIB
    reason = f"Needs {needed:,.1f} GiB with one row at a time; {pool.gpu.name} holds {held:,.1f} GiB."
    fixes = ways_to_fit(
        architecture=request.architecture,
        plan=placement.plan,
        gpu=pool.gpu,
        other_gpus=tuple(gpu for gpu in other_gpus if gpu.key != pool.gpu.key),
    )
    return reason, fixes


def _nearest_published(request: QuoteRequest, pool: PoolFacts, published: tuple[ProbeRow, ...]) -> ProbeRow | None:
    found = nearest(
        published=published,
        gpu_key=pool.gpu.key,
        architecture=request.architecture,
        method=request.method,
        max_length=padded_length(request),
    )
    return found if found and _is_comparable(request.architecture, found.architecture) else None


def _is_comparable(asked: Architecture, measured: Architecture) -> bool:
    ratio = active_linear_parameter_count(asked) / active_linear_parameter_count(measured)
    return 1 / _COMPARABLE_SIZE <= ratio <= _COMPARABLE_SIZE


def _speed(
    request: QuoteRequest, pool: PoolFacts, placement: Placement, probe: ProbeRow | None
) -> Throughput | Unmeasured:
    return tokens_per_second(
        architecture=request.architecture,
        plan=placement.plan,
        gpu=pool.gpu,
        probe=probe,
        mean_row_tokens=request.tokens / request.rows,
    )


def _train_seconds(
    request: QuoteRequest, pool: PoolFacts, probe: ProbeRow | None, speed: Throughput | Unmeasured
) -> tuple[float, float, float, Interval] | None:
    if probe is None or isinstance(speed, Unmeasured):
        return None
    interval = time_interval(probe=probe, throughput=speed, method=request.method, ratios=pool.finished_ratios)
    seconds = request.tokens * request.epochs / speed.tokens_per_second
    return seconds * interval.p10, seconds * interval.p50, seconds * interval.p90, interval


def _cost_nano(pool: PoolFacts, seconds: int | None) -> int | None:
    if seconds is None or pool.price_nano is None:
        return None
    return cost_nano(price_nano=pool.price_nano, price_per_seconds=pool.price_per_seconds, seconds=seconds)


def _speed_source(speed: Throughput | Unmeasured) -> SpeedSource:
    if isinstance(speed, Throughput):
        return speed.source
    return SpeedSource(kind="none", text=speed.reason)
