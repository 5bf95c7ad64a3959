"""The customer's side of one request: its body, its answer, and whether anybody still waits for it."""

import asyncio
from collections import deque
from collections.abc import Callable

from apps.core.errors import DomainError
from apps.core.http import (
    DEFAULT_BODY_BYTES,
    MIB,
    REQUEST_ID_HEADER,
    Message,
    Receive,
    Scope,
    Send,
    TooLarge,
    declared_length,
    usable_request_id,
)
from apps.core.ids import new_ulid
from apps.gateway.errors import body_of, event_of, headers_of
from apps.gateway.limits import Headers

# The engine does not wait for a slow reader, so what it wrote piles up here: such a reader is cut off.
SLOWEST_READ_SECONDS = 60
_UNWATCHED_SECONDS = 0.05  # a customer who leaves sooner is noticed then
_REQUEST_ID = REQUEST_ID_HEADER.encode()
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_JSON = (b"content-type", b"application/json")


class ClientGone(Exception):
    """The customer closed the connection."""


class Client:
    """One request's connection, both ways."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        headers = dict(scope["headers"])
        self.authorization = _text(headers.get(b"authorization"))
        self.ulid = new_ulid()
        self.request_id = usable_request_id(_text(headers.get(_REQUEST_ID))) or f"req_{self.ulid}"
        self.limit_headers: Callable[[], Headers] = list  # asked when the answer begins, once the key is known
        self._has_started = False

    async def read_body(self) -> bytes:
        """Raises TooLarge, ClientGone."""
        if declared_length(self._scope) > DEFAULT_BODY_BYTES:
            raise _too_large()
        parts, size, more = [], 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > DEFAULT_BODY_BYTES:
                raise _too_large()
            more = message.get("more_body", False)
        return b"".join(parts)

    async def left(self) -> None:
        """Return when the customer has closed the connection."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start_stream(self) -> None:
        headers = [*_STREAM_HEADERS, (_REQUEST_ID, self.request_id.encode()), *self.limit_headers()]
        self._has_started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def send_part(self, content: bytes) -> None:
        """Raises ClientGone when the customer does not read."""
        await self._send_body({"type": "http.response.body", "body": content, "more_body": True})

    async def end(self, content: bytes) -> None:
        await self._send_body({"type": "http.response.body", "body": content})

    async def _send_body(self, message: Message) -> None:
        try:
            async with asyncio.timeout(SLOWEST_READ_SECONDS):
                await self._send(message)
        except TimeoutError as error:
            raise ClientGone from error

    async def send_json(self, content: bytes) -> None:
        await self._respond(200, [_JSON, (_REQUEST_ID, self.request_id.encode()), *self.limit_headers()], content)

    async def refuse(self, error: DomainError, *, status: int | None = None) -> None:
        """Answer with the error; in the middle of a stream, end it with an error event and no [DONE]."""
        if self._has_started:
            await self.end(event_of(error))
        else:
            headers = [*headers_of(error, self.request_id), *self.limit_headers()]
            await self._respond(status or int(error.status), headers, body_of(error))

    async def _respond(self, status: int, headers: list[tuple[bytes, bytes]], content: bytes) -> None:
        headers = [*headers, (b"content-length", str(len(content)).encode())]
        self._has_started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": content})


class Watch:
    """Stops what is done for customers who leave.

    Looked for only when a request takes its time, with one timer for all: to be told of a customer who leaves costs as
    much as reading the request. Use inside one event loop.
    """

    def __init__(self) -> None:
        self._young: deque[_Watched] = deque()
        self._is_due = False

    def over(self, client: Client) -> "_Watched":
        """Stop the block as soon as the customer leaves. Raises ClientGone."""
        return _Watched(self, client)

    def begin(self, watched: "_Watched") -> None:
        self._young.append(watched)
        if not self._is_due:
            self._look_at(watched.began_at + _UNWATCHED_SECONDS)

    def _look_at(self, moment: float) -> None:
        self._is_due = True
        asyncio.get_running_loop().call_at(moment, self._look)

    def _look(self) -> None:
        self._is_due = False
        latest = asyncio.get_running_loop().time() - _UNWATCHED_SECONDS
        while self._young:
            if not self._young[0].is_over and self._young[0].began_at > latest:
                self._look_at(self._young[0].began_at + _UNWATCHED_SECONDS)
                return
            self._young.popleft().look_after()


class _Watched:
    """A block whose task is cancelled when the customer leaves before its end."""

    def __init__(self, watch: Watch, client: Client) -> None:
        self._watch, self._client = watch, client
        self._leaving: asyncio.Task[None] | None = None
        self._has_cancelled = self.is_over = False
        self.began_at = 0.0

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self.began_at = asyncio.get_running_loop().time()
        self._watch.begin(self)

    def look_after(self) -> None:
        """Have the block stopped from now on."""
        if not self.is_over:
            self._leaving = asyncio.ensure_future(self._client.left())
            self._leaving.add_done_callback(self._note_gone)

    def _note_gone(self, leaving: "asyncio.Task[None]") -> None:
        if not self.is_over:
            self._has_cancelled = True
            self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        self.is_over = True
        if self._leaving is not None:
            self._leaving.cancel()
        if self._has_cancelled and kind is asyncio.CancelledError:
            self._task.uncancel()
            raise ClientGone from None


def _text(value: bytes | None) -> str | None:
    return value.decode("latin-1") if value is not None else None


def _too_large() -> TooLarge:
    return TooLarge(f"The request body is larger than {DEFAULT_BODY_BYTES / MIB:.0f} MiB.")
