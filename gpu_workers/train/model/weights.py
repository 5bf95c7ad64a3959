"""The trained weights as files: an adapter's, or the whole model's after full training."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from apps.contracts.failures import FailureCode
from apps.contracts.hyperparameters import Method
from apps.contracts.runs import Manifest, RunSpec
from gpu_workers.common.artifacts import seal_folder
from gpu_workers.train.failures import TrainingFailed
from gpu_workers.train.model.adapter_export import adapter_tensors, write_adapter

MODEL_FILE = "model.safetensors"
_OF_THE_BASE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
_ONE_FILE = "1TB"  # one file, so that a resume finds all weights under one name


def export_result(
    final: Path,
    model: torch.nn.Module,
    spec: RunSpec,
    *,
    step: int,
    base_folder: Path,
    state_dict: dict[str, torch.Tensor] | None = None,
) -> str:
    """Write the finished adapter or model in bfloat16 with its manifest; return the manifest's SHA-256.

    A whole model includes the base's tokenizer and chat template, so that it can be used alone.
    """
    kind = "model" if spec.hyperparameters.method is Method.FULL else "adapter"
    temporary = final.with_name(f"tmp-{final.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write_weights(temporary, model, spec, dtype=torch.bfloat16, state_dict=state_dict)
    for name in _OF_THE_BASE if kind == "model" else ():
        if (base_folder / name).is_file():
            shutil.copyfile(base_folder / name, temporary / name)
    return seal_folder(
        temporary,
        final,
        lambda files: Manifest(kind=kind, run_id=spec.run_id, attempt=spec.attempt, step=step, files=files),
    )


def write_weights(
    folder: Path,
    model: torch.nn.Module,
    spec: RunSpec,
    *,
    dtype: torch.dtype,
    state_dict: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write the trained weights with their configuration; raises TrainingFailed if they cannot be served."""
    if spec.hyperparameters.method is not Method.FULL:
        write_adapter(folder, model, spec, dtype=dtype, state_dict=state_dict)
        return
    assert isinstance(model, PreTrainedModel)
    tied = model.all_tied_weights_keys or {}  # written once, under the name they are tied to
    whole = {name: tensor for name, tensor in (state_dict or model.state_dict()).items() if name not in tied}
    tensors = {name: tensor.detach().to("cpu", dtype) for name, tensor in whole.items()}
    check_finite(tensors)
    model.save_pretrained(folder, state_dict=tensors, max_shard_size=_ONE_FILE)
    config = json.loads((folder / "config.json").read_text())  # transformers writes the dtype of the live model
    (folder / "config.json").write_text(json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")}, indent=2))


def check_finite(tensors: dict[str, torch.Tensor]) -> None:
    """Raise TrainingFailed for a NaN or infinite weight."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            message = f"Training diverged: {name} holds values that are not finite. Lower the learning rate."
            raise TrainingFailed(FailureCode.LOSS_NOT_FINITE, message)


def trained_tensors(
    model: torch.nn.Module, spec: RunSpec, *, state_dict: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Return a copy of the trained weights, in float32 on the CPU."""
    if spec.hyperparameters.method is not Method.FULL:
        return adapter_tensors(model, dtype=torch.float32, state_dict=state_dict)
    own = state_dict or dict(model.named_parameters())
    return {name: p.detach().to("cpu", torch.float32, copy=True).contiguous() for name, p in own.items()}


def save_trained(
    path: Path, model: torch.nn.Module, spec: RunSpec, *, state_dict: dict[str, torch.Tensor] | None = None
) -> None:
    """Write the trained weights to one file, which appears whole or not at all."""
    temporary = path.with_suffix(".tmp")
    save_file(trained_tensors(model, spec, state_dict=state_dict), temporary)
    temporary.replace(path)
