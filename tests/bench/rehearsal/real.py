"""The same step with real tensors on this CPU, as torch's own allocator counts it."""

import tempfile
import time
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from apps.contracts.runs import MemoryRequest
from gpu_workers.bench import made_up
from gpu_workers.rehearsal import trace
from gpu_workers.rehearsal.machine import CPU
from gpu_workers.rehearsal.storages import CPU_BLOCK_BYTES, LiveStorages
from gpu_workers.train.model.attention import register_attention


class _Clock(LiveStorages):
    """Notes when the step begins; its counts are not the ones compared."""

    began_ns = 0

    def enter(self, moment: str) -> None:
        if moment == trace.BATCH:
            self.began_ns = time.time_ns()
        super().enter(moment)


def real_peak_bytes(request: MemoryRequest) -> int:
    """Run one step and return the peak of the bytes that torch's CPU allocator handed out, its workspaces included."""
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
