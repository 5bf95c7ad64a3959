"""The API reference: the OpenAPI document as tables that people read."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from django.conf import settings
from django.utils.module_loading import import_string

from apps.core.http.openapi.document import document
from apps.interfaces.web.help.markdown import Passage

Schema = Mapping[str, Any]
_MAX_DEPTH = 3


@dataclass(frozen=True)
class DescribedField:
    """A parameter, or a member of a body or an answer; `name` is its path, such as `recipe.epochs`."""

    name: str
    kind: str
    is_required: bool
    text: str = ""


@dataclass(frozen=True)
class DescribedCall:
    """One method of one path."""

    method: str
    path: str
    anchor: str
    summary: str
    text: str
    scope: str
    parameters: tuple[DescribedField, ...]
    body: tuple[DescribedField, ...]
    example: str
    answer: tuple[DescribedField, ...]
    errors: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class DescribedGroup:
    """The calls of one kind of object."""

    title: str
    anchor: str
    calls: tuple[DescribedCall, ...]


@cache
def api_groups() -> list[DescribedGroup]:
    """Return every call of this installation's API."""
    listed = [one for name in settings.API_OPERATIONS for one in import_string(name)()]
    return list_groups(document(listed, server=settings.PUBLIC_URL))


def list_passages(groups: Iterable[DescribedGroup]) -> Iterator[Passage]:
    """Yield the text of each call, for the search."""
    for call in (call for group in groups for call in group.calls):
        fields = (f"{field.name} {field.text}" for field in (*call.parameters, *call.body, *call.answer))
        yield Passage(f"{call.method} {call.path}", call.anchor, " ".join([call.summary, call.text, *fields]))


def list_groups(document: Schema) -> list[DescribedGroup]:
    """Return the calls of an OpenAPI document by their tag, in the order of their paths."""
    components: Schema = document["components"]["schemas"]
    by_tag: dict[str, list[DescribedCall]] = {}
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            by_tag.setdefault(described["tags"][0], []).append(_call(method, path, described, components))
    return [
        DescribedGroup(tag.replace("_", " ").replace("-", " ").capitalize(), tag, tuple(calls))
        for tag, calls in sorted(by_tag.items())
    ]


def _call(method: str, path: str, described: Schema, components: Schema) -> DescribedCall:
    content = described.get("requestBody", {}).get("content", {})
    sent: Schema = next(iter(content.values()), {})
    answers: Schema = described["responses"].get("200", {}).get("content", {})
    answer = answers.get("application/json", {}).get("schema", {})
    example = sent.get("example")
    return DescribedCall(
        method=method.upper(),
        path=path,
        anchor=described["operationId"],
        summary=described["summary"].replace("`", ""),
        text=described["description"].replace("`", ""),
        scope=described["security"][0]["apiKey"][0],
        parameters=tuple(
            DescribedField(
                name=each["name"],
                kind=f"{_kind(each['schema'], components)}, {each['in']}",
                is_required=bool(each.get("required")),
                text=each.get("description", ""),
            )
            for each in described["parameters"]
        ),
        body=tuple(_fields(sent.get("schema", {}), components)),
        example=json.dumps(example, indent=2, ensure_ascii=False) if example is not None else "",
        answer=tuple(_fields(answer, components)),
        errors=tuple(
            (status, refused["description"])
            for status, refused in sorted(described["responses"].items())
            if int(status) >= 400
        ),
    )


def _fields(schema: Schema, components: Schema, prefix: str = "", depth: int = 0) -> Iterator[DescribedField]:
    """Yield the members of an object and of the objects in it; lists are entered as `name[]`."""
    shape = _resolved(schema, components)
    required = set(shape.get("required", ()))
    for name, inner in shape.get("properties", {}).items():
        path = f"{prefix}{name}"
        yield DescribedField(
            path, _kind(inner, components), name in required, _resolved(inner, components).get("description", "")
        )
        if depth + 1 < _MAX_DEPTH:
            entry, suffix = _entry(inner, components)
            if entry is not None:
                yield from _fields(entry, components, f"{path}{suffix}.", depth + 1)


def _entry(schema: Schema, components: Schema) -> tuple[Schema | None, str]:
    """Return the one object that a schema holds, directly or as entries of a list."""
    for option in _options(schema):
        shape = _resolved(option, components)
        if shape.get("properties"):
            return shape, ""
        if shape.get("type") == "array" and isinstance(shape.get("items"), Mapping):
            entry = _resolved(shape["items"], components)
            if entry.get("properties"):
                return entry, "[]"
    return None, ""


def _kind(schema: Schema, components: Schema) -> str:
    kinds = dict.fromkeys(_kind_of(_resolved(option, components), components) for option in _options(schema))
    return " or ".join(kinds)


def _kind_of(shape: Schema, components: Schema) -> str:
    if "enum" in shape:
        return " or ".join(json.dumps(value) for value in shape["enum"])
    if "const" in shape:
        return json.dumps(shape["const"])
    if "anyOf" in shape or "oneOf" in shape:
        return _kind(shape, components)
    if shape.get("type") == "array" and isinstance(shape.get("items"), Mapping):
        return f"list of {_kind(shape['items'], components)}"
    kind = shape.get("type", "any")
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def _options(schema: Schema) -> list[Schema]:
    options: list[Schema] = list(schema.get("anyOf") or schema.get("oneOf") or [schema])
    return options


def _resolved(schema: Schema, components: Schema) -> Schema:
    reference = schema.get("$ref", "")
    return components[reference.rsplit("/", 1)[1]] if reference else schema
