"""Files on this worker's disk: replaced atomically, flushed, hashed, removed."""

import hashlib
import os
import shutil
from pathlib import Path

PRIVATE = 0o600  # readable by this user only


def replace_file(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write a file atomically: a crash leaves the old or the new content, never a part. Return once it is on disk."""
    temporary = path.with_name(path.name + ".tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def flush(path: Path) -> None:
    """Flush a file or a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_file(path: Path) -> str:
    """Return the SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_tree(path: Path) -> None:
    """Remove a folder, even if it is read-only. A missing folder is no error."""
    if path.is_dir():
        path.chmod(0o700)
        shutil.rmtree(path)
