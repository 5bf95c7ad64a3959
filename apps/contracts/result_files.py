"""Files that a run may leave, by the kind of their manifest: known names, and nothing that runs code when loaded.

Only a checkpoint contains files that torch pickles. It goes to other trainers of the platform, which load it as data
only, and never to a customer or an engine.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from apps.contracts.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from apps.contracts.parity import PARITY_FILE
from apps.contracts.runs import Manifest

MODEL_CONFIG = "config.json"
MAX_FILES = 1024  # per manifest; the largest open model has some two hundred
MAX_BYTES = 4 * 2**40
MAX_METADATA = 16_384  # characters of all pairs
_ADAPTER = frozenset({WEIGHTS_FILE, CONFIG_FILE, PARITY_FILE})
_BESIDE_WEIGHTS = frozenset(
    {
        MODEL_CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
        "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
        "model.safetensors.index.json",
    }
)  # fmt: skip
_WEIGHTS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}\.safetensors")
_GGUF = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}\.gguf")
_STATE = frozenset(
    {"optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "trainer_state.json", "progress.json"}
)
_SHA256 = re.compile(r"[0-9a-f]{64}")


def is_model_file(name: str) -> bool:
    """Return whether a whole model may contain a file of this name."""
    return name in _BESIDE_WEIGHTS or _WEIGHTS.fullmatch(name) is not None


def unexpected(kind: str, names: Collection[str]) -> list[str]:
    """Return the names that a manifest of this kind ("checkpoint", "adapter", "model") must not contain, sorted."""
    allowed = {
        "adapter": lambda name: name in _ADAPTER,
        "model": lambda name: is_model_file(name) or _GGUF.fullmatch(name) is not None,
        "checkpoint": lambda name: name in _ADAPTER | _STATE or is_model_file(name),
    }[kind]
    return sorted(name for name in names if not allowed(name))


def problem_of(manifest: Manifest) -> str:
    """Return the fault of a manifest before any of its files exist; empty when it has none."""
    names = [file.name for file in manifest.files]
    if not 0 < len(names) <= MAX_FILES:
        return f"A manifest names 1 to {MAX_FILES} files."
    if len({name.lower() for name in names}) < len(names):
        return "Two files of the manifest have the same name."
    if strange := unexpected(manifest.kind, names):
        return f"No {manifest.kind} has a file named {strange[0][:100]!r}."
    if any(not 0 <= file.bytes <= MAX_BYTES or _SHA256.fullmatch(file.sha256) is None for file in manifest.files):
        return "A file of the manifest has no size or no SHA-256."
    if sum(len(key) + len(value) for key, value in manifest.metadata.items()) > MAX_METADATA:
        return f"The metadata of a manifest has at most {MAX_METADATA:,} characters."
    return ""


def problem_of_start(name: str, start: bytes) -> str:
    """Return why a file with this start does not match its name; empty when it may.

    Torch would open a pickle or an archive under any name.
    """
    if name.endswith(".safetensors") and start[8:9] != b"{":  # eight bytes of length, then a JSON object
        return f"{name} is no safetensors file"
    if name.endswith(".gguf") and start[:4] != b"GGUF":
        return f"{name} is no GGUF file"
    return ""


def problem_of_config(name: str, content: bytes) -> str:
    """Return why a configuration must not be delivered; empty when it may: it must not name code."""
    try:
        config: Any = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError):
        return f"{name} is no JSON"
    if not isinstance(config, Mapping):
        return f"{name} is no JSON object"
    return f"{name} names code (auto_map)" if "auto_map" in config or "custom_pipelines" in config else ""
