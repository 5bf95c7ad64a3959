"""Downloads that are produced while they are sent, and archives of stored objects."""

import asyncio
import io
import tempfile
import weakref
import zipfile
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, StreamingHttpResponse
from django.utils.translation import gettext

from apps.core.errors import InvalidState
from apps.core.http.csv_text import csv_chunks
from apps.core.objects.store import download_headers, read_chunks, store

_IN_MEMORY_BYTES, _CHUNK_BYTES = 1_000_000, 64 * 1024


def stream_download(
    request: HttpRequest, chunks: Iterator[bytes], *, filename: str, content_type: str
) -> StreamingHttpResponse:
    """Return a response that sends `chunks` as they are produced. Producing them must not need the database."""
    # Under ASGI, Django would read an ordinary iterator into memory whole.
    body: Any = _in_threads(chunks) if isinstance(request, ASGIRequest) else chunks
    return StreamingHttpResponse(body, headers=download_headers(filename, content_type))


def download_csv(
    request: HttpRequest, header: Sequence[str], rows: Iterable[Sequence[object]], *, filename: str
) -> StreamingHttpResponse:
    """Return a response that sends a CSV file. Its rows are read first, into a file that has no name."""
    with ExitStack() as closing:
        file = closing.enter_context(tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES))
        for chunk in csv_chunks(header, rows):  # `writelines` would first keep all of them in memory
            file.write(chunk)
        chunks = _read(file)
        weakref.finalize(chunks, closing.pop_all().close)  # also if it is never sent
    return stream_download(request, chunks, filename=filename, content_type="text/csv; charset=utf-8")


def too_many_rows(most: int) -> InvalidState:
    """Return the refusal of a file that would have more than `most` rows."""
    return InvalidState(
        gettext("A file has at most %(most)s rows. Search or filter the list, or read it through the API.")
        % {"most": f"{most:,}"}
    )


def _read(file: "tempfile.SpooledTemporaryFile[bytes]") -> Iterator[bytes]:
    file.seek(0)
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk


async def _in_threads(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    while chunk := await asyncio.to_thread(next, chunks, b""):
        yield chunk


def zip_chunks(files: Sequence[tuple[str, str]], *, texts: Sequence[tuple[str, str]] = ()) -> Iterator[bytes]:
    """Yield a ZIP archive of `texts` (name, content) and `files` (name, object key).

    The files are stored uncompressed, because they are weights.
    """
    sink = _Sink()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:
        for name, text in texts:
            archive.writestr(name, text)
        for name, key in files:
            with store().open_stream(key) as stream, archive.open(name, "w", force_zip64=True) as member:
                for chunk in read_chunks(stream):
                    member.write(chunk)
                    yield from sink.take()
            yield from sink.take()
    yield from sink.take()


class _Sink(io.RawIOBase):
    """The archive's output. It cannot seek, so sizes follow their file."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def take(self) -> Iterator[bytes]:
        parts, self._parts = b"".join(self._parts), []
        if parts:
            yield parts
