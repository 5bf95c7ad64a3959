"""The same step with real tensors on this CPU, as torch's own allocator counts it.

`python -m tests.bench.rehearsal.real FOLDER RANK` is one process of jobs that several share.
"""

import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile

from apps.contracts.runs import MemoryRequest
from gpu_workers.bench import made_up
from gpu_workers.rehearsal import trace
from gpu_workers.rehearsal.machine import CPU
from gpu_workers.rehearsal.storages import CPU_BLOCK_BYTES, LiveStorages
from gpu_workers.train.model.attention import register_attention

_REQUESTS, _PEAKS = "requests.jsonl", "peaks.json"
_MOST_SECONDS = 600


class _Clock(LiveStorages):
    """Notes when the step begins; its counts are not the ones compared."""

    began_ns = 0

    def enter(self, moment: str) -> None:
        if moment == trace.BATCH:
            self.began_ns = time.time_ns()
        super().enter(moment)


def real_peak_bytes(request: MemoryRequest) -> int:
    """Run one step and return the peak of the bytes that torch's CPU allocator handed out, its workspaces included."""
    gc.collect()  # what an earlier step left would otherwise be freed in this one
    register_attention()
    clock = _Clock(block_bytes=CPU_BLOCK_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        made_up.write_folder(Path(folder), request.config)
        # No dispatch mode: under one, autograd adds up gradients out of place.
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            trace.trace_step(request, Path(folder), clock, CPU, made_up.build_base)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        if event.start_ns() >= clock.began_ns:
            peak = max(peak, live)
    return peak


def shared_peaks(requests: Sequence[MemoryRequest]) -> list[int]:
    """Run jobs of equally many processes over gloo; return the peaks of the first process."""
    processes = {request.gpu_count for request in requests}
    if not processes:
        return []
    [count] = processes
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / _REQUESTS).write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in requests))
        command = [sys.executable, "-m", __name__, folder]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
        running = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(count)]
        try:
            codes = [process.wait(timeout=_MOST_SECONDS) for process in running]
        finally:
            for process in running:
                process.kill()
        if any(codes):
            raise RuntimeError(f"the shared jobs ended with {codes}")
        return msgspec.json.decode((Path(folder) / _PEAKS).read_bytes(), type=list[int])


def _main(folder: Path, rank: int) -> None:
    lines = (folder / _REQUESTS).read_bytes().splitlines()
    requests = [msgspec.json.decode(line, type=MemoryRequest) for line in lines]
    store = f"file://{folder / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=requests[0].gpu_count)
    peaks = [real_peak_bytes(request) for request in requests]
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    if rank == 0:
        (folder / _PEAKS).write_bytes(msgspec.json.encode(peaks))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
