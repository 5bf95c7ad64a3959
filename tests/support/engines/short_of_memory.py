"""`python -m tests.support.engines.short_of_memory SPEC DIR`: a training process; the second of two runs out of memory.

The first has enough, and waits for it in the operation that sums their gradients.
"""

import runpy

import torch

from gpu_workers.train.loop.launch import read_rank
from gpu_workers.train.loop.sft import Trainer

MODULE = "tests.support.engines.short_of_memory"
STEP = 3


def leave_too_little() -> None:
    original, rank = Trainer.loss_parts, read_rank()

    def loss_parts(trainer, model, inputs):
        if rank is not None and rank.index == 1 and trainer.state.global_step >= STEP:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return original(trainer, model, inputs)

    Trainer.loss_parts = loss_parts  # type: ignore[method-assign]


if __name__ == "__main__":
    leave_too_little()
    runpy.run_module("gpu_workers.train", run_name="__main__", alter_sys=True)
