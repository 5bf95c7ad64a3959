"""Memory and time profiles of training frameworks: switches read from their code and documentation.

A profile contains no figure fitted to a publisher's rows; the few constants that all stacks share are in `memory` and
`timing`. `loss_bytes` are alive in the head and loss at their peak, per token and vocabulary entry:

- 12: transformers since 4.49: fp32 log-probabilities and two fp32 gradients of them (16-bit logits are temporary)
- 14: transformers before: 16-bit logits, their fp32 copy, its shifted copy, log-probabilities
- 16: the same in a loop that keeps the model's output, and so its fp32 logits, through the backward pass
- 12: remote code under autocast: 16-bit logits and shifted copy, fp32 copy, log-probabilities
- 8: everything in 16 bits (no autocast): logits, shifted copy, log-probabilities, gradient
- 6: LitGPT: chunked head, 16-bit cross entropy, gradients of one chunk at a time
- 0: never complete: tiles (TRL >= 1, Liger, Unsloth, cut cross entropy)
"""

import msgspec

from apps.estimates.models.architectures import Architecture

_SHORT_TYPES = ("bfloat16", "float16")


class StackProfile(msgspec.Struct, frozen=True, kw_only=True):
    """How one training framework uses memory and time.

    `full_state` of full fine-tuning is "mixed" (fp32 master and moments, 16 bytes per parameter) or "pure" (8).
    """

    key: str
    name: str
    loss_bytes: float = 12.0
    compiled_loss_bytes: float = 12.0  # the same under torch.compile, if less
    is_tiled_loss: bool = False
    has_head_loss: bool = False  # the loss has the head's type: twice the bytes under a head in fp32
    heads_trained_only: bool = False  # computes the output head only where a token is trained
    adapter_bytes: int = 4  # of each LoRA weight, if the base is 16-bit
    quantized_adapter_bytes: int = 4  # the same, if the base is 4-bit
    is_autocast: bool = True  # fp32 adapters are cast to 16 bits at each use, and the copies are kept for the step
    upcasts_unquantized: bool = False  # prepare_model_for_kbit_training: embeddings, norms and head to fp32
    # prepare_model_for_kbit_training: at least the norms over a 4-bit base in fp32, if computing in one of these types.
    wide_norms: tuple[str, ...] = ()
    # Of each weight of a mixture's experts over a 4-bit base. transformers 5 keeps a layer's experts in one tensor,
    # which bitsandbytes does not quantise. None: one matrix per expert (transformers 4), quantised like all others.
    expert_bytes: int | None = None
    # Full training of fp32 weights under autocast: the forward pass keeps a 16-bit copy of each matrix.
    casts_trained_weights: bool = False
    double_quantization: bool = True
    quantizes_head: bool = False
    quantized_activation_bytes: int | None = None  # with a 4-bit base; None: like the compute type
    full_state: str = "mixed"
    has_step_copy: bool = False  # foreach AdamW: one more copy of the second moment during the step
    offloads_checkpoints: bool = False  # to the host
    fused_kernels: bool = False  # norms, gated activation and rotary in one kernel each
    fused_adapters: bool = False  # no copy of an adapted matrix's input: neither converted nor dropped out
    repeats_key_values: bool = True  # grouped heads are expanded before attention
    groups_lengths: bool = False  # rows of similar length share a micro-batch: almost no padding
    packs_micro_batches: bool = False  # a micro-batch's rows become one sequence: no padding if rows can be packed
    frees_cache: bool = False  # returns cached blocks, or grows segments: varying lengths do not fragment memory
    ties_embeddings: bool = True  # as the model does; False: embedding and head are two matrices in every model
    # FSDP gathers this many layers at once, and the root unit (embedding and head) this often; FSDP1 with its buffer.
    fsdp_units: int = 3
    fsdp_root_copies: int = 2
    evaluates: bool = False  # on held-out rows while training; published figures are of training alone
    gathers_to_load: bool = False  # FSDP: each GPU gathers all weights to load the checkpoint
    offloads_quantized: bool = True  # 4-bit weights may stay in the host's memory
    reference_ahead: bool = False  # DPO: the reference processes all rows once, before training
    counter: str = "device"  # what its own log counts: the device's memory, or torch's "allocated" tensors
    launch_share: float = 1.0  # of the eager cost of launching kernels; less if compiled or fused
    attention_cost: float = 1.0  # time of the attention kernels as a multiple of FlashAttention-2's
    sources: tuple[str, ...] = ()


