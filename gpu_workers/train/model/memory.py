"""Memory and load of what trains: on the GPU, or in the machine on a CPU."""

import os
import resource
from pathlib import Path

import torch

try:
    import pynvml
except ImportError:  # a machine without GPUs needs no driver library
    pynvml = None

_CGROUP = Path("/sys/fs/cgroup")


def peak_memory_bytes() -> int:
    """Return the highest memory this process has reached."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_bytes() -> int:
    """Return what is reserved on the GPU now, or resident on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.memory_reserved()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def free_bytes() -> int:
    """Return what a model may take now: of the GPU, or of the machine and this process's control group."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
    try:
        limit = int((_CGROUP / "memory.max").read_text()) - int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no control group, or one without a limit
        return available
    return min(available, limit)


def gpu_utilization() -> float | None:
    """Return the share of the last moments in which the GPU worked, or None where nobody can tell."""
    if not torch.cuda.is_available() or pynvml is None:
        return None
    return torch.cuda.utilization() / 100


def peak_allocated_bytes() -> int | None:
    """What tensors held at most, without what the allocator kept in reserve; None on a CPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
