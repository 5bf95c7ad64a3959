"""Code that every HTTP process runs around a view: request ids, processor time, and pages for errors.

Machine paths (the public APIs, the worker API, signed objects) get OpenAI-shaped JSON; people get a page.
"""

import json
import os
import re
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from typing import IO, Any, cast
from urllib.parse import unquote

from asgiref.sync import sync_to_async
from django.conf import settings
from django.core.handlers.asgi import ASGIHandler, ASGIRequest
from django.db import connection
from django.http import HttpRequest, HttpResponse, HttpResponseBase, HttpResponseNotAllowed, JsonResponse
from django.template.loader import render_to_string
from django.utils.deprecation import MiddlewareMixin
from django.utils.translation import gettext

from apps.core.database.read_times import read_seconds
from apps.core.errors import DomainError, InvalidValue, NotFound, PermissionDenied, Status
from apps.core.ids import new_id
from apps.core.messages import tracing

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

MACHINE_PREFIXES = ("/v1/", "/api/", "/internal/", "/objects/")
REQUEST_ID_HEADER = "x-request-id"
PROCESSOR_SECONDS = "anneal.processor_seconds"  # key in the scope
PROCESSOR_SECONDS_HEADER = b"x-anneal-processor-seconds"  # between processes of ours, never to a client
_BODY = "anneal.body"  # key in the scope: the file of the body
# Calls of workers, every few seconds of each, and files are not traced.
_UNTRACED = ("/internal/", "/objects/", "/static/")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{8,64}")

# Headers that pages of other origins may read.
_EXPOSED = (
    "ETag", "Retry-After", "retry-after-ms", "x-should-retry", "x-request-id", "Content-Disposition", "Content-Range",
    "Idempotent-Replayed",
    *(f"x-ratelimit-{part}-{unit}" for part in ("limit", "remaining", "reset") for unit in ("requests", "tokens")),
)  # fmt: skip
MIB = 1024 * 1024
DEFAULT_BODY_BYTES = 4 * MIB


class TooLarge(DomainError):
    """The body of a request exceeds the limit of its path."""

    code = "request_too_large"
    status = Status.TOO_LARGE


class UnsupportedMediaType(DomainError):
    """The body of a request has a type or an encoding that its address does not accept."""

    code = "unsupported_media_type"
    status = Status.UNSUPPORTED_MEDIA_TYPE


def require_unencoded(encoding: str) -> None:
    """Raise UnsupportedMediaType for a body with this Content-Encoding, unless it means no encoding."""
    if encoding.strip().lower() not in ("", "identity"):
        text = f"The Content-Encoding of the body is {encoding[:40]}: send the body uncompressed, without this header."
        raise UnsupportedMediaType(text)


class UnknownUrl(NotFound):
    code = "unknown_url"


class TooSlow(DomainError):
    """The body of a request did not arrive in time."""

    code = "request_timeout"
    status = Status.TIMED_OUT
    is_retryable = True


class ClientGone(Exception):
    """The client closed the connection before its answer was complete, or does not read the answer."""


class ServerFault(DomainError):
    """A bug or a broken dependency. The message reveals no internals."""

    code = "server_error"
    status = Status.FAULT
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

    All middleware and the view run in one visit to the request's thread. Django would visit it a dozen times, and each
    visit waits for the interpreter and for a processor. At the end of the visit, the database connection is returned,
    because a client may read its answer slowly. When an answer begins, and again when the request ends, the scope has
    the processor time of the request's thread.
    """

    request_class = MeasuredRequest

    def load_middleware(self, is_async: bool = False) -> None:
        super().load_middleware(is_async=False)

    async def get_response_async(self, request: HttpRequest) -> HttpResponseBase:
        return await sync_to_async(self.get_response)(request)

    def get_response(self, request: HttpRequest) -> HttpResponseBase:
        try:
            if tracing.is_on() and not request.path.startswith(_UNTRACED):
                return _traced(request, super().get_response)
            return super().get_response(request)
        finally:
            _end_visit(cast(Scope, cast(ASGIRequest, request).scope))

    async def handle(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        try:
            await super().handle(scope, receive, send)
        finally:
            if body := scope.pop(_BODY, None):  # Django leaves it open if the answer cannot be sent
                body.close()
            await sync_to_async(_end_visit)(scope)

    def create_request(self, scope: Mapping[str, Any], body_file: IO[bytes]) -> tuple[Any, Any]:
        cast(Scope, scope)[_BODY] = body_file
        return super().create_request(scope, body_file)


def _traced(request: HttpRequest, view: Callable[[HttpRequest], HttpResponseBase]) -> HttpResponseBase:
    """Return the view's response. Its span names the route and not the path, because a path may hold a secret."""
    method = request.method if request.method in _METHODS else "_OTHER"
    attributes = {"http.request.method": method}
    span = tracing.begin_request(str(method), sent=request.headers.get(tracing.HEADER, ""), attributes=attributes)
    with tracing.working(span):
        response = view(request)
        if span:
            route = f"/{request.resolver_match.route}" if request.resolver_match else ""
            request_id = response.headers.get(REQUEST_ID_HEADER)
            span.rename(f"{method} {route}".rstrip())
            span.annotate({"http.route": route, "http.response.status_code": response.status_code})
            span.annotate({"anneal.request.id": request_id})
            if response.status_code >= 500:
                span.fail(str(response.status_code))
    return response


