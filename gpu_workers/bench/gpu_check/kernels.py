"""Checks of torch and of each kernel library, on small inputs and against torch's own result."""

import importlib.util
import time
from pathlib import Path

import torch
from torch.nn import functional

from gpu_workers.bench.gpu_check.findings import Finding, Verdict
from gpu_workers.bench.gpu_check.triton_kernel import add
from gpu_workers.train.model.hardware import detect

_TOLERANCE = 0.02  # of bfloat16 results of size 1
_NUMBERS, _SIDE, _REPEATS = 4096, 4096, 20


def check_torch(folder: Path) -> Finding:
    """Multiply matrices on every GPU, and compare with the CPU."""
    if not torch.cuda.is_available():
        said = f"torch {torch.__version__} finds no CUDA although the driver answers."
        return Finding(verdict=Verdict.FAILED, said=said, advice="Install the GPU lock: `make setup`.")
    teraflops = {}
    for index in range(torch.cuda.device_count()):
        a, b = (torch.randn(_SIDE, _SIDE, device=f"cuda:{index}", dtype=torch.bfloat16) for _ in range(2))
        expected = a[:8].float().cpu() @ b.float().cpu()
        if not torch.allclose((a @ b)[:8].float().cpu(), expected, rtol=0.05, atol=2.0):
            said = f"GPU {index} multiplies wrongly."
            return Finding(verdict=Verdict.FAILED, said=said, advice="Take this GPU out of use and test it.")
        torch.cuda.synchronize(index)
        begun = time.perf_counter()
        for _ in range(_REPEATS):
            a @ b
        torch.cuda.synchronize(index)
        teraflops[f"tflops_{index}"] = round(2 * _SIDE**3 * _REPEATS / (time.perf_counter() - begun) / 1e12, 1)
    slowest, fastest = min(teraflops.values()), max(teraflops.values())
    said = f"{len(teraflops)} GPUs multiply bfloat16 at {slowest:g} to {fastest:g} TFLOP/s."
    if slowest < 0.8 * fastest:
        advice = "One GPU is slower than the others: look for heat or a power limit (`nvidia-smi -q -d PERFORMANCE`)."
        return Finding(verdict=Verdict.WARNING, said=said, advice=advice, figures=teraflops)
    return Finding(verdict=Verdict.PASSED, said=said, figures=teraflops)


def check_triton(folder: Path) -> Finding:
    """Compile and run a kernel."""
    a, b = (torch.randn(_NUMBERS, device="cuda") for _ in range(2))
    if not torch.equal(add(a, b), a + b):
        return Finding(verdict=Verdict.FAILED, said="A compiled kernel adds wrongly.")
    return Finding(verdict=Verdict.PASSED, said="A kernel was compiled and adds correctly.")


def check_flash_attention(folder: Path) -> Finding:
    """Compare flash_attn with torch's attention."""
    if not detect().has_flash_attention:
        return _not_installed("flash_attn", "Without it, models with a soft cap and packed rows use slower kernels.")
    from flash_attn import flash_attn_func  # noqa: PLC0415 - optional

    q, k, v = (torch.randn(2, 128, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    swapped = (each.transpose(1, 2) for each in (q, k, v))
    expected = functional.scaled_dot_product_attention(*swapped, is_causal=True).transpose(1, 2)
    return _compared("FlashAttention", flash_attn_func(q, k, v, causal=True), expected)


def check_liger(folder: Path) -> Finding:
    """Compare Liger's RMS norm with torch's."""
    if not detect().has_liger:
        return _not_installed("liger_kernel", "Without it, norms and activations run as torch operators.")
    from liger_kernel.transformers import LigerRMSNorm  # noqa: PLC0415 - optional

    norm = LigerRMSNorm(512, eps=1e-6).to("cuda", torch.bfloat16)
    rows = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)
    return _compared("Liger's norm", norm(rows), functional.rms_norm(rows, (512,), norm.weight, 1e-6))


def check_bitsandbytes(folder: Path) -> Finding:
    """Store a matrix in NF4, multiply with it, and compare with the 16-bit product."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit  # noqa: PLC0415 - only for QLoRA

    weight = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
    stored, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    error = float((dequantize_4bit(stored, state) - weight).abs().mean())
    figures = {"mean_error": round(error, 4)}
    if not error < 0.1:  # 0.073 for normal numbers
        said = f"NF4 loses {error:.3f} of numbers of size 1; 0.07 is usual."
        return Finding(verdict=Verdict.FAILED, said=said, figures=figures)
    said = f"NF4 stores {weight.numel() / stored.numel():.0f} weights in a byte, with a mean error of {error:.3f}."
    return Finding(verdict=Verdict.PASSED, said=said, figures=figures)


def _compared(name: str, found: torch.Tensor, expected: torch.Tensor) -> Finding:
    difference = float((found.float() - expected.float()).abs().max())
    figures = {"largest_difference": round(difference, 5)}
    if not difference < _TOLERANCE * max(1.0, float(expected.abs().max())):
        said = f"{name} differs from torch by up to {difference:.3g}."
        return Finding(
            verdict=Verdict.FAILED, said=said, advice="Uninstall it, or install another build.", figures=figures
        )
    return Finding(verdict=Verdict.PASSED, said=f"{name} agrees with torch.", figures=figures)


def _not_installed(module: str, effect: str) -> Finding:
    assert importlib.util.find_spec(module) is None
    advice = f"{effect} It is optional: install a build for this torch and CUDA."
    return Finding(verdict=Verdict.WARNING, said=f"{module} is not installed.", advice=advice)
