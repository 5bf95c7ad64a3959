"""Limits of a request body before it is parsed: bytes, time and tokens.

A body is held in memory until it is complete, and parsing it blocks everything else. So both are limited to what the
installation's models could use, and counted against the sending organization.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from apps.core.errors import DomainError, RateLimited, Status
from apps.core.http.asgi import DEFAULT_BODY_BYTES, MIB
from apps.core.http.fair_shares import Places, TooManyWaiting
from apps.interfaces.gateway.http.held_bytes import HeldBytes

Parsed = TypeVar("Parsed")

BODY_SECONDS = 30.0
MAX_OF_ONE = 32 * MIB  # of one organization's bodies
MAX_OF_ALL = 256 * MIB
LARGE_BYTES = 64 * 1024  # larger bodies are parsed one at a time, in a thread
_PARSING_WAITS, _PARSING_SECONDS = 512, 10.0  # the first of each organization, which has no more requests at once

_FIXED_BYTES = 256 * 1024  # for tools, schemas and JSON syntax
_BYTES_PER_TOKEN = 16  # English has about 4; JSON writes some characters with 12
_BYTES_PER_TOKEN_UNREAD, _MAX_TOKENS_UNREAD = 16, 32_768


class BodyTooSlow(DomainError):
    """The body was not complete in time."""

    code = "request_timeout"
    status = Status.TIMED_OUT


def largest_body(context_length: int, *, takes_media: bool) -> int:
    """Return the size in bytes of the largest body that a model with this context can use, images included."""
    if takes_media:
        return DEFAULT_BODY_BYTES
    return min(DEFAULT_BODY_BYTES, _FIXED_BYTES + context_length * _BYTES_PER_TOKEN)


def tokens_unread(body_bytes: int) -> int:
    """Return the number of tokens that a body counts as before it is parsed.

    A body refused before parsing counts as this number too.
    """
    return min(body_bytes // _BYTES_PER_TOKEN_UNREAD, _MAX_TOKENS_UNREAD)


class Bodies(HeldBytes):
    """Counts the bytes of bodies in memory, and parses large ones in turns. Use inside one event loop."""

    def __init__(self) -> None:
        advice = "Send fewer large requests at a time."
        super().__init__("bodies", most_of_one=MAX_OF_ONE, most_of_all=MAX_OF_ALL, advice=advice)
        self._turns = Places(1, most_waiting=_PARSING_WAITS, wait_seconds=_PARSING_SECONDS)

    async def parse_aside(self, organization_id: str, parse: Callable[[bytes], Parsed], raw: bytes) -> Parsed:
        """Parse a large body in a thread when it is the organization's turn; return the result of `parse`.

        The interpreter runs one thread at a time, so more at once would only slow down the event loop. Raises
        RateLimited and the errors of `parse`.
        """
        try:
            await self._turns.take(organization_id, most=1)
        except TooManyWaiting:
            raise RateLimited("Your organization sends too many large requests at once. Send fewer.") from None
        task = asyncio.ensure_future(asyncio.to_thread(parse, raw))
        task.add_done_callback(lambda done: self._end_turn(organization_id, done))
        return await asyncio.shield(task)  # the thread goes on if the customer leaves

    def _end_turn(self, organization_id: str, task: "asyncio.Future[Parsed]") -> None:
        self._turns.give_back(organization_id)
        if not task.cancelled():
            task.exception()  # retrieved here because the customer may have left
