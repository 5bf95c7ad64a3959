"""What each training framework does with memory and time: switches read from its code and documentation.

A profile holds no figure fitted to a publisher's rows; the few shared constants are in `constants.py`.
"""

from enum import StrEnum

import msgspec


class Loss(StrEnum):
    """How a stack turns hidden states into a loss; see `memory.loss_bytes_per_value`."""

    TILED = "tiled"  # head and loss in tiles of tokens x vocabulary (TRL >= 1, Liger, cut cross entropy)
    CHUNKED = "chunked"  # logits computed whole, cross entropy over chunks of tokens (torchtune, litgpt)
    STOCK = "stock"  # transformers: 16-bit logits, upcast to fp32 before cross entropy
    AUTOCAST = "autocast"  # 16-bit logits, autocast makes cross entropy fp32 (transformers < 4.45 remote code)


class Attention(StrEnum):
    EAGER = "eager"  # scores of length x length are kept
    SDPA = "sdpa"  # memory-efficient or flash kernel of torch
    FLASH = "flash"  # FlashAttention 2 or 3, cuDNN


class StackProfile(msgspec.Struct, frozen=True, kw_only=True):
    """`pads`: rows reach the model padded ("longest" of the micro-batch, "fixed" max_length) or "never"."""

    key: str
    name: str
    loss: str = "stock"
    attention: str = "sdpa"
    adapter_bytes: int = 4  # of each LoRA weight, where the base is 16-bit
    quantized_adapter_bytes: int = 4  # the same, where the base is 4-bit
    upcasts_unquantized: bool = False  # prepare_model_for_kbit_training: embeddings, norms and head to fp32
    double_quantization: bool = True
    quantizes_head: bool = False
    master_weights: bool = False  # full fine-tuning keeps fp32 weights and moments beside 16-bit ones
    gradient_bytes: int | None = None  # of full fine-tuning; None: as the weights
    offloads_checkpoints: bool = False  # Unsloth moves them to the host
    fused_kernels: bool = False  # norms, SwiGLU and rotary in one kernel each: fewer saved copies
    pads: str = "longest"
    fp8: bool = False
    compiled: bool = False
    sources: tuple[str, ...] = ()


ANNEAL = StackProfile(
    key="anneal", name="Anneal (TRL, PEFT)", loss="tiled", quantized_adapter_bytes=2, master_weights=True,
    sources=("TRL 1.16 trl/kernels/chunked_logprob.py", "PEFT autocast_adapter_dtype"),
)  # fmt: skip

STACKS: dict[str, StackProfile] = {
    profile.key: profile
    for profile in (
        ANNEAL,
        StackProfile(key="hf", name="transformers, TRL, PEFT", upcasts_unquantized=True, double_quantization=False),
        StackProfile(
            key="unsloth", name="Unsloth", loss="tiled", attention="flash", offloads_checkpoints=True,
            fused_kernels=True, quantized_adapter_bytes=4,
        ),
        StackProfile(key="axolotl", name="Axolotl (FSDP)", attention="flash"),
        StackProfile(
            key="nemo", name="NVIDIA NeMo", loss="stock", attention="flash", master_weights=True, gradient_bytes=4,
            fp8=True, fused_kernels=True,
        ),
        StackProfile(key="torchtune", name="torchtune", loss="chunked", adapter_bytes=2),
        StackProfile(
            key="torchtitan", name="torchtitan", attention="flash", master_weights=True, gradient_bytes=4,
            compiled=True, pads="never",
        ),
        StackProfile(key="litgpt", name="LitGPT", loss="chunked", adapter_bytes=2, quantized_adapter_bytes=2),
        StackProfile(key="swift", name="ms-swift", attention="flash"),
        StackProfile(key="llama_factory", name="LLaMA-Factory", attention="sdpa", upcasts_unquantized=True),
    )
}  # fmt: skip
