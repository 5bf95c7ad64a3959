"""The OpenAPI document of the API, made from the types of its requests and answers.

The app of each surface lists its `Operation`s in a function that settings.API_OPERATIONS names.
"""

from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
from django.core.files.uploadedfile import UploadedFile

from apps.core.errors import ErrorBody
from apps.core.http.openapi.schemas import named, published, tidied

_REF = "#/components/schemas/{name}"
# OpenAPI 3.1 says bytes by the media type; generators look for the format of 3.0.
_BYTES = {"type": "string", "format": "binary", "contentMediaType": "application/octet-stream"}
_JSON = "application/json"
_ERRORS = (400, 401, 403, 429, 500, 503)  # of every call
_ERRORS_OF_BODIES = (408, 413, 415)
_RANGE = {
    "name": "Range",
    "in": "header",
    "description": "The bytes to send, to go on with a download: `bytes=1000-`.",
    "schema": {"type": "string"},
}
_IF_NONE_MATCH = {
    "name": "If-None-Match",
    "in": "header",
    "description": "The ETag of the answer that you have: if it is still the same, the status is 304.",
    "schema": {"type": "string"},
}
_PHRASES = {413: "Content Too Large", 422: "Unprocessable Content"}  # RFC 9110; Python before 3.13 has older ones
_ABOUT = """Calls under `/v1` are OpenAI's, with Anneal's own members beside theirs. Calls under `/api/v1` are Anneal's.
Each call needs an API key and names the scope that the key must have."""


class FileAnswer(NamedTuple):
    """An answer that is a file. A resumable one answers Range, If-Range and If-None-Match."""

    media_type: str
    is_resumable: bool = False


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One method of one address. `query`, `body`, `form` and `answers` are types that msgspec can describe."""

    method: str
    path: str  # with `{name}` for each part that varies
    name: str  # unique
    text: str  # the first line is the summary
    scope: str
    query: Any = None
    headers: Mapping[str, str] = {}  # name and meaning
    body: Any = None
    is_body_required: bool = True
    form: Any = None
    example: Any = None
    answers: tuple[Any, ...] = ()
    errors: tuple[int, ...] = ()  # besides those that follow from the rest


def document(operations: Iterable[Operation], *, server: str) -> dict[str, Any]:
    """Return the document in OpenAPI 3.1."""
    listed = sorted(operations, key=lambda one: (one.path, one.method))
    kinds = dict.fromkeys([ErrorBody, *(kind for one in listed for kind in _types(one))])
    schemas, components = msgspec.json.schema_components(kinds, schema_hook=_schema_hook, ref_template=_REF)
    schema_of = {kind: tidied(schema) for kind, schema in zip(kinds, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for one in listed:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Anneal API", "version": "1", "description": _ABOUT},
        "servers": [{"url": server}],
        "security": [{"apiKey": []}],
        "paths": paths,
        "components": {
            "schemas": published(components),
            "securitySchemes": {"apiKey": {"type": "http", "scheme": "bearer", "description": "An API key."}},
        },
    }


def _types(one: Operation) -> list[Any]:
    written = [kind for kind in one.answers if not isinstance(kind, FileAnswer)]
    return [kind for kind in (one.body, one.form, *written) if kind is not None]


def _schema_hook(kind: type) -> dict[str, Any]:
    if kind is UploadedFile:
        return _BYTES
    raise NotImplementedError


def _operation(one: Operation, schema_of: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    summary, _, rest = one.text.partition("\n")
    described = {
        "operationId": one.name,
        "tags": [one.path.removeprefix("/api").split("/")[2]],
        "summary": summary.strip(),
        "description": f"{' '.join(rest.split())} Scope: `{one.scope}`.".strip(),
        "security": [{"apiKey": [one.scope]}],
        "parameters": _parameters(one),
        "responses": _responses(one, schema_of),
    }
    sent = one.body or one.form
    if sent is None:
        return described
    media_type = _JSON if one.body else "multipart/form-data"
    content = {"schema": schema_of[sent]} | ({"example": one.example} if one.example is not None else {})
    return described | {"requestBody": {"required": one.is_body_required, "content": {media_type: content}}}


def _parameters(one: Operation) -> list[dict[str, Any]]:
    parts = [part[1:-1] for part in one.path.split("/") if part.startswith("{")]
    found: list[dict[str, Any]] = [
        {"name": part, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}} for part in parts
    ]
    if one.query is not None:
        known = msgspec.json.schema(one.query)["$defs"]
        fields = known[one.query.__name__]["properties"]
        found += [_query_parameter(name, tidied(_inlined(schema, known))) for name, schema in fields.items()]
    found += [
        {"name": name, "in": "header", "description": text, "schema": {"type": "string"}}
        for name, text in one.headers.items()
    ]
    found += [_IF_NONE_MATCH] if _is_conditional(one) else []
    return [*found, _RANGE] if _resumable(one) else found


def _inlined(schema: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with the enumerations that it refers to."""
    if "anyOf" in schema:
        return schema | {"anyOf": [_inlined(option, known) for option in schema["anyOf"]]}
    name = schema.get("$ref", "").rpartition("/")[2]
    return (
        {"type": "string", "enum": known[name]["enum"]} | {k: v for k, v in schema.items() if k != "$ref"}
        if name
        else schema
    )


