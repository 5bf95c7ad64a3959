"""Code that every HTTP process runs around a view: request ids, processor time, and pages for errors.

Machine paths (the public APIs, the worker API, signed objects) get OpenAI-shaped JSON; people get a page.
"""

import json
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from functools import wraps
from http import HTTPStatus
from typing import IO, Any, cast
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
PROCESSOR_SECONDS_HEADER = b"x-anneal-processor-seconds"  # between processes of ours, never to a client
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{8,64}")

MIB = 1024 * 1024
DEFAULT_BODY_BYTES = 4 * MIB


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

    A client may read its answer slowly, so an answer is sent without holding a database connection. When an answer
    begins, and again when the request ends, the scope has the processor time of the request's own thread and of its
    error page.
    """

    request_class = MeasuredRequest

    async def handle(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        counted = 0.0

        async def count() -> None:
            nonlocal counted
            seconds = await sync_to_async(_end_of_thread)()
            scope[PROCESSOR_SECONDS] = scope.get(PROCESSOR_SECONDS, 0.0) + seconds - counted
            counted = seconds

        async def answer(message: Mapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                await count()
            await send(message)

        try:
            await super().handle(scope, receive, answer)
        finally:
            await count()


class ReportProcessorSeconds:
    """ASGI: sends the processor time of a request to the process in front, as a header of the answer."""

    def __init__(self, application: Application) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                seconds = f"{scope.get(PROCESSOR_SECONDS, 0.0):.6f}".encode()
                message = {**message, "headers": [*message["headers"], (PROCESSOR_SECONDS_HEADER, seconds)]}
            await send(message)

        await self._application(scope, receive, answer)


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


def declared_length(scope: Scope) -> int:
    """Return the Content-Length of a request; zero if it is missing or not a number."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else 0
    return 0


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
    if request.path.startswith(settings.STATIC_URL):  # only a browser asks, for a part of a page
        return HttpResponse("There is no such file.\n", status=404, content_type="text/plain")
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
