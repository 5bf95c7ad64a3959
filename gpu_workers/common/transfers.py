"""Signed downloads and uploads between a worker and the object store.

It is separate from `artifacts`, so that a child, which transfers nothing, starts without the HTTP client.
"""

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx

from apps.contracts.runs import SignedFile
from apps.contracts.worker_api import UploadResponse
from gpu_workers.common.artifacts import MANIFEST_FILE, BrokenArtifact, read_manifest, verify_file
from gpu_workers.common.files import hash_file

_CHUNK_BYTES = 256 * 1024
_TRIES = 6


class StoreUnavailable(Exception):
    """The object store did not accept or deliver a file within the allowed number of attempts."""


class Interrupted(Exception):
    """The caller's `should_stop` returned true during a transfer."""


class Transfers:
    """Reads and writes objects through signed URLs only. This worker has no other rights to the store."""

    def __init__(
        self,
        *,
        base_url: str = "",
        should_stop: Callable[[], bool] = lambda: False,
        note_bytes: Callable[[int], None] = lambda number: None,
        sleep: Callable[[float], None] = time.sleep,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        timeout = httpx.Timeout(60.0, connect=5.0)
        self._http = httpx.Client(base_url=base_url, timeout=timeout, transport=transport, trust_env=False)
        self._should_stop = should_stop
        self._note_bytes = note_bytes
        self._sleep = sleep

    def close(self) -> None:
        self._http.close()

    def download(self, file: SignedFile, destination: Path) -> None:
        """Download and verify one object; keep a file that is already there and whole."""
        if destination.is_file() and destination.stat().st_size == file.bytes and hash_file(destination) == file.sha256:
            return
        partial = destination.with_name(destination.name + ".part")
        self._retry(lambda: self._download_once(file, partial))
        verify_file(partial, sha256=file.sha256, size=file.bytes)
        partial.replace(destination)

    def upload_folder(self, folder: Path, sign: Callable[[], UploadResponse]) -> UploadResponse:
        """Upload every file of a sealed folder, the manifest last, so that an object with a manifest is whole.

        `sign` returns the URLs, each time for the same places. It is called again when a URL has expired. An existing
        object stays, so repeating an upload is harmless.
        """
        places = _Places(sign)
        for name in (*(file.name for file in read_manifest(folder).files), MANIFEST_FILE):
            for number in range(len(places.urls(name))):
                self._retry(partial(self._upload_once, folder / name, places, number), renew=places.renew)
        return places.signed

    def _download_once(self, file: SignedFile, partial: Path) -> None:
        with self._http.stream("GET", file.url) as response, partial.open("wb") as target:
            response.raise_for_status()
            received = 0
            for chunk in response.iter_bytes():  # unsized chunks: a slow store must not delay the check
                self._check()
                self._note_bytes(len(chunk))
                received += len(chunk)
                if received > file.bytes:
                    raise BrokenArtifact(f"{file.name} is longer than the {file.bytes} bytes registered.")
                target.write(chunk)

    def _upload_once(self, path: Path, places: "_Places", number: int) -> None:
        if number >= len(places.urls(path.name)):  # verified meanwhile
            return
        start, size = places.extent(path, number)
        # An explicit length avoids chunked encoding. The URLs of a bucket are signed for the other header.
        headers = {"Content-Length": str(size), "If-None-Match": "*"}
        answer = self._http.put(
            places.urls(path.name)[number], content=self._chunks(path, start, size), headers=headers
        )
        if answer.status_code != httpx.codes.PRECONDITION_FAILED:  # else it is there already, and its hash is checked
            answer.raise_for_status()

    def _chunks(self, path: Path, start: int, size: int) -> Iterator[bytes]:
        with path.open("rb") as file:
            file.seek(start)
            while chunk := file.read(min(_CHUNK_BYTES, start + size - file.tell())):
                self._check()
                yield chunk
                self._note_bytes(len(chunk))  # the next chunk was requested, so this one is sent

    def _retry(self, transfer: Callable[[], None], *, renew: Callable[[], None] | None = None) -> None:
        """Repeat the transfer after a temporary failure, and after `renew` if its URL is refused once."""
        was_refused = False
        for attempt in range(_TRIES):
            self._check()
            try:
                return transfer()
            except (httpx.TransportError, httpx.HTTPStatusError) as error:
                is_refused = _is_refused(error)
                is_expired = is_refused and renew is not None and not was_refused
                if attempt == _TRIES - 1 or not (is_expired or _is_temporary(error)):
                    raise StoreUnavailable(_reason(error)) from error
            if is_refused and renew is not None:
                renew()
            was_refused = is_refused
            self._sleep(min(0.5 * 2**attempt, 8.0) * random.uniform(0.7, 1.3))  # noqa: S311 (jitter)
        return None

    def _check(self) -> None:
        if self._should_stop():
            raise Interrupted


class _Places:
    """The signed URLs of an upload: one for each file, or one for each part of a large file."""

    def __init__(self, sign: Callable[[], UploadResponse]) -> None:
        self._sign = sign
        self.signed = sign()

    def renew(self) -> None:
        self.signed = self._sign()

    def urls(self, name: str) -> tuple[str, ...]:
        """Return where the file is sent; nowhere if its parts were joined already."""
        return self.signed.parts[name] if name in self.signed.parts else (self.signed.files[name],)

    def extent(self, path: Path, number: int) -> tuple[int, int]:
        """Return where a part, counted from 0, begins in its file, and its size."""
        whole = path.stat().st_size
        if path.name not in self.signed.parts:
            return 0, whole
        start = number * self.signed.part_bytes
        return start, min(self.signed.part_bytes, whole - start)


def _is_refused(error: Exception) -> bool:
    """Return whether the store refused a URL: it has expired, or it never was valid."""
    return isinstance(error, httpx.HTTPStatusError) and error.response.status_code == httpx.codes.FORBIDDEN


def _is_temporary(error: Exception) -> bool:
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code >= 500 or error.response.status_code in (408, 409, 429)
    return True


def _reason(error: Exception) -> str:
    """Return the cause without the URL, which is a credential."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"the object store answered {error.response.status_code}"
    return f"the object store could not be reached ({type(error).__name__})"
