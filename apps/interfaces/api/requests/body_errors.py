"""Errors of a request body in the client's words: the field as sent, its value, and the allowed values.

msgspec reports where a body does not fit its struct; the words come from the struct itself.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import inspect

from apps.core.errors import DomainError, InvalidValue, MissingParameter

_AT_PATH = re.compile(r"(?P<what>.*?) - at `\$(?P<path>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_STEP = re.compile(r"\.(?P<name>[^.\[]+)|\[(?P<index>[0-9]+)\]|(?P<value>\[\.\.\.\])")
_MAX_SHOWN = 60


def explain(error: msgspec.ValidationError, data: object, kind: type) -> DomainError:
    """Return the error for a body `data` that is not a valid `kind`."""
    match = _AT_PATH.fullmatch(str(error))
    what, path = (match["what"], match["path"]) if match else (str(error), "")
    param, value, expected = _follow(path, data, inspect.type_info(kind))
    if missing := _MISSING.fullmatch(what):
        name = _join(param, missing["name"])
        return MissingParameter(f"Missing required parameter: '{name}'.{_use(expected, missing['name'])}", param=name)
    if unknown := _UNKNOWN.fullmatch(what):
        name = _join(param, unknown["name"])
        return InvalidValue(f"Unknown parameter: '{_cut(name)}'.{_taken(param, expected)}", param=name)
    if not param:
        return InvalidValue(f"The body must be {_described(expected)}, not {_shown(value)}.")
    return InvalidValue(f"Invalid value for '{param}': {_shown(value)}. Use {_described(expected)}.", param=param)


def _follow(path: str, data: object, kind: inspect.Type) -> tuple[str, object, inspect.Type]:
    """Return the field that msgspec's path names, its value as sent, and its expected type."""
    param, expected = "", kind
    value: Any = data  # msgspec has followed the same path
    for step in _STEP.finditer(path):
        if step["name"]:
            param, value = _join(param, step["name"]), value.get(step["name"])
            expected = _field(expected, step["name"])
        elif step["index"]:
            param, value, expected = f"{param}[{step['index']}]", value[int(step["index"])], _item(expected)
        else:
            key = next(key for key, one in value.items() if not isinstance(one, str))
            param, value, expected = _join(param, key), value[key], _item(expected)
    return param, value, expected


def _parts(kind: inspect.Type) -> list[inspect.Type]:
    """Return the types that a value may have, without null."""
    parts = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return [part for part in parts if not isinstance(part, inspect.NoneType)]


def _fields(kind: inspect.Type) -> dict[str, inspect.Type]:
    structs = (part for part in _parts(kind) if isinstance(part, inspect.StructType))
    return {field.encode_name: field.type for struct in structs for field in struct.fields}


def _field(kind: inspect.Type, name: str) -> inspect.Type:
    return _fields(kind).get(name, inspect.AnyType())


def _item(kind: inspect.Type) -> inspect.Type:
    for part in _parts(kind):
        if isinstance(part, inspect.DictType):
            return part.value_type
        if isinstance(part, inspect.ListType | inspect.VarTupleType):
            return part.item_type
    return inspect.AnyType()


def _described(kind: inspect.Type) -> str:
    return " or ".join(dict.fromkeys(_word(part) for part in _parts(kind)))


def _word(kind: inspect.Type) -> str:
    match kind:
        case inspect.StrType():
            return "a string"
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType(ge=least, le=most):
            return "a whole number" if most is None else f"a whole number from {least or 0:,} to {most:,}"
        case inspect.FloatType():
            return "a number"
        case inspect.EnumType(cls=members):
            return _one_of([member.value for member in members])
        case inspect.LiteralType(values=values):
            return _one_of(values)
        case inspect.ListType() | inspect.VarTupleType():
            return "a list"
        case _:
            return "an object"


def _one_of(values: Iterable[object]) -> str:
    return f"one of {', '.join(map(repr, map(str, values)))}"


def _use(kind: inspect.Type, name: str) -> str:
    return f" Send it as {_described(_field(kind, name))}."


def _taken(param: str, kind: inspect.Type) -> str:
    names = ", ".join(_fields(kind))
    subject = f"'{param}'" if param else "This call"
    return f" {subject} takes {names}." if names else f" {subject} takes nothing."


def _shown(value: object) -> str:
    """Return a value as the client wrote it, shortened if it is long."""
    return _cut(json.dumps(value, ensure_ascii=False))


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def _join(param: str, name: str) -> str:
    return f"{param}.{name}" if param else name
