"""GET /api/v1/schema: the OpenAPI document, built once in each process."""

from functools import cache
from threading import Lock

from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.renderers import OpenApiJsonRenderer

_building = Lock()  # the generator is not thread-safe


@require_safe
def show(request: HttpRequest) -> HttpResponse:
    headers = {"Cache-Control": "public, max-age=300"}
    with _building:
        document = _document()
    return HttpResponse(document, content_type=OpenApiJsonRenderer.media_type, headers=headers)


@cache
def _document() -> bytes:
    return bytes(OpenApiJsonRenderer().render(SchemaGenerator().get_schema(request=None, public=True)))
