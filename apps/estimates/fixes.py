"""Changes that make a job fit, each sufficient alone, with the cost of the changed job."""

from collections.abc import Iterator

import msgspec

from apps.contracts.hyperparameters import Method
from apps.estimates.durations import duration
from apps.estimates.intervals import memory_interval, time_interval
from apps.estimates.physics.gpus import GIB, Gpu
from apps.estimates.placement import ChosenPlan, Task, choose_plan, least_host_bytes, longest_length, smallest_plan
from apps.estimates.requests import PoolFacts, pieces_of

_LENGTH_STEP = 64  # suggested lengths are round numbers
_MAX_GPUS = 64
_LIGHTER = {Method.FULL: (Method.LORA, Method.QLORA), Method.LORA: (Method.QLORA,), Method.QLORA: ()}
_NAMES = {Method.LORA: "LoRA", Method.QLORA: "QLoRA"}


class Fix(msgspec.Struct, frozen=True, kw_only=True):
    """One change that makes the job fit, and the cost of the changed job.

    `key` is "micro_batch", "checkpointing", "method", "max_length", "gpu_count", "offload", "gpu" (another type) or
    "none" (no offered GPU can hold it). The cost is at the pool's own price; for another type only the time is known
    here.
    """

    key: str
    text: str
    peak_bytes: int
    method: str | None = None
    max_length: int | None = None
    gpu_key: str | None = None
    gpu_count: int | None = None
    micro_batch_size: int | None = None
    gradient_checkpointing: bool | None = None
    cpu_offload: bool | None = None
    host_bytes: int = 0
    train_seconds_p50: float | None = None
    cost_nano_p50: int | None = None


def ways_to_fit(task: Task, pool: PoolFacts, *, gpu_count: int, other_gpus: tuple[Gpu, ...] = ()) -> tuple[Fix, ...]:
    """Return the single changes that suffice, smallest first; else a combination, or the fix "none"."""
    wanted = least_host_bytes(task, pool.gpu)
    if pool.host_memory_bytes is not None and wanted > pool.host_memory_bytes:
        text = f"Choose a smaller base model, or a pool whose machines have {gib(wanted)} of memory."
        return (Fix(key="none", text=text, peak_bytes=_peak_bytes(_placed(task, pool, gpu_count), pool)),)
    fixes = tuple(_single_changes(task, pool, gpu_count, other_gpus))
    return fixes or _combined(task, pool, other_gpus)


def ways_within(task: Task, pool: PoolFacts, limit: int, *, gpu_count: int) -> tuple[Fix, ...]:
    """Return the fix that cuts rows to the base model's token limit, or to the longest length that fits.

    Return () if no length fits.
    """
    limited, text = _with_length(task, limit), f"Set max_length to {limit:,} tokens or fewer"
    whole = tuple(_change(limited, pool, gpu_count, "max_length", text, {"max_length": limit}))
    return whole or tuple(_shorter(limited, pool, gpu_count))


def _single_changes(task: Task, pool: PoolFacts, gpu_count: int, others: tuple[Gpu, ...]) -> Iterator[Fix]:
    request = task.request
    if request.micro_batch_size is not None and request.micro_batch_size > 1:
        yield from _change(
            task, pool, gpu_count, "micro_batch", "Let the trainer choose the micro-batch", {"micro_batch_size": None}
        )
    if request.gradient_checkpointing is False:
        changes: dict[str, object] = {"gradient_checkpointing": True}
        yield from _change(task, pool, gpu_count, "checkpointing", "Recompute activations (checkpointing)", changes)
    for method in _LIGHTER[Method(request.method)]:
        asked: dict[str, object] = {"method": method.value}
        if method == Method.QLORA and request.cpu_offload:
            asked["cpu_offload"] = False
        found = list(_change(task, pool, gpu_count, "method", f"Use {_NAMES[method]}", asked))
        if found:
            yield found[0]
            break
    yield from _shorter(task, pool, gpu_count)
    yield from _more_gpus(task, pool, gpu_count)
    can_offload = request.method != Method.QLORA or task.stack.offloads_quantized
    if request.cpu_offload:
        text = "Keep everything in the GPU's memory"
        yield from _change(task, pool, gpu_count, "offload", text, {"cpu_offload": False})
    elif can_offload and not (request.node_count > 1 or pool.gpu.is_cpu):
        text = "Keep the base model in the host's memory (slower)"
        if request.method == Method.FULL:
            text = "Keep weights, gradients and optimizer state in the host's memory (slower)"
        yield from _change(task, pool, gpu_count, "offload", text, {"cpu_offload": True})
    yield from _other_types(task, pool, others)


def _change(
    task: Task, pool: PoolFacts, gpu_count: int, key: str, text: str, changes: dict[str, object]
) -> Iterator[Fix]:
    changed = task.changed(changes)
    placement = _placed(changed, pool, gpu_count)
    if placement.fits:
        yield _priced(changed, pool, placement, key, text, changes)


def _placed(task: Task, pool: PoolFacts, gpu_count: int) -> ChosenPlan:
    margin, host = memory_interval(pool).margin, pool.host_memory_bytes
    link = pool.node_bytes_per_second
    return choose_plan(
        task, pool.gpu, gpu_count=gpu_count, margin=margin, node_bytes_per_second=link, host_memory_bytes=host
    )


def _shorter(task: Task, pool: PoolFacts, gpu_count: int) -> Iterator[Fix]:
    """Yield the longest round length that fits, found by bisection: memory never decreases with length."""
    length = _longest(task, pool, gpu_count)
    if length:
        text = f"Set max_length to {length:,} tokens or fewer"
        yield from _change(_with_length(task, length), pool, gpu_count, "max_length", text, {"max_length": length})


