"""Where files live: a directory or an S3-compatible bucket behind one interface, opened to others by signed URLs only.

`store()` is the store of settings.OBJECT_STORE: `file:///path` or
`s3://bucket[/prefix]?endpoint=URL&public_endpoint=URL&region=NAME`. Trainers, serving agents and customers never reach
it but through `signed_url`; a directory store's URLs are answered by apps/core/object_views.py.
"""

import base64
import functools
import hashlib
import hmac
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Literal, Protocol
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import boto3
import msgspec
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import ClientError
from django.conf import settings

from apps.core.errors import DomainError, NotFound, PermissionDenied, Status

Method = Literal["GET", "PUT"]
Base = Literal["internal", "public"]

# No segment starts with a dot, so no key can climb or hide; nothing in it needs quoting in a URL.
KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.-]*)*", re.ASCII)
KEY_LIMIT = 300  # the width of the columns that hold keys
CHUNK_BYTES = 256 * 1024
UNSIZED_PUT_LIMIT_BYTES = 1024 * 1024
STALE_DRAFT_SECONDS = 24 * 3600
MULTIPART_BYTES = 8 * 1024 * 1024
CHECKSUM_HEADER = "x-amz-checksum-sha256"  # S3's own, so that a client need not know which store it talks to


class InvalidKey(ValueError):
    """A key that `object_key` or `platform_key` would never make."""


class ObjectMissing(NotFound):
    """No object has this key."""

    code = "object_missing"


class ObjectExists(DomainError):
    """Another content already has this key; keys are written once."""

    code = "object_exists"
    status = Status.INVALID


class WrongContent(DomainError):
    """The bytes sent are not those announced; nothing was kept."""

    code = "wrong_content"


class InvalidSignature(PermissionDenied):
    """The URL was altered, was signed for something else, or has expired."""

    code = "invalid_signature"


class StoredObject(msgspec.Struct, frozen=True):
    """What a whole object is. `sha256` is lower-case hex."""

    bytes: int
    sha256: str


class ObjectInfo(msgspec.Struct, frozen=True):
    bytes: int
    modified_at: float  # Unix seconds


class Grant(msgspec.Struct, frozen=True):
    """What one signed URL allows. `content_bytes` is the exact length of a PUT's body."""

    method: str
    key: str
    expires: int
    filename: str = ""
    content_bytes: int | None = None

    def digest(self) -> str:
        """Return the HMAC-SHA256 of every field, safe in a URL."""
        message = "\n".join([self.method, self.key, str(self.expires), self.filename, str(self.content_bytes or "")])
        secret = b"objects:" + settings.SIGNING_KEY.encode()
        return base64.urlsafe_b64encode(hmac.digest(secret, message.encode(), "sha256")).rstrip(b"=").decode()


class ObjectStore(Protocol):
    """Objects are whole or absent: a write that fails leaves nothing under its key."""

    def put_stream(self, key: str, chunks: Iterable[bytes]) -> StoredObject:
        """Write an object from a stream, replacing one of the same key, and say what was written."""

    def open_stream(self, key: str, *, offset: int = 0) -> IO[bytes]:
        """Open an object for reading from `offset`; a context manager. Raises ObjectMissing."""

    def stat(self, key: str) -> ObjectInfo:
        """Return size and time of an object. Raises ObjectMissing."""

    def delete(self, key: str) -> None:
        """Remove an object; one that is not there is no error."""

    def delete_prefix(self, prefix: str) -> None:
        """Remove every object below `prefix`, which names a whole folder and no organization's root."""

    def signed_url(
        self,
        key: str,
        method: Method = "GET",
        *,
        expires_seconds: int,
        base: Base = "internal",
        filename: str | None = None,
        content_bytes: int | None = None,
    ) -> str:
        """Return a URL that allows this one thing until it expires.

        `filename` is what a browser saves a download as. A PUT must carry exactly `content_bytes`; without it a
        directory store takes up to 1 MiB.
        """


