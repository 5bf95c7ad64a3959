"""Checks of a LoRA adapter's files before a shared engine loads them.

The engine trusts these files. If tensor names are wrong, it answers like the bare base model. If the adapter is for a
smaller model, it answers noise. If numbers are invalid, it spoils the answers of other adapters. So names and shapes
must equal a table computed from the base model's configuration. Web (when a run finishes) and the serving agent (before
loading) share this code, which needs only the standard library. The agent checks the weights themselves.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import IO, Any

from apps.contracts.adapter_files.support import TARGET_MODULES, find_support

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

MAX_HEADER_BYTES = 8 * 2**20  # 1,120 tensors (80 layers x 7 x 2) need 180 KB
MAX_CONFIG_BYTES = 64 * 2**10
MAX_TENSORS = 20_000
MAX_RANK = 512  # the largest rank that vLLM accepts
MAX_SCALE = 64.0  # lora_alpha / r; 2 is usual, 1e9 makes finite weights overflow
_MAX_ALPHA = MAX_SCALE * MAX_RANK
_MAX_SHOWN = 100  # characters of a name in a message

_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
WEIGHT_DTYPES = frozenset({"BF16", "F16", "F32"})

# Keys written by PEFT that do not affect plain LoRA inference with any value.
_IRRELEVANT_KEYS = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "inference_mode", "init_lora_weights", "lora_dropout",
        "megatron_core", "peft_version", "qalora_group_size", "revision", "task_type", "ensure_weight_tying",
    }
)  # fmt: skip
# Keys of features that the engine ignores or refuses: allowed only with a neutral value.
_NEUTRAL_KEYS = frozenset(
    {
        "alora_invocation_tokens", "alpha_pattern", "arrow_config", "corda_config", "eva_config", "exclude_modules",
        "fan_in_fan_out", "kasa_config", "layer_replication", "layers_pattern", "layers_to_transform", "loftq_config",
        "lora_bias", "lora_ga_config", "megatron_config", "modules_to_save", "monteclora_config", "rank_pattern",
        "target_parameters", "trainable_token_indices", "use_bdlora", "use_dora", "use_qalora",
        "velora_config",
    }
)  # fmt: skip
_VALUE_KEYS = frozenset({"peft_type", "r", "lora_alpha", "target_modules", "bias", "use_rslora"})
CONFIG_KEYS = _IRRELEVANT_KEYS | _NEUTRAL_KEYS | _VALUE_KEYS


class ProblemCode(StrEnum):
    UNKNOWN_KEY = "unknown_key"
    UNSUPPORTED_FEATURE = "unsupported_feature"
    INVALID_VALUE = "invalid_value"
    UNSUPPORTED_ARCHITECTURE = "unsupported_architecture"
    MISSING_TENSOR = "missing_tensor"
    UNEXPECTED_TENSOR = "unexpected_tensor"
    WRONG_SHAPE = "wrong_shape"
    WRONG_DTYPE = "wrong_dtype"


@dataclass(frozen=True, slots=True)
class Problem:
    """One reason why an adapter cannot be served. `message` names the key or tensor for the adapter's owner."""

    code: ProblemCode
    message: str


class AdapterFileError(ValueError):
    """The bytes are not a safetensors file, not JSON, or too large."""


