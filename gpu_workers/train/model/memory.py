"""Memory and load of the training hardware: of the GPU, or of the machine on a CPU."""

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

try:
    import pynvml
except ImportError:  # a machine without GPUs needs no driver library
    pynvml = None

_CGROUP = Path("/sys/fs/cgroup")


def peak_memory_bytes() -> int:
    """Return the highest memory use of this process so far."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_bytes() -> int:
    """Return the bytes now reserved on the GPU, or resident on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.memory_reserved()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def free_bytes() -> int:
    """Return the bytes that a model may use now: of the GPU, or of the machine and this process's control group."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
    try:
        limit = int((_CGROUP / "memory.max").read_text()) - int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no control group, or one without a limit
        return available
    return min(available, limit)


class GpuReading(NamedTuple):
    """The share of recent time in which the GPU worked, its temperature and its power; None if unknown."""

    utilization: float | None = None
    celsius: float | None = None
    watts: float | None = None


def read_gpu() -> GpuReading:
    """Return what the driver measures on this process's GPU; some cards do not measure everything."""
    if not torch.cuda.is_available() or pynvml is None:
        return GpuReading()
    return GpuReading(
        _measured(lambda: torch.cuda.utilization() / 100),
        _measured(lambda: float(torch.cuda.temperature())),
        _measured(lambda: torch.cuda.power_draw() / 1000),
    )


def _measured(read: Callable[[], float]) -> float | None:
    try:
        return read()
    except pynvml.NVMLError:
        return None


def peak_allocated_bytes() -> int | None:
    """Return the peak bytes of tensors, without the allocator's reserve; None on a CPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
