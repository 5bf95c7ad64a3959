"""The customers' connections: uvicorn's protocol with a shorter path for each request and answer.

    uvicorn --http apps.interfaces.gateway.http.connections:GatewayConnection

For each request, uvicorn creates a timer, an event, a list of checked headers and two packets. That is a sixth of the
gateway's work. The gateway's applications take the `Exchange` from the scope and use only the parts that they need.
Other applications can use it through ASGI.
"""

import asyncio
import math
import urllib.parse
from collections import deque
from collections.abc import Callable
from typing import cast

from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from apps.core.http.asgi import Application, Message, Scope
from apps.core.http.connections import MAX_AHEAD, TooManyAhead
from apps.interfaces.gateway.http.transports import CoalescingTransport

EXCHANGE = "anneal.exchange"  # key in the scope
_MAX_PIPELINED = 16  # requests read ahead of their turn; more stay in the socket
_MAX_HEAD_BYTES = 64 * 1024
_HEAD_SECONDS = 30.0  # for a complete head
_MAX_DISCARDED = 64 * 1024  # bytes of a body that are read after its answer, to keep the connection
_LINGER_SECONDS = 2.0  # for the client to read an answer to a body that is not read
_SENT_WITHIN_SECONDS = 10.0  # what is left of an answer when the connection ends
_CHECK_SECONDS = 10.0  # longest interval between two checks of the deadlines
_TOO_LARGE_HEAD = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_WITHOUT_BODY = (204, 304)


