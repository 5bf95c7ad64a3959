"""Parsing of JSON bodies. Each error is a sentence that names the field and its allowed values."""

import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec
from msgspec import inspect

from apps.core.errors import DomainError, InvalidJson, InvalidValue, MissingParameter
from apps.interfaces.gateway.errors import UnknownParameter

Parsed = TypeVar("Parsed", bound=msgspec.Struct)
_Body = type[msgspec.Struct]


def decode_body(raw: bytes, decoder: "msgspec.json.Decoder[Parsed]") -> Parsed:
    """Return the decoded body. Raises DomainErrors that name the field."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), decoder.type) from error
    except RecursionError as error:
        raise InvalidJson("The body is nested too deeply.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidJson(f"The body is not valid JSON{_where(str(error))}.") from error


def convert_body(fields: Mapping[str, object], kind: type[Parsed], names: Mapping[str, str]) -> Parsed:
    """Return a body converted from another surface's request. Refusals use that surface's field `names`."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), kind, names) from error


def _where(text: str) -> str:
    if "truncated" in text or "end of" in text:
        return ": it ends in the middle of a value"
    found = re.search(r"\(byte (\d+)\)", text)
    return f", from byte {found[1]} on" if found else ""


# --- msgspec's messages in our words ----------------------------------------------------------------------------------

_AT = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`(?P<place>.*)`)?$", re.DOTALL)
_FIELD = re.compile(r"`(\w+)`$")
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")
_TYPES = re.compile(r"Expected `(?P<wanted>[^`]*)`, got `(?P<given>\w+)`")
_BOUND = re.compile(r"Expected `(?P<type>\w+)`(?P<length> of length)? (?P<sign>[<>]=?) (?P<bound>\S+)")
_NAMES = {
    "int": "an integer", "float": "a number", "str": "a string", "bool": "true or false", "array": "a list",
    "object": "an object", "null": "null",
}  # fmt: skip
_COUNTED = {"str": "characters", "array": "items", "object": "entries"}
_SIGNS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}


def _refusal(text: str, kind: _Body, names: Mapping[str, str] | None = None) -> DomainError:
    """Convert msgspec's "Expected `int` >= 1 - at `$.n`" into an error that names the field."""
    found = _AT.match(text)
    assert found is not None  # it matches any text
    what, place = found["what"], found["place"] or "$"
    param = _renamed(place.removeprefix("$").removeprefix(".").replace("[...]", ""), names or {})
    if what.startswith("Object contains unknown field") and (unknown := _FIELD.search(what)):
        taken = f"`{param}` takes {', '.join(_fields_at(kind, place))}" if param else "Remove it"
        return UnknownParameter(
            f"Unknown parameter: `{_joined(param, unknown[1])}`. {taken}.", param=_joined(param, unknown[1])
        )
    if what.startswith("Object missing required field") and (missing := _FIELD.search(what)):
        return MissingParameter(f"`{_joined(param, missing[1])}` is required.", param=_joined(param, missing[1]))
    subject = f"`{param}`" if param else "The body"
    if place.endswith("[...]"):
        subject = f"Each value of {subject}"
    return InvalidValue(f"{subject} {_in_plain_words(what, kind, place)}.", param=param or None)


def _renamed(param: str, names: Mapping[str, str]) -> str:
    first = re.split(r"[.\[]", param, maxsplit=1)[0]
    return names.get(first, first) + param.removeprefix(first)


def _joined(param: str, name: str) -> str:
    return f"{param}.{name}" if param else name


def _in_plain_words(what: str, kind: _Body, place: str) -> str:
    if found := _TYPES.match(what):
        names = [_NAMES.get(name, name) for name in found["wanted"].split(" | ") if name != "null"]
        return f"must be {' or '.join(names)}, not {_NAMES.get(found['given'], found['given'])}"
    if found := _BOUND.match(what):
        if found["length"] and found["sign"] == ">=" and found["bound"] == "1":
            return "must not be empty"
        counted = f" {_COUNTED[found['type']]}" if found["length"] else ""
        verb = "must have" if counted else "must be"
        return f"{verb} {_SIGNS[found['sign']]} {found['bound'].removesuffix('.0')}{counted}"
    if what.startswith("Invalid enum value"):
        values = [f"'{value}'" for value in _values_at(kind, place)]
        wanted = f"one of {', '.join(values)}" if len(values) > 1 else "".join(values)
        return f"must be {wanted}, not {what.removeprefix('Invalid enum value ')[:60]}"
    if "matching regex" in what:
        return f"must match {what.partition('matching regex ')[2]}"
    return f"is not valid: {what[:1].lower()}{what[1:]}"


# --- Types at a place -------------------------------------------------------------------------------------------------


def _fields_at(kind: _Body, place: str) -> list[str]:
    found = [one for one in _types_at(kind, place) if isinstance(one, inspect.StructType)]
    return [f"`{field.encode_name}`" for one in found for field in one.fields]


def _values_at(kind: _Body, place: str) -> list[object]:
    return [value for one in _types_at(kind, place) if isinstance(one, inspect.LiteralType) for value in one.values]


_described: dict[_Body, inspect.Type] = {}  # by kind of body, of which there are few


def _types_at(kind: _Body, place: str) -> list[inspect.Type]:
    """Return the types that a value at the place may have."""
    if kind not in _described:
        _described[kind] = inspect.type_info(kind)
    here = _members(_described[kind])
    for step in _STEP.finditer(place):
        here = [inner for one in here for inner in _members(_inside(one, step[1]))]
    return here


def _inside(kind: inspect.Type, name: str | None) -> inspect.Type | None:
    if isinstance(kind, inspect.StructType):
        return next((field.type for field in kind.fields if field.encode_name == name), None)
    if name is None and isinstance(kind, inspect.ListType):
        return kind.item_type
    return kind.value_type if name is None and isinstance(kind, inspect.DictType) else None


def _members(kind: inspect.Type | None) -> list[inspect.Type]:
    if isinstance(kind, inspect.Metadata):
        return _members(kind.type)
    if isinstance(kind, inspect.UnionType):
        return [member for one in kind.types for member in _members(one)]
    return [kind] if kind is not None else []
