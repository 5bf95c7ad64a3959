"""Storage of files: a directory or an S3-compatible bucket behind one interface, shared only through signed URLs.

`store()` is the store of settings.OBJECT_STORE: `file:///path` or
`s3://bucket[/prefix]?endpoint=URL&public_endpoint=URL&region=NAME`. Trainers, serving agents and customers access it
only through `signed_url`. apps/core/objects/views.py answers a directory store's URLs.
"""

import functools
import hashlib
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from django.conf import settings

from apps.core.objects.directory import DirectoryStore, Grant, check_grant
from apps.core.objects.types import (
    CHECKSUM_HEADER,
    CHUNK_BYTES,
    KEY,
    KEY_LIMIT,
    ONCE,
    PART_BYTES,
    UNSIZED_PUT_LIMIT_BYTES,
    InvalidKey,
    InvalidSignature,
    Keys,
    ObjectMissing,
    ObjectStore,
    PrefixClosed,
    StoredObject,
    WrongContent,
    attachment,
    bounded,
    download_headers,
    object_key,
    platform_key,
    read_chunks,
)

__all__ = [
    "CHECKSUM_HEADER",
    "CHUNK_BYTES",
    "KEY",
    "KEY_LIMIT",
    "ONCE",
    "PART_BYTES",
    "UNSIZED_PUT_LIMIT_BYTES",
    "DirectoryStore",
    "Grant",
    "InvalidKey",
    "InvalidSignature",
    "ObjectMissing",
    "ObjectStore",
    "PrefixClosed",
    "StoredObject",
    "WrongContent",
    "attachment",
    "bounded",
    "check_grant",
    "download_headers",
    "hash_object",
    "object_key",
    "open_store",
    "platform_key",
    "read_chunks",
    "read_object",
    "store",
]


def store() -> ObjectStore:
    """Return the store that this installation is configured for."""
    return open_store(settings.OBJECT_STORE)


@functools.cache
def open_store(url: str, *, keys: Keys | None = None) -> ObjectStore:
    """Return the store at `url`, a bucket with these keys. Raises ValueError for a scheme that is neither file nor s3.

    Without keys, a bucket is opened with those of this installation's own.
    """
    parts = urlsplit(url)
    if parts.scheme == "file":
        return DirectoryStore(Path(unquote(parts.path)))
    if parts.scheme == "s3":
        from apps.core.objects.s3 import S3Store  # noqa: PLC0415 - boto3 is slow to import

        return S3Store(parts.netloc, prefix=parts.path.strip("/"), keys=keys, **dict(parse_qsl(parts.query)))
    raise ValueError(f"an object store is file:///path or s3://bucket, not {url!r}")


def read_object(key: str, *, limit_bytes: int = 16 * 1024 * 1024) -> bytes:
    """Return a whole small object. Raises ObjectMissing, and WrongContent if it is longer than the limit."""
    with store().open_stream(key) as stream:
        content = stream.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise WrongContent(f"{key} is longer than {limit_bytes} bytes")
    return content


def hash_object(key: str) -> StoredObject:
    """Read a whole object and return its true size and hash, to verify an upload. Raises ObjectMissing."""
    digest, size = hashlib.sha256(), 0
    with store().open_stream(key) as stream:
        for chunk in read_chunks(stream):
            digest.update(chunk)
            size += len(chunk)
    return StoredObject(size, digest.hexdigest())
