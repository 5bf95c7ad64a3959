"""HTTP access to a directory store: GET and PUT of single objects through signed URLs only.

It uses no session, API key or database; the signature defines the permission. Bytes are streamed both ways.
"""

import asyncio
import base64
import hashlib
import re
from collections.abc import AsyncIterator, Iterator
from typing import IO

from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse, QueryDict, StreamingHttpResponse
from django.utils.http import parse_etags
from django.views.decorators.csrf import csrf_exempt

from apps.core.errors import DomainError
from apps.core.http.asgi import MIB, Scope
from apps.core.http.body_limits import BodyAllowance, BodyLimit
from apps.core.objects.store import (
    CHECKSUM_HEADER,
    CHUNK_BYTES,
    KEY,
    KEY_LIMIT,
    UNSIZED_PUT_LIMIT_BYTES,
    DirectoryStore,
    Grant,
    InvalidSignature,
    WrongContent,
    check_grant,
    download_headers,
    read_chunks,
    store,
)

_PREFIX = "/objects/"
LARGEST_OBJECT_BYTES = 8 * 1024 * MIB
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


class RangeNotSatisfiable(Exception):
    """The requested range lies outside the object."""


@csrf_exempt  # the signature is the permission; a browser sends no credential
async def signed_object(request: HttpRequest, key: str) -> HttpResponseBase:
    """Serve a GET or HEAD, or accept a PUT, within the limits of the URL's signature."""
    if request.method not in ("GET", "HEAD", "PUT"):
        return HttpResponse(status=405, headers={"Allow": "GET, HEAD, PUT"})
    try:
        grant = _read_grant(request.method, key, request.GET)
        directory = _directory()
        if request.method == "PUT":
            return await _receive(request, directory, grant)
        filename = grant.filename or grant.key.rsplit("/", 1)[-1]
        return await asyncio.to_thread(object_response, request, grant.key, filename=filename)
    except DomainError as error:
        return JsonResponse(error.as_openai(), status=int(error.status), headers={"Cache-Control": "no-store"})


def _directory() -> DirectoryStore:
    directory = store()
    if not isinstance(directory, DirectoryStore):
        raise InvalidSignature("Objects of this installation are not served here.")
    return directory


async def authorize_put(scope: Scope) -> BodyAllowance:
    """Return the allowance that a PUT's URL was signed for, before its body is read. Raises InvalidSignature."""
    _directory()
    query = QueryDict(scope.get("query_string", b"").decode("latin-1"))
    grant = _read_grant(scope["method"], scope["path"].removeprefix(_PREFIX), query)
    return BodyAllowance(UNSIZED_PUT_LIMIT_BYTES if grant.content_bytes is None else grant.content_bytes)


OBJECT_LIMIT = BodyLimit("PUT", _PREFIX, LARGEST_OBJECT_BYTES, authorize_put, is_judged_always=True)


def _read_grant(method: str | None, key: str, query: QueryDict) -> Grant:
    try:
        size = int(str(query["bytes"])) if "bytes" in query else None
        grant = Grant(query.get("method", ""), key, int(query.get("expires", "")), query.get("filename", ""), size)
    except ValueError:
        raise InvalidSignature("The link is incomplete.") from None
    check_grant(grant, query.get("signature", ""))
    wanted = "GET" if method == "HEAD" else method
    if grant.method != wanted or len(key) > KEY_LIMIT or not KEY.fullmatch(key):
        raise InvalidSignature("The link was made for something else.")
    return grant


# --- sending ----------------------------------------------------------------------------------------------------------


class _FilePart:
    """A part of an open file. The response closes it, even if the client disconnects."""

    def __init__(self, file: IO[bytes], length: int) -> None:
        self._file, self._left = file, length

    def read(self) -> bytes:
        chunk = self._file.read(min(CHUNK_BYTES, self._left))
        self._left -= len(chunk)
        return chunk

    def close(self) -> None:
        self._file.close()


class _Chunks(_FilePart):
    def __iter__(self) -> Iterator[bytes]:
        while chunk := self.read():
            yield chunk


