"""`python -m gpu_workers.bench.gpu_check`: check a new CUDA machine and print one report, in less than twenty minutes.

The report and the calibration points are kept in --into. With --post the points are also reported with this worker's
credential, as `gpu_workers.bench.calibrate` does. The pool's calibrations are made from them. Exits with 1 if a check
failed, and with 2 on a machine without CUDA.
"""

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from apps.contracts.worker_api import ProbeReport
from gpu_workers.bench import calibrate
from gpu_workers.bench.gpu_check.findings import is_failed, render_line, render_report, to_json
from gpu_workers.bench.gpu_check.machine import describe_without_cuda
from gpu_workers.bench.gpu_check.runner import Check, run_check
from gpu_workers.common.api_client import ApiClient
from gpu_workers.common.config import ConfigError
from gpu_workers.common.enrolment import NotEnrolled

POINTS_FILE = "points.jsonl"
_HERE = "gpu_workers.bench.gpu_check"
# Their limits together are less than twenty minutes.
CHECKS = (
    Check("driver", "NVIDIA driver", 20, f"{_HERE}.machine:check_driver"),
    Check("wheels", "Packages of the GPU lock", 20, f"{_HERE}.machine:check_wheels"),
    Check("torch", "torch on every GPU", 75, f"{_HERE}.kernels:check_torch"),
    Check("triton", "Triton", 60, f"{_HERE}.kernels:check_triton"),
    Check("flash_attention", "FlashAttention", 45, f"{_HERE}.kernels:check_flash_attention"),
    Check("liger", "Liger kernels", 60, f"{_HERE}.kernels:check_liger"),
    Check("bitsandbytes", "bitsandbytes (NF4)", 45, f"{_HERE}.kernels:check_bitsandbytes"),
    Check("nccl", "NCCL between two GPUs", 90, f"{_HERE}.collectives:check_nccl"),
    Check("lora", "LoRA against its quote", 220, f"{_HERE}.training:check_lora"),
    Check("qlora", "QLoRA against its quote", 220, f"{_HERE}.training:check_qlora"),
    Check("vllm", "vLLM with 16 adapters and certificates", 300, f"{_HERE}.serving:check_vllm"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every check, print the report and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=Path(".anneal/gpu-check"), help="folder of the report")
    parser.add_argument("--post", action="store_true", help="report the points with this worker's credential")
    given = parser.parse_args(arguments)
    if problem := describe_without_cuda():
        _say(problem)
        return 2
    try:
        api = calibrate.connect() if given.post else None
    except (ConfigError, NotEnrolled) as error:
        parser.error(str(error))
    given.into.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=given.into))
    checked = []
    for check in CHECKS:
        checked.append(run_check(check, folder))
        _say(render_line(checked[-1]))
    _say(render_report(checked))
    (given.into / "report.json").write_bytes(to_json(checked))
    points = b"".join(file.read_bytes() for file in sorted(folder.glob(f"*/{POINTS_FILE}")))
    (given.into / POINTS_FILE).write_bytes(points)
    if api:
        with contextlib.closing(api):
            post_points(points, api)
    _say(f"Kept in {given.into}: report.json, {POINTS_FILE} and the log of each check.")
    return 1 if is_failed(checked) else 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class _Point(msgspec.Struct):
    is_busy: bool
    load_1m: float
    report: ProbeReport | None = None


def post_points(lines: bytes, api: ApiClient) -> None:
    """Report measured points to the control plane."""
    for point in msgspec.json.Decoder(_Point).decode_lines(lines):
        if point.report is not None:
            calibrate.report_point(point.report, api, busy_at=point.load_1m if point.is_busy else None)


if __name__ == "__main__":
    sys.exit(main())
