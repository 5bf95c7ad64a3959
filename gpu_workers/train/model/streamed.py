"""A 16-bit model larger than the memory: each weight is read when its module runs, and dropped afterwards.

It is exact but slow: each batch of rows takes one pass over the files. So it only scores and never generates.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from apps.contracts.adapter_files import CONFIG_FILE, WEIGHTS_FILE, get_scale
from gpu_workers.common.pulse import beat
from gpu_workers.train.model.tensor_files import Entry, list_tensors, read_tensor

_PREFIX = "base_model.model."
_TOKENS_A_PASS = 4_096  # padding included: their logits over the whole vocabulary are in memory at once


class NotStreamable(Exception):
    """This model cannot be read weight by weight; the message gives the reason as the end of a sentence."""


class StreamedModel:
    """Scores rows with a base model on `device`, and with an adapter on top of it inside `adapted`."""

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        """Read the model's structure. Raises NotStreamable, and UnknownNumbers for an unknown number format."""
        self._dtype, self._device = dtype, device
        self._places = {
            entry.name: (file, entry) for file in sorted(folder.glob("*.safetensors")) for entry in list_tensors(file)
        }
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with init_empty_weights(include_buffers=False):
            self._model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=False
            ).eval()
        self._tied: dict[str, str] = self._model.all_tied_weights_keys or {}
        for name, module in self._model.named_modules():
            keys = [key for key, weight in module._parameters.items() if weight is not None]
            if own := {key: self._place(f"{name}.{key}" if name else key) for key in keys}:
                module.register_forward_pre_hook(partial(self._fetch, own))
                module.register_forward_hook(partial(_drop, list(own)))
            for key, buffer in module.named_buffers(recurse=False):
                setattr(module, key, buffer.to(device))

    def score(self, rows: Sequence[Sequence[int]]) -> Iterator[torch.Tensor]:
        """Return each row's logits after every token, in float32 and [T, V], in the order of the rows.

        Rows pass through the model side by side. Padding on the right does not affect the tokens before it.
        """
        for batch in _batches(rows):
            width = max(len(row) for row in batch)
            ids_BT = torch.tensor([[*row, *[0] * (width - len(row))] for row in batch], device=self._device)
            with torch.no_grad():
                logits_BTV = self._model(input_ids=ids_BT, use_cache=False).logits
            for row, logits_TV in zip(batch, logits_BTV, strict=True):
                yield logits_TV[: len(row)].float()

    @contextmanager
    def adapted(self, adapter: Path) -> Iterator[None]:
        """Add a LoRA adapter to the layers it names, as it is served: beside the weights, not merged into them."""
        config = json.loads((adapter / CONFIG_FILE).read_text())
        tensors = {name: t.to(self._device, self._dtype) for name, t in load_file(adapter / WEIGHTS_FILE).items()}
        handles = []
        for name, down_RI in tensors.items():
            module = name.removesuffix(".lora_A.weight")
            if module != name:
                up_OR = tensors[f"{module}.lora_B.weight"]
                layer = self._model.get_submodule(module.removeprefix(_PREFIX))
                handles.append(layer.register_forward_hook(partial(_add_product, down_RI, up_OR, get_scale(config))))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _place(self, name: str) -> tuple[Path, Entry]:
        found = self._places.get(name) or self._places.get(self._tied.get(name, ""))
        if found is None:
            raise NotStreamable(f"the files of the base model hold no {name}")
        return found

    def _fetch(self, own: dict[str, tuple[Path, Entry]], module: torch.nn.Module, inputs: object) -> None:
        beat()
        for key, (file, entry) in own.items():
            weight = read_tensor(file, entry).to(self._device, self._dtype)
            module._parameters[key] = torch.nn.Parameter(weight, requires_grad=False)


def _drop(keys: list[str], module: torch.nn.Module, inputs: object, output: object) -> None:
    for key in keys:
        weight = module._parameters[key]
        assert weight is not None
        module._parameters[key] = torch.nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)


def _add_product(
    down_RI: torch.Tensor,
    up_OR: torch.Tensor,
    scale: float,
    module: torch.nn.Module,
    inputs: tuple[torch.Tensor, ...],
    output_BTO: torch.Tensor,
) -> torch.Tensor:
    linear = torch.nn.functional.linear
    return output_BTO + linear(linear(inputs[0], down_RI), up_OR) * scale


def _batches(rows: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Cut the rows in order into batches of limited size, padding included. A longer row is a batch of one."""
    batch: list[Sequence[int]] = []
    for row in rows:
        if batch and (len(batch) + 1) * max(len(row), *(len(each) for each in batch)) > _TOKENS_A_PASS:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
