"""The adapters on this replica's disk: checked, read-only folders named after their content.

The engine may read the folder of a loaded adapter again at any moment, inside a step that serves all requests; if it is
missing, the whole engine dies. So a folder in use stays until `give_back`. This is called after its engine has ended,
or once its name was unloaded and the last answer under it has ended. Returned folders stay as a cache, and the oldest
are deleted first when the folders exceed the size limit.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from apps.contracts.adapter_files import (
    CONFIG_FILE,
    MAX_CONFIG_BYTES,
    WEIGHTS_FILE,
    AdapterFileError,
    SafetensorsHeader,
    check_adapter,
    clean_adapter_config,
    get_scale,
    header_of,
    parse_config,
)
from apps.contracts.parity import MAX_PARITY_BYTES, PARITY_FILE
from apps.contracts.runs import SignedFile
from apps.contracts.serving import DesiredAdapter
from gpu_workers.common.downloads import OpenObject, Unfetchable, fetch
from gpu_workers.common.files import flush, hash_file, remove_tree, replace_file

MAX_WEIGHTS_BYTES = 4 * 2**30
MAX_ABSOLUTE_WEIGHT = 1e3  # trained weights stay below 10
MAX_ABSOLUTE_DELTA = 1e3  # of one entry of scale * B @ A; base weights are below 10
_CHUNK_ITEMS = 1 << 22

# dtype -> (numpy's integer of the same width, mask without the sign, first pattern that is not finite, decoder)
_FLOATS: dict[str, tuple[str, int, int, Callable[[int], float]]] = {
    "BF16": ("<u2", 0x7FFF, 0x7F80, lambda bits: float(np.uint32(bits << 16).view(np.float32))),
    "F16": ("<u2", 0x7FFF, 0x7C00, lambda bits: float(np.uint16(bits).view(np.float16))),
    "F32": ("<u4", 0x7FFFFFFF, 0x7F800000, lambda bits: float(np.uint32(bits).view(np.float32))),
}


class AdapterRejected(Exception):
    """The adapter is permanently unusable; the message is for its owner."""


class AdapterUnavailable(Exception):
    """The files cannot be fetched, stored or used here now; a later attempt may succeed."""


class BaseIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The base model that an adapter must fit, and the engine's limit on rank."""

    path: str
    served_name: str
    max_lora_rank: int

    def read_config(self) -> dict[str, Any]:
        return json.loads((Path(self.path) / "config.json").read_bytes())


class AdapterStore:
    """A blocking store for one caller at a time. `open_object` opens a signed URL."""

    def __init__(self, folder: Path, open_object: OpenObject, *, limit_bytes: int = 0) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._given: set[Path] = set()
        self._open_object = open_object
        self._verified: set[Path] = set()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._staging = folder / "staging"
        remove_tree(self._staging)
        self._staging.mkdir()

    def get_path(self, adapter: DesiredAdapter, base: BaseIdentity) -> Path:
        """Return the folder for exactly these files and this base, whether or not it exists."""
        lines = sorted(f"{file.name} {file.sha256}" for file in adapter.files if file.name in _WANTED)
        identity = "\n".join([base.served_name, base.path, *lines])
        return self._folder / f"sha256-{hashlib.sha256(identity.encode()).hexdigest()}"

    def ensure(self, adapter: DesiredAdapter, base: BaseIdentity) -> Path:
        """Return the folder with the adapter's checked files; raises AdapterRejected or AdapterUnavailable."""
        path = self.get_path(adapter, base)
        if path not in self._verified or not path.exists():
            if adapter.rank > base.max_lora_rank:
                raise AdapterUnavailable(f"Rank {adapter.rank} is above this replica's {base.max_lora_rank}.")
            files = {file.name: file for file in adapter.files if file.name in _WANTED}
            for name, limit in _LIMITS.items():
                if name not in files and name != PARITY_FILE:  # adapters from before certificates have none
                    raise AdapterRejected(f"The adapter has no {name}.")
                if name in files and files[name].bytes > limit:
                    raise AdapterRejected(f"{name} has {files[name].bytes} bytes; at most {limit} are allowed.")
            if not _holds(path, files):
                self._make_room(sum(file.bytes for file in files.values()))
                self._build(path, adapter, files, base)
            self._verified.add(path)
        self._given.add(path)
        os.utime(path)  # garbage collection uses this order
        return path

    def give_back(self, paths: Iterable[Path]) -> None:
        """Mark these folders as no longer readable by any engine."""
        self._given.difference_update(paths)

    def count_bytes(self) -> int:
        """Return the total size of all folders."""
        return sum(_size_of(path) for path in self._folder.glob("sha256-*"))

    def collect_garbage(self, keep: Iterable[Path]) -> list[Path]:
        """Mark all folders except `keep` as unused, and delete the excess above the limit. Returns the deleted folders.

        Call it only between an engine's start and its first adapter.
        """
        self._given = set(keep)
        return self._make_room(0)

    def _make_room(self, wanted_bytes: int) -> list[Path]:
        """Delete folders that are not in use, least recently used first, until there is room."""
        sizes = {path: _size_of(path) for path in self._folder.glob("sha256-*")}
        left = sum(sizes.values()) + wanted_bytes
        removed = []
        for path in sorted(sizes.keys() - self._given, key=lambda path: path.stat().st_mtime_ns):
            if left <= self._limit_bytes:
                break
            self._verified.discard(path)
            remove_tree(path)
            left -= sizes[path]
            removed.append(path)
        return removed

    def _build(self, path: Path, adapter: DesiredAdapter, files: dict[str, SignedFile], base: BaseIdentity) -> None:
        staged = self._staging / adapter.lora_name
        remove_tree(staged)
        staged.mkdir()
        try:
            for file in files.values():
                fetch(file, staged / file.name, self._open_object)
            config = check_files(staged, base, rank=adapter.rank)
            replace_file(staged / CONFIG_FILE, json.dumps(config, indent=1).encode())
            _publish(staged, path)
        except Unfetchable as trouble:
            raise AdapterUnavailable(str(trouble)) from trouble
        except OSError as error:
            raise AdapterUnavailable(f"The files could not be stored: {error.strerror}.") from error
        finally:
            remove_tree(staged)


