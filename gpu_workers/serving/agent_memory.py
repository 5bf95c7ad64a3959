"""The serving agent's files that outlive it, and the hash that identifies the base model."""

from functools import lru_cache
from pathlib import Path

import msgspec

from apps.contracts.serving import DesiredState
from gpu_workers.common.files import PRIVATE, hash_file, replace_file


class Memory(msgspec.Struct):
    """The state that outlives the agent (`serving.json`): desired state, verdicts, and the last cleanup."""

    desired: DesiredState | None = None
    rejected: dict[str, str] = {}
    suspicions: dict[str, int] = {}
    cleaned_generation: str = ""  # the engine start after which garbage was last collected
    passed: dict[str, str] = {}  # folder name by adapter, for those that passed on the canary engine


class MemoryFile:
    """The memory with its file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self.content = msgspec.json.decode(path.read_bytes(), type=Memory)
        except FileNotFoundError:
            self.content = Memory()

    def change(self, **changes: object) -> None:
        self.content = msgspec.structs.replace(self.content, **changes)
        replace_file(self._path, msgspec.json.encode(self.content), mode=PRIVATE)


def hash_weights(model: Path) -> str:
    """Return the SHA-256 of a single-file model; empty for several files, which have no single hash."""
    weights = model / "model.safetensors"
    try:
        stat = weights.stat()
    except FileNotFoundError:
        return ""
    return _hash_file(weights, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=4)
def _hash_file(path: Path, *_version: int) -> str:
    return hash_file(path)