def store() -> ObjectStore:
    """Return the store this installation is configured for."""
    return open_store(settings.OBJECT_STORE)


@functools.cache
def open_store(url: str) -> ObjectStore:
    """Return the store at `url`. Raises ValueError for a scheme that is neither file nor s3."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return DirectoryStore(Path(unquote(parts.path)))
    if parts.scheme == "s3":
        return S3Store(parts.netloc, prefix=parts.path.strip("/"), **dict(parse_qsl(parts.query)))
    raise ValueError(f"an object store is file:///path or s3://bucket, not {url!r}")


def object_key(organization_id: str, kind: str, *parts: str) -> str:
    """Return the key of a tenant's object: `org/<organization>/<kind>/<parts>`. Raises InvalidKey."""
    return checked_key("/".join(["org", organization_id, kind, *parts]))


def platform_key(kind: str, *parts: str) -> str:
    """Return the key of an object that belongs to no tenant. Raises InvalidKey."""
    return checked_key("/".join(["platform", kind, *parts]))


def checked_key(key: str) -> str:
    """Return `key` when it has the shape of one. Raises InvalidKey."""
    if len(key) > KEY_LIMIT or not KEY.fullmatch(key):
        raise InvalidKey(f"{key[:80]!r} is no object key")
    return key


class Readable(Protocol):
    """Anything bytes can be read from: a file, an upload, the body of a request."""

    def read(self, size: int, /) -> bytes: ...


def read_chunks(stream: Readable) -> Iterator[bytes]:
    """Yield what is left of a stream in pieces of bounded size."""
    while chunk := stream.read(CHUNK_BYTES):
        yield chunk


def read_object(key: str, *, limit_bytes: int = 16 * 1024 * 1024) -> bytes:
    """Return a small object whole. Raises ObjectMissing, and WrongContent when it is longer than the limit."""
    with store().open_stream(key) as stream:
        content = stream.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise WrongContent(f"{key} is longer than {limit_bytes} bytes")
    return content


def hash_object(key: str) -> StoredObject:
    """Read an object whole and return its true size and hash: how an upload is verified. Raises ObjectMissing."""
    digest, size = hashlib.sha256(), 0
    with store().open_stream(key) as stream:
        for chunk in read_chunks(stream):
            digest.update(chunk)
            size += len(chunk)
    return StoredObject(size, digest.hexdigest())


# --- a directory ------------------------------------------------------------------------------------------------------


