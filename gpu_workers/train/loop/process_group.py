"""The process group of the training processes that `launch` started."""

import contextlib
import datetime
from collections.abc import Iterator

import torch
import torch.distributed

from gpu_workers.train.loop.launch import Rank

# All wait while one downloads the base model or writes a checkpoint. The agent of the first machine ends a run whose
# processes there make no progress, so they wait no longer than that for another machine.
_PATIENCE = datetime.timedelta(hours=12)


def is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@contextlib.contextmanager
def first_rank_first(rank: Rank) -> Iterator[None]:
    """Run the body in the first process of each machine before the others, which then find its files."""
    if rank.is_launched and not is_distributed():
        # Shards in the host's memory are gathered there, which NCCL does not support.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        torch.distributed.init_process_group(backend, timeout=_PATIENCE)
        if torch.cuda.is_available():
            torch.cuda.set_device(rank.local_index)
    if rank.count > 1 and not rank.is_first_here:
        torch.distributed.barrier()
    yield
    if rank.count > 1 and rank.is_first_here:
        torch.distributed.barrier()
