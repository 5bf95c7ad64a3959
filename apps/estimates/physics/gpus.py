"""Capacity and speed of GPU types, read from the catalog's rows; a CPU is one more type."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TypedDict

import msgspec

from apps.estimates.errors import EstimateError

GIB = 1024**3
MIB = 1024**2

# Share of the label's GiB that torch reports as total memory, for types without a published figure. Both are the least
# share among the types with an observation in gpus.json: HBM 79.15/80 (A100), GDDR6 with ECC 14.563/16 (T4).
_HBM_USABLE_SHARE = 0.987
_GDDR_USABLE_SHARE = 0.910
# Multiprocessors x boost clock in GHz, from NVIDIA's data sheets and architecture white papers: each multiprocessor
# evaluates 16 exponentials a clock (CUDA C programming guide, throughput of native arithmetic instructions).
_EXPONENTIALS_PER_CLOCK = 16
# One direction over 16 lanes, as bandwidth tests reach it (generation 4: 25 of 31.5 GB/s; CUDA samples bandwidthTest).
_PCIE = {"PCIe5": 50e9, "PCIe4": 25e9, "PCIe3": 12.5e9}
# NVIDIA's data sheets: PCIe Gen5, 128 GB/s in both directions
_PCIE5_PREFIXES = ("h100-sxm", "h200-sxm", "b200", "b300")
# FlashAttention-2 multiplies with Ampere's instruction, mma.sync. Hopper runs it at 62.9 % of its peak
# (arXiv 2402.13499). Blackwell's data centre types are assumed to do the same.
_MMA_SYNC_SHARE, _MMA_SYNC_PREFIXES = 0.629, ("h100", "h200", "b200", "b300", "gb200", "gb300")
_EXPONENTIALS_PER_BYTE = 1.2  # of an A100 80GB: 2.44e12 exponentials and 2.04e12 bytes per second
_MULTIPROCESSORS = {
    "a100": (108, 1.41), "h100-pcie": (114, 1.755), "h100": (132, 1.83), "h200": (132, 1.83), "b200": (148, 1.965),
    "b300": (160, 1.965), "gb200": (148, 1.965), "gb300": (160, 1.965), "l40s": (142, 2.52), "l40": (142, 2.49),
    "l4": (58, 2.04), "rtx-4090": (128, 2.52), "rtx-5090": (170, 2.41), "rtx-6000-ada": (142, 2.505),
    "rtx-pro-6000": (188, 2.6), "a10g": (80, 1.695), "t4": (40, 1.59), "v100": (80, 1.53), "rtx-a6000": (84, 1.80),
    "rtx-3090": (82, 1.695), "rtx-4080": (76, 2.505),
}  # fmt: skip
_LONGEST_PREFIXES = sorted(_MULTIPROCESSORS, key=len, reverse=True)  # "l40s" is found before "l40"
# GeForce cards multiply 16-bit numbers with fp32 sums at half the rate of their units (Ampere and Ada white papers),
# and clock above the data sheet. Feeding the units is never the limit, so they reach the sheet's figure.
_GEFORCE_PREFIXES, _GEFORCE_SHARE = ("rtx-30", "rtx-40", "rtx-50"), 1.0
# Best measured matrix product / data sheet for types without a measurement: 0.87 on A100, 0.73-0.80 on types of 700 W
# and more, which cannot hold their clock (mamf_bf16_tflops_measured in gpus.json).
_GEMM_SHARE, _GEMM_SHARE_LARGE, _LARGE_FLOPS = 0.87, 0.78, 5e14
_HBM_KEY_PREFIXES = ("a100", "h100", "h200", "b200", "b300", "gb", "mi3", "v100")


class Interconnect(TypedDict):
    kind: str
    gpu_bidir_gb_s: float | None


class GpuRow(TypedDict, total=False):
    """One row of the catalog's `gpus.json`: the fields that estimates read. Unknown figures are null."""

    key: str
    name: str
    arch: str
    memory_gb_label: int
    usable_gib_observed: float | None
    total_gib: float | None
    mem_bw_gb_s: float | None
    dense_tflops: dict[str, float | None]
    mamf_bf16_tflops_measured: float | None
    interconnect: Interconnect
    sources: list[str]


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU type.

    `memory_bytes` is the total that the framework can allocate (torch's total_memory), before any CUDA context.
    `nvlink_bytes_per_second` counts both directions, as vendors do; None means PCIe only.
    """

    key: str
    name: str
    memory_bytes: int
    kind: str = "cuda"  # "cuda" | "rocm" | "cpu"
    memory_bandwidth_bytes_per_second: int | None = None
    bf16_flops: float | None = None
    fp16_flops: float | None = None
    nvlink_bytes_per_second: int | None = None
    measured_gemm_flops: float | None = None  # of the best known 16-bit matrix product (mamf-finder)
    pcie_bytes_per_second: float = 25e9  # 16 lanes in one direction, as reached: generation 4; twice for 5, half for 3
    has_nvlink_switch: bool = False  # every GPU reaches every other at the full rate
    sources: tuple[str, ...] = ()

    @property
    def reachable_flops(self) -> float:
        """Return the speed of 16-bit matrix products: measured, else the data sheet times measured types' share."""
        sheet = self.bf16_flops or self.fp16_flops or 0.0
        if self.key.startswith(_GEFORCE_PREFIXES):
            return self.measured_gemm_flops or sheet * _GEFORCE_SHARE
        return self.measured_gemm_flops or sheet * (_GEMM_SHARE if sheet < _LARGE_FLOPS else _GEMM_SHARE_LARGE)

    @property
    def attention_flops(self) -> float:
        """Return the speed of 16-bit matrix products in attention kernels that are not written for this type."""
        return self.reachable_flops * (_MMA_SYNC_SHARE if self.key.startswith(_MMA_SYNC_PREFIXES) else 1.0)

    @property
    def exponentials_per_second(self) -> float:
        """Return the rate that limits softmax; an unlisted type is assumed to have an A100's ratio to bandwidth."""
        return (
            _listed_exponentials(self.key) or (self.memory_bandwidth_bytes_per_second or 0.0) * _EXPONENTIALS_PER_BYTE
        )

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"


@cache
def _listed_exponentials(key: str) -> float:
    for prefix in _LONGEST_PREFIXES:
        if key.startswith(prefix):
            count, gigahertz = _MULTIPROCESSORS[prefix]
            return count * gigahertz * 1e9 * _EXPONENTIALS_PER_CLOCK
    return 0.0


def cpu(*, memory_bytes: int) -> Gpu:
    """Return a machine without a GPU: `memory_bytes` is the RAM that a training process may use."""
    return Gpu(key="cpu", name="CPU", memory_bytes=memory_bytes, kind="cpu")


def from_row(row: GpuRow) -> Gpu:
    tflops, bandwidth = row["dense_tflops"], row.get("mem_bw_gb_s")
    return Gpu(
        key=row["key"],
        name=row["name"],
        memory_bytes=_memory(row),
        kind="rocm" if row["arch"].startswith("CDNA") else "cuda",
        memory_bandwidth_bytes_per_second=round(bandwidth * 1e9) if bandwidth else None,
        # Cards before Ampere have no bf16 matrix units; their fp16 peak is not this figure.
        bf16_flops=_tera(tflops.get("bf16")),
        fp16_flops=_tera(tflops.get("fp16")),
        nvlink_bytes_per_second=_nvlink(row["interconnect"]),
        pcie_bytes_per_second=_pcie(row["key"], row["interconnect"]["kind"]),
        measured_gemm_flops=_tera(row.get("mamf_bf16_tflops_measured")),
        has_nvlink_switch="bridge" not in row["interconnect"]["kind"] and _nvlink(row["interconnect"]) is not None,
        sources=tuple(row["sources"]),
    )


def load(path: Path) -> dict[str, Gpu]:
    """Read the file `gpus.json`."""
    rows: list[GpuRow] = msgspec.json.decode(path.read_bytes())["gpus"]
    return {row["key"]: from_row(row) for row in rows}


def find(types: Mapping[str, Gpu], key: str) -> Gpu:
    """Return the type of this key. Raises EstimateError naming `gpu` and the known keys."""
    if key not in types:
        raise EstimateError("gpu", f"GPU type {key!r} is not known; known: {', '.join(sorted(types))}")
    return types[key]


def _memory(row: GpuRow) -> int:
    if observed := row.get("usable_gib_observed") or row.get("total_gib"):
        return int(observed * GIB)
    share = _HBM_USABLE_SHARE if row["key"].startswith(_HBM_KEY_PREFIXES) else _GDDR_USABLE_SHARE
    return int(row["memory_gb_label"] * share * GIB)


def _tera(value: float | None) -> float | None:
    return value * 1e12 if value else None


def _pcie(key: str, kind: str) -> float:
    """Return the PCIe rate to the host; a type listed with NVLink also reaches its host over PCIe."""
    named = next((rate for generation, rate in _PCIE.items() if generation in kind), None)
    return named or _PCIE["PCIe5" if key.startswith(_PCIE5_PREFIXES) else "PCIe4"]


def _nvlink(interconnect: Interconnect) -> int | None:
    rate = interconnect.get("gpu_bidir_gb_s")
    return round(rate * 1e9) if rate and "NVLink" in interconnect["kind"] else None
