"""The OpenAPI document as a check: an answer of the API has a documented status, and JSON of the documented schema."""

import json
import re
from functools import cache
from typing import Any

import jsonschema_rs
from django.conf import settings
from django.utils.module_loading import import_string

from apps.core.http.openapi.document import document


@cache
def api_document() -> dict[str, Any]:
    return document([one for name in settings.API_OPERATIONS for one in import_string(name)()], server="http://x")


def check_answer(method: str, path: str, status: int, content_type: str, body: bytes) -> None:
    """Raise AssertionError if an operation of the document never answers so. Other addresses are not checked."""
    operation = _find(method, path.partition("?")[0])
    if operation is None or status in (404, 405):  # no such address, or no such method
        return
    found = operation["responses"].get(str(status))
    assert found is not None, f"{method} {path} is not documented to answer {status}"
    if status < 500 and content_type.startswith("application/json") and "application/json" in found["content"]:
        errors = list(_validator(_schema_of(found)).iter_errors(json.loads(body)))
        assert not errors, f"{method} {path} answers other JSON than documented: {str(errors[0])[:500]}"


@cache
def _routes() -> list[tuple[re.Pattern[str], dict[str, Any]]]:
    """Return the addresses, the most exact ones first. A model's name may have slashes."""
    paths = sorted(api_document()["paths"].items(), key=lambda each: (each[0].count("{"), -len(each[0])))
    return [
        (re.compile(re.sub(r"{(\w+)}", lambda part: ".+" if part[1] == "model" else "[^/]+", path)), operations)
        for path, operations in paths
    ]


def _find(method: str, path: str) -> dict[str, Any] | None:
    for pattern, operations in _routes():
        if pattern.fullmatch(path):
            found: dict[str, Any] | None = operations.get("get" if method == "HEAD" else method.lower())
            return found
    return None


def _schema_of(answer: dict[str, Any]) -> str:
    return json.dumps(answer["content"]["application/json"]["schema"])


@cache
def _validator(schema: str) -> Any:
    return jsonschema_rs.validator_for(json.loads(schema) | {"components": api_document()["components"]})