ANNEAL = StackProfile(
    key="anneal",
    name="Anneal (TRL, PEFT)",
    loss_bytes=0.0,
    is_tiled_loss=True,
    heads_trained_only=True,
    expert_bytes=2,
    wide_norms=("float16",),
    casts_trained_weights=True,
    packs_micro_batches=True,
    fsdp_units=2,
    fsdp_root_copies=1,
    evaluates=True,
    offloads_quantized=False,
    reference_ahead=True,
    sources=(
        "TRL 1.16 trl/kernels/chunked_logprob.py; trl/trainer/utils.py add_fused_lm_head: only valid positions",
        "gpu_workers/train/loop/sft.py _score_selected, on a CPU",
        "PEFT autocast_adapter_dtype; gpu_workers/train/loop/sft.py _adapter_in_float32",
        "gpu_workers/train/model/loading.py _widen_norms",
        "gpu_workers/train/loop/dpo.py",
    ),
)

_PROFILES = (
    ANNEAL,
    StackProfile(
        key="hf",
        name="transformers, TRL, PEFT",
        has_step_copy=True,
        upcasts_unquantized=True,
        wide_norms=_SHORT_TYPES,
        full_state="pure",
        sources=(
            "transformers 5 loss_utils.ForCausalLMLoss",
            "PEFT prepare_model_for_kbit_training",
            "torch.optim.AdamW, foreach, the default: about the parameters' size more at the peak",
        ),
    ),
    StackProfile(
        key="fms",
        name="transformers, TRL, PEFT with accelerated-peft-bnb",
        has_step_copy=True,
        full_state="pure",
        sources=("fms-acceleration, accelerated-peft README: 16-bit weights beside the 4-bit ones are not upcast",),
    ),
    StackProfile(
        key="loop",
        name="PyTorch loop around transformers and PEFT",
        loss_bytes=16.0,
        is_autocast=False,
        has_step_copy=True,
        upcasts_unquantized=True,
        wide_norms=_SHORT_TYPES,
        full_state="pure",
        sources=(
            "`output` alive through backward, as in the loop of fsdp_qlora",
            "PEFT prepare_model_for_kbit_training: the head in fp32, and without autocast so are the logits",
        ),
    ),
    StackProfile(
        key="plain_loop",
        name="PyTorch loop with a cross entropy of its own",
        loss_bytes=8.0,
        has_head_loss=True,
        is_autocast=False,
        has_step_copy=True,
        upcasts_unquantized=True,
        wide_norms=_SHORT_TYPES,
        full_state="pure",
        sources=("torch.nn.functional.cross_entropy of the head's type: logits, shifted, log-probabilities, gradient",),
    ),
    StackProfile(
        key="peft",
        name="PEFT method comparison",
        full_state="pure",
        has_step_copy=True,
        groups_lengths=True,
        frees_cache=True,
        sources=("peft method_comparison/MetaMathQA/run.py: batches sorted by length, empty_cache",),
    ),
    StackProfile(
        key="qwen",
        name="Qwen finetune.py (transformers 4.3x, remote code)",
        has_step_copy=True,
        repeats_key_values=False,
        sources=("QwenLM/Qwen finetune.py, modeling_qwen.py",),
    ),
    StackProfile(
        key="swift",
        name="ms-swift",
        has_step_copy=True,
        full_state="pure",
        repeats_key_values=False,
        adapter_bytes=4,
        upcasts_unquantized=True,
        sources=("modelscope/swift docs Benchmark.md; transformers Trainer",),
    ),
    StackProfile(
        key="fsdp_qlora",
        name="fsdp_qlora (Answer.AI)",
        loss_bytes=16.0,
        adapter_bytes=2,
        quantized_adapter_bytes=2,
        is_autocast=False,
        has_step_copy=True,
        full_state="pure",
        double_quantization=False,
        sources=("AnswerDotAI/fsdp_qlora train.py: bf16 throughout, torch AdamW, `output` alive through backward",),
    ),
    StackProfile(
        key="litgpt",
        name="LitGPT",
        counter="allocated",
        loss_bytes=6.0,
        adapter_bytes=2,
        quantized_adapter_bytes=2,
        is_autocast=False,
        has_step_copy=True,
        full_state="pure",
        double_quantization=False,
        quantizes_head=True,
        quantized_activation_bytes=4,
        ties_embeddings=False,
        gathers_to_load=True,
        sources=(
            "lightning fabric/strategies/fsdp.py _load_raw_module_state",
            "litgpt/finetune/lora.py: lm_head_chunk_size=128; bf16-true; bnb.nf4 of every Linear",
            "litgpt/model.py: GPT holds lm_head and transformer.wte apart, also of models that tie them",
        ),
    ),
    StackProfile(
        key="unsloth",
        name="Unsloth",
        loss_bytes=0.0,
        is_tiled_loss=True,
        full_state="pure",
        offloads_checkpoints=True,
        fused_kernels=True,
        fused_adapters=True,
        repeats_key_values=False,
        launch_share=0.7,
        sources=("unsloth README: offloaded gradient checkpointing, fused cross entropy",),
    ),
    StackProfile(
        key="axolotl",
        name="Axolotl",
        full_state="pure",
        repeats_key_values=False,
        sources=("axolotl loaders/model.py: embeddings and head back to the compute type after the k-bit preparation",),
    ),
    StackProfile(
        key="llama_factory",
        name="LLaMA-Factory",
        loss_bytes=14.0,
        full_state="mixed",
        sources=(
            "LLaMA-Factory README: full AMP 18 bytes, pure bf16 8",
            "published figures are of 2024, and so of transformers before 4.49",
            "model_utils/checkpointing.py: upcast_layernorm and upcast_lmhead_output are off by default",
        ),
    ),
    StackProfile(
        key="torchtune",
        name="torchtune",
        loss_bytes=6.0,
        fsdp_units=2,
        fsdp_root_copies=1,
        compiled_loss_bytes=2.25,  # 16-bit logits, and the gradient of one of eight chunks; fp32 stays in registers
        counter="allocated",
        adapter_bytes=2,
        quantized_adapter_bytes=2,
        is_autocast=False,
        full_state="pure",
        repeats_key_values=False,
        launch_share=0.7,
        sources=(
            "torchtune CEWithChunkedOutputLoss, of which compute_cross_entropy is compiled; bf16 throughout",
            "torchtune/training/memory.py get_memory_stats: torch's active, allocated and reserved bytes",
        ),
    ),
    StackProfile(
        key="torchtitan",
        name="torchtitan",
        fsdp_units=2,
        fsdp_root_copies=1,
        loss_bytes=12.0,
        repeats_key_values=False,
        fused_kernels=True,
        fused_adapters=True,
        launch_share=0.5,
        frees_cache=True,
        sources=("torchtitan: FSDP2 mixed precision, fp32 parameters, fused AdamW, torch.compile",),
    ),
    StackProfile(
        key="foundry",
        name="LLM Foundry",
        loss_bytes=12.0,
        repeats_key_values=False,
        launch_share=0.7,
        attention_cost=1.8,  # forward 1.4 and backward 2, with 2.5 backward passes' work in each forward pass
        sources=(
            "llm-foundry: FSDP amp_bf16, flash attention, fused cross entropy",
            "llm-foundry scripts/train/yamls/pretrain/mpt-7b.yaml: attn_impl: triton",
            "arXiv 2307.08691, section 4.1: FlashAttention-2 beside FlashAttention in Triton",
        ),
    ),
    StackProfile(
        key="automodel",
        name="NeMo AutoModel",
        loss_bytes=0.0,
        is_tiled_loss=True,
        adapter_bytes=2,
        is_autocast=False,
        repeats_key_values=False,
        launch_share=0.5,
        sources=("NeMo AutoModel performance summary: TE fused kernels, compile",),
    ),
    StackProfile(
        key="nemo",
        name="NVIDIA NeMo (Megatron)",
        loss_bytes=12.0,
        adapter_bytes=2,
        is_autocast=False,
        fused_kernels=True,
        fused_adapters=True,
        repeats_key_values=False,
        launch_share=0.4,
        sources=("MLPerf Training submissions: Transformer Engine, distributed optimizer, CUDA graphs",),
    ),
)
STACKS: dict[str, StackProfile] = {profile.key: profile for profile in _PROFILES}
# torchtune without its chunked loss: complete logits, as in plain transformers.
WHOLE_SUFFIX = "+whole"
STACKS[f"torchtune{WHOLE_SUFFIX}"] = msgspec.structs.replace(
    STACKS["torchtune"],
    key=f"torchtune{WHOLE_SUFFIX}",
    name="torchtune, whole logits",
    loss_bytes=12.0,
    compiled_loss_bytes=12.0,
)
# transformers under FSDP with mixed precision: Accelerate holds the trained weights, and so the optimizer's state, in
# fp32 (accelerate docs, concept guide "FSDP vs DeepSpeed": local data types of FSDP).
MIXED_SUFFIX = "+mixed"
STACKS[f"hf{MIXED_SUFFIX}"] = msgspec.structs.replace(
    STACKS["hf"],
    key=f"hf{MIXED_SUFFIX}",
    name="transformers, TRL, FSDP with mixed precision",
    full_state="mixed",
)
# transformers before 4.49 (17 February 2025) keeps the 16-bit logits and their fp32 copies.
BEFORE_449_SUFFIX = "+before-4.49"
STACKS |= {
    f"{key}{BEFORE_449_SUFFIX}": msgspec.structs.replace(
        STACKS[key],
        key=f"{key}{BEFORE_449_SUFFIX}",
        name=f"{STACKS[key].name}, before transformers 4.49",
        loss_bytes=14.0,
        compiled_loss_bytes=14.0,
    )
    for key in ("hf", "fms", f"hf{MIXED_SUFFIX}")
}
# Any of them with a fused head and loss (Liger, cut cross entropy): the logits are never complete.
TILED_SUFFIX = "+tiled"
STACKS |= {
    f"{profile.key}{TILED_SUFFIX}": msgspec.structs.replace(
        profile,
        key=f"{profile.key}{TILED_SUFFIX}",
        name=f"{profile.name}, fused loss",
        loss_bytes=0.0,
        is_tiled_loss=True,
    )
    for profile in (*_PROFILES, STACKS[f"hf{MIXED_SUFFIX}"])
    if not profile.is_tiled_loss
}
# All of Liger's kernels: a norm keeps its input as it is given, and the backward pass repeats the gated activation
# (save_for_backward in liger_kernel/ops/rms_norm.py and swiglu.py). fms-acceleration's kernels are its own.
# Its cross entropy of complete logits writes their gradient in their place (liger_kernel/ops/cross_entropy.py).
LIGER_SUFFIX, LIGER_WHOLE_SUFFIX = "+liger", "+liger+whole"
for _key in ("hf", f"hf{MIXED_SUFFIX}", "loop", "plain_loop", "llama_factory", "swift", "axolotl"):
    _liger = msgspec.structs.replace(
        STACKS[f"{_key}{TILED_SUFFIX}"],
        key=f"{_key}{LIGER_SUFFIX}",
        name=f"{STACKS[_key].name}, Liger kernels",
        fused_kernels=True,
    )
    _whole = msgspec.structs.replace(
        _liger,
        key=f"{_key}{LIGER_WHOLE_SUFFIX}",
        name=f"{_liger.name}, complete logits",
        loss_bytes=2.0,
        is_tiled_loss=False,
    )
    STACKS |= {_liger.key: _liger, _whole.key: _whole}


def held_by(stack: StackProfile, architecture: Architecture) -> Architecture:
    """Return the model as this framework stores it in memory."""
    if stack.ties_embeddings or not architecture.tie_word_embeddings:
        return architecture
    return msgspec.structs.replace(architecture, tie_word_embeddings=False)
