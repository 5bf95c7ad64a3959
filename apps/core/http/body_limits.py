"""Limits on the size and the duration of a request's body, enforced before any view runs."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from apps.core.errors import DomainError
from apps.core.http.asgi import (
    DEFAULT_BODY_BYTES,
    MIB,
    Application,
    Message,
    Receive,
    Scope,
    Send,
    TooLarge,
    TooSlow,
    declared_length,
    send_error,
)

# Limits for slow bodies: the longest silence, and the fewest bytes per second after the first minute.
_IDLE_SECONDS, _FREE_SECONDS, _MIN_BYTES_PER_SECOND = 30.0, 60.0, 8 * 1024


Refuse = Callable[[Scope, Send, DomainError], Awaitable[None]]


class BodyAllowance(NamedTuple):
    """The most bytes of a request's body to read, and the error for a larger body if it is not "too large"."""

    limit_bytes: int
    refusal: DomainError | None = None


class BodyLimit(NamedTuple):
    """The largest body of requests whose path starts with `prefix`.

    `judge` decides on one request before its body is read. It returns the size that this request may send, at most
    `limit_bytes`, or raises a DomainError to refuse it. Bodies up to the default limit are not judged unless
    `is_judged_always`.
    """

    method: str
    prefix: str
    limit_bytes: int
    judge: Callable[[Scope], Awaitable[BodyAllowance]] | None = None
    is_judged_always: bool = False


class LimitBodies:
    """ASGI layer that refuses a body above its path's limit before it fills a disk, even if it declared no length.

    `refuse` answers such a request; without it, the answer is an error object.

    Django writes the whole body to disk before any view runs. A limit or a permission check in a view is therefore too
    late, so paths with large bodies are judged here.
    """

    def __init__(
        self, application: Application, limits: Sequence[BodyLimit] = (), *, refuse: Refuse | None = None
    ) -> None:
        self._application = application
        self._limits = limits
        self._refuse = refuse or _refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        try:
            allowance = await self._allowance(scope)
        except DomainError as refusal:
            await self._refuse(scope, send, refusal)
            return
        error = allowance.refusal or TooLarge(
            f"The request body is larger than {allowance.limit_bytes / MIB:.0f} MiB.", limit_bytes=allowance.limit_bytes
        )
        if declared_length(scope) > allowance.limit_bytes:
            await self._refuse(scope, send, error)
            return
        counted = _CountedBody(receive, send, limit_bytes=allowance.limit_bytes)
        await self._application(scope, counted.receive, counted.send)
        if counted.is_exceeded and not counted.has_answered:
            await self._refuse(scope, send, error)
        elif counted.is_late and not counted.has_answered:
            await self._refuse(scope, send, TooSlow("The request body did not arrive in time. Send it again."))

    async def _allowance(self, scope: Scope) -> BodyAllowance:
        matching = (
            limit
            for limit in self._limits
            if limit.method == scope["method"] and scope["path"].startswith(limit.prefix)
        )
        limit = next(matching, None)
        if limit is None:
            return BodyAllowance(DEFAULT_BODY_BYTES)
        is_small = 0 < declared_length(scope) <= DEFAULT_BODY_BYTES
        if limit.judge is None or (is_small and not limit.is_judged_always):
            return BodyAllowance(limit.limit_bytes)
        allowance = await limit.judge(scope)
        return allowance._replace(limit_bytes=min(allowance.limit_bytes, limit.limit_bytes))


async def _refuse(scope: Scope, send: Send, error: DomainError) -> None:
    await send_error(send, error)


class _CountedBody:
    """Counts the bytes that the application reads. Past the limits, the application sees a client that disconnected."""

    def __init__(self, receive: Receive, send: Send, *, limit_bytes: int) -> None:
        self._receive, self._send = receive, send
        self.limit_bytes = limit_bytes
        self.read_bytes = 0
        self.is_late = self.has_answered = False
        self._is_whole = False
        self._began = asyncio.get_running_loop().time()

    @property
    def is_exceeded(self) -> bool:
        return self.read_bytes > self.limit_bytes

    async def receive(self) -> Message:
        try:
            async with asyncio.timeout(self._patience_seconds()):
                message = await self._receive()
        except TimeoutError:
            self.is_late = True
            return {"type": "http.disconnect"}
        self.read_bytes += len(message.get("body", b""))
        self._is_whole = not message.get("more_body", False)
        return {"type": "http.disconnect"} if self.is_exceeded else message

    def _patience_seconds(self) -> float | None:
        """Return the seconds to wait for more.

        None means forever, because after a complete body only a disconnect can follow.
        """
        if self._is_whole:
            return None
        spent = asyncio.get_running_loop().time() - self._began
        return max(0.0, min(_IDLE_SECONDS, _FREE_SECONDS + self.read_bytes / _MIN_BYTES_PER_SECOND - spent))

    async def send(self, message: Message) -> None:
        self.has_answered = True
        await self._send(message)
