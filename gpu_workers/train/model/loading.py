"""The model to train: the base with an adapter, or the base itself, in this machine's best training precision."""

import json
from pathlib import Path

import peft
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GraniteMoeConfig, PreTrainedModel

from apps.contracts.adapter_files import adapted_modules
from apps.contracts.failures import FailureCode
from apps.contracts.hyperparameters import Hyperparameters, Method
from gpu_workers.train.failures import TrainingFailed
from gpu_workers.train.model.attention import attention_of, register_attention
from gpu_workers.train.model.hardware import Engine, choose_engine, detect
from gpu_workers.train.model.sharding import shard_model

try:
    from bitsandbytes.nn import Linear4bit
except ImportError:  # only for QLoRA (gpu_workers/trainer/child.py)
    Linear4bit = ()  # an instance of no class

try:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
except ImportError:  # only on GPU machines; `Engine.uses_liger` is set if installed
    _apply_liger_kernel_to_instance = None

# TRL 1.16's loss reads this name of every mixture; Granite's configuration is the only one without an alias for it.
GraniteMoeConfig.attribute_map = GraniteMoeConfig.attribute_map | {"num_experts": "num_local_experts"}
CONFIG_FILE, ADAPTER_FILE = "config.json", "adapter_model.safetensors"


def load_model(
    folder: Path,
    hyperparameters: Hyperparameters,
    *,
    start: Path | None = None,
    engine: Engine | None = None,
    is_sharded: bool = False,
    copies: int = 1,
) -> torch.nn.Module:
    """Return the model to train, its trained weights in float32; the caller sets the seed.

    `start` contains an adapter or a whole model of an earlier job to begin with. A sharded model is spread over all
    processes, or each of its `copies` over as many of them.
    """
    _require_layers(folder, hyperparameters)
    engine = engine or choose_engine(detect(), hyperparameters, attention=attention_of(folder))
    base = _load_base(folder, hyperparameters, engine, is_sharded=is_sharded)
    if start is not None:
        base = _begin_with(base, start, hyperparameters)
    model = adapt(base, hyperparameters, engine, is_sharded=is_sharded)
    is_adapter = hyperparameters.method is not Method.FULL
    if is_adapter and start is not None and (start / ADAPTER_FILE).is_file():
        _begin_with_adapter(model, start)
    if not is_sharded:
        return model
    return shard_model(
        model,
        base,
        copies=copies,
        is_offloaded=hyperparameters.cpu_offload,
        gathers_bf16=not is_adapter and engine.autocast == "bf16",
    )


def _require_layers(folder: Path, hyperparameters: Hyperparameters) -> None:
    """Refuse layers that the architecture does not have, because PEFT would leave them out or train experts instead."""
    modules = adapted_modules(json.loads((folder / CONFIG_FILE).read_bytes()))
    unknown = sorted(set(hyperparameters.target_modules) - set(modules))
    if unknown and hyperparameters.method is not Method.FULL:
        message = f"This base model has no {', '.join(unknown)} to adapt: use {', '.join(modules)}."
        raise TrainingFailed(FailureCode.ADAPTER_REJECTED, message)


def adapt(
    base: PreTrainedModel, hyperparameters: Hyperparameters, engine: Engine, *, is_sharded: bool = False
) -> torch.nn.Module:
    """Add the kernels and the new adapter to a loaded base model; a fully trained model gets no adapter."""
    if engine.uses_liger:
        # Apply only Liger's layer kernels: the loss has its own fused path in the head.
        _apply_liger_kernel_to_instance(model=base, fused_linear_cross_entropy=False, cross_entropy=False)
    # Stop bitsandbytes from rearranging 4-bit weights in the first evaluation, as it does on CPUs with bfloat16
    # products. No gradient passes through the rearranged product, so all further training would silently be wrong.
    for module in base.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
    if hyperparameters.method is Method.FULL:
        return base
    if is_sharded:  # one layer's shards must have one dtype
        _cast_float_weights(base, engine.torch_dtype)
    elif hyperparameters.method is Method.QLORA and engine.dtype == "float16":
        _widen_norms(base)
    return peft.get_peft_model(base, lora_config(hyperparameters))


def _widen_norms(base: PreTrainedModel) -> None:
    """Convert the norms to float32, and so the values between the layers.

    Values that a model learned in bfloat16 can exceed float16. On cards with bfloat16, they need no conversion.
    """
    for parameter in base.parameters():
        if parameter.ndim == 1:
            parameter.data = parameter.data.float()


def lora_config(hyperparameters: Hyperparameters) -> peft.LoraConfig:
    return peft.LoraConfig(
        r=hyperparameters.lora_rank,
        lora_alpha=hyperparameters.lora_alpha,
        lora_dropout=hyperparameters.lora_dropout,
        target_modules=sorted(hyperparameters.target_modules),
        use_dora=hyperparameters.use_dora,
        use_rslora=hyperparameters.use_rslora,
        bias="none",
        task_type="CAUSAL_LM",
    )


def _cast_float_weights(base: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert what a model keeps in float32. Autocast converts it at each use anyway."""
    for parameter in base.parameters():
        if parameter.dtype is torch.float32:
            parameter.data = parameter.data.to(dtype)


def _begin_with(base: PreTrainedModel, start: Path, hyperparameters: Hyperparameters) -> PreTrainedModel:
    """Load whole weights; merge an adapter here only if every weight is to be trained."""
    if (start / ADAPTER_FILE).is_file():
        if hyperparameters.method is Method.FULL:
            return peft.PeftModel.from_pretrained(base, start).merge_and_unload().requires_grad_(True)
        return base
    for file in sorted(start.glob("model*.safetensors")):
        unknown = base.load_state_dict(load_file(file), strict=False).unexpected_keys
        if unknown:
            message = f"The model to continue from has other weights than the base model ({unknown[0]})."
            raise TrainingFailed(FailureCode.CHECKPOINT_INVALID, message)
    return base


def _begin_with_adapter(model: peft.PeftModel, start: Path) -> None:
    tensors = {name: tensor.float() for name, tensor in load_file(start / ADAPTER_FILE).items()}
    expected = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    if {name: tensor.shape for name, tensor in expected.items()} != {n: t.shape for n, t in tensors.items()}:
        message = "The adapter to continue from has another rank or other layers than this recipe."
        raise TrainingFailed(FailureCode.CHECKPOINT_INVALID, message)
    peft.set_peft_model_state_dict(model, tensors)


def _load_base(folder: Path, hyperparameters: Hyperparameters, engine: Engine, *, is_sharded: bool) -> PreTrainedModel:
    options: dict[str, object] = {"dtype": engine.torch_dtype, "attn_implementation": attention_implementation(engine)}
    if torch.cuda.is_available() and not is_sharded:  # shards move to their GPU layer by layer
        options["device_map"] = {"": torch.cuda.current_device()}
    if hyperparameters.method is Method.QLORA:
        options["quantization_config"] = quantization_config(
            engine.torch_dtype, storage=engine.torch_dtype if is_sharded else None
        )
    return AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, **options
    )


def quantization_config(dtype: torch.dtype, *, storage: torch.dtype | None = None) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=storage,
    )


def attention_implementation(engine: Engine) -> str:
    """Return the name of the attention with which to load a model; register it if it is ours."""
    if engine.uses_flash_attention:
        return "flash_attention_2"
    if engine.uses_own_attention:
        return "eager"
    is_plain = engine.dtype == "float32" or engine.is_gpu
    return "sdpa" if is_plain and not engine.is_packing else register_attention()
