"""The base model with a fresh LoRA adapter, in the dtype that trains well and fast on this machine."""

import hashlib
from pathlib import Path
from typing import Any

import peft
import torch
from huggingface_hub import snapshot_download
from transformers import AttentionInterface, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from apps.contracts.failures import FailureCode
from apps.contracts.runs import BaseModelRef, Hyperparameters, Method
from gpu_workers.train.failures import TrainingFailed

# bfloat16 attention's backward has no fast CPU kernel (measured 16 ms a layer against 2 ms in float32), so on a CPU
# only the attention product runs in float32.
CPU_ATTENTION = "sdpa_in_float32"

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def fetch_base_model(base_model: BaseModelRef, *, hub_token: str | None) -> Path:
    """Return the folder of the base model, downloaded at its pinned commit unless it is local, files verified."""
    if base_model.path is not None:
        folder = Path(base_model.path)
    else:
        try:
            folder = Path(
                snapshot_download(
                    base_model.repo, revision=base_model.revision, token=hub_token, allow_patterns=_HUB_FILES
                )
            )
        except (OSError, ValueError) as error:  # every hub and connection error is one of the two
            message = f"The base model {base_model.name} could not be downloaded ({type(error).__name__})."
            raise TrainingFailed(FailureCode.BASE_MODEL_UNAVAILABLE, message) from error
    _verify_base_model(folder, base_model)
    return folder


def _verify_base_model(folder: Path, base_model: BaseModelRef) -> None:
    if not (folder / "config.json").is_file():
        message = f"The base model {base_model.name} is not installed on this machine."
        raise TrainingFailed(FailureCode.BASE_MODEL_UNAVAILABLE, message)
    for name, sha256 in base_model.files_sha256.items():
        path = folder / name
        if not path.is_file() or _sha256(path) != sha256:
            message = f"{name} of the base model {base_model.name} is not the file this job was created with."
            raise TrainingFailed(FailureCode.BASE_MODEL_UNAVAILABLE, message)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_model(folder: Path, hyperparameters: Hyperparameters) -> peft.PeftModel:
    """Return the base model, in NF4 for QLoRA, with a new adapter in float32; seeded by the caller."""
    return adapt(_load_base(folder, is_quantized=hyperparameters.method is Method.QLORA), hyperparameters)


def adapt(base: PreTrainedModel, hyperparameters: Hyperparameters) -> peft.PeftModel:
    """Give a loaded base model its new adapter."""
    if hyperparameters.method is Method.QLORA:
        base = peft.prepare_model_for_kbit_training(
            base, use_gradient_checkpointing=hyperparameters.gradient_checkpointing
        )
        if not torch.cuda.is_available():
            _cast_float_weights(base, training_dtype())
    return peft.get_peft_model(base, lora_config(hyperparameters))


def _cast_float_weights(base: PreTrainedModel, dtype: torch.dtype) -> None:
    """Take norms and embeddings back from float32: on a GPU autocast does it, and on a CPU every product would pay."""
    for parameter in base.parameters():
        if parameter.dtype is torch.float32:
            parameter.data = parameter.data.to(dtype)


def lora_config(hyperparameters: Hyperparameters) -> peft.LoraConfig:
    return peft.LoraConfig(
        r=hyperparameters.lora_rank,
        lora_alpha=hyperparameters.lora_alpha,
        lora_dropout=hyperparameters.lora_dropout,
        target_modules=sorted(hyperparameters.target_modules),
        bias="none",
        task_type="CAUSAL_LM",
    )


def _load_base(folder: Path, *, is_quantized: bool) -> PreTrainedModel:
    dtype = training_dtype()
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention_implementation(dtype)}
    if torch.cuda.is_available():
        options["device_map"] = {"": 0}
    if is_quantized:
        options["quantization_config"] = quantization_config(dtype)
    return AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, **options
    )


def quantization_config(dtype: torch.dtype) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def training_dtype() -> torch.dtype:
    """bfloat16 where the hardware multiplies it, float32 elsewhere."""
    if torch.cuda.is_available():
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if has_bf16 else torch.float32


def attention_implementation(dtype: torch.dtype) -> str:
    """Return the name of the attention to load a model with, registered where it is ours."""
    if torch.cuda.is_available() or dtype is torch.float32:
        return "sdpa"
    AttentionInterface.register(CPU_ATTENTION, _attention_in_float32)
    AttentionMaskInterface.register(CPU_ATTENTION, sdpa_mask)
    return CPU_ATTENTION


def _attention_in_float32(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    if attention_mask is not None and attention_mask.dtype is not torch.bool:
        attention_mask = attention_mask.float()
    output, weights = sdpa_attention_forward(
        module, query.float(), key.float(), value.float(), attention_mask, **options
    )
    return output.to(query.dtype), weights
