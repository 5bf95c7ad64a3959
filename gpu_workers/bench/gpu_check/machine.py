"""Checks of the driver and the installed packages; no torch."""

import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

from gpu_workers.bench.gpu_check.findings import Finding, Verdict
from gpu_workers.common.config import REPOSITORY
from gpu_workers.common.preflight import GpuUnreachable, installed_software, list_gpu_memory, list_gpus

GPU_LOCK = REPOSITORY / "requirements/engines/engines-gpu.lock"
_MIN_DRIVER = 580  # of CUDA 13.0, for which the lock's torch is built (CUDA 13 release notes, table 3)
_FREE_SHARE = 0.95  # of a GPU's memory that nothing else uses
_INSTALL = "Run `make setup` on this machine: it installs the GPU lock where it finds a driver."


def describe_without_cuda() -> str:
    """Return a sentence about what was found instead of a CUDA GPU; return "" if there is one."""
    try:
        if list_gpus():
            return ""
        found = "no NVIDIA driver answers"
    except GpuUnreachable as error:
        found = f"the NVIDIA driver is installed but broken ({error})"
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    torch = installed_software().get("torch", "no torch")
    return (
        f"There is no usable CUDA GPU here: {found}; this machine has {os.cpu_count()} {platform.machine()} cores, "
        f"{gib:.0f} GiB of memory and torch {torch.removeprefix('no torch') or 'missing'}."
    )


def check_driver(folder: Path) -> Finding:
    """Report GPUs and driver. An old driver fails the check; memory in use by others is a warning."""
    gpus, memory = list_gpus(), list_gpu_memory()
    names = ", ".join(f"{gpu.name} ({gpu.memory_bytes / 2**30:.0f} GiB)" for gpu in gpus)
    driver = gpus[0].driver
    said = f"Driver {driver} with {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}: {names}."
    if int(driver.partition(".")[0] or 0) < _MIN_DRIVER:
        advice = f"Install driver {_MIN_DRIVER} or newer: the locked torch is built for CUDA 13.0."
        return Finding(verdict=Verdict.FAILED, said=said, advice=advice)
    if len({gpu.key for gpu in gpus}) > 1:
        advice = "A pool has one type of GPU: start one worker for each type, with CUDA_VISIBLE_DEVICES."
        return Finding(verdict=Verdict.WARNING, said=said, advice=advice)
    if any(each.free_bytes < _FREE_SHARE * each.total_bytes for each in memory):
        advice = "Other processes use GPU memory: stop them (`nvidia-smi` lists them) and run the check again."
        return Finding(verdict=Verdict.WARNING, said=said, advice=advice)
    return Finding(verdict=Verdict.PASSED, said=said, figures={"gpus": len(gpus)})


def check_wheels(folder: Path) -> Finding:
    """Compare the installed packages with the GPU lock."""
    installed = {_plain(each.name): each.version for each in importlib.metadata.distributions()}
    wrong = find_differences(locked_versions(GPU_LOCK.read_text()), installed)
    if not wrong:
        return Finding(verdict=Verdict.PASSED, said="Every package has the locked version.")
    shown = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
    return Finding(
        verdict=Verdict.FAILED, said=f"{len(wrong)} packages differ from the lock: {shown}.", advice=_INSTALL
    )


def locked_versions(text: str) -> dict[str, str]:
    """Return the versions of a lock by package."""
    pairs = (line.split()[0].split("==") for line in text.splitlines() if "==" in line and not line.startswith("#"))
    return {_plain(name): version for name, version in pairs}


def find_differences(locked: Mapping[str, str], installed: Mapping[str, str]) -> list[str]:
    """Return each package that is missing or has another version than the lock.

    A local part such as +cu130 is ignored.
    """
    return [
        f"{name} {installed.get(name, 'missing')} (locked {version})"
        for name, version in locked.items()
        if installed.get(name, "").partition("+")[0] != version.partition("+")[0]
    ]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
