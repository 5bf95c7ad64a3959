"""uvicorn's HTTP connections, with limits on the head of a request and on the connections of one address.

    uvicorn --http apps.core.http.connections:Connection

uvicorn waits forever for the rest of a head and accepts heads of any size. The limits are those of deploy/nginx, which
enforces them in front of these processes if it is used.
"""

import asyncio

from django.conf import settings
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from apps.core.http.asgi import Receive, Scope, Send
from apps.core.http.fair_shares import Buckets, OpenCounts

HEAD_SECONDS = 15.0
MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 100
MAX_CONNECTIONS = 256  # of one address that is not a proxy
# An address that opens connections faster waits with each further one: opening costs us more than it.
PROMPT_CONNECTIONS_PER_MINUTE, DELAY_SECONDS = 600, 1.0
_MOMENT_SECONDS = 0.01
MAX_AHEAD = 64  # requests of one connection that arrived before their turn

_CLOSED = [(b"content-length", b"0"), (b"connection", b"close")]
_TOO_LARGE_HEAD = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_open, _opened = OpenCounts(), Buckets()


async def refuse_head(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer 431 instead of the application."""
    await send({"type": "http.response.start", "status": 431, "headers": _CLOSED})
    await send({"type": "http.response.body", "body": b""})


class TooManyAhead(Exception):
    """A client sends requests faster than they are answered. The parser stops, and the connection ends with 400."""


class Connection(HttpToolsProtocol):
    """One client's connection."""

    _head_timer: asyncio.TimerHandle | None = None
    _is_in_head = False
    _head_bytes = 0
    _early: list[bytes] | None = None  # what was received before this connection may be read
    _address = ""  # counted while the connection is open

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        host = self.client[0] if self.client else ""
        if host and not is_proxy(host):
            if _open[host] >= MAX_CONNECTIONS:
                transport.abort()
                return
            self._address = host
            _open.add(host)
            if _opened.wait_seconds(host, PROMPT_CONNECTIONS_PER_MINUTE):
                self._early = []
                self.loop.call_later(DELAY_SECONDS, self._resume)
            else:
                _opened.take(host, PROMPT_CONNECTIONS_PER_MINUTE)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self._address:
            _open.remove(self._address)
            self._address = ""
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._early is not None:
            self._early.append(data)
            self.flow.pause_reading()
            return
        super().data_received(data)
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.write(_TOO_LARGE_HEAD)
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, 0
        self._wait_for_head()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_waiting()
        size_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            self.app = refuse_head  # for this connection, which ends with the answer
        super().on_headers_complete()
        if len(self.pipeline) > MAX_AHEAD:  # one read of the socket may bring thousands
            raise TooManyAhead

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.pipeline:
            self.flow.pause_reading()

    def _resume(self) -> None:
        """Continue to read. A moment later, the socket has shown whether the client is still connected."""
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self.loop.call_later(_MOMENT_SECONDS, self._begin)

    def _begin(self) -> None:
        early, self._early = self._early, None
        if not self.transport.is_closing():
            self.flow.resume_reading()
        for data in early or ():
            self.data_received(data)

    def _wait_for_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._end_waiting)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_waiting(self) -> None:
        self._head_timer = None
        if self.flow.read_paused:
            self._wait_for_head()  # this server paused reading, so the client is not late
        else:
            self.transport.close()


def is_proxy(host: str) -> bool:
    """Return whether this address forwards the connections of many clients."""
    if not settings.TRUSTED_PROXIES:
        return False
    proxies = ProxyHeadersMiddleware(refuse_head, trusted_hosts=settings.TRUSTED_PROXIES)  # type: ignore[arg-type]
    return host in proxies.trusted_hosts
