"""Files of a base model in the hub client's cache: which of them are damaged, and their removal."""

from collections.abc import Collection, Mapping
from pathlib import Path

from gpu_workers.common.files import hash_file

# The files of a model whose names are not known.
HUB_PATTERNS = ("*.json", "model*.safetensors", "*.jinja", "*.txt", "tokenizer.model")


def find_damaged(folder: Path, files_sha256: Mapping[str, str]) -> list[str]:
    """Return the names of the files that are missing or have another SHA-256."""
    damaged = []
    for name, sha256 in files_sha256.items():
        path = folder / name
        if not path.is_file() or hash_file(path) != sha256:
            damaged.append(name)
    return damaged


def remove_cached(folder: Path, names: Collection[str]) -> None:
    """Remove the files from a snapshot of the cache, with the blobs that they link to, so that they load again."""
    for name in names:
        path = folder / name
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
