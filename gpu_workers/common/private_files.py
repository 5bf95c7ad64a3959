"""Small private files of this worker: no other user can read them, and no reader sees a half-written one."""

import os
from pathlib import Path


def write_private(path: Path, data: bytes) -> None:
    """Replace the file atomically, readable by this user only; return once it is on disk."""
    partial = path.with_name(path.name + ".part")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
