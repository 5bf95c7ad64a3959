"""The check of NCCL: two processes on two GPUs add their tensors."""

import socket
import time
from pathlib import Path

import msgspec
import torch
from torch import distributed, multiprocessing

from gpu_workers.bench.gpu_check.findings import Finding, Verdict
from gpu_workers.common.config import rank_environment, replace_environment

_CARDS = 2
_BYTES, _REPEATS = 256 * 2**20, 10
_RESULT_FILE = "reduced.json"


def check_nccl(folder: Path) -> Finding:
    """Reduce 256 MiB between two GPUs, check the sum and measure the rate."""
    cards = torch.cuda.device_count()
    if cards < _CARDS:
        return Finding(verdict=Verdict.SKIPPED, said=f"This machine has {cards} GPU.")
    return reduce_between(folder, backend="nccl")


def reduce_between(folder: Path, *, backend: str, size_bytes: int = _BYTES) -> Finding:
    """Start two processes that reduce a tensor between them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(_reduce, args=(port, backend, size_bytes, str(folder)), nprocs=_CARDS)
    is_right, seconds = msgspec.json.decode((folder / _RESULT_FILE).read_bytes(), type=tuple[bool, float])
    if not is_right:
        advice = "Run it with NCCL_P2P_DISABLE=1; if that helps, the machine's PCIe access control (ACS) is in the way."
        return Finding(verdict=Verdict.FAILED, said="Two GPUs add wrongly.", advice=advice)
    rate = size_bytes / seconds / 1e9
    return Finding(
        verdict=Verdict.PASSED, said=f"Two GPUs add {rate:.1f} GB/s.", figures={"gb_per_second": round(rate, 2)}
    )


def _reduce(rank: int, port: int, backend: str, size_bytes: int, folder: str) -> None:
    replace_environment(rank_environment(index=rank, count=_CARDS, port=port))
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    distributed.init_process_group(backend)
    numbers = torch.full((size_bytes // 4,), float(rank + 1), device=device)
    distributed.all_reduce(numbers)
    is_right = bool((numbers == 3.0).all())
    begun = time.perf_counter()
    for _ in range(_REPEATS):
        distributed.all_reduce(numbers)
    if backend == "nccl":
        torch.cuda.synchronize(device)
    seconds = (time.perf_counter() - begun) / _REPEATS
    if rank == 0:
        (Path(folder) / _RESULT_FILE).write_bytes(msgspec.json.encode((is_right, seconds)))
    distributed.destroy_process_group()