def check_files(folder: Path, base: BaseIdentity, *, rank: int) -> dict[str, Any]:
    """Return the configuration for serving the adapter in `folder`; raises AdapterRejected with every reason."""
    weights = folder / WEIGHTS_FILE
    try:
        config = parse_config((folder / CONFIG_FILE).read_bytes())
        header = read_header(weights)
    except AdapterFileError as error:
        raise AdapterRejected(str(error)) from error
    problems = [problem.message for problem in check_adapter(header, config, base.read_config())]
    if not problems and config["r"] != rank:
        problems = [f"r is {config['r']}, but the adapter is registered with rank {rank}."]
    if not problems:
        problems = find_bad_numbers(weights, header, config)
    if problems:
        more = f" ({len(problems) - 3} more)" if len(problems) > 3 else ""
        raise AdapterRejected(" ".join(problems[:3]) + more)
    return clean_adapter_config(config, base_model=base.served_name)


def read_header(weights: Path) -> SafetensorsHeader:
    """Read a safetensors header; raises AdapterFileError."""
    with open(weights, "rb") as file:
        return header_of(file, file_bytes=weights.stat().st_size)


def find_bad_numbers(weights: Path, header: SafetensorsHeader, config: dict[str, Any]) -> list[str]:
    """Return which weights are not finite or far too large. One NaN would spoil other customers' answers."""
    largest: dict[str, float] = {}
    with open(weights, "rb") as file:
        for name, tensor in header.tensors.items():
            file.seek(tensor.begin)
            largest[name] = _find_largest(file, tensor.dtype, math.prod(tensor.shape))
    problems = [f"{name} has NaN or infinite values." for name, value in largest.items() if not math.isfinite(value)]
    if problems:
        return problems
    problems = [
        f"{name} has values above {MAX_ABSOLUTE_WEIGHT:g}."
        for name, value in largest.items()
        if value > MAX_ABSOLUTE_WEIGHT
    ]
    scale = get_scale(config)
    for name, value in largest.items():
        other = largest.get(name.replace(".lora_A.", ".lora_B."), 0.0)
        if ".lora_A." in name and scale * config["r"] * value * other > MAX_ABSOLUTE_DELTA:
            problems.append(f"{name.split('.lora_A.')[0]} changes weights by more than {MAX_ABSOLUTE_DELTA:g}.")
    return problems


def _find_largest(file: BinaryIO, dtype: str, items: int) -> float:
    """Return the largest magnitude of the next `items` numbers; infinite if one is not finite.

    Without the sign, the bit pattern of a float grows with its value, and NaN and infinity come last.
    """
    integer, mask, first_bad, decode = _FLOATS[dtype]
    top = 0
    while items > 0:
        count = min(items, _CHUNK_ITEMS)
        bits = np.frombuffer(file.read(count * np.dtype(integer).itemsize), dtype=integer)
        top = max(top, int((bits & mask).max()))
        items -= count
    return math.inf if top >= first_bad else decode(top)


_WANTED = (CONFIG_FILE, WEIGHTS_FILE, PARITY_FILE)
_LIMITS = {CONFIG_FILE: MAX_CONFIG_BYTES, WEIGHTS_FILE: MAX_WEIGHTS_BYTES, PARITY_FILE: MAX_PARITY_BYTES}


def _holds(path: Path, files: dict[str, SignedFile]) -> bool:
    """Return whether the folder has the announced files. The agent writes the configuration itself."""
    try:
        is_equal = all(hash_file(path / name) == file.sha256 for name, file in files.items() if name != CONFIG_FILE)
        return is_equal and (path / CONFIG_FILE).exists()
    except FileNotFoundError:
        return False


def _publish(staged: Path, path: Path) -> None:
    """Move the files to their final place. Replace damaged ones there one by one."""
    for file in staged.iterdir():
        file.chmod(0o444)
    if path.exists():
        path.chmod(0o700)
        for file in list(staged.iterdir()):
            os.replace(file, path / file.name)
    else:
        staged.rename(path)
    path.chmod(0o555)
    flush(path)
    flush(path.parent)


def _size_of(folder: Path) -> int:
    """Return the size of a folder's files; 0 if another thread removes it meanwhile."""
    try:
        return sum(path.stat().st_size for path in folder.iterdir())
    except FileNotFoundError:
        return 0
