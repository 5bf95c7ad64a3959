"""Requests that another process answers. They pass through unbuffered in both directions.

Plain ASGI: a streamed answer costs no thread and none of Django's request stack. When the client disconnects, the
request to the other process is closed too.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from apps.core.errors import DomainError
from apps.core.http.asgi import (
    PROCESSOR_SECONDS,
    PROCESSOR_SECONDS_HEADER,
    REQUEST_ID_HEADER,
    ClientGone,
    Message,
    Receive,
    Scope,
    Send,
    declared_length,
    request_id_from,
    send_error,
)

CONNECT_TIMEOUT_SECONDS = 5
_MAX_HEAD_BYTES = 64 * 1024  # of a line of an answer: a Content-Security-Policy, a cookie

# RFC 9110 §7.6.1: these headers describe one connection only.
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# The caller could use these to claim another address or id.
_OURS = frozenset({b"expect", b"forwarded", b"x-forwarded-for", b"x-forwarded-proto", REQUEST_ID_HEADER.encode()})


class PassThrough:
    """An HTTP process at `unix://<socket>` or `http://<host>:<port>`.

    It receives the caller's address and scheme as `x-forwarded-for` and `x-forwarded-proto`, and must not trust these
    headers from any other sender. `dropped` are headers that it does not receive. `unavailable` is the error if it does
    not answer. With `works_on`, the process keeps working when the client leaves. The request then lasts until its
    answer begins, so that limits count all of it.
    """

    def __init__(
        self, url: str, *, unavailable: DomainError, dropped: Iterable[bytes] = (), works_on: bool = False
    ) -> None:
        parts = urlsplit(url)
        self._socket_path = parts.path if parts.scheme == "unix" else None
        self._base_url = "http://process" if self._socket_path else url.rstrip("/")
        self._not_forwarded = _HOP_BY_HOP | _OURS | frozenset(dropped)
        self._unavailable, self._works_on = unavailable, works_on
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the other process's answer, or the error if it cannot be reached."""
        request_id = request_id_from(_header(scope, REQUEST_ID_HEADER.encode()))
        client = _Client(receive, send)
        answering = asyncio.ensure_future(self._answer(scope, client, request_id))
        leaving = asyncio.ensure_future(client.left())
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if self._works_on and not client.has_answer:
                await asyncio.wait({answering})
        finally:
            for task in (answering, leaving):
                task.cancel()
            outcomes = await asyncio.gather(answering, leaving, return_exceptions=True)
        await self._finish(outcomes[0], client, request_id)

    async def _finish(self, outcome: object, client: "_Client", request_id: str) -> None:
        match outcome:
            case None | ClientGone() | asyncio.CancelledError():
                return
            case aiohttp.ClientError() | TimeoutError() if not client.has_answer and not client.is_gone:
                await send_error(client.send, self._unavailable, request_id=request_id)
            case aiohttp.ClientError() | TimeoutError():
                # Headers are sent: an unfinished answer breaks the connection, so no client takes it for complete.
                return
            case BaseException():
                raise outcome

    async def _answer(self, scope: Scope, client: "_Client", request_id: str) -> None:
        headers = [*_kept(scope["headers"], self._not_forwarded), (REQUEST_ID_HEADER.encode(), request_id.encode())]
        if address := scope.get("client"):
            headers.append((b"x-forwarded-for", address[0].encode()))
        headers.append((b"x-forwarded-proto", scope.get("scheme", "http").encode()))
        decoded = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
        path = scope.get("raw_path") or scope["path"].encode()
        query = scope.get("query_string", b"")
        url = URL((self._base_url.encode() + path + (b"?" + query if query else b"")).decode("latin-1"), encoded=True)
        body = client.body()
        if not _has_body(scope):
            async for _ in body:  # its end is the moment to begin
                pass
        async with self._connection().request(
            scope["method"], url, data=body if _has_body(scope) else None, headers=decoded,
            allow_redirects=False,
        ) as upstream:  # fmt: skip
            raw = [(name.lower(), value) for name, value in upstream.raw_headers]
            scope[PROCESSOR_SECONDS] = float(dict(raw).get(PROCESSOR_SECONDS_HEADER, 0.0))
            answer = _kept(raw, _HOP_BY_HOP | {PROCESSOR_SECONDS_HEADER})
            if not client.has_sent_body:  # it was refused: its rest is not read
                answer.append((b"connection", b"close"))
            await client.start(upstream.status, answer)
            async for chunk in upstream.content.iter_any():
                await client.continue_with(chunk)
        await client.end()

    def _connection(self) -> aiohttp.ClientSession:
        """Return the session, created on first use because it belongs to the running event loop."""
        if self._session is None:
            path = self._socket_path
            self._session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(path, limit=0) if path else aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_SECONDS),
                auto_decompress=False,
                skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
                cookie_jar=aiohttp.DummyCookieJar(),
                max_line_size=_MAX_HEAD_BYTES,
                max_field_size=_MAX_HEAD_BYTES,
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


class _Client:
    """Both directions of one caller's connection."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self.send = receive, send
        self._has_sent_body = asyncio.Event()
        self.has_answer = self.is_gone = False

    async def body(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self._message()
            more = message.get("more_body", False)
            if chunk := message.get("body", b""):
                yield chunk
        self._has_sent_body.set()

    @property
    def has_sent_body(self) -> bool:
        return self._has_sent_body.is_set()

    async def left(self) -> None:
        """Wait until the caller disconnects after sending its body."""
        await self._has_sent_body.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.is_gone = True

    async def _message(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.is_gone = True
            raise ClientGone
        return message

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        if self.is_gone:
            raise ClientGone
        self.has_answer = True
        await self.send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def continue_with(self, chunk: bytes) -> None:
        await self.send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self) -> None:
        await self.send({"type": "http.response.body", "body": b""})


def _has_body(scope: Scope) -> bool:
    return declared_length(scope) > 0 or _header(scope, b"transfer-encoding") is not None


def _header(scope: Scope, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


def _kept(headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name not in dropped]
