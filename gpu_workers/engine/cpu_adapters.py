"""A fix of vLLM 0.32 on CPUs, where rows without an adapter got the adapter of the last slot.

Such a row has the index -1, which torch reads as the last slot. So while adapters fill all slots, the base model would
answer as one of them. The Triton kernels of GPUs skip the index -1.
"""

from typing import Any

from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu


def leave_out_rows_without_adapter() -> None:
    """Make the CPU kernels add nothing to rows whose index is -1."""
    shrink = lora_ops.bgmv_shrink

    def shrink_adapted(inputs: Any, weights: Any, output: Any, indices: Any, scaling: float = 1.0) -> None:
        shrink(inputs, weights, output, indices, scaling)
        output[indices < 0] = 0

    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = shrink_adapted
