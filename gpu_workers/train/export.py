"""An adapter as files: safetensors and a config of known keys, nothing that could run code when loaded."""

import json
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import save_file

from apps.contracts.failures import FailureCode
from apps.contracts.runs import RunSpec
from gpu_workers.train.failures import TrainingFailed

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"


def write_adapter(
    folder: Path,
    model: torch.nn.Module,
    spec: RunSpec,
    *,
    dtype: torch.dtype,
    state_dict: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write weights and config; raises TrainingFailed when a weight is not a finite number."""
    tensors = adapter_tensors(model, dtype=dtype, state_dict=state_dict)
    check_finite(tensors)
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(adapter_config(spec), indent=2, sort_keys=True) + "\n")


def adapter_tensors(
    model: torch.nn.Module, *, dtype: torch.dtype, state_dict: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Return the adapter's tensors alone (never embeddings), on the CPU, with PEFT's own names."""
    state = peft.get_peft_model_state_dict(model, state_dict=state_dict, save_embedding_layers=False)
    return {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in sorted(state.items())}


def check_finite(tensors: dict[str, torch.Tensor]) -> None:
    """Raise TrainingFailed for a NaN or infinite weight: one such adapter poisons its neighbours when served."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            message = f"Training diverged: {name} holds values that are not finite. Lower the learning rate."
            raise TrainingFailed(FailureCode.LOSS_NOT_FINITE, message)


def adapter_config(spec: RunSpec) -> dict[str, Any]:
    """Return the config from the recipe, key by key, rather than whatever a library chose to write."""
    hyperparameters = spec.hyperparameters
    return {
        "base_model_name_or_path": spec.base_model.repo or spec.base_model.name,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": hyperparameters.lora_alpha,
        "lora_dropout": hyperparameters.lora_dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": hyperparameters.lora_rank,
        "revision": spec.base_model.revision,
        "target_modules": sorted(hyperparameters.target_modules),
        "task_type": "CAUSAL_LM",
        "use_dora": hyperparameters.use_dora,
        "use_rslora": hyperparameters.use_rslora,
    }
