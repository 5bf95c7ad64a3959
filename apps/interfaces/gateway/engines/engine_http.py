"""HTTP/1.1 client of the engines' proxies: persistent connections with one POST at a time, and streamed answers.

A general client would cost more per request than all other work of the gateway. Replicas need no redirects, cookies,
compression or proxies.
"""

import asyncio
import math
import socket
import ssl
import time
from collections import deque
from typing import cast
from urllib.parse import urlsplit

import httptools

from apps.contracts.addresses.replicas import AddressRefused, AddressRules, is_ip
from apps.interfaces.gateway.http.transports import CoalescingTransport

CONNECT_SECONDS = 5.0
FIRST_TOKEN_SECONDS = 600.0  # an engine may queue the request; if the customer disconnects, the wait ends
IDLE_SECONDS = 120.0  # between two parts of an answer
_KEEP_ALIVE_SECONDS = 15.0  # below the proxy's 75, so that it never closes a connection just before its next use
_MAX_BUFFERED_BYTES = 256 * 1024
_CHECK_SECONDS = 5.0  # longest interval between checks; a timer for each part of an answer costs as much as reading it


class Unreachable(Exception):
    """No connection could be made, so the replica never saw the request."""


class Broken(Exception):
    """The connection ended, fell silent or broke HTTP before the answer was complete."""


class EngineResponse:
    """The status and body of one answer. Close it: closing before the end stops the engine."""

    __slots__ = ("_connection", "status")

    def __init__(self, connection: "_Connection", status: int) -> None:
        self._connection = connection
        self.status = status

    @property
    def has_ended(self) -> bool:
        """Return whether the body was read to its end."""
        return self._connection.is_drained

    async def read(self, seconds: float | None = None) -> bytes:
        """Return the bytes received, waiting if there are none yet; empty at the end. Raises Broken.

        It waits IDLE_SECONDS, or these.
        """
        return await self._connection.read(seconds)

    async def read_all(self, most_bytes: int) -> bytes:
        """Return the body, truncated to `most_bytes`. Raises Broken."""
        parts, size = [], 0
        while size < most_bytes and (content := await self.read()):
            parts.append(content)
            size += len(content)
        return b"".join(parts)[:most_bytes]

    def read_nowait(self) -> bytes:
        return self._connection.take_received()

    def close(self) -> None:
        self._connection.let_go()


class ReplicaClient:
    """The connections to one replica, at `unix:///path` or `http(s)://host:port`. Use inside one event loop.

    If `rules` are given, no connection is made to an address that they refuse. Host names are resolved for each
    connection.
    """

    def __init__(self, url: str, rules: AddressRules | None = None) -> None:
        self._rules = rules
        parts = urlsplit(url)
        self._path = parts.path if parts.scheme == "unix" else None
        self._host = parts.hostname or "replica"
        self._is_ip = is_ip(self._host)
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host_header = parts.netloc.rpartition("@")[2] or "replica"
        self._idle: deque[_Connection] = deque()
        self._openings: dict[tuple[str, str], bytes] = {}

    async def post(
        self, path: str, *, token: str, request_id: str, body: bytes, traceparent: str = ""
    ) -> EngineResponse:
        """Send the request; return its answer once the status is known. Raises Unreachable, Broken."""
        opening = self._openings.get((path, token)) or self._open(path, token)
        if traceparent:
            opening += b"Traceparent: %b\r\n" % traceparent.encode("ascii")
        content = b"%bX-Request-Id: %b\r\nContent-Length: %d\r\n\r\n%b" % (
            opening, request_id.encode("ascii"), len(body), body
        )  # fmt: skip
        while (kept := self._take_idle()) is not None:
            try:
                return await kept.send(content)
            except Broken:
                if kept.has_answered or kept.was_silent:
                    raise
                # The replica closed the connection while it was taken from the idle ones.
        return await (await self._connect()).send(content)

    def _open(self, path: str, token: str) -> bytes:
        """Return the first header lines of requests to the path.

        They can be cached, because there are few paths and one token at a time.
        """
        self._openings = {known: opening for known, opening in self._openings.items() if known[1] == token}
        opening = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host_header}\r\nAuthorization: Bearer {token}\r\n"
            "Content-Type: application/json\r\n"
        )
        self._openings[path, token] = found = opening.encode("ascii")
        return found

    def _take_idle(self) -> "_Connection | None":
        oldest = time.monotonic() - _KEEP_ALIVE_SECONDS
        while self._idle:
            kept = self._idle.pop()
            if kept.is_open and kept.idle_since > oldest:
                return kept
            kept.abort()
        return None

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                if self._path is not None:
                    path = self._rules.check_socket(self._path) if self._rules else self._path
                    return (await loop.create_unix_connection(lambda: _Connection(self._idle), path))[1]
                return await self._connect_to_one(loop)
        except (OSError, TimeoutError, AddressRefused) as error:
            raise Unreachable(repr(error)) from error

    async def _connect_to_one(self, loop: asyncio.AbstractEventLoop) -> "_Connection":
        """Return a connection to the first address of the host that accepts one. Raises OSError, AddressRefused."""
        failure: OSError | None = None
        name = self._host if self._tls else None
        hosts = [self._host]
        if not self._is_ip:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            hosts = list(dict.fromkeys(str(address[0]) for *_, address in found))
        for host in hosts:
            if self._rules is not None:
                self._rules.check_ip(host)
            try:
                made = await loop.create_connection(
                    lambda: _Connection(self._idle), host, self._port, ssl=self._tls, server_hostname=name
                )
            except OSError as error:
                failure = error
            else:
                return made[1]
        raise failure or OSError(f"{self._host} has no address")

    def close(self) -> None:
        while self._idle:
            self._idle.pop().abort()


