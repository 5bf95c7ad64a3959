"""One mapping from what went wrong to OpenAI's error object, so that `openai` raises the right class."""

from typing import Any, ClassVar

from django.core.exceptions import PermissionDenied as DjangoPermissionDenied
from django.core.exceptions import RequestDataTooBig, SuspiciousOperation, TooManyFieldsSent, TooManyFilesSent
from django.http import Http404, HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt
from rest_framework import exceptions, status
from rest_framework.response import Response

from apps.core.errors import DomainError, InvalidValue, NotFound, PermissionDenied, RateLimited, Status
from apps.core.http import TooLarge, error_headers, not_found


class InvalidApiKey(DomainError):
    code = "invalid_api_key"
    status = Status.UNAUTHENTICATED


class MethodNotAllowed(DomainError):
    code = "method_not_allowed"
    http_status: ClassVar[int] = status.HTTP_405_METHOD_NOT_ALLOWED


class UnsupportedMediaType(DomainError):
    code = "unsupported_media_type"
    http_status: ClassVar[int] = status.HTTP_415_UNSUPPORTED_MEDIA_TYPE


class InvalidJson(DomainError):
    code = "invalid_json"


def exception_handler(exception: Exception, context: dict[str, Any]) -> Response | None:
    """Return the answer to an anticipated failure; None for a bug, which Django logs and answers with 500."""
    error = as_domain_error(exception)
    if error is None:
        return None
    headers = error_headers(error)
    if isinstance(error, InvalidApiKey):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(exception, exceptions.MethodNotAllowed):
        headers["Allow"] = ", ".join(context["view"].allowed_methods)
    return Response(error.as_openai(), status=getattr(error, "http_status", int(error.status)), headers=headers)


def as_domain_error(exception: Exception) -> DomainError | None:
    """Translate Django's and REST framework's exceptions; None for one that nobody foresaw."""
    match exception:
        case DomainError():
            return exception
        case exceptions.NotAuthenticated() | exceptions.AuthenticationFailed():
            return InvalidApiKey(str(exception.detail))
        case Http404() | exceptions.NotFound():
            return NotFound("No such object.")
        case DjangoPermissionDenied() | exceptions.PermissionDenied():
            return PermissionDenied("This API key may not do this.")
        case exceptions.MethodNotAllowed():
            return MethodNotAllowed(str(exception.detail))
        case exceptions.UnsupportedMediaType():
            return UnsupportedMediaType(str(exception.detail))
        case exceptions.ValidationError():
            return _invalid(exception.detail)
        case exceptions.ParseError():
            return InvalidJson(str(exception.detail))
        case exceptions.Throttled():
            return RateLimited(str(exception.detail), retry_after_seconds=int(getattr(exception, "wait", None) or 1))
        case RequestDataTooBig():
            return TooLarge("The request body is too large.")
        case TooManyFieldsSent() | TooManyFilesSent() | SuspiciousOperation() | exceptions.APIException():
            return InvalidValue("The request could not be understood.")
    return None


@csrf_exempt
def unknown_url(request: HttpRequest, rest: str) -> HttpResponse:
    """Answer for every address of the API that is none."""
    return not_found(request)


def _invalid(detail: Any) -> InvalidValue:
    """Name the first field at fault and what is wrong with it."""
    path: list[str] = []
    while isinstance(detail, dict | list) and detail:
        key = next(iter(detail)) if isinstance(detail, dict) else 0
        if isinstance(detail, dict) and key != "non_field_errors":
            path.append(str(key))
        detail = detail[key]
    return InvalidValue(str(detail), param=".".join(path) or None)
