"""Hashed folders with a manifest, which travel between a worker and the object store.

A folder is whole if it contains `manifest.json` and every file has the size and hash from the manifest.
"""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from apps.contracts.runs import Manifest, ManifestFile
from gpu_workers.common.files import flush, hash_file, replace_file

MANIFEST_FILE = "manifest.json"


class BrokenArtifact(Exception):
    """A file is missing, truncated or changed; the message names it."""


def seal_folder(temporary: Path, final: Path, manifest_of: Callable[[tuple[ManifestFile, ...]], Manifest]) -> str:
    """Hash every file, write the manifest, flush all to disk and rename into place; return the manifest's SHA-256."""
    files = tuple(
        ManifestFile(name=path.name, sha256=hash_file(path), bytes=path.stat().st_size)
        for path in sorted(temporary.iterdir())
        if path.name != MANIFEST_FILE
    )
    content = msgspec.json.encode(manifest_of(files))
    for path in temporary.iterdir():
        flush(path)
    replace_file(temporary / MANIFEST_FILE, content)
    flush(temporary)
    if final.exists():
        shutil.rmtree(final)
    temporary.rename(final)
    flush(final.parent)
    return hashlib.sha256(content).hexdigest()


def verify_folder(folder: Path, *, manifest_sha256: str | None = None) -> Manifest:
    """Return the manifest of a whole folder; raises BrokenArtifact."""
    try:
        content = (folder / MANIFEST_FILE).read_bytes()
        manifest = msgspec.json.decode(content, type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise BrokenArtifact("The manifest is missing or unreadable.") from error
    if manifest_sha256 is not None and hashlib.sha256(content).hexdigest() != manifest_sha256:
        raise BrokenArtifact("The manifest is not the one that was registered.")
    for file in manifest.files:
        verify_file(folder / file.name, sha256=file.sha256, size=file.bytes)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    return msgspec.json.decode((folder / MANIFEST_FILE).read_bytes(), type=Manifest)


def folder_bytes(manifest: Manifest) -> int:
    return sum(file.bytes for file in manifest.files)


def verify_file(path: Path, *, sha256: str, size: int) -> None:
    """Raise BrokenArtifact if the file is missing, truncated or changed."""
    if not path.is_file():
        raise BrokenArtifact(f"{path.name} is missing.")
    if path.stat().st_size != size:
        raise BrokenArtifact(f"{path.name} has {path.stat().st_size} bytes, not {size}.")
    if hash_file(path) != sha256:
        raise BrokenArtifact(f"{path.name} has another SHA-256 than the one registered.")
