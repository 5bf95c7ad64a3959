"""A base model on this machine: its location, and which files from a hub are damaged."""

import fcntl
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from apps.contracts.runs import BaseModelRef
from gpu_workers.common.files import hash_file

HUB_PATTERNS = ("*.json", "model*.safetensors", "*.jinja", "*.txt", "tokenizer.model")  # if no names are known


class NotInstalled(Exception):
    """The base model's local path does not lead to anything that this worker may read."""


def locate_base_model(base_model: BaseModelRef, roots: tuple[Path, ...]) -> BaseModelRef:
    """Return the reference with an absolute path inside one of `roots`; a hub model is returned unchanged.

    The roots prevent a path from the control plane from opening any other folder of this machine.
    """
    if base_model.path is None:
        return base_model
    for root in roots:
        folder = (root / base_model.path).resolve()
        if folder.is_relative_to(root.resolve()) and (folder / "config.json").is_file():
            return msgspec.structs.replace(base_model, path=str(folder))
    raise NotInstalled(f"The base model {base_model.name} is not installed on this machine.")


def find_damaged(folder: Path, files_sha256: Mapping[str, str]) -> list[str]:
    """Return the names of the files that are missing or have another SHA-256."""
    damaged = []
    for name, sha256 in files_sha256.items():
        path = folder / name
        if not path.is_file() or hash_file(path) != sha256:
            damaged.append(name)
    return damaged


def repair(folder: Path, files_sha256: Mapping[str, str], download: Callable[[], object]) -> list[str]:
    """Remove the damaged files of a hub's snapshot, with the blobs that they link to, and download again, once.

    Processes that share the cache take turns. Returns the names that were damaged.
    """
    if not find_damaged(folder, files_sha256):
        return []
    with (folder.parent / ".repair").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        damaged = find_damaged(folder, files_sha256)
        for name in damaged:
            (folder / name).resolve().unlink(missing_ok=True)
            (folder / name).unlink(missing_ok=True)
        if damaged:
            download()
    return damaged
