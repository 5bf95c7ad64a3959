"""Code that every HTTP process runs around a view: request ids, limits on bodies, and pages for errors.

Machine paths (the public APIs, the worker API, signed objects) get OpenAI-shaped JSON; people get a page.
"""

import asyncio
import json
import os
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from functools import wraps
from http import HTTPStatus
from typing import IO, Any, NamedTuple, cast
from urllib.parse import unquote

from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.conf import settings
from django.core.handlers.asgi import ASGIHandler, ASGIRequest
from django.db import connection
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.template.loader import render_to_string
from django.utils.deprecation import MiddlewareMixin

from apps.core.errors import DomainError, NotFound, Status
from apps.core.ids import new_id

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

MACHINE_PREFIXES = ("/v1/", "/api/", "/internal/", "/objects/")
REQUEST_ID_HEADER = "x-request-id"
PROCESSOR_SECONDS = "anneal.processor_seconds"  # key in the scope
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{8,64}")

MIB = 1024 * 1024
DEFAULT_BODY_BYTES = 4 * MIB

# Limits for slow bodies: the longest silence, and the fewest bytes per second after the first minute.
_IDLE_SECONDS, _FREE_SECONDS, _MIN_BYTES_PER_SECOND = 30.0, 60.0, 8 * 1024


class TooLarge(DomainError):
    """The body of a request exceeds the limit of its path."""

    code = "request_too_large"
    status = Status.TOO_LARGE


class UnknownUrl(NotFound):
    code = "unknown_url"


class TooSlow(DomainError):
    """The body of a request did not arrive in time."""

    code = "request_timeout"
    status = Status.TIMED_OUT
    is_retryable = True


class ClientGone(Exception):
    """The client closed the connection before its answer was complete, or reads none of it."""


class ServerFault(DomainError):
    """A bug or a broken dependency. The message reveals no internals."""

    code = "server_error"
    type = "server_error"


def request_id_from(value: str | None) -> str:
    """Return the caller's request id if it is safe to log and echo; otherwise a new one."""
    return usable_request_id(value) or new_id("req")


def usable_request_id(value: str | None) -> str | None:
    return value if value and _REQUEST_ID.fullmatch(value) else None


class MeasuredRequest(ASGIRequest):
    """A request whose length is that of its received body.

    Django and REST framework read no body without a length, and a chunked body has none (RFC 9112 §7.1).
    """

    def __init__(self, scope: Scope, body_file: IO[bytes]) -> None:
        super().__init__(scope, body_file)
        self.META["CONTENT_LENGTH"] = str(body_file.seek(0, os.SEEK_END))
        body_file.seek(0)