@dataclass(frozen=True, slots=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    begin: int  # from the start of the file
    end: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """Every tensor of a file. Together they cover it from the header's end to its own, without hole or overlap."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)


class UnsupportedArchitecture(ValueError):
    """No table of tensors exists for this base model."""


def header_of(stream: IO[bytes], *, file_bytes: int) -> SafetensorsHeader:
    """Read the header of a file of `file_bytes` from its start. Raises AdapterFileError naming the fault."""
    start = stream.read(8)
    return parse_header(start + stream.read(_header_bytes(start) - 8), file_bytes=file_bytes)


def _header_bytes(start: bytes) -> int:
    if len(start) < 8:
        raise AdapterFileError("The file is shorter than a safetensors header.")
    size = int.from_bytes(start[:8], "little")
    if not 2 <= size <= MAX_HEADER_BYTES:
        raise AdapterFileError(f"The header claims {size} bytes; at most {MAX_HEADER_BYTES} are allowed.")
    return 8 + size


def parse_header(start: bytes, *, file_bytes: int) -> SafetensorsHeader:
    """Parse the header in `start` of a file of `file_bytes`. Raises AdapterFileError naming the fault."""
    header_end = _header_bytes(start)
    if header_end > min(len(start), file_bytes):
        raise AdapterFileError("The file ends inside its header.")
    raw = _parse_object(start[8:header_end], "header")
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise AdapterFileError("The header's __metadata__ must map names to strings.")
    if len(raw) > MAX_TENSORS:
        raise AdapterFileError(f"The file has {len(raw)} tensors; at most {MAX_TENSORS} are allowed.")
    tensors = {name: _parse_tensor(name, entry, header_end) for name, entry in raw.items()}
    _require_full_cover(tensors, begin=header_end, end=file_bytes)
    return SafetensorsHeader(tensors=tensors, metadata=metadata)


def parse_config(data: bytes) -> dict[str, Any]:
    """Parse an adapter_config.json. Raises AdapterFileError when it is too large or not a JSON object."""
    if len(data) > MAX_CONFIG_BYTES:
        raise AdapterFileError(f"{CONFIG_FILE} has {len(data)} bytes; at most {MAX_CONFIG_BYTES} are allowed.")
    return _parse_object(data, CONFIG_FILE)


def expected_tensors(
    base_config: Mapping[str, Any], *, rank: int, target_modules: tuple[str, ...]
) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of an adapter for the base model with this config.json.

    Raises UnsupportedArchitecture for a model that is served without adapters, or has no such layers.
    """
    sizes = _module_sizes(base_config)
    if unknown := [module for module in target_modules if module not in sizes]:
        raise UnsupportedArchitecture(f"This base model has no {', '.join(unknown)}; adapt {', '.join(sizes)}.")
    table: dict[str, tuple[int, ...]] = {}
    for layer in range(int(base_config["num_hidden_layers"])):
        for module in target_modules:
            block, inputs, outputs = sizes[module]
            prefix = f"base_model.model.model.layers.{layer}.{block}.{module}"
            table[f"{prefix}.lora_A.weight"] = (rank, inputs)
            table[f"{prefix}.lora_B.weight"] = (outputs, rank)
    return table


def check_adapter(
    header: SafetensorsHeader, adapter_config: Mapping[str, Any], base_config: Mapping[str, Any]
) -> list[Problem]:
    """Return every reason why this adapter cannot be served on this base model; empty when it can."""
    problems = check_config(adapter_config)
    if any(problem.code is ProblemCode.INVALID_VALUE for problem in problems):
        return problems  # without rank and modules there is no table for comparison
    try:
        table = expected_tensors(
            base_config, rank=adapter_config["r"], target_modules=_get_target_modules(adapter_config)
        )
    except UnsupportedArchitecture as error:
        return [*problems, Problem(ProblemCode.UNSUPPORTED_ARCHITECTURE, str(error))]
    return problems + _check_tensors(header.tensors, table)


def base_reference(*, repo: str | None, name: str) -> str:
    """Return the base model as an adapter's config names it: its hub repository, or a local folder.

    The name alone would be a hub id that anyone could own.
    """
    return repo or f"./{name}"


def check_origin(adapter_config: Mapping[str, Any], *, base: str, revision: str) -> list[Problem]:
    """Return what would make PEFT load anything but this base model on the customer's machine."""
    problems = []
    if adapter_config.get("base_model_name_or_path") != base:
        problems.append(Problem(ProblemCode.INVALID_VALUE, f"base_model_name_or_path must be {base}."))
    if adapter_config.get("revision") not in (None, revision):
        problems.append(Problem(ProblemCode.INVALID_VALUE, "revision must be the base model's."))
    if adapter_config.get("auto_mapping") is not None:
        problems.append(Problem(ProblemCode.UNSUPPORTED_FEATURE, "auto_mapping is not supported."))
    return problems


def check_config(config: Mapping[str, object]) -> list[Problem]:
    """Return why no engine serves an adapter with this configuration; empty when one may. Files are not read."""
    problems = [
        Problem(ProblemCode.UNKNOWN_KEY, f"adapter_config.json has the unknown key {key[:_MAX_SHOWN]!r}.")
        for key in sorted(set(config) - CONFIG_KEYS)
    ]
    problems += [
        Problem(ProblemCode.UNSUPPORTED_FEATURE, f"{key} is not supported; only plain LoRA is.")
        for key in sorted(_NEUTRAL_KEYS & set(config))
        if config[key] not in (None, False, {}, [])
    ]
    if config.get("peft_type") != "LORA":
        problems.append(Problem(ProblemCode.UNSUPPORTED_FEATURE, "peft_type must be LORA."))
    if config.get("bias", "none") != "none":
        problems.append(Problem(ProblemCode.UNSUPPORTED_FEATURE, "bias must be none."))
    return problems + _check_values(config)


def check_unserved_config(adapter_config: Mapping[str, Any]) -> list[Problem]:
    """Return why the config of an adapter that no engine loads is none of ours. It may be DoRA."""
    return check_config({key: value for key, value in adapter_config.items() if key != "use_dora"})


def clean_adapter_config(adapter_config: Mapping[str, Any], *, base_model: str) -> dict[str, object]:
    """Return the configuration to serve a checked adapter with: ours, with only four values of the adapter's."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapter_config["r"],
        "lora_alpha": adapter_config["lora_alpha"],
        "target_modules": sorted(_get_target_modules(adapter_config)),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": bool(adapter_config.get("use_rslora")),
    }


def get_scale(adapter_config: Mapping[str, Any]) -> float:
    """Return the factor of B @ A: alpha divided by the rank, or by its square root with rsLoRA."""
    rank = adapter_config["r"]
    return float(adapter_config["lora_alpha"] / (math.sqrt(rank) if adapter_config.get("use_rslora") else rank))


def _parse_object(data: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise AdapterFileError(f"The {what} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise AdapterFileError(f"The {what} must be a JSON object.")
    return value


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key appears twice")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _parse_tensor(name: str, entry: object, header_end: int) -> Tensor:
    shown = repr(name[:_MAX_SHOWN])
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise AdapterFileError(f"Tensor {shown} must have dtype, shape and data_offsets.")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise AdapterFileError(f"Tensor {shown} has the unknown dtype {json.dumps(dtype)[:_MAX_SHOWN]}.")
    if not _are_sizes(shape) or len(shape) > 8 or not _are_sizes(offsets) or len(offsets) != 2:
        raise AdapterFileError(f"Tensor {shown} has an unusable shape or offsets.")
    if offsets[1] - offsets[0] != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise AdapterFileError(f"Tensor {shown} occupies {offsets[1] - offsets[0]} bytes, not what its shape needs.")
    return Tensor(dtype=dtype, shape=tuple(shape), begin=header_end + offsets[0], end=header_end + offsets[1])


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**48 for value in values)


def _require_full_cover(tensors: Mapping[str, Tensor], *, begin: int, end: int) -> None:
    position = begin
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != position:
            raise AdapterFileError(f"Tensor {name[:_MAX_SHOWN]!r} leaves a hole or overlaps its neighbour.")
        position = tensor.end
    if position != end:
        raise AdapterFileError(f"The tensors end at byte {position}, the file at {end}.")


def _module_sizes(base_config: Mapping[str, Any]) -> dict[str, tuple[str, int, int]]:
    """Return (block, inputs, outputs) of each layer that LoRA adapts."""
    support = find_support(base_config)
    if support is None:
        named = (base_config.get("architectures") or ["?"])[0]
        raise UnsupportedArchitecture(f"Adapters for {named} are not supported.")
    hidden, heads = int(base_config["hidden_size"]), int(base_config["num_attention_heads"])
    head = int(base_config.get("head_dim") or hidden // heads)
    keys = int(base_config.get("num_key_value_heads") or heads) * head
    inner = int(base_config["intermediate_size"])
    sizes = {
        "q_proj": ("self_attn", hidden, heads * head),
        "k_proj": ("self_attn", hidden, keys),
        "v_proj": ("self_attn", hidden, keys),
        "o_proj": ("self_attn", heads * head, hidden),
        "gate_proj": ("mlp", hidden, inner),
        "up_proj": ("mlp", hidden, inner),
        "down_proj": ("mlp", inner, hidden),
        "qkv_proj": ("self_attn", hidden, heads * head + 2 * keys),
        "gate_up_proj": ("mlp", hidden, 2 * inner),
    }
    return {module: sizes[module] for module in support.modules}


def _check_values(config: Mapping[str, object]) -> list[Problem]:
    problems = []
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        problems.append(Problem(ProblemCode.INVALID_VALUE, f"r must be a whole number from 1 to {MAX_RANK}."))
    elif (
        isinstance(alpha, bool)
        or not isinstance(alpha, int | float)
        or not 0 < alpha <= _MAX_ALPHA  # a longer integer has no quotient
        or not 0 < get_scale(config) <= MAX_SCALE
    ):
        message = f"lora_alpha must be above 0 and scale the adapter by at most {MAX_SCALE:g}."
        problems.append(Problem(ProblemCode.INVALID_VALUE, message))
    if config.get("use_rslora") not in (None, False, True):
        problems.append(Problem(ProblemCode.INVALID_VALUE, "use_rslora must be true or false."))
    modules = config.get("target_modules")
    if not isinstance(modules, list) or not modules or not all(module in TARGET_MODULES for module in modules):
        message = f"target_modules must be a list out of {', '.join(TARGET_MODULES)}."
        problems.append(Problem(ProblemCode.INVALID_VALUE, message))
    return problems


def _get_target_modules(config: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(module for module in TARGET_MODULES if module in config["target_modules"])


def _check_tensors(tensors: Mapping[str, Tensor], table: Mapping[str, tuple[int, ...]]) -> list[Problem]:
    problems = [Problem(ProblemCode.MISSING_TENSOR, f"{name} is missing.") for name in table if name not in tensors]
    for name, tensor in tensors.items():
        if name not in table:
            message = f"{name[:200]!r} does not belong to an adapter for this base model."
            problems.append(Problem(ProblemCode.UNEXPECTED_TENSOR, message))
        elif tensor.shape != table[name]:
            message = f"{name} has shape {list(tensor.shape)}, expected {list(table[name])}."
            problems.append(Problem(ProblemCode.WRONG_SHAPE, message))
        elif tensor.dtype not in WEIGHT_DTYPES:
            problems.append(Problem(ProblemCode.WRONG_DTYPE, f"{name} is {tensor.dtype}, not BF16, F16 or F32."))
    return problems
