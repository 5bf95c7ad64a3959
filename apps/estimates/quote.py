"""Estimate of a job on one pool: memory, time, wait and cost, with the reasons shown."""

import msgspec

from apps.estimates.bills import bill_of, cost_nano, download_seconds
from apps.estimates.durations import Duration, duration, step_count
from apps.estimates.errors import EstimateError
from apps.estimates.fixes import Fix, ways_to_fit, ways_within
from apps.estimates.intervals import memory_interval, time_interval
from apps.estimates.physics.gpus import GIB, Gpu
from apps.estimates.physics.memory import MemoryPart
from apps.estimates.physics.plans import TrainingPlan
from apps.estimates.physics.throughput import ProbeRow, SpeedSource
from apps.estimates.physics.timing import StepTime
from apps.estimates.placement import ChosenPlan, Task, choose_plan, padded_length, task_of
from apps.estimates.published.sources import nearest
from apps.estimates.requests import Correction, PoolFacts, QuoteRequest

__all__ = [
    "Correction", "Estimate", "EstimateError", "PoolFacts", "QuoteRequest", "TimePart", "cost_nano", "padded_length",
    "quote", "quote_placements", "step_count",
]  # fmt: skip

_GPU_COUNTS = (1, 2, 4, 8, 16, 32, 64)
_TIME_LABELS = {
    "compute": "Matrix products",
    "attention": "Attention",
    "head": "Output head and loss",
    "adapters": "Adapters",
    "dequantization": "Dequantisation",
    "memory": "Memory traffic",
    "fixed": "Launches and bookkeeping",
    "communication": "Communication",
}


