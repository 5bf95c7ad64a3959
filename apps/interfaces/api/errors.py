"""Mapping of failures to OpenAI's error object, so that `openai` raises the right class."""

import logging
from typing import TypedDict

from django.core.exceptions import PermissionDenied as DjangoPermissionDenied
from django.core.exceptions import RequestDataTooBig, SuspiciousOperation, TooManyFieldsSent, TooManyFilesSent
from django.db import DataError
from django.http import Http404
from rest_framework import exceptions
from rest_framework.response import Response
from rest_framework.views import APIView

from apps.core.errors import (
    DomainError,
    InvalidApiKey,
    InvalidValue,
    MethodNotAllowed,
    NotFound,
    PermissionDenied,
    RateLimited,
)
from apps.core.http.asgi import TooLarge, UnsupportedMediaType, error_headers

logger = logging.getLogger(__name__)


class ViewContext(TypedDict):
    """The part of REST framework's context of a failure that is used here."""

    view: APIView


def exception_handler(exception: Exception, context: ViewContext) -> Response | None:
    """Return the answer to an anticipated failure; None for a bug, which Django logs and answers with 500."""
    error = _of_view(exception, context["view"]) or as_domain_error(exception)
    if error is None:
        return None
    headers = error_headers(error)
    if isinstance(error, InvalidApiKey):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(exception, exceptions.MethodNotAllowed):
        headers["Allow"] = ", ".join(context["view"].allowed_methods)
    return Response(error.as_openai(), status=int(error.status), headers=headers)


def _of_view(exception: Exception, view: APIView) -> DomainError | None:
    """Return an error that names the methods or body types this view accepts."""
    request = view.request
    match exception:
        case exceptions.MethodNotAllowed():
            taken = " or ".join(method for method in view.allowed_methods if method != request.method)
            return MethodNotAllowed(f"{request.method} is not taken at {request.path}: use {taken}.")
        case exceptions.UnsupportedMediaType():
            taken = " or ".join(parser.media_type for parser in view.parser_classes)
            sent = (request.content_type or "none")[:80]
            return UnsupportedMediaType(f"The Content-Type of the body is {sent}: send {taken}.")
    return None


def as_domain_error(exception: Exception) -> DomainError | None:
    """Translate Django's and REST framework's exceptions; return None for an unforeseen one."""
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
            return MethodNotAllowed("This address does not take this method; the header Allow lists those it takes.")
        case exceptions.UnsupportedMediaType():
            return UnsupportedMediaType("The body has the wrong Content-Type for this address.")
        case exceptions.ValidationError():
            return _invalid(exception.detail)
        case DataError():
            logger.warning("refused by the database: %s", exception)
            return InvalidValue(
                "A value is too large, too long or holds a NUL character. Send a shorter or smaller one."
            )
        case exceptions.Throttled():
            return RateLimited(str(exception.detail), retry_after_seconds=int(getattr(exception, "wait", None) or 1))
        case RequestDataTooBig():
            return TooLarge("The request body is too large.")
        case TooManyFieldsSent() | TooManyFilesSent() | SuspiciousOperation() | exceptions.APIException():
            return InvalidValue("The request could not be understood.")
    return None


def _invalid(detail: object) -> InvalidValue:
    """Return an error for the first invalid field."""
    path: list[str] = []
    while isinstance(detail, dict | list) and detail:
        key = next(iter(detail)) if isinstance(detail, dict) else 0
        if isinstance(detail, dict) and key != "non_field_errors":
            path.append(str(key))
        detail = detail[key]
    return InvalidValue(str(detail), param=".".join(path) or None)
