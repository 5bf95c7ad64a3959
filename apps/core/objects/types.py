"""Types common to all object stores: keys, errors, and the interface. `apps.core.objects.store` returns the store."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Literal, Protocol
from urllib.parse import quote

import msgspec

from apps.core.errors import DomainError, NotFound, PermissionDenied

Method = Literal["GET", "PUT"]
Base = Literal["internal", "public"]
Keys = tuple[str, str]  # a bucket's key ID and secret

# No segment starts with a dot, so no key can leave its folder or be hidden. No character needs quoting in a URL.
KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.-]*)*", re.ASCII)
KEY_LIMIT = 300  # the width of the columns that store keys
CHUNK_BYTES = 256 * 1024
UNSIZED_PUT_LIMIT_BYTES = 1024 * 1024
STALE_DRAFT_SECONDS = 24 * 3600
MULTIPART_BYTES = 8 * 1024 * 1024
PART_BYTES = 4 * 2**30  # a larger object is sent in parts, because Amazon S3 takes at most 5 GB at once
ONCE = {"If-None-Match": "*"}  # for a PUT that replaces nothing (RFC 9110 §13.1.2)
CHECKSUM_HEADER = "x-amz-checksum-sha256"  # S3's own header, so that a client need not know which store it uses


class InvalidKey(ValueError):
    """A key that `object_key` or `platform_key` would never return."""


class ObjectMissing(NotFound):
    """No object has this key."""

    code = "object_missing"


class NotDeleted(Exception):
    """The store kept objects that it was told to delete. Deleting them again may succeed."""


class PrefixClosed(DomainError):
    """The prefix is closed: nothing more may be written here, even with a URL signed earlier."""

    code = "upload_closed"


class WrongContent(DomainError):
    """The bytes sent are not those announced. Nothing was stored."""

    code = "wrong_content"


class InvalidSignature(PermissionDenied):
    """The URL was altered, was signed for something else, or has expired."""

    code = "invalid_signature"


class StoredObject(msgspec.Struct, frozen=True):
    """Size and hash of a whole object. `sha256` is lower-case hex."""

    bytes: int
    sha256: str


class ObjectInfo(msgspec.Struct, frozen=True):
    bytes: int
    modified_at: float  # Unix seconds


class ObjectStore(Protocol):
    """Stores whole objects. A failed write leaves nothing under its key."""

    def put_stream(self, key: str, chunks: Iterable[bytes]) -> StoredObject:
        """Write an object from a stream, replacing any with the same key; return its size and hash."""

    def open_stream(self, key: str, *, offset: int = 0) -> IO[bytes]:
        """Open an object for reading from `offset`, as a context manager. Raises ObjectMissing."""

    def stat(self, key: str) -> ObjectInfo:
        """Return the size and modification time of an object. Raises ObjectMissing."""

    def delete(self, key: str) -> None:
        """Delete an object; a missing one is not an error."""

    def delete_prefix(self, prefix: str) -> None:
        """Delete every object below `prefix`, which names a whole folder and not an organization's root."""

    def close_prefix(self, prefix: str) -> bool:
        """Refuse every later PUT below `prefix`, even with URLs signed earlier; return whether the store can do this.

        A bucket does not: its signed URLs work until they expire, so the caller must delete the prefix again after
        that.
        """

    def list_objects(self, prefix: str) -> Iterator[tuple[str, ObjectInfo]]:
        """Yield every object below the folder `prefix`, which may be "org", in no particular order."""

    def compose(
        self, key: str, part_keys: Sequence[str], *, on_chunk: Callable[[bytes], None] = lambda _: None
    ) -> StoredObject:
        """Write an object that concatenates other objects; `on_chunk` sees its bytes in order.

        Raises ObjectMissing. If `on_chunk` raises, nothing is left under the key.
        """

    def join_parts(self, key: str, part_keys: Sequence[str]) -> None:
        """Write an object that concatenates other objects, unless the key exists. A bucket does not read their bytes.

        Each part but the last has at least 5 MiB. Raises ObjectMissing.
        """

    def signed_url(
        self,
        key: str,
        method: Method = "GET",
        *,
        expires_seconds: int,
        base: Base = "internal",
        filename: str | None = None,
        content_bytes: int | None = None,
        is_once: bool = False,
    ) -> str:
        """Return a URL that allows this one operation until it expires.

        `filename` is the name under which a browser saves a download. A PUT must carry exactly `content_bytes`; without
        it a directory store accepts up to 1 MiB. A PUT with `is_once` must carry the header of `ONCE` and never
        replaces an object. In a directory store, no PUT does.
        """


def object_key(organization_id: str, kind: str, *parts: str) -> str:
    """Return the key of a tenant's object: `org/<organization>/<kind>/<parts>`. Raises InvalidKey."""
    return checked_key("/".join(["org", organization_id, kind, *parts]))


def platform_key(kind: str, *parts: str) -> str:
    """Return the key of an object that belongs to no tenant. Raises InvalidKey."""
    return checked_key("/".join(["platform", kind, *parts]))


def checked_key(key: str) -> str:
    """Return `key` if it is well formed. Raises InvalidKey."""
    if len(key) > KEY_LIMIT or not KEY.fullmatch(key):
        raise InvalidKey(f"{key[:80]!r} is no object key")
    return key


def checked_prefix(prefix: str) -> str:
    """Return the folder that `prefix` names, if it is below an organization or a kind. Raises InvalidKey."""
    key = checked_key(prefix.removesuffix("/"))
    if key.count("/") < 2:
        raise InvalidKey(f"{prefix!r} is not below an organization or a kind")
    return key


class Readable(Protocol):
    """A source of bytes: a file, an upload, the body of a request."""

    def read(self, size: int, /) -> bytes: ...


def bounded(chunks: Iterable[bytes], limit_bytes: int | None, refusal: Exception) -> Iterator[bytes]:
    """Yield the chunks. Raises `refusal` before the chunk that exceeds the limit; None is no limit."""
    size = 0
    for chunk in chunks:
        size += len(chunk)
        if limit_bytes is not None and size > limit_bytes:
            raise refusal
        yield chunk


def read_chunks(stream: Readable) -> Iterator[bytes]:
    """Yield the rest of a stream in chunks of at most CHUNK_BYTES."""
    while chunk := stream.read(CHUNK_BYTES):
        yield chunk


def attachment(filename: str) -> str:
    """Return a Content-Disposition that saves under `filename` and cannot inject anything else (RFC 6266)."""
    plain = re.sub(r"[^A-Za-z0-9 _.()+-]", "_", filename)[:150] or "download"
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(filename[:150], safe='')}"


def download_headers(filename: str, content_type: str) -> dict[str, str]:
    """Return the headers of an answer that a browser saves under `filename`, and that no cache keeps."""
    return {
        "Content-Type": content_type,
        "Content-Disposition": attachment(filename),
        "Cache-Control": "private, no-store",
        "X-Content-Type-Options": "nosniff",
    }


def tapped(store: ObjectStore, keys: Iterable[str], on_chunk: Callable[[bytes], None]) -> Iterator[bytes]:
    """Yield the bytes of objects one after another, after passing each chunk to `on_chunk`. Raises ObjectMissing."""
    for key in keys:
        with store.open_stream(key) as stream:
            for chunk in read_chunks(stream):
                on_chunk(chunk)
                yield chunk