class TimePart(msgspec.Struct, frozen=True):
    """Seconds of one part of an optimizer step. `key` is one of the labels, or "optimizer"."""

    key: str
    label: str
    seconds: float


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """The estimate for one pool and number of GPUs.

    Time and cost are None if the job does not fit or its speed is unknown (a CPU without a measurement).

    Memory is of one GPU: `peak_bytes` is the median of `peak_bytes_p10` to `peak_bytes_p90`, and a job fits if the p90
    does.

    Times are of the whole job. `queue_seconds` and `finish_seconds_*` are None if no worker is live and the pool can
    start none, because the time of the next one is unknown. `run_seconds_*` are from a worker's claim to the end,
    `beside_seconds_*` the part of them that is not training: download, start-up, evaluations, checkpoints, and
    `handling_seconds`.

    Billing covers training seconds of all GPUs, and on spot the redone work if the pool bills it. The queue is never
    billed, and the seconds beside training only as far as a minimum charge covers them.
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
    tokens_per_second: float | None = None  # of all GPUs together
    train_seconds_p10: float | None = None
    train_seconds_p50: float | None = None
    train_seconds_p90: float | None = None
    startup_seconds: float
    queue_seconds: float | None
    billed_seconds_p10: int | None = None
    billed_seconds_p50: int | None = None
    billed_seconds_p90: int | None = None
    cost_nano_p10: int | None = None
    cost_nano_p50: int | None = None
    cost_nano_p90: int | None = None
    interval_origin: str | None = None
    speed_source: SpeedSource
    gpu_count: int = 1
    parallelism: str = "single"
    stack: str = "anneal"
    peak_bytes_p10: int = 0
    peak_bytes_p90: int = 0
    memory_origin: str = ""
    utilisation: float | None = None  # share of the GPU's dense peak that useful arithmetic reaches
    bottleneck: str | None = None  # "compute" | "memory_bandwidth" | "interconnect" | "host_link" | "fixed_cost"
    time_parts: tuple[TimePart, ...] = ()  # seconds of one optimizer step, by purpose
    evaluation_seconds: float | None = None
    checkpoint_seconds: float | None = None
    reference_seconds: float | None = None  # DPO: the reference's pass over every row, before training; not billed
    beside_seconds_p10: float | None = None
    beside_seconds_p50: float | None = None
    beside_seconds_p90: float | None = None
    host_bytes: int = 0  # of a GPU machine's own memory: for offloaded weights, or for what follows training
    download_seconds: float = 0.0
    run_seconds_p10: float | None = None
    run_seconds_p50: float | None = None
    run_seconds_p90: float | None = None
    finish_seconds_p10: float | None = None
    finish_seconds_p50: float | None = None
    finish_seconds_p90: float | None = None
    cost_nano_per_million_trained_tokens: int | None = None
    cost_nano_per_a100_hour: int | None = None  # price of the work that one A100 80 GB SXM does in an hour
    is_spot: bool = False
    interruptions: float = 0.0  # expected number during the job
    redone_seconds: float = 0.0  # expected repeated work and restarts, because of interruptions
    redone_is_billed: bool = True

    @property
    def handling_seconds(self) -> float:
        """Return the expected seconds beside training that no other figure has: loading, samples, upload and so on."""
        known = self.download_seconds + (self.reference_seconds or 0.0) + (self.evaluation_seconds or 0.0)
        return max((self.beside_seconds_p50 or 0.0) - known - (self.checkpoint_seconds or 0.0), 0.0)


def quote(
    *,
    request: QuoteRequest,
    pool: PoolFacts,
    published: tuple[ProbeRow, ...] = (),
    other_gpus: tuple[Gpu, ...] = (),
    gpu_count: int = 1,
) -> Estimate:
    """Estimate the job on `gpu_count` GPUs of this pool. Raises EstimateError naming the invalid field.

    `other_gpus` are the types to suggest if the job does not fit this one; `published` are measurements to cite beside
    a computed speed.
    """
    task = task_of(request)
    return _quote(task, pool, _closest(request, pool, published), other_gpus, gpu_count)


def quote_placements(
    *,
    task: Task,
    pool: PoolFacts,
    published: tuple[ProbeRow, ...] = (),
    other_gpus: tuple[Gpu, ...] = (),
    gpu_counts: tuple[int, ...] | None = None,
    with_fixes: bool = True,
) -> tuple[Estimate, ...]:
    """Return one estimate for each sensible number of GPUs of this pool, fewest first.

    The numbers are powers of two up to the pool's. `task` is task_of(request), made once for all pools. Only the fewest
    GPUs get changes that make the job fit.
    """
    most, closest = pool.max_gpu_count or pool.gpus_per_worker, _closest(task.request, pool, published)
    counts = gpu_counts or tuple(n for n in _GPU_COUNTS if n <= most and task.request.batch_size % n == 0)
    return tuple(
        _quote(task, pool, closest, other_gpus, count, with_fixes=with_fixes and count == counts[0]) for count in counts
    )


def _quote(
    task: Task,
    pool: PoolFacts,
    closest: ProbeRow | None,
    other_gpus: tuple[Gpu, ...],
    gpu_count: int,
    *,
    with_fixes: bool = True,
) -> Estimate:
    request, spread = task.request, memory_interval(pool)
    chosen = choose_plan(
        task,
        pool.gpu,
        gpu_count=gpu_count,
        margin=spread.margin,
        node_bytes_per_second=pool.node_bytes_per_second,
        host_memory_bytes=pool.host_memory_bytes,
    )
    low, peak, high = spread.amounts(chosen.memory.peak_bytes, chosen.memory.parts[0].bytes)
    reason = _obstacle(task, pool, chosen, high, gpu_count)
    times = duration(task, chosen.plan, pool)
    steps = step_count(rows=request.rows, batch_size=request.batch_size, epochs=request.epochs)
    estimate = Estimate(
        gpu_key=pool.gpu.key,
        fits=reason is None,
        reason=reason,
        fixes=_ways_out(task, pool, chosen, other_gpus, gpu_count) if reason and with_fixes else (),
        capacity_bytes=pool.gpu.memory_bytes,
        peak_bytes=peak,
        headroom_bytes=pool.gpu.memory_bytes - peak,
        phase=chosen.memory.phase,
        parts=chosen.memory.parts,
        plan=chosen.plan,
        steps=times.optimizer_steps if times else steps,
        total_tokens=request.tokens * request.epochs,
        total_trained_tokens=request.trained_tokens * request.epochs,
        startup_seconds=pool.startup_seconds,
        queue_seconds=queue_seconds(pool, gpu_count),
        speed_source=_speed_source(pool, times, closest),
        gpu_count=gpu_count,
        parallelism=chosen.plan.parallelism,
        stack=request.stack,
        peak_bytes_p10=low,
        peak_bytes_p90=high,
        memory_origin=spread.origin,
        host_bytes=chosen.host_bytes,
        download_seconds=download_seconds(pool),
        is_spot=pool.is_spot,
        redone_is_billed=pool.bills_redone_work,
    )
    return _with_times(estimate, request, pool, times) if times and estimate.fits else estimate


def _with_times(estimate: Estimate, request: QuoteRequest, pool: PoolFacts, times: Duration) -> Estimate:
    """Return the estimate of a job that fits, with its times and cost."""
    interval = time_interval(pool, times)
    bill, queue = bill_of(pool, times, interval, estimate.gpu_count), estimate.queue_seconds
    run = [beside + training for beside, training in zip(bill.beside, bill.whole, strict=True)]  # from claim to end
    finish = [None if queue is None else queue + seconds for seconds in run]
    cost_nano, per_million, per_a100_hour = bill.costs[1], None, None
    if cost_nano is not None:
        per_million = round(cost_nano * 1e6 / (request.trained_tokens * request.epochs))
        per_a100_hour = round(cost_nano * 3600 / times.a100_seconds) if times.a100_seconds else None
    step: StepTime = times.step
    scale = times.probe_factor * estimate.plan.gradient_accumulation_steps
    parts = [TimePart(key, label, getattr(step, key) * scale) for key, label in _TIME_LABELS.items()]
    return msgspec.structs.replace(
        estimate,
        tokens_per_second=times.tokens_per_second / interval.p50,
        train_seconds_p10=bill.seconds[0],
        train_seconds_p50=bill.seconds[1],
        train_seconds_p90=bill.seconds[2],
        billed_seconds_p10=bill.billed[0],
        billed_seconds_p50=bill.billed[1],
        billed_seconds_p90=bill.billed[2],
        cost_nano_p10=bill.costs[0],
        cost_nano_p50=bill.costs[1],
        cost_nano_p90=bill.costs[2],
        interval_origin=interval.origin,
        utilisation=times.utilisation / interval.p50 if times.utilisation else None,
        bottleneck=times.bottleneck,
        time_parts=(*parts, TimePart("optimizer", "Optimizer", step.optimizer * times.probe_factor)),
        evaluation_seconds=times.evaluation_seconds,
        checkpoint_seconds=times.checkpoint_seconds,
        reference_seconds=times.reference_seconds,
        beside_seconds_p10=bill.beside[0],
        beside_seconds_p50=bill.beside[1],
        beside_seconds_p90=bill.beside[2],
        run_seconds_p10=run[0],
        run_seconds_p50=run[1],
        run_seconds_p90=run[2],
        finish_seconds_p10=finish[0],
        finish_seconds_p50=finish[1],
        finish_seconds_p90=finish[2],
        cost_nano_per_million_trained_tokens=per_million,
        cost_nano_per_a100_hour=per_a100_hour,
        interruptions=bill.interruptions,
        redone_seconds=bill.redone,
    )


def _obstacle(task: Task, pool: PoolFacts, placement: ChosenPlan, needed_bytes: int, gpu_count: int) -> str | None:
    """Return why the job cannot run on this placement, None if it can."""
    if limit := _exceeded_limit(task.request):
        return f"The longest row has {padded_length(task.request):,} tokens; this base model reads at most {limit:,}."
    if placement.fits:
        return None
    if needed_bytes <= pool.gpu.memory_bytes:
        wanted, there = placement.host_bytes / GIB, (pool.host_memory_bytes or 0) / GIB
        return f"Needs {wanted:,.1f} GiB of the host's memory; a worker here has {there:,.1f} GiB."
    needed, held = needed_bytes / GIB, pool.gpu.memory_bytes / GIB
    rows = placement.plan.micro_batch_size
    at_once = f"Needs up to {needed:,.1f} GiB with {rows} rows at a time"
    if rows == 1:
        at_once = f"Needs up to {needed:,.1f} GiB with one row at a time"
    holder = "each of them" if gpu_count > 1 else pool.gpu.name
    return f"{at_once}; {holder} holds {held:,.1f} GiB."


def _ways_out(
    task: Task, pool: PoolFacts, placement: ChosenPlan, other_gpus: tuple[Gpu, ...], gpu_count: int
) -> tuple[Fix, ...]:
    if limit := _exceeded_limit(task.request):
        text = f"Set max_length to {limit:,} tokens or fewer."
        bare = Fix(key="max_length", text=text, peak_bytes=placement.memory.peak_bytes, max_length=limit)
        return ways_within(task, pool, limit, gpu_count=gpu_count) or (bare,)
    return ways_to_fit(task, pool, gpu_count=gpu_count, other_gpus=other_gpus)


def _exceeded_limit(request: QuoteRequest) -> int | None:
    """Return the base model's token limit if a row exceeds it."""
    limit = request.architecture.max_position_embeddings
    return limit if limit is not None and padded_length(request) > limit else None


