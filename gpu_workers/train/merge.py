"""An adapter merged into its 16-bit base, tensor by tensor: never into a 4-bit one, and in little memory.

Every product is taken in float32 and rounded once, where merging in the dtype of the base rounds twice.
"""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from apps.contracts.adapter_files import CONFIG_FILE, WEIGHTS_FILE

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
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class NotMergeable(Exception):
    """The adapter changes something the base model has not got, or the base is not of plain 16- or 32-bit weights."""


def merge_adapter(base: Path, adapter: Path, target: Path) -> None:
    """Write the whole model with the adapter in it to `target`, in the files the base has; raises NotMergeable."""
    target.mkdir(parents=True, exist_ok=True)
    layers = _Layers(adapter)
    for name in _weight_files(base):
        save_file(dict(_merged(base / name, layers)), target / name, metadata={"format": "pt"})
    if left := layers.left():
        raise NotMergeable(f"The base model has no {left[0]}.")
    for name in _BESIDE:
        if (base / name).is_file():
            shutil.copy(base / name, target / name)


def _weight_files(base: Path) -> list[str]:
    if not (base / INDEX_FILE).is_file():
        return [_ONE_FILE]
    return sorted(set(json.loads((base / INDEX_FILE).read_text())["weight_map"].values()))


def _merged(file: Path, layers: "_Layers") -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(file, "pt") as opened:
        for name in opened.keys():  # noqa: SIM118 (no mapping)
            weight = opened.get_tensor(name)
            if not weight.is_floating_point():
                raise NotMergeable(f"{name} is quantised: merging needs the 16-bit base model.")
            dtype = weight.dtype if weight.dtype in _SIXTEEN_BITS else torch.bfloat16
            yield name, layers.apply(name, weight).to(dtype).contiguous()


class _Layers:
    """The adapter's matrices by the name of the weight they change."""

    def __init__(self, adapter: Path) -> None:
        self._config: dict[str, Any] = json.loads((adapter / CONFIG_FILE).read_text())
        self._tensors = load_file(adapter / WEIGHTS_FILE)
        rank = self._config["r"]
        self._scale = self._config["lora_alpha"] / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def apply(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        module = _PREFIX + name.removesuffix(".weight")
        down = self._tensors.pop(f"{module}.lora_A.weight", None)
        if down is None:
            return weight
        up = self._tensors.pop(f"{module}.lora_B.weight")
        changed = weight.float() + self._scale * (up.float() @ down.float())
        magnitude = self._magnitude(module)
        if magnitude is None:
            return changed
        return changed * (magnitude.float() / torch.linalg.vector_norm(changed, dim=1))[:, None]

    def left(self) -> list[str]:
        return sorted(self._tensors)

    def _magnitude(self, module: str) -> torch.Tensor | None:
        """DoRA's length of every row."""
        for name in (f"{module}.lora_magnitude_vector", f"{module}.lora_magnitude_vector.weight"):
            if name in self._tensors:
                return self._tensors.pop(name)
        return None
