"""A kernel for Triton to compile: it adds two vectors."""

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # only on GPU machines
    triton = None

_BLOCK = 1024


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a + b, computed by a compiled kernel. Raises RuntimeError without Triton."""
    if triton is None:
        raise RuntimeError("Triton is not installed")
    result = torch.empty_like(a)
    _add[(triton.cdiv(a.numel(), _BLOCK),)](a, b, result, a.numel(), BLOCK=_BLOCK)
    return result


if triton is not None:

    @triton.jit
    def _add(a, b, result, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = at < count
        tl.store(result + at, tl.load(a + at, mask=mask) + tl.load(b + at, mask=mask), mask=mask)
