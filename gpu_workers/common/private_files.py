"""Small files of this worker that others must neither read nor find half written."""

import os
from pathlib import Path


def write_private(path: Path, data: bytes) -> None:
    """Replace the file at once, readable by this user alone, and only return when it is on the disk."""
    partial = path.with_name(path.name + ".part")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
