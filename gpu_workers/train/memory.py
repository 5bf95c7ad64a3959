"""The highest memory this process has reached, where it matters: on the GPU, or in the machine on a CPU."""

import resource

import torch


def peak_memory_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
