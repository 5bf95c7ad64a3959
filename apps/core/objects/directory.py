"""Objects as files in one directory. They are shared through URLs that this installation signs and serves."""

import base64
import hashlib
import hmac
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, urlencode

import msgspec
from django.conf import settings

from apps.core.objects.types import (
    STALE_DRAFT_SECONDS,
    Base,
    DomainError,
    InvalidSignature,
    Method,
    ObjectInfo,
    ObjectMissing,
    PrefixClosed,
    StoredObject,
    WrongContent,
    bounded,
    checked_key,
    checked_prefix,
    tapped,
)


class Grant(msgspec.Struct, frozen=True):
    """The permission that one signed URL gives. `content_bytes` is the exact length of a PUT's body."""

    method: str
    key: str
    expires: int
    filename: str = ""
    content_bytes: int | None = None

    def digest(self) -> str:
        """Return the HMAC-SHA256 over every field, URL-safe."""
        size = "" if self.content_bytes is None else str(self.content_bytes)
        message = "\n".join([self.method, self.key, str(self.expires), self.filename, size])
        secret = b"objects:" + settings.SIGNING_KEY.encode()
        return base64.urlsafe_b64encode(hmac.digest(secret, message.encode(), "sha256")).rstrip(b"=").decode()


class DirectoryStore:
    """Objects as files below `root`, for one machine. Drafts are written separately, synced, then renamed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._drafts = root / ".drafts"
        self._closed = root / ".closed"
        self._drafts.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._closed.mkdir(exist_ok=True, mode=0o700)
        root.chmod(0o700)
        self._remove_stale_drafts()

    def put_stream(self, key: str, chunks: Iterable[bytes]) -> StoredObject:
        target = self._path(key)
        draft, stored = self._write_draft(chunks)
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft.replace(target)
        _sync_folder(target.parent)
        return stored

    def put_once(
        self, key: str, chunks: Iterable[bytes], *, limit_bytes: int, exact: bool, sha256: str | None = None
    ) -> StoredObject:
        """Write an object that must not exist yet. Writing the same content again is allowed.

        Raises WrongContent, DomainError, and PrefixClosed below a closed prefix. Then nothing is stored.
        """
        target = self._path(key)
        self._require_open(key)
        too_long = WrongContent(f"The URL was made for {limit_bytes} bytes; more came.")
        draft, stored = self._write_draft(bounded(chunks, limit_bytes, too_long))
        try:
            if exact and stored.bytes != limit_bytes:
                raise WrongContent(f"The URL was made for {limit_bytes} bytes; {stored.bytes} came.")
            if sha256 is not None and not hmac.compare_digest(sha256, stored.sha256):
                raise WrongContent("The bytes received do not have the announced SHA-256; send them again.")
            _give_new_name(draft, target, stored)
            self._require_open(key)  # closed meanwhile: either this check sees the mark, or the closer sees this file
        except PrefixClosed:
            target.unlink(missing_ok=True)
            raise
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
        folder = self._path(checked_prefix(prefix))
        if folder.is_dir():
            shutil.rmtree(folder)

    def close_prefix(self, prefix: str) -> bool:
        (self._closed / _mark_of(checked_prefix(prefix))).touch()
        return True

    def list_objects(self, prefix: str) -> Iterator[tuple[str, ObjectInfo]]:
        for folder, _, names in os.walk(self._path(prefix)):
            for name in names:
                path = Path(folder, name)
                try:
                    found = path.lstat()
                except FileNotFoundError:
                    continue  # deleted during the listing
                yield str(path.relative_to(self.root)), ObjectInfo(found.st_size, found.st_mtime)

    def compose(
        self, key: str, part_keys: Sequence[str], *, on_chunk: Callable[[bytes], None] = lambda _: None
    ) -> StoredObject:
        return self.put_stream(key, tapped(self, part_keys, on_chunk))

    def join_parts(self, key: str, part_keys: Sequence[str]) -> None:
        size = sum(self.stat(part).bytes for part in part_keys)
        self.put_once(key, tapped(self, part_keys, lambda _: None), limit_bytes=size, exact=True)

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

    def _require_open(self, key: str) -> None:
        """Raise PrefixClosed for an object below a closed prefix."""
        parts = key.split("/")
        for depth in range(3, len(parts)):
            if (self._closed / _mark_of("/".join(parts[:depth]))).exists():
                raise PrefixClosed("The upload was completed or given up; start a new one.")

    def _remove_stale_drafts(self) -> None:
        """Delete drafts that killed writers left behind, and marks of closed prefixes older than any URL."""
        oldest = time.time() - STALE_DRAFT_SECONDS
        for left in (*self._drafts.iterdir(), *self._closed.iterdir()):
            try:
                if left.stat().st_mtime < oldest:
                    left.unlink()
            except FileNotFoundError:
                continue  # another process cleans up at the same time


def _mark_of(prefix: str) -> str:
    return hashlib.sha256(prefix.encode()).hexdigest()


def check_grant(grant: Grant, signature: str) -> None:
    """Raise InvalidSignature unless `signature` was made for exactly this grant and has not expired."""
    is_genuine = hmac.compare_digest(grant.digest().encode(), signature.encode())
    if not is_genuine or grant.expires < time.time():
        raise InvalidSignature("The link is not valid, or it has expired; ask for a new one.")


def _give_new_name(draft: Path, target: Path, stored: StoredObject) -> None:
    """Name the draft unless the name is taken. `link` checks and names in one step."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        os.link(draft, target)
    except FileExistsError:
        with target.open("rb") as file:
            existing = hashlib.file_digest(file, "sha256").hexdigest()
        if existing != stored.sha256:
            raise DomainError("Something else was already stored under this URL.", code="object_exists") from None
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