def queue_seconds(pool: PoolFacts, gpu_count: int) -> float | None:
    """Return the wait for this many free GPUs of one worker, or of as many as share them; None without such workers.

    A pool that can start further workers may have them earlier than those that work.
    """
    nodes = max(gpu_count // pool.gpus_per_worker, 1) if pool.max_gpu_count else 1
    gpu_count //= nodes
    waits = _wait_for_live(pool, gpu_count, nodes), _wait_for_further(pool, gpu_count, nodes)
    return min((wait for wait in waits if wait is not None), default=None)


def _wait_for_live(pool: PoolFacts, gpu_count: int, nodes: int) -> float | None:
    if not pool.live_workers:
        return None
    if sum(free >= gpu_count for free in pool.free_gpus) >= nodes:
        return 0.0
    if not pool.worker_gpus:
        return pool.seconds_ahead / pool.live_workers
    return _longest_share(pool, pool.worker_gpus, gpu_count, nodes)


def _wait_for_further(pool: PoolFacts, gpu_count: int, nodes: int) -> float | None:
    """Return the wait if the pool starts workers: for these if no run waits, else also for what is ahead on all."""
    ready = (*pool.further_gpus, *pool.free_gpus)
    if not pool.further_gpus or (not pool.has_queue and sum(gpus >= gpu_count for gpus in ready) >= nodes):
        return pool.start_seconds if pool.further_gpus else None
    wait = _longest_share(pool, (*pool.worker_gpus, *pool.further_gpus), gpu_count, nodes)
    return None if wait is None else max(wait, pool.start_seconds)


def _longest_share(pool: PoolFacts, worker_gpus: tuple[int, ...], gpu_count: int, nodes: int) -> float | None:
    """Return the wait if these workers share what is ahead; None if too few have so many GPUs.

    A run uses only its own GPUs of a worker. Only workers with at least k GPUs do the work that needs k. So the wait is
    the longest of these shares: of all GPU time ahead over all GPUs, and of that of larger runs over the GPUs of larger
    workers.
    """
    if sum(gpus >= gpu_count for gpus in worker_gpus) < nodes:
        return None
    waits = []
    for need in {1, gpu_count} | {need for need, _ in pool.ahead_by_gpus if need < gpu_count}:
        able = sum(gpus for gpus in worker_gpus if gpus >= need)
        if not able:
            return None
        waits.append(sum(gpus * seconds for gpus, seconds in pool.ahead_by_gpus if gpus >= need) / able)
    return max(waits)


def _closest(request: QuoteRequest, pool: PoolFacts, published: tuple[ProbeRow, ...]) -> ProbeRow | None:
    """Return the measurement to cite beside a computed speed; a pool with its own probe needs none."""
    if pool.probe is not None or not published:
        return None
    return nearest(
        published=published,
        gpu_key=pool.gpu.key,
        architecture=request.architecture,
        method=request.method,
        max_length=padded_length(request),
    )


def _speed_source(pool: PoolFacts, times: Duration | None, closest: ProbeRow | None) -> SpeedSource:
    if pool.probe is not None:
        return pool.probe.source
    if times is None:
        return SpeedSource(kind="none", text=f"no measurement for {pool.gpu.name} yet")
    text = f"Computed from {pool.gpu.name}'s data sheet; this pool has not been measured yet"
    if closest is None:
        return SpeedSource(kind="physics", text=text)
    return SpeedSource(kind="physics", text=f"{text}. Closest {closest.source.text.lower()}", url=closest.source.url)
