"""Checks of training: the trainer's own loop on a model of true shape with random weights, against its quote."""

from pathlib import Path

import msgspec

from apps.contracts.hyperparameters import Method
from apps.contracts.worker_api import ProbeReport
from apps.estimates.calibration import predict_point
from apps.estimates.errors import EstimateError
from apps.estimates.physics.gpus import Gpu, find, load
from apps.estimates.quote import Estimate
from apps.estimates.requests import PoolFacts
from gpu_workers.bench import calibrate
from gpu_workers.bench.calibrate import CUDA_GRID, SHAPES, GridPoint
from gpu_workers.bench.gpu_check.findings import Finding, Verdict
from gpu_workers.common.config import REPOSITORY
from gpu_workers.common.preflight import Machine, inspect_machine
from gpu_workers.trainer.children.executor import SubprocessExecutor
from gpu_workers.trainer.idle.probes import MODULE as PROBING_CHILD

POINTS_FILE = "points.jsonl"
GPU_TYPES = REPOSITORY / "apps/catalog/data/gpus.json"
_POINT_SECONDS = 200.0
_CALIBRATE = (
    "Run `make gpu-check POST=1` with the worker's environment and use the new points in the pool's calibration: "
    "quotes then follow this machine."
)


def check_lora(folder: Path) -> Finding:
    return check_method(folder, Method.LORA)


def check_qlora(folder: Path) -> Finding:
    return check_method(folder, Method.QLORA)


def check_method(folder: Path, method: Method) -> Finding:
    """Measure the first shape that fits by its estimate, keep it as a calibration point, and compare with the quote."""
    machine = inspect_machine(folder)
    try:
        gpu = find(load(GPU_TYPES), machine.gpu_key)
    except EstimateError as error:
        advice = "Add the GPU type to apps/catalog/data/gpus.json: without a data sheet there is no quote."
        return Finding(verdict=Verdict.FAILED, said=f"{error}.", advice=advice)
    gpu = msgspec.structs.replace(gpu, memory_bytes=machine.gpus[0].memory_bytes)
    point = choose_point(method, gpu)
    if point is None:
        return Finding(verdict=Verdict.SKIPPED, said="No shape of the grid fits into this GPU.")
    return measure(folder, point, machine, gpu)


def choose_point(method: Method, gpu: Gpu) -> GridPoint | None:
    """Return the first point of the grid that fits into the GPU by its estimate."""
    points = (point for point in CUDA_GRID if point.method == method)
    fitting = (point for point in points if predict_point(as_report(point), pool=PoolFacts(gpu=gpu))[0].fits)
    return next(fitting, None)


def measure(folder: Path, point: GridPoint, machine: Machine, gpu: Gpu) -> Finding:
    executor = SubprocessExecutor(PROBING_CHILD, thread_limit=0, environment=calibrate.OFFLINE)
    report, reason = calibrate.measure_point(point, executor, folder, timeout_seconds=_POINT_SECONDS)
    if report is not None:
        report = msgspec.structs.replace(report, gpu_key=machine.gpu_key)
    calibrate.keep_point((point, report, reason), machine, folder / POINTS_FILE, None)
    if report is None:
        why = reason.replace("_", " ")
        said = (
            f"{point.method} on {point.shape} was not measured: it {why}." if why != "failed" else "The probe failed."
        )
        return Finding(verdict=Verdict.FAILED, said=said, advice=f"Read {folder / 'log'}.")
    return judge(report, *predict_point(report, pool=PoolFacts(gpu=gpu)))


def judge(report: ProbeReport, estimate: Estimate, expected: float) -> Finding:
    """Compare memory and speed with the quote; `expected` are its tokens a second.

    If the memory exceeds its P90, jobs fail. If the speed is outside its range, quotes are wrong.
    """
    memory, quoted = report.peak_memory_bytes / 2**30, estimate.peak_bytes / 2**30
    rate = report.tokens_per_second
    said = f"{report.method} on {report.shape}: {memory:.1f} GiB, quoted {quoted:.1f}; {rate:,.0f} tokens/s"
    said += f", quoted {expected:,.0f}." if expected else ", without a quote."
    figures = {"gib": round(memory, 2), "quoted_gib": round(quoted, 2), "tokens_per_second": round(rate, 1)}
    if expected:
        figures["quoted_tokens_per_second"] = round(expected, 1)
    if report.peak_memory_bytes > estimate.peak_bytes_p90:
        advice = f"It needs more than the quote's P90: jobs that fill the GPU will fail. {_CALIBRATE}"
        return Finding(verdict=Verdict.FAILED, said=said, advice=advice, figures=figures)
    p10, p50, p90 = (estimate.train_seconds_p10, estimate.train_seconds_p50, estimate.train_seconds_p90)
    is_inside = expected and p10 and p50 and p90 and p10 <= p50 * expected / rate <= p90
    if not is_inside:
        advice = f"The speed is outside the quote's range. {_CALIBRATE}"
        return Finding(verdict=Verdict.WARNING, said=said, advice=advice, figures=figures)
    return Finding(verdict=Verdict.PASSED, said=said, figures=figures)


def as_report(point: GridPoint) -> ProbeReport:
    """Return the point as a report that has no figures yet."""
    return ProbeReport(
        base_model_id="",
        method=point.method,
        gpu_key="",
        micro_batch_size=point.micro,
        sequence_length=point.length,
        lora_rank=point.rank,
        threads=1,
        tokens_per_second=1.0,
        tokens_per_second_low=1.0,
        tokens_per_second_high=1.0,
        seconds_per_micro_step=1.0,
        peak_memory_bytes=0,
        startup_seconds=0.0,
        shape=point.shape,
        config=SHAPES[point.shape],
        gradient_checkpointing=point.checkpointing,
    )