class DirectoryStore:
    """Objects as files below `root`, for one machine. Drafts are written aside, synced, then named."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._drafts = root / ".drafts"
        self._drafts.mkdir(parents=True, exist_ok=True, mode=0o700)
        root.chmod(0o700)
        self._remove_stale_drafts()

    def put_stream(self, key: str, chunks: Iterable[bytes]) -> StoredObject:
        target = self._path(key)
        draft, stored = self._write_draft(chunks)
        _give_name(draft, target)
        return stored

    def put_once(
        self, key: str, chunks: Iterable[bytes], *, limit_bytes: int, exact: bool, sha256: str | None = None
    ) -> StoredObject:
        """Write an object that must not exist; the same content again is no error.

        Raises WrongContent and ObjectExists, and keeps nothing then.
        """
        target = self._path(key)
        draft, stored = self._write_draft(_limited(chunks, limit_bytes))
        try:
            if exact and stored.bytes != limit_bytes:
                raise WrongContent(f"The URL was made for {limit_bytes} bytes; {stored.bytes} came.")
            if sha256 is not None and not hmac.compare_digest(sha256, stored.sha256):
                raise WrongContent("The bytes received do not have the announced SHA-256; send them again.")
            _give_new_name(draft, target, stored)
        finally:
            draft.unlink(missing_ok=True)
        return stored

    def open_stream(self, key: str, *, offset: int = 0) -> IO[bytes]:
        try:
            stream = os.fdopen(os.open(self._path(key), os.O_RDONLY | os.O_NOFOLLOW), "rb")
        except (FileNotFoundError, NotADirectoryError):
            raise ObjectMissing("No such object.") from None
        stream.seek(offset)
        return stream

    def stat(self, key: str) -> ObjectInfo:
        try:
            found = self._path(key).lstat()
        except (FileNotFoundError, NotADirectoryError):
            raise ObjectMissing("No such object.") from None
        return ObjectInfo(found.st_size, found.st_mtime)

    def delete(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def delete_prefix(self, prefix: str) -> None:
        folder = self._path(_checked_prefix(prefix))
        if folder.is_dir():
            shutil.rmtree(folder)

    def signed_url(
        self,
        key: str,
        method: Method = "GET",
        *,
        expires_seconds: int,
        base: Base = "internal",
        filename: str | None = None,
        content_bytes: int | None = None,
    ) -> str:
        expires = int(time.time()) + expires_seconds
        grant = Grant(method, checked_key(key), expires, filename or "", content_bytes)
        query: dict[str, Any] = {"expires": expires, "method": method}
        query |= {"filename": filename} if filename else {}
        query |= {"bytes": content_bytes} if content_bytes is not None else {}
        origin = settings.PUBLIC_URL if base == "public" else settings.INTERNAL_URL
        return f"{origin}/objects/{key}?{urlencode(query | {'signature': grant.digest()}, quote_via=quote)}"

    def _path(self, key: str) -> Path:
        return self.root / checked_key(key)

    def _write_draft(self, chunks: Iterable[bytes]) -> tuple[Path, StoredObject]:
        draft = self._drafts / secrets.token_hex(16)
        digest, size = hashlib.sha256(), 0
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                    digest.update(chunk)
                    size += len(chunk)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        return draft, StoredObject(size, digest.hexdigest())

    def _remove_stale_drafts(self) -> None:
        """This function will remove what writers that were killed left behind."""
        oldest = time.time() - STALE_DRAFT_SECONDS
        for draft in self._drafts.iterdir():
            try:
                if draft.stat().st_mtime < oldest:
                    draft.unlink()
            except FileNotFoundError:
                continue  # another process cleans up too


def check_grant(grant: Grant, signature: str) -> None:
    """Raise InvalidSignature unless `signature` was made for exactly this grant and it has not expired."""
    is_genuine = hmac.compare_digest(grant.digest().encode(), signature.encode())
    if not is_genuine or grant.expires < time.time():
        raise InvalidSignature("The link is not valid, or it has expired; ask for a new one.")


def _limited(chunks: Iterable[bytes], limit_bytes: int) -> Iterator[bytes]:
    size = 0
    for chunk in chunks:
        size += len(chunk)
        if size > limit_bytes:
            raise WrongContent(f"The URL was made for {limit_bytes} bytes; more came.")
        yield chunk


def _give_name(draft: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft.replace(target)
    _sync_folder(target.parent)


def _give_new_name(draft: Path, target: Path, stored: StoredObject) -> None:
    """Name the draft unless the name is taken; `link` decides that in one step."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        os.link(draft, target)
    except FileExistsError:
        with target.open("rb") as file:
            existing = hashlib.file_digest(file, "sha256").hexdigest()
        if existing != stored.sha256:
            raise ObjectExists("Something else was already stored under this URL.") from None
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checked_prefix(prefix: str) -> str:
    key = checked_key(prefix.removesuffix("/"))
    if key.count("/") < 2:
        raise InvalidKey(f"{prefix!r} is not below an organization or a kind")
    return key


# --- S3 ---------------------------------------------------------------------------------------------------------------


