"""Runs each check in its own process with a time limit. A check that fails, dies or hangs does not stop the others."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from gpu_workers.bench.gpu_check.findings import Checked, Finding, Verdict
from gpu_workers.common.config import REPOSITORY, child_environment

FINDING_FILE = "finding.json"
_CHILD = "gpu_workers.bench.gpu_check.child"
_TAIL_CHARACTERS = 300
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
}


class Check(msgspec.Struct, frozen=True):
    """One check. `target` is the `module:function` that returns its finding. The function gets its own folder."""

    name: str
    title: str
    seconds: float  # its limit
    target: str


def run_check(check: Check, folder: Path) -> Checked:
    """Run the check below `folder` and return its finding, even for a crash or a timeout."""
    work_dir = folder / check.name
    work_dir.mkdir(parents=True)
    begun = time.monotonic()
    finding = _run(check, work_dir)
    return Checked(name=check.name, title=check.title, seconds=round(time.monotonic() - begun, 1), finding=finding)


def _run(check: Check, work_dir: Path) -> Finding:
    log_file = work_dir / "log"
    with log_file.open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", _CHILD, check.target, str(work_dir)],
            cwd=REPOSITORY,
            env=child_environment(threads=0, extra=_ENVIRONMENT),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            child.wait(check.seconds)
        except subprocess.TimeoutExpired:
            return _failed(f"It did not end within {check.seconds:.0f} s.", log_file)
        finally:
            if child.poll() is None or _has_group(child.pid):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    try:
        return msgspec.json.decode((work_dir / FINDING_FILE).read_bytes(), type=Finding)
    except (OSError, msgspec.DecodeError):
        return _failed(f"Its process ended unexpectedly ({child.returncode}).", log_file)


def _has_group(leader: int) -> bool:
    """Return whether a process that the check started still exists."""
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    return True


def _failed(said: str, log_file: Path) -> Finding:
    lines = log_file.read_text(errors="replace").strip().splitlines()
    last = f" Its last line: {lines[-1].strip()[:_TAIL_CHARACTERS]}" if lines else ""
    return Finding(verdict=Verdict.FAILED, said=said + last, advice=f"Read {log_file}.")