class _Connection(asyncio.Protocol):
    """One connection; returns to `shelf` after a complete answer."""

    def __init__(self, shelf: "deque[_Connection]") -> None:
        self._shelf = shelf
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._check: asyncio.TimerHandle | None = None
        self._silent_at = math.inf  # deadline for the next byte
        self._parts: list[bytes] = []
        self._size_bytes = 0
        self._fault: str | None = None
        self._is_whole = False
        self._is_paused = False
        self._keeps_alive = False
        self.has_answered = False
        self.was_silent = False
        self.is_open = False
        self.idle_since = 0.0

    # --- Called for a request.

    async def send(self, content: bytes) -> EngineResponse:
        """Send the request; return its answer. Raises Broken."""
        assert self._transport is not None
        self.has_answered = self._is_whole = False
        self._transport.write(content)
        try:
            while not self.has_answered:
                await self._wait(FIRST_TOKEN_SECONDS)
        except BaseException:
            self.abort()  # no other code holds this connection yet
            raise
        return EngineResponse(self, self._parser.get_status_code())

    async def read(self, seconds: float | None = None) -> bytes:
        """Return the bytes received, waiting as long, or IDLE_SECONDS, if there are none yet. Raises Broken."""
        while not self._parts and not self._is_whole:
            await self._wait(IDLE_SECONDS if seconds is None else seconds)
        return self.take_received()

    async def _wait(self, seconds: float) -> None:
        """Wait for any data. Raises Broken."""
        if self._fault is not None:
            raise Broken(self._fault)
        self._waiter = self._loop.create_future()
        self._expect_within(seconds)
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _expect_within(self, seconds: float) -> None:
        now = self._loop.time()
        self._silent_at = now + seconds
        if self._check is not None and self._check.when() > self._silent_at:
            self._check.cancel()
            self._check = None
        if self._check is None:
            self._check = self._loop.call_at(min(now + _CHECK_SECONDS, self._silent_at), self._check_silence)

    def _check_silence(self) -> None:
        self._check = None
        if self._waiter is None:
            return
        left = self._silent_at - self._loop.time()
        if left > 0:
            self._expect_within(left)
        else:
            self.was_silent = True
            self._fail("silent for too long")

    @property
    def is_drained(self) -> bool:
        return self._is_whole and not self._parts

    def take_received(self) -> bytes:
        content = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._size_bytes = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return content

    def let_go(self) -> None:
        """Keep the connection for the next request if this answer is complete; otherwise end it."""
        if self.is_drained and self._keeps_alive and self.is_open:
            self.idle_since = time.monotonic()
            self._shelf.append(self)
        else:
            self.abort()

    def abort(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # --- Called by asyncio and the parser.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        own = cast(asyncio.Transport, transport)  # uvloop's class is not a subclass
        self._transport = CoalescingTransport(own, self._loop)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"not HTTP: {error!r}")
            return
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._fail(repr(exc) if exc else "closed")

    def _fail(self, reason: str) -> None:
        self._fault = self._fault or reason
        self.abort()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def on_headers_complete(self) -> None:
        self.has_answered = True

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._size_bytes += len(body)
        if self._size_bytes > _MAX_BUFFERED_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self._is_whole = True
        self._keeps_alive = self._parser.should_keep_alive()
