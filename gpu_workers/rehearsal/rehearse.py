"""The memory of a job from its model's config.json and its recipe, in seconds and without a GPU."""

import importlib.metadata
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from apps.contracts.runs import MemoryReport, MemoryRequest
from apps.estimates.physics.memory import device_bytes
from gpu_workers.bench import made_up
from gpu_workers.rehearsal.depths import Depths, depths_of, whole_trace
from gpu_workers.rehearsal.machine import CPU, GPU, fake_tensors
from gpu_workers.rehearsal.storages import BLOCK_BYTES, CPU_BLOCK_BYTES, LiveStorages
from gpu_workers.rehearsal.trace import Trace, trace_step

_SOFTWARE = ("torch", "transformers", "peft", "trl", "bitsandbytes", "accelerate")


def rehearse_memory(request: MemoryRequest) -> MemoryReport:
    """Return the memory of one process of the job."""
    started = time.monotonic()
    depths = Depths(dict(request.config), ()) if request.is_full_depth else depths_of(request.config)
    processes = request.gpu_count if request.parallelism == "fsdp" else 1

    def trace(config: Mapping[str, object]) -> Trace:
        with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
            live = LiveStorages(block_bytes=CPU_BLOCK_BYTES if request.is_on_cpu else BLOCK_BYTES)
            made_up.write_folder(Path(folder), config)
            with fake_tensors(live, is_gpu=not request.is_on_cpu, processes=processes):
                return trace_step(request, Path(folder), live, CPU if request.is_on_cpu else GPU)

    found = whole_trace(depths, trace)
    moment = max(found.peaks, key=found.peaks.__getitem__)
    allocated = found.peaks[moment]
    peak = device_bytes(
        allocated=allocated,
        resting=min(found.resting, allocated),
        gpu_count=request.gpu_count,
        is_cpu=request.is_on_cpu,
    )
    return MemoryReport(
        allocated_bytes=allocated,
        resting_bytes=found.resting,
        weight_bytes=found.weights,
        peak_bytes=peak,
        moment=moment,
        moments=found.peaks,
        seconds=time.monotonic() - started,
        software={name: importlib.metadata.version(name) for name in _SOFTWARE},
    )
