"""The customer's side of one request: its body, its answer, and whether the customer is still connected."""

import asyncio
from collections.abc import Callable

from apps.batches import signatures
from apps.core.errors import DomainError
from apps.core.http.asgi import (
    DEFAULT_BODY_BYTES,
    REQUEST_ID_HEADER,
    ClientGone,
    Scope,
    TooLarge,
    require_unencoded,
    usable_request_id,
)
from apps.core.http.connections import is_proxy
from apps.core.http.origin import network_of
from apps.core.ids import new_ulid
from apps.core.messages import tracing
from apps.interfaces.gateway.errors import body_of, event_of, headers_of
from apps.interfaces.gateway.http.bodies import BODY_SECONDS, BodyTooSlow
from apps.interfaces.gateway.http.connections import EXCHANGE, Exchange

# The engine does not wait for a slow reader, so its output piles up here. Such a reader is cut off.
MAX_READ_SECONDS = 60
_REQUEST_ID = REQUEST_ID_HEADER.encode()
_TRACEPARENT = tracing.HEADER.encode()
_BATCH_REQUEST = signatures.HEADER.encode()
_STREAM_LINES = (
    b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\nx-accel-buffering: no\r\n"
)
_JSON_LINE = b"content-type: application/json\r\n"


class Client:
    """Both directions of one request's connection."""

    __slots__ = (
        "_exchange",
        "_has_started",
        "_peer",
        "authorization",
        "batch_key_id",
        "is_batched",
        "limit_headers",
        "project",
        "request_id",
        "ulid",
    )

    def __init__(self, scope: Scope) -> None:
        self._exchange: Exchange = scope[EXCHANGE]
        self._peer: tuple[str, int] | None = scope.get("client")
        headers = self._exchange.headers
        self.authorization = headers.get(b"authorization", b"").decode("latin-1")
        self.project = headers.get(b"openai-project", b"").decode("latin-1").strip()
        batched = headers.get(_BATCH_REQUEST)
        named = signatures.read(batched.decode("latin-1"), authorization=self.authorization) if batched else None
        self.is_batched = named is not None
        self.ulid, self.batch_key_id = named or (new_ulid(), "")
        given = headers.get(_REQUEST_ID)
        self.request_id = (given and usable_request_id(given.decode("latin-1"))) or f"req_{self.ulid}"
        self.limit_headers: Callable[[], bytes] = bytes  # called when the answer begins, once the key is known
        self._has_started = False

    def address(self) -> str:
        """Return the client's network; empty if it is unknown."""
        return address_of(self._peer, self._exchange.headers.get(b"x-forwarded-for", b""))

    @property
    def traceparent(self) -> str:
        """Return the trace context that the client sent, unchecked; empty without one."""
        return self._exchange.headers.get(_TRACEPARENT, b"").decode("latin-1")

    @property
    def declared_bytes(self) -> int:
        """Return the body's length from the request's head; zero if the head has none."""
        declared = self._exchange.headers.get(b"content-length", b"")
        return int(declared) if declared.isdigit() else 0

    async def read_body(self, *, most_bytes: int = DEFAULT_BODY_BYTES, count: Callable[[int], None]) -> bytes:
        """Return the body. If it comes in parts, `count` is called with the bytes received so far, and may raise.

        Raises UnsupportedMediaType, TooLarge, BodyTooSlow, ClientGone.
        """
        exchange = self._exchange
        require_unencoded(exchange.headers.get(b"content-encoding", b"").decode("latin-1"))
        if self.declared_bytes > most_bytes:
            raise _too_large(most_bytes)
        if not exchange.is_whole:
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    await self._wait_for_body(most_bytes, count)
            except TimeoutError as error:
                exchange.keeps_alive = False
                raise BodyTooSlow(f"The request body did not arrive within {BODY_SECONDS:.0f} s.") from error
        if exchange.size_bytes > most_bytes:
            raise _too_large(most_bytes)
        return exchange.take_body()

    async def _wait_for_body(self, most_bytes: int, count: Callable[[int], None]) -> None:
        exchange = self._exchange
        while not exchange.is_whole and exchange.size_bytes <= most_bytes:
            if exchange.is_gone:
                raise ClientGone
            await exchange.news()
            count(exchange.size_bytes)

    @property
    def is_gone(self) -> bool:
        return self._exchange.is_gone

    def watch(self) -> "_Watched":
        """Stop the block as soon as the customer leaves. Raises ClientGone."""
        return _Watched(self._exchange)

    def start_stream(self) -> None:
        self._has_started = True
        self._exchange.start(200, _STREAM_LINES + self._lines())

    async def send_part(self, content: bytes) -> None:
        """Send a part of the stream. Raises ClientGone if the customer does not read."""
        await self._readable()
        self._exchange.write(content, more=True)

    async def end(self, content: bytes) -> None:
        await self._readable()
        self._exchange.write(content, more=False)

    async def send_json(self, content: bytes) -> None:
        if self._exchange.is_blocked:
            await self._readable()
        self._has_started = True
        self._exchange.answer(200, _JSON_LINE + self._lines(), content)

    async def refuse(self, error: DomainError) -> None:
        """Answer with the error. In the middle of a stream, end it with an error event and no [DONE]."""
        if self._has_started:
            await self.end(event_of(error))
            return
        await self._readable()
        self._has_started = True
        lines = headers_of(error, self.request_id) + self.limit_headers()
        self._exchange.answer(int(error.status), lines, body_of(error))

    def _lines(self) -> bytes:
        return b"x-request-id: %b\r\n%b" % (self.request_id.encode(), self.limit_headers())

    async def _readable(self) -> None:
        """Wait until the customer has read most of the previous output.

        Raises ClientGone after MAX_READ_SECONDS.
        """
        if self._exchange.is_blocked:
            try:
                async with asyncio.timeout(MAX_READ_SECONDS):
                    await self._exchange.drained()
            except TimeoutError as error:
                raise ClientGone from error


def _too_large(most_bytes: int) -> TooLarge:
    return TooLarge(f"The request body is larger than {most_bytes // 1024:,} KiB, the most that a model here can use.")


class _Watched:
    """A block whose task is cancelled if the customer leaves before the block ends."""

    __slots__ = ("_exchange", "_has_cancelled", "_task")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._has_cancelled = False

    def __enter__(self) -> None:
        assert self._exchange.task is not None
        self._task = self._exchange.task
        self._exchange.on_gone = self._stop
        if self._exchange.is_gone:
            self._stop()

    def _stop(self) -> None:
        self._has_cancelled = True
        self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        self._exchange.on_gone = None
        if self._has_cancelled and kind is asyncio.CancelledError:
            self._task.uncancel()
            raise ClientGone from None


def address_of(peer: tuple[str, int] | None, forwarded: bytes) -> str:
    """Return the network that limits count as one: an IPv4 address, or the /64 of one IPv6 customer.

    The front door reaches the gateway over a Unix socket, and nginx from an address in FORWARDED_ALLOW_IPS. Both
    replace `X-Forwarded-For` with the address of their own client. The header of any other peer is ignored.

    `forwarded` is the header of a request. The result is empty if the front did not name its client.
    """
    host = peer[0] if peer else ""
    if not host or is_proxy(host):
        host = forwarded.rpartition(b",")[2].strip().decode("latin-1")
    try:
        return network_of(host)
    except ValueError:
        return ""