class ReportProcessorSeconds:
    """ASGI layer that sends the processor time of a request to the process in front, in a header of the answer."""

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


def _end_visit(scope: Scope) -> None:
    """Store the processor seconds of a request's thread and of the database for its lists, and close its connections.

    Django closes nothing if a bug interrupts an answer.
    """
    give_back_connection()
    scope[PROCESSOR_SECONDS] = time.thread_time() + read_seconds()


class RequestIdMiddleware(MiddlewareMixin):
    """Gives every request an id, and every response the same id in `x-request-id`."""

    def process_request(self, request: HttpRequest) -> None:
        request.id = request_id_from(request.headers.get(REQUEST_ID_HEADER))  # type: ignore[attr-defined]

    def process_response(self, request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
        response.headers[REQUEST_ID_HEADER] = request.id  # type: ignore[attr-defined]
        return response


class RefuseNulMiddleware(MiddlewareMixin):
    """Refuses NUL in paths and queries. PostgreSQL stores no NUL, so a lookup by one would fail like a bug."""

    def process_request(self, request: HttpRequest) -> HttpResponse | None:
        has_nul = "\0" in request.path or "\0" in unquote(request.META.get("QUERY_STRING", ""))
        if has_nul and is_machine_path(request.path):
            name = next((name for name, values in request.GET.lists() if any("\0" in value for value in values)), None)
            what = f"'{name[:60]}'" if name else "The address"
            text = f"{what} holds a NUL character (%00). Remove it."
            return error_response(InvalidValue(text, param=name and name[:60]))
        return bad_request(request) if has_nul else None


class ShowRefusedMethodsMiddleware(MiddlewareMixin):
    """Shows a page for the address of a form that is opened as one. Django's answer is empty."""

    def process_response(self, request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
        is_page = request.method == "GET" and not is_machine_path(request.path)
        if not is_page or not isinstance(response, HttpResponseNotAllowed):
            return response
        message = gettext(
            "This address has no page: it only takes a form. Open the page of the form and send it again."
        )
        page = error_page(request, response.status_code, message=message)
        page.headers["Allow"] = response.headers["Allow"]
        return page


def allow_origins(application: Application, origins: Collection[str]) -> Application:
    """Return the application with CORS: pages of these origins may call its API, but never with cookies."""
    if not origins:
        return application
    from starlette.middleware.cors import CORSMiddleware  # noqa: PLC0415 - few installations need it

    answering = CORSMiddleware(
        application,
        allow_origins=list(origins),
        allow_methods=("GET", "POST", "PUT", "DELETE"),
        allow_headers=["*"],
        expose_headers=_EXPOSED,
        max_age=7200,  # seconds; browsers keep the answer to a preflight no longer
    )

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_api = scope["type"] == "http" and scope["path"].startswith(("/v1/", "/api/v1/"))
        await (answering if is_api else application)(scope, receive, send)

    return answer


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
    return {"x-should-retry": "false"} if error.status in (Status.TOO_MANY, Status.UNAVAILABLE) else {}


def error_response(error: DomainError) -> JsonResponse:
    return JsonResponse(error.as_openai(), status=error.status, headers=error_headers(error))


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


def not_found(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    text = f"Unknown request URL: {request.method} {request.path}."
    if is_machine_path(request.path):
        return error_response(UnknownUrl(text))
    if request.headers.get("Authorization", "").lower().startswith("bearer "):
        return error_response(UnknownUrl(f"{text} Set the base URL of your client to {settings.PUBLIC_URL}/v1."))
    return error_page(request, 404)


def permission_denied(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    return error_page(request, 403, message=str(exception) if exception and exception.args else "")


def too_many_requests(request: HttpRequest) -> HttpResponse:
    return error_page(request, 429)


def bad_request(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    if is_machine_path(request.path):
        return error_response(DomainError("The request could not be understood."))
    return error_page(request, 400)


def csrf_failure(request: HttpRequest, reason: str = "") -> HttpResponse:
    message = gettext(
        "The form was too old or came from another site. Go back, copy what you typed, reload the page and try again."
    )
    if wants_json(request):
        return error_response(PermissionDenied(message))
    return error_page(request, 403, message=message)


def wants_json(request: HttpRequest) -> bool:
    """Return whether a script asks, which reads no page. A browser and a client without `Accept` get pages."""
    return request.get_preferred_type(["text/html", "application/json"]) == "application/json"


def error_page(request: HttpRequest, status: int, *, message: str = "") -> HttpResponse:
    """Render templates/shell/errors/<status>.html, or the general page if the status has no template."""
    context = {
        "status": status,
        "message": message,
        "request_id": getattr(request, "id", ""),
    }
    page = render_to_string([f"shell/errors/{status}.html", "shell/errors/base.html"], context, request=request)
    return HttpResponse(page, status=status)


def plain_page(
    status: int, heading: str, message: str, *, is_signed_in: bool, can_repeat: bool, request_id: str = ""
) -> str:
    """Return a page for an error that is rendered without its request: its frame queries nothing, so it cannot fail.

    `is_signed_in` adds the navigation. It may be a guess, because the pages behind it decide who sees them.
    """
    context = {
        "status": status,
        "heading": heading,
        "message": message,
        "is_signed_in": is_signed_in,
        "can_repeat": can_repeat,
        "request_id": request_id,
    }
    return render_to_string("shell/errors/500.html", context)