class GatewayConnection(HttpToolsProtocol):
    """Reads requests and has them answered in order."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        # Of repeated header lines, the last one counts. The parser fills this without a Python frame for each line.
        self._lines: dict[bytes, bytes] = {}
        self.on_header = self._lines.__setitem__  # type: ignore[assignment,method-assign]
        super().__init__(config, server_state, app_state, _loop)
        self.headers = []  # uvicorn looks here for a WebSocket; none is supported
        self.ws_protocol_class = None
        self._application = cast(Application, self.app)
        self._incoming: Exchange  # being read
        self._waiting: deque[tuple[Scope, Exchange]] = deque()
        self._current: Exchange | None = None  # being answered
        self._is_in_head = False
        self._head_bytes = 0  # of an incomplete head
        self._head_since = math.inf
        self._idle_since = math.inf
        self._idle_timer: asyncio.TimerHandle | None = None
        self._is_ending = False  # nothing more is read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(CoalescingTransport(transport, self.loop))
        self._scope: dict[str, object] = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": "1.1",
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "root_path": self.root_path,
        }
        self._idle_since = self.loop.time()
        self._check_later(self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        self.connections.discard(self)
        self._waiting.clear()
        if self._current is not None:
            self._current.mark_gone()
        self.flow.resume_writing()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self.parser = self._current = None  # type: ignore[assignment]

    # --- Reading a request.

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._is_ending:
            return  # bytes that come with the end of the connection belong to no request
        idle_since = self._idle_since
        super().data_received(data)
        if self._current is None and not self._is_in_head:  # the rest of a body that was refused before it came
            self._idle_since = idle_since
            self._check_later(self.timeout_keep_alive)
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self.transport.write(_TOO_LARGE_HEAD)
                self.transport.close()

    def on_message_begin(self) -> None:
        self._is_in_head, self._head_bytes = True, 0
        self._head_since = self.loop.time()
        self._check_later(_HEAD_SECONDS)
        self.url = b""
        self._lines.clear()

    def on_headers_complete(self) -> None:
        self._is_in_head, self._head_since = False, math.inf
        raw_path, _, query = self.url.partition(b"?")
        path = raw_path.decode("ascii")
        version = self.parser.get_http_version()
        method = self.parser.get_method().decode("ascii")
        keeps_alive = version == "1.1" and self.parser.should_keep_alive()
        headers = {name.lower(): value for name, value in self._lines.items()}
        exchange = Exchange(self, headers, version, keeps_alive=keeps_alive, has_body=method != "HEAD")
        scope = self._scope | {
            "http_version": version,
            "method": method,
            "path": urllib.parse.unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": headers.items(),
            "state": self.app_state.copy(),
            EXCHANGE: exchange,
        }
        self._incoming = exchange
        if self._current is None:
            self._begin(scope, exchange)
            return
        self._waiting.append((scope, exchange))
        if len(self._waiting) > MAX_AHEAD:  # one read of the socket may bring thousands
            raise TooManyAhead
        if len(self._waiting) >= _MAX_PIPELINED:
            self.flow.pause_reading()

    def on_body(self, body: bytes) -> None:
        exchange = self._incoming
        if not exchange.response_complete and exchange.add_body(body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()

    def on_message_complete(self) -> None:
        self._incoming.end_body()

    # --- Answering it.

    def _begin(self, scope: Scope, exchange: "Exchange") -> None:
        self._current = exchange
        exchange.task = task = self.loop.create_task(exchange.run(self._application, scope))
        self.tasks.add(task)

    def opening(self, status: int) -> bytes:
        """Return the start of an answer: its status line and the headers that all answers have."""
        common = self.server_state.default_headers
        known = _openings.get(status)
        if known is None or known[0] is not common:  # uvicorn renews them each second, with the date
            lines = b"".join([b"%b: %b\r\n" % pair for pair in common])
            known = _openings[status] = common, STATUS_LINE[status] + lines
        return known[1]

    def on_response_complete(self) -> None:
        """Begin the next request if it has arrived; otherwise wait for one until the keep-alive timeout."""
        self.server_state.total_requests += 1
        self._current = None
        if self.transport.is_closing() or self._is_ending:
            return
        following = self._waiting.popleft() if self._waiting else None
        if self.flow.read_paused and not self._waiting:
            self.flow.resume_reading()
        if following is not None:
            self._begin(*following)
            return
        self._idle_since = self.loop.time()
        self._check_later(self.timeout_keep_alive)

    def end_unread(self) -> None:
        """Stop reading, and close a little later.

        If a socket is closed with unread bytes, the client may lose the answer.
        """
        self._is_ending = True
        self.flow.pause_reading()
        self.loop.call_later(_LINGER_SECONDS, self.transport.close)

    def _check_later(self, seconds: float) -> None:
        """Check the deadlines after at most this long. One timer serves all deadlines of a connection."""
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(min(seconds, _CHECK_SECONDS), self.timeout_keep_alive_handler)

    def _unset_keepalive_if_required(self) -> None:
        """Record that data came.

        The timer stays, because a new one for each request costs as much as reading the request.
        """
        self._idle_since = math.inf

    def timeout_keep_alive_handler(self) -> None:
        self._idle_timer = None
        ends_at = min(self._idle_since + self.timeout_keep_alive, self._head_since + _HEAD_SECONDS)
        left = ends_at - self.loop.time()
        if left <= 0:
            self.end()
        elif left < math.inf:
            self._check_later(left)

    def end(self) -> None:
        """Close once everything is sent, or after some seconds if the client does not read it."""
        self.transport.close()
        self.loop.call_later(_SENT_WITHIN_SECONDS, self.transport.abort)

    def shutdown(self) -> None:
        """Close after the answers in progress, or at once if there are none."""
        if self._current is None:
            self.transport.close()
            return
        last = self._waiting[-1][1] if self._waiting else self._current
        last.keeps_alive = False


_openings: dict[int, tuple[list[tuple[bytes, bytes]], bytes]] = {}  # by status


class Exchange:
    """One request and its answer."""

    __slots__ = (
        "_connection", "_has_body", "_has_started", "_has_told_end", "_head", "_is_chunked", "_leaves_body", "_parts",
        "_version", "_waiter", "_waits_for_100", "headers", "is_gone", "is_whole", "keeps_alive", "on_gone",
        "response_complete", "size_bytes", "task",
    )  # fmt: skip

    def __init__(
        self,
        connection: GatewayConnection,
        headers: dict[bytes, bytes],
        version: str,
        *,
        keeps_alive: bool,
        has_body: bool,
    ) -> None:
        """`has_body`: whether the answer has a body."""
        self.headers = headers
        self.keeps_alive = keeps_alive
        self.size_bytes = 0  # bytes of the body received and not yet taken
        self.is_whole = self.is_gone = self.response_complete = False
        self.task: asyncio.Task[None] | None = None  # the task that answers it
        self.on_gone: Callable[[], None] | None = None  # called if the customer leaves before the end of the answer
        self._connection = connection
        self._version = version
        self._parts: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self._waits_for_100 = headers.get(b"expect", b"").lower() == b"100-continue"
        self._has_told_end = self._has_started = self._is_chunked = self._leaves_body = False
        self._has_body = has_body
        self._head = b""

    # --- Called by the connection.

    def add_body(self, content: bytes) -> int:
        """Add a part of the body; return the bytes not yet taken."""
        self._parts.append(content)
        self.size_bytes += len(content)
        if self._waiter is not None:
            self._wake()
        return self.size_bytes

    def end_body(self) -> None:
        self.is_whole = True
        if self._waiter is not None:
            self._wake()

    def mark_gone(self) -> None:
        self.is_gone = True
        self._wake()
        if self.on_gone is not None:
            self.on_gone()

    async def run(self, application: Application, scope: Scope) -> None:
        """Have the request answered, and end the answer if the application did not."""
        try:
            await application(scope, self.receive, self.send)
        except BaseException as error:
            self._connection.logger.error("Exception in ASGI application\n", exc_info=error)
        finally:
            self._connection.tasks.discard(self.task)
            self.task = None
            if not (self.response_complete or self.is_gone):
                self.keeps_alive = False
                if self._has_started:
                    self._connection.end()
                else:
                    self.answer(500, b"content-type: text/plain; charset=utf-8\r\n", b"Internal Server Error")

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- Reading.

    async def news(self) -> None:
        """Wait for more of the body, its end, the end of the answer, or the customer's disconnection."""
        if self._waits_for_100:
            self._waits_for_100 = False
            self._connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._connection.flow.resume_reading()
        self._waiter = self._connection.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def take_body(self) -> bytes:
        """Return the part of the body received so far."""
        content = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self.size_bytes = 0
        if self._connection.flow.read_paused:
            self._connection.flow.resume_reading()
        return content

    async def receive(self) -> Message:
        """Receive a message as ASGI defines it."""
        while not (self._parts or self.is_gone or self.response_complete or self.is_whole > self._has_told_end):
            await self.news()
        if self.is_gone or self.response_complete:
            return {"type": "http.disconnect"}
        self._has_told_end = self.is_whole
        return {"type": "http.request", "body": self.take_body(), "more_body": not self.is_whole}

    # --- Answering.

    @property
    def is_blocked(self) -> bool:
        """Return whether the customer reads more slowly than the answer is written.

        If so, wait until it is `drained`.
        """
        return self._connection.flow.write_paused and not self.is_gone

    async def drained(self) -> None:
        await self._connection.flow.drain()

    def answer(self, status: int, lines: bytes, body: bytes) -> None:
        """Send a whole answer. `lines` are its headers, each with its line end."""
        self.start(status, b"%bcontent-length: %d\r\n" % (lines, len(body)), has_length=True)
        self.write(body, more=False)

    def start(self, status: int, lines: bytes, *, has_length: bool = False) -> None:
        """Begin an answer. Its head is sent with the first part. Without a length it is sent in chunks."""
        self._has_started = True
        self._is_chunked = not has_length and self._has_body and self._version == "1.1" and status not in _WITHOUT_BODY
        if self._waits_for_100 and not self.is_whole:
            self.keeps_alive = False  # the body may or may not come nevertheless
        declared = self.headers.get(b"content-length", b"")
        most_left = int(declared) - self.size_bytes if declared.isdigit() else math.inf
        self._leaves_body = not self.is_whole and most_left > _MAX_DISCARDED
        if self._leaves_body:
            self.keeps_alive = False
        coding = b"transfer-encoding: chunked\r\n" if self._is_chunked else b""
        closing = b"" if self.keeps_alive else b"connection: close\r\n"
        self._head = b"%b%b%b%b\r\n" % (self._connection.opening(status), lines, coding, closing)

    def write(self, content: bytes, *, more: bool) -> None:
        """Send a part of the answer, or its end. Does nothing once the customer is gone."""
        if self.is_gone:
            return
        if not self._has_body:
            content = b""
        elif self._is_chunked:
            part = b"%x\r\n%b\r\n" % (len(content), content) if content else b""
            content = part if more else part + b"0\r\n\r\n"
        if self._head:
            content, self._head = self._head + content, b""
        self._connection.transport.write(content)
        if not more:
            self.response_complete = True
            if self._waiter is not None:
                self._wake()
            if self._leaves_body:
                self._connection.end_unread()
            elif not self.keeps_alive:
                self._connection.transport.close()
            self._connection.on_response_complete()

    async def send(self, message: Message) -> None:
        """Send a message as ASGI defines it."""
        if message["type"] == "http.response.start":
            headers = {name.lower(): value for name, value in message.get("headers", ())}
            if b"close" in headers.pop(b"connection", b"").lower():
                self.keeps_alive = False
            lines = b"".join([b"%b: %b\r\n" % pair for pair in headers.items()])
            self.start(message["status"], lines, has_length=b"content-length" in headers)
            return
        if self.is_blocked:
            await self.drained()
        self.write(message.get("body", b""), more=message.get("more_body", False))
