"""GET /api/v1/schema: the OpenAPI document, built once in each process; and the operations of this API's views."""

import inspect
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, get_resolver
from django.utils.module_loading import import_string
from django.views.decorators.http import require_safe

from apps.core.http.openapi.document import Operation, document
from apps.interfaces.api.requests import conditions, idempotency
from apps.interfaces.api.requests.handlers import signature_of
from apps.interfaces.api.views import ApiView

_PART = re.compile(r"<\w+:(\w+)>")


@require_safe
def show(request: HttpRequest) -> HttpResponse:
    headers = {"Cache-Control": "public, max-age=300"}
    return HttpResponse(_document(), content_type="application/json", headers=headers)


@cache
def _document() -> bytes:
    return msgspec.json.encode(_described(settings.PUBLIC_URL))


def published() -> bytes:
    """Return the document as docs/openapi.json has it: indented, and with the address of `make demo`."""
    return msgspec.json.format(msgspec.json.encode(_described("http://127.0.0.1:8000")), indent=1) + b"\n"


def _described(server: str) -> dict[str, Any]:
    listed = [one for name in settings.API_OPERATIONS for one in import_string(name)()]
    return document(listed, server=server)


def operations() -> Iterator[Operation]:
    """Yield an operation for each method of each view, as the signature of its handler says."""
    for entry in get_resolver("apps.interfaces.api.urls").url_patterns:
        if not isinstance(entry, URLPattern):
            continue
        view = getattr(entry.callback, "view_class", None)
        if view is not None and issubclass(view, ApiView):
            path = "/" + _PART.sub(r"{\1}", str(entry.pattern))
            name = str(entry.name).removeprefix("api_")
            yield from (_operation(view, method, path, name) for method in view.required_scope)


def _operation(view: type[ApiView], method: str, path: str, name: str) -> Operation:
    handler = getattr(view, method.lower())
    read, takes_key = signature_of(handler), method == "POST" and view.takes_idempotency_key
    takes_condition = method != "GET" and view.has_etag()
    return Operation(
        method=method,
        path=path,
        name=f"{name}_{method.lower()}",
        text=inspect.cleandoc(handler.__doc__ or vars(view).get("__doc__") or ""),
        scope=view.required_scope[method],
        query=read.query,
        headers=(idempotency.HEADERS if takes_key else {}) | (conditions.HEADERS if takes_condition else {}),
        body=read.body,
        is_body_required=read.is_body_required,
        form=read.form,
        example=view.examples.get(method),
        answers=read.answers,
        errors=view.errors.get(method, ()) + ((409, 422) if takes_key else ()) + ((412,) if takes_condition else ()),
    )
