"""The public origin of an installation without a proxy: inference goes to the gateway, the rest to Django.

Plain ASGI passes inference through unbuffered in both directions, so that a streamed answer costs no thread and none of
Django's request stack. When the client disconnects, the request to the gateway is closed too.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from urllib.parse import urlsplit

import aiohttp

from apps.core.errors import Unavailable
from apps.core.http.asgi import (
    REQUEST_ID_HEADER,
    Application,
    ClientGone,
    LimitBodies,
    Receive,
    Scope,
    Send,
    request_id_from,
    send_error,
)
from apps.core.objects.views import OBJECT_LIMIT
from apps.interfaces.web.edge.request_limits import LimitRequests, WebLimits
from apps.interfaces.web.edge.upload_limits import UPLOAD_LIMITS

INFERENCE_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"})
CONNECT_TIMEOUT_SECONDS = 5
BODY_LIMITS = (*UPLOAD_LIMITS, OBJECT_LIMIT)

# RFC 9110 §7.6.1: these headers describe one connection only. Cookies belong to the dashboard and are not forwarded.
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
_NOT_FORWARDED = _HOP_BY_HOP | {b"host", b"cookie", b"expect", REQUEST_ID_HEADER.encode()}


class FrontDoor:
    """ASGI application of the web process."""

    def __init__(self, django_application: Application, *, gateway_url: str, limits: WebLimits) -> None:
        self._django = LimitRequests(LimitBodies(django_application, BODY_LIMITS), limits)
        self._gateway = GatewayClient(gateway_url)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif is_inference(scope):
            await self._gateway.pass_through(scope, receive, send)
        else:
            await self._django(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._gateway.close()
        await send({"type": "lifespan.shutdown.complete"})


def is_inference(scope: Scope) -> bool:
    return scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in INFERENCE_PATHS


class GatewayClient:
    """Passes requests to the gateway at `unix://<socket>` or `http://<host>:<port>`."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._socket_path = parts.path if parts.scheme == "unix" else None
        self._base_url = "http://gateway" if self._socket_path else url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    async def pass_through(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the gateway's answer, or 503 if the gateway cannot be reached."""
        request_id = request_id_from(_header(scope, REQUEST_ID_HEADER.encode()))
        client = _Client(receive, send)
        answering = asyncio.ensure_future(self._answer(scope, client, request_id))
        leaving = asyncio.ensure_future(client.left())
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (answering, leaving):
                task.cancel()
            outcomes = await asyncio.gather(answering, leaving, return_exceptions=True)
        await self._finish(outcomes[0], client, request_id)

    async def _finish(self, outcome: object, client: "_Client", request_id: str) -> None:
        match outcome:
            case None | ClientGone() | asyncio.CancelledError():
                return
            case aiohttp.ClientError() | TimeoutError() if not client.has_answer:
                error = Unavailable("The inference gateway is not available. Try again in a moment.")
                await send_error(client.send, error, request_id=request_id)
            case aiohttp.ClientError() | TimeoutError():
                # Headers are sent: an unfinished answer breaks the connection, so no client takes it for complete.
                return
            case BaseException():
                raise outcome

    async def _answer(self, scope: Scope, client: "_Client", request_id: str) -> None:
        headers = [*_kept(scope["headers"], _NOT_FORWARDED), (REQUEST_ID_HEADER.encode(), request_id.encode())]
        url = self._base_url + scope["path"]
        async with self._connection().post(url, data=client.body(), headers=_decoded(headers)) as upstream:
            await client.start(upstream.status, _kept(_lowered(upstream.raw_headers), _HOP_BY_HOP))
            async for chunk in upstream.content.iter_any():
                await client.continue_with(chunk)
        await client.end()

    def _connection(self) -> aiohttp.ClientSession:
        """Return the session, created on first use because it belongs to the running event loop."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=self._connector(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_SECONDS),
                auto_decompress=False,
                skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    def _connector(self) -> aiohttp.BaseConnector:
        if self._socket_path:
            return aiohttp.UnixConnector(self._socket_path, limit=0)
        return aiohttp.TCPConnector(limit=0)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


class _Client:
    """Both directions of one caller's connection."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self.send = receive, send
        self._has_sent_body = asyncio.Event()
        self.has_answer = False

    async def body(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            more = message.get("more_body", False)
            if chunk := message.get("body", b""):
                yield chunk
        self._has_sent_body.set()

    async def left(self) -> None:
        """Return when the caller disconnects after sending its body."""
        await self._has_sent_body.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.has_answer = True
        await self.send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def continue_with(self, chunk: bytes) -> None:
        await self.send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self) -> None:
        await self.send({"type": "http.response.body", "body": b""})


def _header(scope: Scope, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


def _kept(headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name not in dropped]


def _lowered(headers: Iterable[tuple[bytes, bytes]]) -> Iterable[tuple[bytes, bytes]]:
    return ((name.lower(), value) for name, value in headers)


def _decoded(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
