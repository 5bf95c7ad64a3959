"""`python -m gpu_workers.bench.calibrate`: measure this machine's GPU type over a grid of shapes, within ten minutes.

Each point is one probe (gpu_workers.bench.probe) in a separate child process: the trainer's own loop on a model of real
shapes with made-up weights. It runs on one GPU, or with small shapes on the CPU of a machine without a GPU. The points
are printed and written to --into as JSON lines. With --post they are also reported through the internal API with this
worker's credential (the environment of the worker: ANNEAL_INTERNAL_URL, ANNEAL_WORK_DIR, ANNEAL_GPU_KEY), unless the
machine was busy with something else. A point that does not fit is also a result: `did_not_fit`.
"""

import argparse
import contextlib
import datetime
import logging
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from apps.contracts.runs import BaseModelRef
from apps.contracts.worker_api import ProbeReport, ProbeRequest
from gpu_workers.common.api_client import ApiClient, ApiError, Unavailable, load_credential
from gpu_workers.common.config import ConfigError, read_config, read_gpu_key
from gpu_workers.common.enrolment import NotEnrolled
from gpu_workers.common.events import LOG_FILE, SPEC_FILE
from gpu_workers.common.files import replace_file
from gpu_workers.common.preflight import Machine, inspect_machine, list_devices, list_gpu_memory
from gpu_workers.trainer.children.executor import SubprocessExecutor
from gpu_workers.trainer.idle.probes import MODULE as PROBING_CHILD
from gpu_workers.trainer.idle.probes import PROBE_FILE

log = logging.getLogger("gpu_workers.bench.calibrate")

BUDGET_SECONDS = 570.0  # under ten minutes, the last report included
_POINT_SECONDS = 240.0
_BUSY_GPU_SHARE = 0.05  # memory share in use while no point runs: another process uses it
# Nothing is loaded from the hub. A library that contacts it anyway would wait for a network that may be missing.
OFFLINE = {"HF_HUB_OFFLINE": "1"}
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "MemoryError")


def _llama(
    layers: int, hidden: int, mlp: int, heads: int, kv_heads: int, vocab: int, *, tied: bool
) -> dict[str, str | int]:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 131_072,
    }


# The dimensions of apps/catalog/data/models.json, which names their sources; the small ones are for CPUs.
SHAPES = {
    "llama-3.2-1b": _llama(16, 2048, 8192, 32, 8, 128_256, tied=True),
    "llama-3.1-8b": _llama(32, 4096, 14_336, 32, 8, 128_256, tied=False),
    "llama-3.1-70b": _llama(80, 8192, 28_672, 64, 8, 128_256, tied=False),
    "small-3m": _llama(4, 192, 512, 4, 2, 4_096, tied=True),
    "small-14m": _llama(6, 384, 1_024, 6, 2, 8_192, tied=True),
    "small-42m": _llama(8, 640, 1_728, 10, 2, 8_192, tied=True),
}


class GridPoint(msgspec.Struct, frozen=True):
    """One measurement: rows of `length` tokens, `micro` at a time."""

    shape: str
    method: str
    rank: int
    length: int
    micro: int
    checkpointing: bool = False


