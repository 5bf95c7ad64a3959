"""Places for running requests. A request holds one from the end of its body to the start of its answer.

A body in transit holds no place, and neither does an answer that is read slowly. A client that leaves while it waits
gets no place.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial

from apps.core.errors import RateLimited
from apps.core.http.asgi import Application, Message, Receive, Scope, Send, send_error
from apps.core.http.fair_shares import LateRefusals, Pace, Places, TooManyWaiting

CALLER = "anneal.caller"  # key in the scope: whose credential it is, once that is known
_STRANGERS, _MAX_KNOWN = "strangers", 10_000


class PlacedRequest:
    """One request. `begin` waits for a place and may raise RateLimited; `end` returns the place."""

    def __init__(
        self, begin: Callable[[], Awaitable[None]], end: Callable[[], None], receive: Receive, send: Send
    ) -> None:
        self._begin, self._end, self._receive, self._send = begin, end, receive, send
        self._is_running = self._has_body = False
        self.refusal: RateLimited | None = None
        self.has_answered = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body") and not self._has_body:
            self._has_body = True
            await self._start_unless_left()
            if not self._is_running:
                return {"type": "http.disconnect"}
        return message

    async def _start_unless_left(self) -> None:
        """Wait for a place, or until the client leaves, because it would not read its answer."""
        starting, leaving = asyncio.ensure_future(self._start()), asyncio.ensure_future(self._receive())
        try:
            await asyncio.wait({starting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            has_left = leaving.done()
            starting.cancel()
            leaving.cancel()
            outcome, _ = await asyncio.gather(starting, leaving, return_exceptions=True)
        if has_left:
            self.end()
        elif isinstance(outcome, RateLimited):
            self.refusal = outcome
        elif outcome is not None:
            raise outcome

    async def _start(self) -> None:
        await self._begin()
        self._is_running = True

    async def send(self, message: Message) -> None:
        self.has_answered = True
        self.end()
        await self._send(message)

    def end(self) -> None:
        if self._is_running:
            self._is_running = False
            self._end()


class TakeTurns:
    """ASGI layer that runs a few requests at once. Callers take turns; all unverified credentials share one turn.

    A view that verifies a credential stores its caller under CALLER in the scope, so that a machine is one caller with
    all its tokens. Others verify none: an answer to a signed URL says nothing about the credential beside it.

    A machine's request may wait for database rows, and holds a connection meanwhile. `pace` spreads the calls of each
    caller. It also spreads those of each address without a verified credential, such as calls for signed objects.
    """

    def __init__(
        self,
        application: Application,
        *,
        places: int,
        most_of_one: int,
        most_waiting: int,
        wait_seconds: float,
        pace: Pace,
    ) -> None:
        self._application, self._most_of_one = application, most_of_one
        self._pace, self._refusals = pace, LateRefusals()
        self._places = Places(places, most_waiting=most_waiting, wait_seconds=wait_seconds)
        # Callers by the digests of their verified credentials, most recent last.
        self._known: OrderedDict[str, str] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        credential = dict(scope["headers"]).get(b"authorization", b"")
        digest = hashlib.sha256(credential).hexdigest()
        owner, address = self._known.get(digest, _STRANGERS), (scope.get("client") or ("unknown",))[0]
        caller = owner if credential and owner != _STRANGERS else f"{_STRANGERS} {address}"
        if digest in self._known:
            scope[CALLER] = owner
        try:
            await self._pace.wait_turn(caller)
        except TooManyWaiting:
            await self._refusals.wait(caller)
            await send_error(send, RateLimited("This machine calls too often. Wait a second.", retry_after_seconds=1))
            return

        async def answer(message: Message) -> None:
            if message.get("status", 400) < 400 and CALLER in scope:
                self._known[digest] = scope[CALLER]
                self._known.move_to_end(digest)
                if len(self._known) > _MAX_KNOWN:
                    self._known.popitem(last=False)
            await send(message)

        run = PlacedRequest(partial(self._begin, owner), partial(self._places.give_back, owner), receive, answer)
        try:
            await self._application(scope, run.receive, run.send)
        finally:
            run.end()
        if run.refusal and not run.has_answered:
            await self._refusals.wait(caller)
            await send_error(send, run.refusal)

    async def _begin(self, owner: str) -> None:
        try:
            await self._places.take(owner, most=self._most_of_one)
        except TooManyWaiting:
            text = "Too many calls of this machine are waiting. Try again in 1 s."
            raise RateLimited(text, retry_after_seconds=1) from None
