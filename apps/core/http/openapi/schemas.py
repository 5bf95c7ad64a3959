"""The schemas of msgspec, in the form that lets generators of clients make the best types.

They accept the same values. Names are words, a single value is a constant, values have a type, lists and objects
describe their contents, and a shape inside a union has the name of its field.
"""

import inspect
import re
from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

_GENERIC = re.compile(r"([A-Za-z0-9]+)_(\w+)_")  # msgspec's name of Generic[Argument]
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}  # a bool is an int, so it comes first


def published(components: Mapping[str, Schema]) -> dict[str, Schema]:
    """Return the components of a document under their public names."""
    return {_public(name): tidied(schema) | {"title": _public(name)} for name, schema in components.items()}


def tidied(schema: Schema) -> Schema:
    """Return a schema for the document, with everything inside it."""
    found = {key: value for key, value in schema.items() if (key, value) != ("default", None)}  # absent means null
    if "description" in found:  # a docstring, whose indent Python before 3.13 keeps
        found["description"] = inspect.cleandoc(found["description"])
    if "$ref" in found:
        found["$ref"] = _referred(found["$ref"])
    if "enum" in found:
        found |= _values(found.pop("enum"))
    if "discriminator" in found:
        mapping = {value: _referred(reference) for value, reference in found["discriminator"]["mapping"].items()}
        found["discriminator"] = found["discriminator"] | {"mapping": mapping}
    if found.get("type") == "array" and "prefixItems" not in found:
        found.setdefault("items", {})
    if found.get("type") == "object" and "properties" not in found:
        found.setdefault("additionalProperties", True)
    for key in ("items", "additionalProperties"):
        if isinstance(found.get(key), dict):
            found[key] = tidied(found[key])
    if "anyOf" in found:
        found["anyOf"] = [tidied(option) for option in found["anyOf"]]
    if "properties" in found:
        found["properties"] = {name: named(tidied(inner), name) for name, inner in found["properties"].items()}
    return found


def named(schema: Schema, name: str) -> Schema:
    """Return a tidied schema of a field. A generator calls a shape by its title, or else by its place in the union."""
    options = schema.get("anyOf")
    return schema | {"anyOf": [_titled(option, _in_words(name)) for option in options]} if options else schema


def _titled(option: Schema, title: str) -> Schema:
    if option.get("type") == "array":
        return option | {"items": _titled(option["items"], f"{title}Item")}
    return {"title": title} | option if "enum" in option or option.get("type") == "object" else option


def _values(values: list[Any]) -> Schema:
    kind = next(name for type_, name in _TYPES.items() if isinstance(values[0], type_))
    if len(values) == 1:
        return {"type": kind, "const": values[0]}
    return {"type": kind} if kind == "boolean" else {"type": kind, "enum": values}


def _referred(reference: str) -> str:
    start, slash, name = reference.rpartition("/")
    return f"{start}{slash}{_public(name)}"


def _public(name: str) -> str:
    """Return `FileObjectList` for msgspec's `ListObject_FileObject_`; other names stay as they are."""
    generic = _GENERIC.fullmatch(name)
    return f"{_in_words(generic[2])}{generic[1].removesuffix('Object')}" if generic else name


def _in_words(name: str) -> str:
    return "".join(word[:1].upper() + word[1:] for word in re.split(r"[^A-Za-z0-9]+", name))
