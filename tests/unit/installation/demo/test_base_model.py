"""The committed demo base model is small, a plain Llama, and chats in a prefix-stable format."""

from __future__ import annotations

import json
import math
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2

MODEL = Path(__file__).parents[4] / "demo" / "base_model"
MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello\nthere {{ 1 }}"},
    {"role": "assistant", "content": " hi "},
    {"role": "user", "content": "bye"},
]


def tensors() -> dict[str, Any]:
    """Read the header of the weights file."""
    data = (MODEL / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    return header


def test_weights_are_small_bfloat16_llama() -> None:
    """At most 8 M parameters and 16 MB, in bfloat16, for LlamaForCausalLM."""
    header = tensors()
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    assert sum(math.prod(entry["shape"]) for entry in header.values()) <= 8_000_000
    assert (MODEL / "model.safetensors").stat().st_size <= 16_000_000
    assert json.loads((MODEL / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_configuration_agrees_with_the_tokenizer() -> None:
    """Vocabulary size and special token ids match."""
    config = json.loads((MODEL / "config.json").read_text())
    tokenizer = json.loads((MODEL / "tokenizer.json").read_text())
    special = {entry["content"]: entry["id"] for entry in tokenizer["added_tokens"]}
    assert len(tokenizer["model"]["vocab"]) == config["vocab_size"]
    assert config["eos_token_id"] == special["<|end|>"]
    assert config["pad_token_id"] == special["<|pad|>"]
    assert {"<|system|>", "<|user|>", "<|assistant|>"} <= set(special)


def test_chat_template_is_prefix_stable() -> None:
    """Rendering more messages only appends text; the generation prompt opens an assistant turn."""
    template = jinja2.Environment(autoescape=False).from_string((MODEL / "chat_template.jinja").read_text())
    rendered = [template.render(messages=MESSAGES[:count]) for count in range(1, 5)]
    for shorter, longer in pairwise(rendered):
        assert longer.startswith(shorter)
    assert rendered[2].endswith("<|assistant|> hi <|end|>")
    assert template.render(messages=MESSAGES, add_generation_prompt=True) == rendered[3] + "<|assistant|>"
