"""The merge of an adapter into its 16-bit base, tensor by tensor, never into a 4-bit base.

It needs memory for the adapter and two tensors only (`reading_bytes` of the estimates). Every product is computed in
float32 and rounded once; merging in the dtype of the base rounds twice.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from apps.contracts.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from apps.estimates.physics.states import MERGE_BYTES
from gpu_workers.common.pulse import beat
from gpu_workers.train.model.tensor_files import Entry, list_tensors, read_tensor, write_tensors

INDEX_FILE = "model.safetensors.index.json"
_ONE_FILE = "model.safetensors"
_BESIDE = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "chat_template.jinja",
    INDEX_FILE,
)
_PREFIX = "base_model.model."
_NUMBERS_AT_A_TIME = MERGE_BYTES // 4 // 2  # in float32, with the product beside them
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class NotMergeable(Exception):
    """The adapter changes a weight that the base model lacks, or the base is not of plain 16- or 32-bit weights."""


def merge_adapter(base: Path, adapter: Path, target: Path) -> None:
    """Write the base model merged with the adapter to `target`, in the base's file layout; raises NotMergeable."""
    target.mkdir(parents=True, exist_ok=True)
    layers = _Layers(adapter)
    names = [_ONE_FILE]
    if (base / INDEX_FILE).is_file():
        names = sorted(set(json.loads((base / INDEX_FILE).read_text())["weight_map"].values()))
    for name in names:
        source = list_tensors(base / name)
        entries = [Entry(entry.name, _dtype_of(entry), entry.shape) for entry in source]
        write_tensors(target / name, entries, (_merged(base / name, entry, layers) for entry in source))
    if left := layers.left():
        raise NotMergeable(f"The base model has no {left[0]}.")
    for name in _BESIDE:
        if (base / name).is_file():
            shutil.copy(base / name, target / name)


def _dtype_of(entry: Entry) -> torch.dtype:
    """Return the dtype in which a tensor is written: 16 bits."""
    if not entry.dtype.is_floating_point or entry.dtype.itemsize < 2:
        raise NotMergeable(f"{entry.name} is quantised: merging needs the 16-bit base model.")
    return entry.dtype if entry.dtype in _SIXTEEN_BITS else torch.bfloat16


def _merged(file: Path, entry: Entry, layers: "_Layers") -> torch.Tensor:
    beat()
    return layers.apply(entry.name, read_tensor(file, entry)).to(_dtype_of(entry))


class _Layers:
    """The adapter's matrices, by the name of the weight that they change."""

    def __init__(self, adapter: Path) -> None:
        self._config: dict[str, Any] = json.loads((adapter / CONFIG_FILE).read_text())
        self._tensors = load_file(adapter / WEIGHTS_FILE)
        rank = self._config["r"]
        self._scale = self._config["lora_alpha"] / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def apply(self, name: str, weight_OI: torch.Tensor) -> torch.Tensor:
        """Change the weight in place, if the adapter has a change for it, and return it."""
        module = _PREFIX + name.removesuffix(".weight")
        down_RI = self._tensors.pop(f"{module}.lora_A.weight", None)
        if down_RI is None:
            return weight_OI
        up_OR = self._tensors.pop(f"{module}.lora_B.weight")
        magnitude_O, down_RI = self._magnitude(module), down_RI.float()
        rows = max(1, _NUMBERS_AT_A_TIME // weight_OI.shape[1])
        for begin in range(0, weight_OI.shape[0], rows):
            part = slice(begin, begin + rows)
            changed_OI = weight_OI[part].float().addmm_(up_OR[part].float(), down_RI, alpha=self._scale)
            if magnitude_O is not None:
                changed_OI *= (magnitude_O[part].float() / torch.linalg.vector_norm(changed_OI, dim=1))[:, None]
            weight_OI[part] = changed_OI
        return weight_OI

    def left(self) -> list[str]:
        return sorted(self._tensors)

    def _magnitude(self, module: str) -> torch.Tensor | None:
        """Return DoRA's length of every row."""
        for name in (f"{module}.lora_magnitude_vector", f"{module}.lora_magnitude_vector.weight"):
            if name in self._tensors:
                return self._tensors.pop(name)
        return None
