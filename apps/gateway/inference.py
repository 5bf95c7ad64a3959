"""POST /v1/chat/completions and /v1/completions, as plain ASGI.

A request is identified, limited, parsed, routed and paid for before the engine sees it. An answer is complete for the
customer only when what it used is on the disk; a customer who leaves stops the engine and pays for what it wrote.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from apps.core.errors import DomainError
from apps.core.http import (
    DEFAULT_BODY_BYTES,
    MIB,
    REQUEST_ID_HEADER,
    Message,
    Receive,
    Scope,
    Send,
    ServerFault,
    TooLarge,
    declared_length,
    request_id_from,
)
from apps.core.ids import new_ulid
from apps.gateway.chunks import Assembler, Renderer
from apps.gateway.errors import EngineError, body_of, event_of, headers_of
from apps.gateway.keys import Caller, Keys
from apps.gateway.limits import OpenRequests, RequestRate
from apps.gateway.metering import Metering, Ticket
from apps.gateway.routes import Routes
from apps.gateway.schema import EngineRequest
from apps.gateway.upstreams import EngineAnswer, Upstreams

logger = logging.getLogger(__name__)

# The engine does not wait for a slow reader, so what it wrote piles up here: such a reader is cut off.
SLOWEST_READ_SECONDS = 60
_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Services:
    """What both routes share."""

    keys: Keys
    routes: Routes
    rate: RequestRate
    open_requests: OpenRequests
    metering: Metering
    upstreams: Upstreams


class ClientGone(Exception):
    """The customer closed the connection."""


class Inference:
    """One of the two routes."""

    def __init__(self, services: Services, *, path: str, parse: Callable[[bytes], EngineRequest]) -> None:
        self._services = services
        self._path = path
        self._parse = parse
        self._is_chat = path.endswith("/chat/completions")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        client = _Client(receive, send, request_id_from(_text(headers.get(REQUEST_ID_HEADER.encode()))))
        try:
            caller = await self._services.keys.identify(_text(headers.get(b"authorization")))
            self._services.rate.take(caller.organization_id, per_minute=caller.requests_per_minute)
            request = self._parse(await client.read_body(scope))
            with self._services.open_requests.one_more(caller.organization_id, is_structured=request.is_structured):
                await self._serve(caller, request, client)
        except DomainError as error:
            await client.refuse(error)
        except ClientGone:
            return
        except Exception:
            logger.exception("request %s failed", client.request_id)
            await client.refuse(ServerFault("The server had an error while processing your request."), status=500)

    async def _serve(self, caller: Caller, request: EngineRequest, client: "_Client") -> None:
        """Answer, and stop as soon as the customer leaves."""
        answering = asyncio.ensure_future(self._answer(caller, request, client))
        leaving = asyncio.ensure_future(client.left())
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            answering.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
        if not answering.cancelled():
            answering.result()

    async def _answer(self, caller: Caller, request: EngineRequest, client: "_Client") -> None:
        route = await self._services.routes.find(request.model_name, organization_id=caller.organization_id)
        ulid = new_ulid()
        ticket = await self._services.metering.admit(caller, route, request, usage_id=f"use_{ulid}")
        renderer = Renderer(
            id=f"{'chatcmpl' if self._is_chat else 'cmpl'}-{ulid}",
            created=int(time.time()),
            model_name=route.model_name,
            is_chat=self._is_chat,
            wants_usage=request.wants_usage,
        )
        try:
            async with self._services.upstreams.answer(
                route, request, path=self._path, cache_salt=caller.cache_salt, request_id=ulid, meter=ticket.meter
            ) as answer:
                ticket.note_first_token()
                deliver = _stream if request.is_streamed else _send_whole
                await deliver(answer, ticket, renderer, client)
        except DomainError:
            _finish(ticket, "error", is_charged=False)
            raise
        finally:
            # Cancelled because the customer left, too slow a reader, or a bug: what the engine wrote is used.
            _finish(ticket, "aborted", is_charged=True)


def _finish(ticket: Ticket, finish: str, *, is_charged: bool) -> None:
    if not ticket.is_finished:
        ticket.finish(finish, is_charged=is_charged)


async def _stream(answer: EngineAnswer, ticket: Ticket, renderer: Renderer, client: "_Client") -> None:
    await client.start_stream()
    async for chunks in answer.batches():
        if events := b"".join(renderer.event(chunk) for chunk in chunks if chunk.choices):
            await client.send_part(events)
    await _written(ticket)
    usage = renderer.usage_event(ticket.meter.usage()) if renderer.wants_usage else b""
    await client.end(usage + _DONE)


async def _send_whole(answer: EngineAnswer, ticket: Ticket, renderer: Renderer, client: "_Client") -> None:
    assembler = Assembler()
    async for chunks in answer.batches():
        for chunk in chunks:
            assembler.add(chunk)
    await _written(ticket)
    await client.send_json(renderer.whole(assembler, ticket.meter.usage()))


async def _written(ticket: Ticket) -> None:
    """Wait until what the answer used is on the disk; only then may the customer have the end of it.

    A customer who leaves meanwhile ends the waiting, not the writing.
    """
    try:
        await asyncio.shield(ticket.finish(ticket.meter.finish))
    except OSError as error:
        raise EngineError("The answer could not be completed. Try the request again.") from error


def _text(value: bytes | None) -> str | None:
    return value.decode("latin-1") if value is not None else None


# --- The customer's connection ----------------------------------------------------------------------------------------


class _Client:
    def __init__(self, receive: Receive, send: Send, request_id: str) -> None:
        self._receive, self._send = receive, send
        self.request_id = request_id
        self._has_started = False

    async def read_body(self, scope: Scope) -> bytes:
        """Raises TooLarge, ClientGone."""
        if declared_length(scope) > DEFAULT_BODY_BYTES:
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
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            (REQUEST_ID_HEADER.encode(), self.request_id.encode()),
        ]
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
        headers = [(b"content-type", b"application/json"), (REQUEST_ID_HEADER.encode(), self.request_id.encode())]
        await self._respond(200, headers, content)

    async def refuse(self, error: DomainError, *, status: int | None = None) -> None:
        """Answer with the error; in the middle of a stream, end it with an error event and no [DONE]."""
        if self._has_started:
            await self.end(event_of(error))
        else:
            await self._respond(status or int(error.status), headers_of(error, self.request_id), body_of(error))

    async def _respond(self, status: int, headers: list[tuple[bytes, bytes]], content: bytes) -> None:
        headers = [*headers, (b"content-length", str(len(content)).encode())]
        self._has_started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": content})


def _too_large() -> TooLarge:
    return TooLarge(f"The request body is larger than {DEFAULT_BODY_BYTES / MIB:.0f} MiB.")