class _AsyncChunks(_FilePart):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        while chunk := await asyncio.to_thread(self.read):
            yield chunk


def object_response(
    request: HttpRequest, key: str, *, filename: str, content_type: str = "application/octet-stream"
) -> HttpResponseBase:
    """Return a response that streams one object as a download, for a caller whose access was already checked.

    It answers Range, If-Range, If-None-Match and HEAD, so that a client can continue where it stopped. Raises
    ObjectMissing before anything is sent. An ASGI request gets an asynchronous stream, because Django would read a
    synchronous one into memory as a whole.
    """
    size = store().stat(key).bytes
    # A strong validator: an object is written once, so its key and size identify its bytes.
    etag = f'"{hashlib.sha256(f"{key}:{size}".encode()).hexdigest()[:32]}"'
    headers = download_headers(filename, content_type) | {"Accept-Ranges": "bytes", "ETag": etag}
    # A copy with a weak validator is enough too.
    if {"*", etag, f"W/{etag}"} & set(parse_etags(request.headers.get("If-None-Match", ""))):
        return HttpResponse(status=304, headers=headers)
    try:
        # The client's part may belong to another object.
        has_part = request.headers.get("If-Range", etag).strip() == etag
        first, last = _range_of(request.headers.get("Range", "") if has_part else "", size)
    except RangeNotSatisfiable:
        return HttpResponse(status=416, headers=headers | {"Content-Range": f"bytes */{size}"})
    headers["Content-Length"] = str(last - first + 1)
    is_part = last - first + 1 != size
    if is_part:
        headers["Content-Range"] = f"bytes {first}-{last}/{size}"
    status = 206 if is_part else 200
    if request.method == "HEAD":
        return HttpResponse(status=status, headers=headers)
    chunks = _AsyncChunks if isinstance(request, ASGIRequest) else _Chunks
    body = chunks(store().open_stream(key, offset=first), last - first + 1)
    return StreamingHttpResponse(body, status=status, headers=headers)


def _range_of(header: str, size: int) -> tuple[int, int]:
    """Return the first and last byte to send. Several ranges or other units get the whole object."""
    match = _RANGE.fullmatch(header.strip())
    if not match or match.groups() == ("", ""):
        return 0, size - 1
    start, end = match.groups()
    if not start:  # the last N bytes
        first, last = max(0, size - int(end)), size - 1
    else:
        first, last = int(start), min(int(end), size - 1) if end else size - 1
    if first > last:
        raise RangeNotSatisfiable(header)
    return first, last


# --- receiving --------------------------------------------------------------------------------------------------------


async def _receive(request: HttpRequest, directory: DirectoryStore, grant: Grant) -> HttpResponse:
    exact = grant.content_bytes is not None
    limit = grant.content_bytes if grant.content_bytes is not None else UNSIZED_PUT_LIMIT_BYTES
    _refuse_wrong_length(request.headers.get("Content-Length"), limit, exact=exact)
    sha256 = _announced_sha256(request)
    put = sync_to_async(directory.put_once, thread_sensitive=False)
    stored = await put(grant.key, read_chunks(request), limit_bytes=limit, exact=exact, sha256=sha256)
    return HttpResponse(headers={"ETag": f'"{stored.sha256}"'})


def _refuse_wrong_length(header: str | None, limit: int, *, exact: bool) -> None:
    """Raise WrongContent before any byte is read if the announced length is wrong."""
    if header is None or not header.isdigit():
        return
    if int(header) > limit or (exact and int(header) != limit):
        raise WrongContent(f"The URL was made for {limit} bytes; {header} were announced.")


def _announced_sha256(request: HttpRequest) -> str | None:
    header = request.headers.get(CHECKSUM_HEADER)
    if header is None:
        return None
    try:
        return base64.b64decode(header, validate=True).hex()
    except ValueError:
        raise WrongContent(f"{CHECKSUM_HEADER} must be the base64 of 32 bytes.") from None