def _query_parameter(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the parameter. If it is absent, the code reads null or {}, but a client cannot send either."""
    options = [option for option in schema.get("anyOf", ()) if option != {"type": "null"}]
    known = {key: value for key, value in schema.items() if key != "anyOf"}
    if known.get("default") in (None, {}):
        known.pop("default", None)
    plain = named(known | ((options[0] if len(options) == 1 else {"anyOf": options}) if options else {}), name)
    text = plain.pop("description", None)
    takes_object = any(option.get("type") == "object" for option in plain.get("anyOf", [plain]))
    style = {"style": "deepObject", "explode": True} if takes_object else {}
    return {"name": name, "in": "query", "schema": plain} | style | ({"description": text} if text else {})


def _is_conditional(one: Operation) -> bool:
    return one.method == "GET" and any(not isinstance(kind, FileAnswer) for kind in one.answers)


def _resumable(one: Operation) -> bool:
    return any(isinstance(kind, FileAnswer) and kind.is_resumable for kind in one.answers)


def _responses(one: Operation, schema_of: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    objects: list[Any] = [schema_of[kind] for kind in one.answers if not isinstance(kind, FileAnswer)]
    schema = objects[0] if len(objects) == 1 else {"anyOf": objects}
    content: dict[str, Any] = {_JSON: {"schema": schema}} if objects else {}  # the first is what generators read
    content |= {
        kind.media_type: {"schema": {"type": "string"} if kind.media_type.startswith("text/") else _BYTES}
        for kind in one.answers
        if isinstance(kind, FileAnswer)
    }
    found: dict[str, Any] = {"200": {"description": "Done.", "content": content}} if one.answers else {}
    if _resumable(one):
        found["206"] = {"description": "The bytes that `Range` asks for.", "content": content}
        found["304"] = {"description": "The file is the one that `If-None-Match` names."}
        found["416"] = {"description": "The file has no such bytes."}
    if _is_conditional(one):
        found["304"] = {"description": "The answer is the one that `If-None-Match` names."}
    refused = {"description": "", "content": {_JSON: {"schema": schema_of[ErrorBody]}}}
    has_body = one.body is not None or one.form is not None
    names_objects = has_body or "{" in one.path
    statuses = {*_ERRORS, *one.errors, *(_ERRORS_OF_BODIES if has_body else ()), *((404,) if names_objects else ())}
    for status in sorted(statuses):
        found[str(status)] = refused | {"description": _PHRASES.get(status) or HTTPStatus(status).phrase}
    return found
