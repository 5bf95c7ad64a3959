"""Downloads from the object store to this machine's disk: by signed URLs, bounded, hashed and durable."""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import httpx

from apps.contracts.runs import SignedFile

OpenObject = Callable[[str], AbstractContextManager[Iterator[bytes]]]  # opens a signed URL


class Unfetchable(Exception):
    """The file cannot be fetched now; the message gives the reason."""


def fetch(file: SignedFile, target: Path, open_object: OpenObject) -> None:
    """Write the file to `target`, checked against its size and SHA-256. Raises Unfetchable, OSError."""
    digest, size = hashlib.sha256(), 0
    try:
        with open_object(file.url) as chunks, open(target, "wb") as output:
            for chunk in chunks:
                size += len(chunk)
                if size > file.bytes:
                    break
                digest.update(chunk)
                output.write(chunk)
            output.flush()
            os.fsync(output.fileno())
    except httpx.HTTPError as error:
        raise Unfetchable(f"{file.name} could not be downloaded ({type(error).__name__}).") from error
    if size != file.bytes or digest.hexdigest() != file.sha256:
        raise Unfetchable(f"{file.name} arrived damaged: its size or SHA-256 differs.")
