"""Adapters, good and bad, written byte by byte for the demo base model."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from apps.contracts.adapter_files import ALL_LINEAR, CONFIG_FILE, WEIGHTS_FILE, expected_tensors

Arrays = dict[str, np.ndarray]


def make_arrays(
    base_model: Path, *, rank: int = 8, seed: int = 0, size: float = 0.3, modules: Sequence[str] = ALL_LINEAR
) -> Arrays:
    """Return random weights of the right names and shapes: strong enough to change greedy answers."""
    random = np.random.default_rng(seed)
    config = json.loads((base_model / "config.json").read_text())
    table = expected_tensors(config, rank=rank, target_modules=modules)
    return {name: random.normal(0, size, shape).astype(np.float32) for name, shape in table.items()}


def to_bfloat16(array: np.ndarray) -> bytes:
    return (array.view(np.uint32) >> 16).astype("<u2").tobytes()


def write_safetensors(arrays: Arrays, *, dtype: str = "BF16") -> bytes:
    """Return the bytes of a safetensors file of BF16 or F32."""
    header, data = {}, b""
    for name, array in arrays.items():
        raw = to_bfloat16(array) if dtype == "BF16" else array.astype("<f4").tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def make_files(arrays: Arrays, *, rank: int = 8, dtype: str = "BF16", **config: object) -> dict[str, bytes]:
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "anything",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(ALL_LINEAR),
        "bias": "none",
    }
    return {CONFIG_FILE: json.dumps(settings | config).encode(), WEIGHTS_FILE: write_safetensors(arrays, dtype=dtype)}