# In order of importance: the budget may leave no time for the last points.
CUDA_GRID = (
    GridPoint("llama-3.1-8b", "qlora", 16, 1024, 1),
    GridPoint("llama-3.1-8b", "lora", 16, 1024, 1),
    GridPoint("llama-3.2-1b", "lora", 16, 1024, 1),
    GridPoint("llama-3.1-8b", "qlora", 16, 1024, 4, checkpointing=True),
    GridPoint("llama-3.1-8b", "lora", 16, 1024, 4, checkpointing=True),
    GridPoint("llama-3.2-1b", "lora", 16, 1024, 8),
    GridPoint("llama-3.1-70b", "qlora", 16, 1024, 1, checkpointing=True),
    GridPoint("llama-3.1-8b", "lora", 16, 4096, 1, checkpointing=True),
    GridPoint("llama-3.1-8b", "qlora", 64, 1024, 1),
    GridPoint("llama-3.2-1b", "qlora", 16, 4096, 1),
    GridPoint("llama-3.2-1b", "lora", 64, 4096, 2, checkpointing=True),
    GridPoint("llama-3.1-8b", "qlora", 16, 8192, 1, checkpointing=True),
)
CPU_GRID = (
    GridPoint("small-14m", "lora", 16, 128, 4),
    GridPoint("small-14m", "qlora", 16, 128, 4),
    GridPoint("small-3m", "lora", 16, 128, 4),
    GridPoint("small-42m", "lora", 16, 128, 4),
    GridPoint("small-14m", "lora", 16, 128, 16),
    GridPoint("small-14m", "lora", 16, 512, 4),
    GridPoint("small-14m", "lora", 64, 128, 4),
    GridPoint("small-14m", "lora", 16, 128, 4, checkpointing=True),
    GridPoint("small-3m", "qlora", 8, 128, 16),
    GridPoint("small-42m", "qlora", 16, 128, 4),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the grid, write and report its points; return 1 if no point could be measured."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, help="append the points, one JSON object a line")
    parser.add_argument("--post", action="store_true", help="report them with this worker's credential")
    parser.add_argument("--threads", type=int, default=0, help="the most for torch; 0: one for each free core")
    parser.add_argument(
        "--gpu-key", help="the catalogue's key, where the driver's name is not known to it; default: ANNEAL_GPU_KEY"
    )
    parser.add_argument("--budget-seconds", type=float, default=BUDGET_SECONDS)
    given = parser.parse_args(arguments)
    try:
        api = connect() if given.post else None
    except (ConfigError, NotEnrolled) as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory(prefix="calibrate-") as folder, contextlib.ExitStack() as stack:
        machine = inspect_machine(Path(folder), gpu_key=given.gpu_key or read_gpu_key())
        if not machine.gpus[0].driver and _DRIVER_FILE.exists():
            parser.error("there is an NVIDIA driver here, but NVML does not answer: install nvidia-ml-py")
        if api:
            stack.enter_context(contextlib.closing(api))
        if given.into:
            given.into.parent.mkdir(parents=True, exist_ok=True)
        executor = SubprocessExecutor(PROBING_CHILD, thread_limit=given.threads, environment=OFFLINE)
        points = measure_grid(machine, executor, Path(folder), budget_seconds=given.budget_seconds)
        measured = [keep_point(point, machine, given.into, api) for point in points]
    return 0 if any(measured) else 1


def connect() -> ApiClient:
    """Return a client of the control plane.

    It is called before the measurements, to find a missing credential early. Raises ConfigError, NotEnrolled.
    """
    config = read_config()
    try:
        credential = load_credential(config.credential_file).credential
    except FileNotFoundError as error:
        text = f"{config.credential_file} does not exist. Enrol this machine, or leave out --post."
        raise NotEnrolled(text) from error
    return ApiClient(config.internal_url, credential=credential)


def measure_grid(
    machine: Machine, executor: SubprocessExecutor, folder: Path, *, budget_seconds: float
) -> Iterator[tuple[GridPoint, ProbeReport | None, str]]:
    """Yield each point with its report, or with None and the reason; stop before the budget is spent."""
    begun, longest = time.monotonic(), 0.0
    for point in CPU_GRID if machine.gpus[0].driver == "" else CUDA_GRID:
        left = budget_seconds - (time.monotonic() - begun)
        if left < longest:
            yield point, None, "no_time_left"
            continue
        started = time.monotonic()
        report, reason = measure_point(point, executor, folder, timeout_seconds=min(left, _POINT_SECONDS))
        if report is not None:  # a point that hung does not predict the others
            longest = max(longest, time.monotonic() - started)
        yield point, report and msgspec.structs.replace(report, gpu_key=machine.gpu_key), reason


def measure_point(
    point: GridPoint, executor: SubprocessExecutor, folder: Path, *, timeout_seconds: float
) -> tuple[ProbeReport | None, str]:
    """Run one probe in a child; return its report, or None and the reason."""
    work_dir = folder / "point"
    shutil.rmtree(work_dir, ignore_errors=True)
    work_dir.mkdir(parents=True)
    request = ProbeRequest(
        base_model=BaseModelRef(id="", name=point.shape),
        method=point.method,
        micro_batch_size=point.micro,
        sequence_length=point.length,
        lora_rank=point.rank,
        gradient_checkpointing=point.checkpointing,
        shape=point.shape,
        config=SHAPES[point.shape],
    )
    replace_file(work_dir / SPEC_FILE, msgspec.json.encode(request))
    child = executor.start(work_dir, devices=list_devices()[:1])  # with several visible the trainer would use them all
    if child.wait(timeout_seconds) is None:
        child.kill()
        return None, "took_too_long"
    try:
        return msgspec.json.decode((work_dir / PROBE_FILE).read_bytes(), type=ProbeReport), ""
    except FileNotFoundError:
        said = (work_dir / LOG_FILE).read_text(errors="replace")
        if child.was_killed_for_memory() or any(word in said for word in _OUT_OF_MEMORY):
            return None, "did_not_fit"
        log.error("%s", said[-2_000:])
        return None, "failed"


def keep_point(
    measured: tuple[GridPoint, ProbeReport | None, str], machine: Machine, into: Path | None, api: ApiClient | None
) -> bool:
    """Print, write and report one point; return whether it was measured."""
    point, report, reason = measured
    load = os.getloadavg()[0]
    conditions = Conditions(
        measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        is_busy=load > machine.cores + 1 or _is_gpu_busy(),
        gpu_key=machine.gpu_key,
        driver=machine.gpus[0].driver,
        cores=machine.cores,
        memory_bytes=machine.memory_bytes,
        load_1m=round(load, 2),
        platform=platform.platform(),
    )
    row = msgspec.to_builtins(point) | msgspec.to_builtins(conditions)
    row |= {"reason": reason} if report is None else {"report": msgspec.to_builtins(report)}
    line = msgspec.json.encode(row) + b"\n"
    sys.stdout.buffer.write(line)
    sys.stdout.flush()
    if into:
        with into.open("ab") as file:
            file.write(line)
    if api and report is not None:
        report_point(report, api, busy_at=conditions.load_1m if conditions.is_busy else None)
    return report is not None


def report_point(report: ProbeReport, api: ApiClient, *, busy_at: float | None) -> None:
    """Report one point. A failure is only printed. The point is still written, and the next ones are still measured."""
    if busy_at is not None:
        log.warning("Not reported: another process uses the first GPU, or the processor (load %s).", busy_at)
        return
    try:
        api.report_probe(report)
    except (ApiError, Unavailable) as error:
        log.error("Not reported: %s", error)


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions besides the point that affect a figure: the machine, its load, and the time."""

    measured_at: str
    is_busy: bool  # with more than this point alone: the speed is not valid
    gpu_key: str
    driver: str
    cores: int
    memory_bytes: int
    load_1m: float
    platform: str


def _is_gpu_busy() -> bool:
    """Return whether another process uses the first GPU, on which the points run. It is called between points."""
    return any(gpu.free_bytes < (1 - _BUSY_GPU_SHARE) * gpu.total_bytes for gpu in list_gpu_memory(list_devices()[:1]))


if __name__ == "__main__":
    sys.exit(main())
