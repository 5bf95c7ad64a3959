"""The files of an adapter: safetensors and a config of known keys. Neither can run code when loaded."""

import json
from pathlib import Path

import peft
import torch
from safetensors.torch import save_file

from apps.contracts.adapter_files import CONFIG_FILE, WEIGHTS_FILE, base_reference
from apps.contracts.failures import FailureCode
from apps.contracts.runs import RunSpec
from gpu_workers.serving.adapters.store import find_bad_numbers, read_header
from gpu_workers.train.failures import TrainingFailed


def write_adapter(
    folder: Path,
    model: torch.nn.Module,
    spec: RunSpec,
    *,
    dtype: torch.dtype,
    state_dict: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write weights and config; raises TrainingFailed for numbers that no replica would serve.

    A run that diverges may not show NaN: a normalization makes the loss finite even for weights of 1e30.
    """
    weights, config = folder / WEIGHTS_FILE, adapter_config(spec)
    save_file(adapter_tensors(model, dtype=dtype, state_dict=state_dict), weights, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if problems := find_bad_numbers(weights, read_header(weights), config):
        message = f"Training diverged: {problems[0]} Lower the learning rate."
        raise TrainingFailed(FailureCode.LOSS_NOT_FINITE, message)


def adapter_tensors(
    model: torch.nn.Module, *, dtype: torch.dtype, state_dict: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Return only the adapter's tensors (never embeddings), on the CPU, with PEFT's own names."""
    state = peft.get_peft_model_state_dict(model, state_dict=state_dict, save_embedding_layers=False)
    return {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in sorted(state.items())}


def adapter_config(spec: RunSpec) -> dict[str, object]:
    """Return the config built key by key from the recipe, not the one that a library writes."""
    hyperparameters = spec.hyperparameters
    return {
        "base_model_name_or_path": base_reference(repo=spec.base_model.repo, name=spec.base_model.name),
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
