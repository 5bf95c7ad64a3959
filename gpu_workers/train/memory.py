"""The highest memory this process has reached, where it matters: on the GPU, or in the machine on a CPU."""

import resource

import torch


def peak_memory_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_allocated_bytes() -> int | None:
    """What tensors held at most, without what the allocator kept in reserve; None on a CPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
