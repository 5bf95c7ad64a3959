"""Checks whether this machine can take this run, before any download and long before billing.

The trainer's first step decides about memory and disk. A run that would certainly fail is refused here at once.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from apps.contracts.adapter_files import MAX_RANK, MAX_SCALE, TARGET_MODULES, get_scale
from apps.contracts.failures import FailureCode
from apps.contracts.runs import CheckpointRef, LogLine, RunSpec
from gpu_workers.common.events import UNNUMBERED
from gpu_workers.common.preflight import MIN_FREE_DISK_BYTES, GpuMemory, GpuUnreachable, list_gpu_memory

_COPIES = 3  # of a checkpoint: the two that are kept, and the one being written
_MIB, _GIB = 1024**2, 1024**3


class Refused(Exception):
    """The run would certainly fail here."""

    def __init__(self, code: FailureCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def check_run(spec: RunSpec, work_dir: Path, devices: Sequence[str]) -> tuple[LogLine, ...]:
    """Return lines for the log of a run on these GPUs: its rehearsed memory, and a warning. Raises Refused."""
    _check_servable(spec)
    _check_disk(spec, work_dir)
    return _check_memory(spec, devices)


def needed_disk_bytes(spec: RunSpec) -> int:
    """Return the known part of the bytes that the run will write: rows, and checkpoints like the one it begins with.

    All runs of the machine share the base model's files, so they do not count.
    """
    rows = spec.training.bytes + (spec.validation.bytes if spec.validation else 0)
    return rows + _COPIES * _bytes_of(spec.resume_from) + _bytes_of(spec.start_from)


def _check_servable(spec: RunSpec) -> None:
    """Refuse a result that cannot be served.

    The control plane checks this when it creates a job, but older ones did not.
    """
    recipe = spec.hyperparameters
    if not recipe.is_servable:
        return
    scale = get_scale({"r": recipe.lora_rank, "lora_alpha": recipe.lora_alpha, "use_rslora": recipe.use_rslora})
    unknown = sorted(set(recipe.target_modules) - set(TARGET_MODULES))
    problems = [f"layers {', '.join(unknown)}"] if unknown else []
    problems += [f"rank {recipe.lora_rank}"] if recipe.lora_rank > MAX_RANK else []
    problems += [f"a scale of {scale:g}"] if scale > MAX_SCALE else []
    if problems:
        message = f"The serving engine cannot load an adapter with {' and '.join(problems)}."
        raise Refused(FailureCode.ADAPTER_REJECTED, message)


def _check_disk(spec: RunSpec, work_dir: Path) -> None:
    free, needed = shutil.disk_usage(work_dir).free, needed_disk_bytes(spec)
    if free < MIN_FREE_DISK_BYTES + needed:
        message = (
            f"The run writes at least {needed // _MIB} MiB and {MIN_FREE_DISK_BYTES // _MIB} MiB must stay free, "
            f"but the machine has only {free // _MIB} MiB of free disk."
        )
        raise Refused(FailureCode.DISK_FULL, message)


def _check_memory(spec: RunSpec, devices: Sequence[str]) -> tuple[LogLine, ...]:
    needed, source = (
        spec.rehearsed_bytes or spec.estimated_peak_bytes,
        "rehearsal" if spec.rehearsed_bytes else "estimate",
    )
    if needed is None:
        return ()
    try:
        memory = list_gpu_memory(devices) or (_machine_memory(),)
    except GpuUnreachable as error:
        raise Refused(FailureCode.GPU_FAULT, f"The driver of the GPU does not answer ({error}).") from error
    smallest = min(memory, key=lambda each: each.free_bytes)
    need, total, free = needed / _GIB, smallest.total_bytes / _GIB, smallest.free_bytes / _GIB
    rehearsed = (_line("info", f"Rehearsed: {need:.1f} of {total:.1f} GiB."),) if spec.rehearsed_bytes else ()
    if needed > smallest.total_bytes:
        # With the same result, the trainer can take fewer rows at a time, or recompute activations.
        recipe = spec.hyperparameters
        has_rows = recipe.batch_size > recipe.gradient_accumulation_steps * spec.gpu_count
        if not (rehearsed and (has_rows or not recipe.gradient_checkpointing)):
            message = f"The run needs {need:.1f} GiB by its {source}, the machine has {total:.1f}."
            raise Refused(FailureCode.OUT_OF_MEMORY, message)
        return (*rehearsed, _line("warn", "If memory runs out before training, the run takes fewer rows at a time."))
    if needed <= smallest.free_bytes:
        return rehearsed
    warning = (
        f"Of {total:.1f} GiB of memory {free:.1f} are free, and the {source} is {need:.1f}: a step before training "
        "shows whether it fits."
    )
    return (*rehearsed, _line("warn", warning))


def _line(level: str, message: str) -> LogLine:
    return LogLine(sequence=UNNUMBERED, level=level, message=message)


def _machine_memory() -> GpuMemory:
    page = os.sysconf("SC_PAGE_SIZE")
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), "0")
    return GpuMemory(total_bytes=page * os.sysconf("SC_PHYS_PAGES"), free_bytes=int(available) * 1024)


def _bytes_of(checkpoint: CheckpointRef | None) -> int:
    return sum(file.bytes for file in checkpoint.files) if checkpoint else 0