class S3Store:
    """Objects in a bucket. Credentials come from boto3's own chain (environment, profile, instance role)."""

    def __init__(
        self,
        bucket: str,
        *,
        prefix: str = "",
        endpoint: str | None = None,
        public_endpoint: str | None = None,
        region: str | None = None,
    ) -> None:
        self._bucket, self._prefix = bucket, prefix
        self._client = _s3_client(endpoint, region)
        self._public_client = _s3_client(public_endpoint, region) if public_endpoint else self._client

    def put_stream(self, key: str, chunks: Iterable[bytes]) -> StoredObject:
        source = _HashedStream(chunks)
        # Parts are sent one after another: memory stays at two parts, and a failure aborts the whole upload.
        transfer = TransferConfig(use_threads=False, multipart_chunksize=MULTIPART_BYTES)
        self._client.upload_fileobj(source, self._bucket, self._name(key), Config=transfer)
        return source.stored()

    def open_stream(self, key: str, *, offset: int = 0) -> IO[bytes]:
        wanted = {"Range": f"bytes={offset}-"} if offset else {}
        try:
            return self._client.get_object(Bucket=self._bucket, Key=self._name(key), **wanted)["Body"]
        except ClientError as error:
            raise _missing_or(error) from error

    def stat(self, key: str) -> ObjectInfo:
        try:
            found = self._client.head_object(Bucket=self._bucket, Key=self._name(key))
        except ClientError as error:
            raise _missing_or(error) from error
        return ObjectInfo(found["ContentLength"], found["LastModified"].timestamp())

    def delete(self, key: str) -> None:
        self._client.delete_object(Bucket=self._bucket, Key=self._name(key))

    def delete_prefix(self, prefix: str) -> None:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._name(_checked_prefix(prefix)) + "/"
        )
        for page in pages:
            found = [{"Key": item["Key"]} for item in page.get("Contents", [])]
            if found:
                self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": found, "Quiet": True})

    def signed_url(
        self,
        key: str,
        method: Method = "GET",
        *,
        expires_seconds: int,
        base: Base = "internal",
        filename: str | None = None,
        content_bytes: int | None = None,
    ) -> str:
        parameters: dict[str, Any] = {"Bucket": self._bucket, "Key": self._name(key)}
        if method == "GET" and filename:
            parameters["ResponseContentDisposition"] = attachment(filename)
        if method == "PUT" and content_bytes is not None:
            parameters["ContentLength"] = content_bytes
        client = self._public_client if base == "public" else self._client
        action = "get_object" if method == "GET" else "put_object"
        return client.generate_presigned_url(action, Params=parameters, ExpiresIn=expires_seconds)

    def _name(self, key: str) -> str:
        return "/".join(filter(None, [self._prefix, checked_key(key)]))


class _HashedStream:
    """Chunks as the file object boto3 reads from, hashed and counted on the way."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._rest = b""
        self._digest, self._size = hashlib.sha256(), 0

    def read(self, size: int = -1) -> bytes:
        parts, wanted = [], size
        while wanted:
            piece = self._rest or next(self._chunks, b"")
            if not piece:
                break
            taken = piece if wanted < 0 else piece[:wanted]
            self._rest = piece[len(taken) :]
            parts.append(taken)
            wanted -= len(taken) if wanted > 0 else 0
        content = b"".join(parts)
        self._digest.update(content)
        self._size += len(content)
        return content

    def stored(self) -> StoredObject:
        return StoredObject(self._size, self._digest.hexdigest())


def attachment(filename: str) -> str:
    """Return a Content-Disposition that saves under `filename` and can carry nothing else (RFC 6266)."""
    plain = re.sub(r"[^A-Za-z0-9 _.()+-]", "_", filename)[:150] or "download"
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(filename[:150], safe='')}"


def _s3_client(endpoint: str | None, region: str | None) -> Any:
    # Path style where an endpoint is named: such servers rarely have a DNS name for each bucket. Checksums only when
    # asked for: not every S3-compatible server takes the newer default.
    config = Config(
        signature_version="s3v4",
        retries={"mode": "standard", "max_attempts": 4},
        s3={"addressing_style": "path" if endpoint else "auto"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    return boto3.client("s3", endpoint_url=endpoint, region_name=region or "us-east-1", config=config)


def _missing_or(error: ClientError) -> Exception:
    if error.response.get("Error", {}).get("Code") in ("404", "NoSuchKey", "NotFound"):
        return ObjectMissing("No such object.")
    return error