class DjangoApplication(ASGIHandler):
    """Django as an ASGI application. Call `django.setup()` first.

    A client may read its answer slowly, so an answer is sent without holding a database connection. When a request
    ends, its scope has the processor time of the request's own thread and of its error page.
    """

    request_class = MeasuredRequest

    async def handle(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        try:
            await super().handle(scope, receive, send)
        finally:
            scope[PROCESSOR_SECONDS] = scope.get(PROCESSOR_SECONDS, 0.0) + await sync_to_async(_end_of_thread)()

    async def send_response(self, response: HttpResponseBase, send: Any) -> None:
        await sync_to_async(give_back_connection)()
        await super().send_response(response, send)


def give_back_connection() -> None:
    """Return this thread's database connection to the pool."""
    if not connection.in_atomic_block:
        connection.close()


def _end_of_thread() -> float:
    """Return the processor seconds of a request's thread. Django closes nothing if a bug interrupts an answer."""
    give_back_connection()
    return time.thread_time()


class RequestIdMiddleware:
    """Gives every request an id, and every response the same id in `x-request-id`."""

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        self._get_response = get_response
        self._is_async = iscoroutinefunction(get_response)
        if self._is_async:
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> Any:
        identifier = request_id_from(request.headers.get(REQUEST_ID_HEADER))
        request.id = identifier  # type: ignore[attr-defined]
        if self._is_async:
            return self._call_async(request, identifier)
        return _with_id(self._get_response(request), identifier)

    async def _call_async(self, request: HttpRequest, identifier: str) -> HttpResponseBase:
        return _with_id(await self._get_response(request), identifier)


def _with_id(response: HttpResponseBase, identifier: str) -> HttpResponseBase:
    response.headers[REQUEST_ID_HEADER] = identifier
    return response


class RefuseNulMiddleware(MiddlewareMixin):
    """Refuses NUL in paths and queries. PostgreSQL stores no NUL, so a lookup by one would fail like a bug."""

    def process_request(self, request: HttpRequest) -> HttpResponse | None:
        has_nul = "\0" in request.path or "\0" in unquote(request.META.get("QUERY_STRING", ""))
        return bad_request(request) if has_nul else None


# --- Limits on bodies -------------------------------------------------------------------------------------------------


class Allowance(NamedTuple):
    """How much of a request's body is read, and the error beyond it if "too large" is not the reason."""

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
    judge: Callable[[Scope], Awaitable[Allowance]] | None = None
    is_judged_always: bool = False


class LimitBodies:
    """ASGI: refuses a body above its path's limit before it fills a disk, even if its length was not declared.

    Django writes the whole body to disk before any view runs. A limit or a permission check in a view is therefore too
    late, so paths with large bodies are judged here.
    """

    def __init__(self, application: Application, limits: Sequence[BodyLimit] = ()) -> None:
        self._application = application
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        try:
            allowance = await self._allowance(scope)
        except DomainError as refusal:
            await send_error(send, refusal)
            return
        error = allowance.refusal or _too_large(allowance.limit_bytes)
        if declared_length(scope) > allowance.limit_bytes:
            await send_error(send, error)
            return
        counted = _CountedBody(receive, send, limit_bytes=allowance.limit_bytes)
        await self._application(scope, counted.receive, counted.send)
        if counted.is_exceeded and not counted.has_answered:
            await send_error(send, error)
        elif counted.is_late and not counted.has_answered:
            await send_error(send, TooSlow("The request body did not arrive in time. Send it again."))

    async def _allowance(self, scope: Scope) -> Allowance:
        limit = self._limit_of(scope)
        if limit is None:
            return Allowance(DEFAULT_BODY_BYTES)
        is_small = 0 < declared_length(scope) <= DEFAULT_BODY_BYTES
        if limit.judge is None or (is_small and not limit.is_judged_always):
            return Allowance(limit.limit_bytes)
        allowance = await limit.judge(scope)
        return allowance._replace(limit_bytes=min(allowance.limit_bytes, limit.limit_bytes))

    def _limit_of(self, scope: Scope) -> BodyLimit | None:
        matching = (
            limit
            for limit in self._limits
            if limit.method == scope["method"] and scope["path"].startswith(limit.prefix)
        )
        return next(matching, None)


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

        None means forever: once the body is complete, only a disconnect follows.
        """
        if self._is_whole:
            return None
        spent = asyncio.get_running_loop().time() - self._began
        return max(0.0, min(_IDLE_SECONDS, _FREE_SECONDS + self.read_bytes / _MIN_BYTES_PER_SECOND - spent))

    async def send(self, message: Message) -> None:
        self.has_answered = True
        await self._send(message)


def declared_length(scope: Scope) -> int:
    """Return the Content-Length of a request; zero if it is missing or not a number."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else 0
    return 0


def _too_large(limit_bytes: int) -> TooLarge:
    return TooLarge(f"The request body is larger than {limit_bytes / MIB:.0f} MiB.", limit_bytes=limit_bytes)


# --- Errors -----------------------------------------------------------------------------------------------------------


def error_headers(error: DomainError) -> dict[str, str]:
    """Return the headers that control whether and when an OpenAI client retries."""
    if error.is_retryable:
        return {"Retry-After": str(error.data.get("retry_after_seconds", 1))}
    return {"x-should-retry": "false"} if error.status is Status.TOO_MANY else {}


def error_response(error: DomainError, *, status: int | None = None) -> JsonResponse:
    return JsonResponse(error.as_openai(), status=status or error.status, headers=error_headers(error))


async def send_error(send: Send, error: DomainError, *, request_id: str | None = None) -> None:
    """Answer an ASGI request with an OpenAI-shaped error.

    The connection is closed, because its body may be half read.
    """
    response = error_response(error)
    response.headers[REQUEST_ID_HEADER] = request_id or new_id("req")
    response.headers["Connection"] = "close"
    headers = [(name.lower().encode(), value.encode()) for name, value in response.items()]
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": response.content})


async def send_page(send: Send, error: DomainError, page: str, *, notice: str = "") -> None:
    """Answer an ASGI request with a page, or with a notice that htmx shows over the current page."""
    headers = error_headers(error) | {"content-type": "text/html; charset=utf-8", "cache-control": "no-store"}
    headers |= {REQUEST_ID_HEADER: new_id("req"), "connection": "close"}
    if notice:
        headers |= {"hx-reswap": "none", "hx-trigger": json.dumps({"toast": {"text": notice, "tone": "error"}})}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": int(error.status), "headers": raw})
    await send({"type": "http.response.body", "body": page.encode()})


def is_machine_path(path: str) -> bool:
    return path.startswith(MACHINE_PREFIXES)


def _of_the_pool(handler: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """Let an error handler run in a thread of the event loop's pool.

    Django answers an exception there and not in the request's own thread. These threads never end, and the end of a
    request closes only its own thread's connections. So each would keep a database connection from the pool forever.
    """

    @wraps(handler)
    def handle(request: HttpRequest, *args: object, **kwargs: object) -> HttpResponse:
        begin = time.thread_time()
        try:
            return handler(request, *args, **kwargs)
        finally:
            give_back_connection()
            if isinstance(request, ASGIRequest):
                scope = cast(Scope, request.scope)
                scope[PROCESSOR_SECONDS] = scope.get(PROCESSOR_SECONDS, 0.0) + time.thread_time() - begin

    return handle


@_of_the_pool
def not_found(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    text = f"Unknown request URL: {request.method} {request.path}."
    if is_machine_path(request.path):
        return error_response(UnknownUrl(text))
    if request.headers.get("Authorization", "").lower().startswith("bearer "):
        return error_response(UnknownUrl(f"{text} Set the base URL of your client to {settings.PUBLIC_URL}/v1."))
    return error_page(request, 404)


@_of_the_pool
def permission_denied(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    return error_page(request, 403, message=str(exception) if exception and exception.args else "")


@_of_the_pool
def bad_request(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    if is_machine_path(request.path):
        return error_response(DomainError("The request could not be understood."))
    return error_page(request, 400)


@_of_the_pool
def server_error(request: HttpRequest) -> HttpResponse:
    if is_machine_path(request.path):
        return error_response(ServerFault("The server had an error while processing your request."), status=500)
    # Render without the request: no context processor and so no query, because the database may have failed.
    page = render_to_string("errors/500.html", {"status": 500, "request_id": getattr(request, "id", "")})
    return HttpResponse(page, status=500)


def csrf_failure(request: HttpRequest, reason: str = "") -> HttpResponse:
    message = "The form was too old or came from another site. Go back, reload the page and try again."
    return error_page(request, 403, message=message)


def error_page(request: HttpRequest, status: int, *, message: str = "") -> HttpResponse:
    """Render templates/errors/<status>.html, or the general page if the status has no template."""
    context = {
        "status": status,
        "title": HTTPStatus(status).phrase.capitalize(),
        "message": message,
        "request_id": getattr(request, "id", ""),
    }
    page = render_to_string([f"errors/{status}.html", "errors/base.html"], context, request=request)
    return HttpResponse(page, status=status)