def _longest(task: Task, pool: PoolFacts, gpu_count: int) -> int:
    margin = memory_interval(pool).margin
    return longest_length(task, pool.gpu, gpu_count=gpu_count, margin=margin, step=_LENGTH_STEP)


def _with_length(task: Task, length: int) -> Task:
    """Return the task cut to this length: by its histogram if there is one, trained tokens in proportion.

    Running text is not cut, but split into more pieces.
    """
    request = task.request
    if request.splits_rows and request.row_lengths:
        pieces = pieces_of(request.row_lengths, length)
        more = sum(number for _, number in pieces) / sum(number for _, number in request.row_lengths)
        return task.changed({"max_length": length, "rows": round(request.rows * more), "row_lengths": pieces})
    tokens = min(request.tokens, length * request.rows * request.sequences_per_row)
    whole = sum(min(bound, request.max_length) * rows for bound, rows in request.row_lengths)
    if whole:
        kept = sum(min(bound, length) * rows for bound, rows in request.row_lengths)
        tokens = min(tokens, round(request.tokens * kept / whole))
    tokens = max(tokens, request.rows)
    trained = max(1, min(tokens, round(request.trained_tokens * tokens / request.tokens)))
    changes = {"max_length": length, "tokens": tokens, "trained_tokens": trained}
    return task.changed(changes)


def _more_gpus(task: Task, pool: PoolFacts, gpu_count: int) -> Iterator[Fix]:
    """Yield the fewest GPUs of this pool that can hold the unchanged job."""
    count, most = gpu_count * 2, min(pool.max_gpu_count or pool.gpus_per_worker, _MAX_GPUS)
    while count <= most and task.request.batch_size % count == 0:
        placement = _placed(task, pool, count)
        if placement.fits:
            yield _priced(task, pool, placement, "gpu_count", f"Use {count} GPUs", {"gpu_count": count})
            return
        count *= 2


def _other_types(task: Task, pool: PoolFacts, others: tuple[Gpu, ...]) -> Iterator[Fix]:
    """Yield the smallest other GPU type that can hold the unchanged job."""
    for gpu in sorted(others, key=lambda gpu: gpu.memory_bytes):
        if gpu.key == pool.gpu.key or gpu.memory_bytes <= pool.gpu.memory_bytes:
            continue
        elsewhere = _with_type(pool, gpu)
        placement = _placed(task, elsewhere, 1)
        if placement.fits:
            yield _priced(task, elsewhere, placement, "gpu", f"Use {gpu.name}", {"gpu_key": gpu.key})
            return


def _with_type(pool: PoolFacts, gpu: Gpu) -> PoolFacts:
    """Return a pool of another type of GPU, of which nothing else is known."""
    return PoolFacts(gpu=gpu, host_memory_bytes=pool.host_memory_bytes, memory_factor=pool.memory_factor)


def _combined(task: Task, pool: PoolFacts, others: tuple[Gpu, ...]) -> tuple[Fix, ...]:
    """Return QLoRA on a larger type, or on the largest type with shorter rows."""
    lightest = {"method": Method.QLORA.value, "gradient_checkpointing": True, "cpu_offload": False}
    least = task.changed(lightest)
    for fix in _other_types(least, pool, others):
        return (msgspec.structs.replace(fix, text=f"Use QLoRA on a larger type. {fix.text}", method="qlora"),)
    largest = max((pool.gpu, *others), key=lambda gpu: gpu.memory_bytes)
    elsewhere = _with_type(pool, largest)
    length = _longest(least, elsewhere, 1)
    if length:
        shorter = _with_length(least, length)
        text = f"Use QLoRA on {largest.name} with max_length {length:,} or fewer"
        changes: dict[str, object] = {"method": "qlora", "max_length": length, "gpu_key": largest.key}
        return (_priced(shorter, elsewhere, smallest_plan(shorter, largest), "max_length", text, changes),)
    peak = _peak_bytes(smallest_plan(least, largest), elsewhere)
    text = f"This job fits on no single GPU here: even QLoRA with one row at a time needs {gib(peak)}."
    return (Fix(key="none", text=text if others else "Choose a smaller base model.", peak_bytes=peak),)


def _priced(task: Task, pool: PoolFacts, placement: ChosenPlan, key: str, text: str, changes: dict[str, object]) -> Fix:
    times, peak = duration(task, placement.plan, pool), _peak_bytes(placement, pool)
    seconds = times.train_seconds * time_interval(pool, times).p50 if times else None
    cost = None
    if seconds is not None and pool.price_nano is not None:
        cost = round(pool.price_nano * seconds * placement.plan.gpu_count / pool.price_per_seconds)
    text = f"{text}: that needs {gib(peak)} of {pool.gpu.name}'s {gib(pool.gpu.memory_bytes)}"
    if placement.memory.host_bytes:
        text = f"{text}, and {gib(placement.memory.host_bytes)} of the host's"
    known = {name: value for name, value in changes.items() if name in Fix.__struct_fields__ and value is not None}
    return Fix(
        key=key,
        text=f"{text}.",
        peak_bytes=peak,
        host_bytes=placement.memory.host_bytes,
        train_seconds_p50=seconds,
        cost_nano_p50=cost,
        **known,  # type: ignore[arg-type]
    )


def _peak_bytes(placement: ChosenPlan, pool: PoolFacts) -> int:
    return memory_interval(pool).amounts(placement.memory.peak_bytes, placement.memory.parts[0].bytes)[1]


def gib(amount: int) -> str:
    """Return an amount of memory for people."""
    return f"{amount / GIB:,.1f} GiB"
