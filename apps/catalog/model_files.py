"""Functions that read a base model's folder.

They read only safetensors and text files of known families, never code.
"""

import hashlib
import json
import math
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec
from django.utils.translation import gettext

from apps.contracts.adapter_files import why_refused
from apps.contracts.chat import ChatRenderer, InvalidChatTemplate
from apps.core.errors import InvalidValue
from apps.core.messages.translation import translated
from apps.estimates.models.architectures import Architecture, from_config, parameter_count
from apps.estimates.models.families import ArchitectureError

TEXT_FILES = frozenset(
    {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "vocab.json",
        "merges.txt",
        "tokenizer.model",
        "model.safetensors.index.json",
    }
)
_REQUIRED = ("config.json", "tokenizer.json", "tokenizer_config.json")
# Files of Python code, or of formats that can carry pickled code. Their mere presence beside the weights is refused.
_CODE_SUFFIXES = frozenset({".py", ".pyc", ".so", ".pkl", ".pickle", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack"})
_CONFIG_LIMIT = 1_000_000
_MOST_PARAMETERS = 10**13
_MOST_CONTEXT_TOKENS = 10**9
_INDEX = "model.safetensors.index.json"
_HEADER_LIMIT_BYTES = 100_000_000
# compressed-tensors wrote the second before it became a format of transformers.
_QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_WEIGHT_TYPES = frozenset({"F16", "BF16", "F32", "F64"})
_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")


class ModelRefused(InvalidValue):
    """A base model that cannot be used safely, with the reason."""

    code = "base_model_refused"

    def __init__(self, message: str, *, param: str) -> None:
        """Replace control characters: messages quote files that are not trusted, and the database refuses NUL."""
        super().__init__("".join(each if each.isprintable() else " " for each in message), param=param)


class ModelFolder(msgspec.Struct, frozen=True, kw_only=True):
    """The data of an installed model that the catalogue stores. `path` is "" if workers fetch it from the hub."""

    path: str
    config: dict[str, object]
    architecture: Architecture
    parameter_count: int
    chat_template: str
    special_tokens: dict[str, str]
    files_sha256: dict[str, str]


def require_repository(repo: str, revision: str) -> None:
    """Raise InvalidValue for an invalid name of a repository, or a revision that is neither a full commit nor empty."""
    if not _REPO.fullmatch(repo) or ".." in repo or "--" in repo:
        raise InvalidValue(gettext("A repository is written owner/name, as on the hub."), param="repo")
    if revision and not COMMIT.fullmatch(revision):
        raise InvalidValue(
            gettext("Give the full 40-digit commit, so that the weights cannot change."), param="revision"
        )


def read_model_folder(path: Path, *, roots: Sequence[Path]) -> ModelFolder:
    """Read and check a local model. Raises ModelRefused with the fault and its fix."""
    folder = _inside(path, roots)
    files = _list_files(folder, roots)
    config = _read_config(folder)
    renderer = _read_renderer(folder)
    weights = [file for file in files if file.suffix == ".safetensors"]
    return ModelFolder(
        path=str(folder),
        config=config,
        architecture=check_config(config),
        parameter_count=sum(_count_parameters(file) for file in weights),
        chat_template=renderer.chat_template,
        special_tokens=renderer.special_tokens,
        files_sha256={file.name: _sha256(file) for file in files},
    )


def read_hub_folder(folder: Path, *, weights_sha256: Mapping[str, str]) -> ModelFolder:
    """Read and check the text files of a hub's model. Only the hashes of its weights are known. Raises ModelRefused."""
    texts = sorted(file for file in folder.iterdir() if file.name in TEXT_FILES)
    _require_files({file.name for file in texts} | weights_sha256.keys(), param="repo")
    _require_shards(folder / _INDEX, weights_sha256)
    config = _read_config(folder)
    architecture = check_config(config)
    parameters = parameter_count(architecture)
    if parameters > _MOST_PARAMETERS:
        raise ModelRefused(gettext("config.json describes more than 10 trillion parameters."), param="config")
    renderer = _read_renderer(folder)
    return ModelFolder(
        path="",
        config=config,
        architecture=architecture,
        parameter_count=parameters,
        chat_template=renderer.chat_template,
        special_tokens=renderer.special_tokens,
        files_sha256={file.name: _sha256(file) for file in texts} | dict(weights_sha256),
    )


def _require_shards(index: Path, weights: Collection[str]) -> None:
    """Raise ModelRefused if the index of sharded weights names a file that the repository lacks."""
    if not index.is_file():
        return
    try:
        named = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()
    except msgspec.DecodeError as error:
        raise ModelRefused(gettext("%(index)s cannot be read.") % {"index": _INDEX}, param="repo") from error
    if missing := sorted(set(named) - set(weights)):
        raise ModelRefused(
            gettext("The repository lacks %(missing)s, which %(index)s names.")
            % {"missing": missing[0], "index": _INDEX},
            param="repo",
        )


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def check_config(config: Mapping[str, object]) -> Architecture:
    """Return the architecture of a config.json. Raises ModelRefused for families that are not on the list."""
    if "auto_map" in config:
        raise ModelRefused(
            gettext("config.json names code of the repository (auto_map), which is never run."), param="config"
        )
    family = str(config.get("model_type", ""))
    if reason := why_refused(family):
        raise ModelRefused(
            gettext("model_type %(family)s is not supported. %(reason)s")
            % {"family": repr(family), "reason": translated(reason)},
            param="model_type",
        )
    if kind := _quantization(config):
        raise ModelRefused(_quantised(kind), param="config")
    try:
        architecture = from_config(config)
    except ArchitectureError as error:
        raise ModelRefused(
            gettext("config.json: %(error)s") % {"error": translated(str(error))}, param="config"
        ) from error
    if (architecture.max_position_embeddings or 0) > _MOST_CONTEXT_TOKENS:
        raise ModelRefused(gettext("config.json describes a context of more than a billion tokens."), param="config")
    return architecture


def _quantization(config: Mapping[str, object]) -> str:
    """Return the format of quantised weights by config.json or its text model's part; "" if they are not quantised."""
    for part in (config, config.get("text_config")):
        for key in _QUANTIZATION_KEYS:
            if isinstance(part, Mapping) and isinstance(found := part.get(key), Mapping) and found:
                return str(found.get("quant_method") or "of an unnamed format")[:40]
    return ""


def _inside(path: Path, roots: Sequence[Path]) -> Path:
    folder = path.resolve()
    if not any(folder.is_relative_to(root.resolve()) for root in roots):
        raise ModelRefused(
            gettext("%(path)s is not in a folder of ANNEAL_BASE_MODEL_ROOTS.") % {"path": path}, param="path"
        )
    if not folder.is_dir():
        raise ModelRefused(gettext("%(path)s is not a folder.") % {"path": path}, param="path")
    return folder


def _list_files(folder: Path, roots: Sequence[Path]) -> list[Path]:
    for file in folder.rglob("*"):
        if file.suffix.lower() in _CODE_SUFFIXES:
            raise ModelRefused(
                gettext("%(name)s may hold code; keep safetensors and text files only.") % {"name": file.name},
                param="path",
            )
    files = sorted(f for f in folder.iterdir() if f.name in TEXT_FILES or f.suffix == ".safetensors")
    for file in files:
        if not any(file.resolve().is_relative_to(root.resolve()) for root in roots):
            raise ModelRefused(
                gettext("%(name)s links out of ANNEAL_BASE_MODEL_ROOTS.") % {"name": file.name}, param="path"
            )
    _require_files({file.name for file in files}, param="path")
    return files


def _require_files(names: Collection[str], *, param: str) -> None:
    missing = [name for name in _REQUIRED if name not in names]
    if missing or not any(name.endswith(".safetensors") for name in names):
        is_folder = param == "path"
        text = gettext("The folder lacks %(missing)s.") if is_folder else gettext("The repository lacks %(missing)s.")
        raise ModelRefused(text % {"missing": ", ".join(missing) or gettext("safetensors weights")}, param=param)


def _read_config(folder: Path) -> dict[str, object]:
    try:
        text = (folder / "config.json").read_text()
        config = json.loads(text)
        json.dumps(config, allow_nan=False, ensure_ascii=False).encode()  # the database refuses NaN and lone surrogates
    except (ValueError, RecursionError) as error:
        raise ModelRefused(
            gettext("config.json is not JSON, or holds NaN or an invalid character."), param="path"
        ) from error
    if not isinstance(config, dict) or len(text) > _CONFIG_LIMIT or "\\u0000" in text:
        raise ModelRefused(
            gettext("config.json is not an object of at most 1 MB, or has NUL characters."), param="path"
        )
    return config


def _read_renderer(folder: Path) -> ChatRenderer:
    try:
        renderer = ChatRenderer.from_folder(folder)
        texts = "".join((renderer.chat_template, *renderer.special_tokens.values()))
        texts.encode()
    except InvalidChatTemplate as error:
        raise ModelRefused(translated(str(error)), param="path") from error
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ModelRefused(gettext("The tokenizer's configuration cannot be read."), param="path") from error
    if "\0" in texts:
        raise ModelRefused(gettext("The chat template or a special token has NUL characters."), param="path")
    return renderer


def _count_parameters(file: Path) -> int:
    """Return the number of elements of all tensors, from the header (https://github.com/huggingface/safetensors)."""
    tensors = _read_header(file)
    if packed := {tensor.dtype for tensor in tensors if len(tensor.shape) > 1} - _WEIGHT_TYPES:
        raise ModelRefused(_quantised(min(packed)[:40]), param="path")
    return sum(math.prod(tensor.shape) for tensor in tensors)


def _quantised(kind: str) -> str:
    text = gettext(
        "The weights are quantised (%(kind)s). Install a copy of the model in 16 bits: it trains, merges and serves."
    )
    return text % {"kind": kind}


class _TensorHeader(msgspec.Struct, frozen=True):
    shape: tuple[int, ...]
    dtype: str


def _read_header(file: Path) -> list[_TensorHeader]:
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= _HEADER_LIMIT_BYTES:
            raise ModelRefused(gettext("%(name)s is not a safetensors file.") % {"name": file.name}, param="path")
        try:
            header = msgspec.json.decode(stream.read(length), type=dict[str, msgspec.Raw])
            header.pop("__metadata__", None)
            return [msgspec.json.decode(tensor, type=_TensorHeader) for tensor in header.values()]
        except msgspec.DecodeError as error:
            raise ModelRefused(
                gettext("%(name)s is not a safetensors file.") % {"name": file.name}, param="path"
            ) from error


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
