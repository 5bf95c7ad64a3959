"""Reading request bodies: OpenAI clients send an empty one where nothing is to say, and types come from msgspec."""

import json
import re
from collections.abc import Mapping
from typing import IO, Any, NoReturn, TypeVar

import msgspec
from rest_framework.exceptions import ParseError
from rest_framework.parsers import JSONParser

from apps.core.errors import DomainError, InvalidValue

T = TypeVar("T")
_AT_PATH = re.compile(r"(?P<what>.*?) - at `\$(?P<path>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]+)`")
_MAX_DEPTH = 64


class MissingParameter(DomainError):
    code = "missing_required_parameter"


class EmptyTolerantJSONParser(JSONParser):
    """Reads strict JSON; an empty body is an empty object (openai sends one on cancel, pause and resume)."""

    def parse(
        self, stream: IO[bytes], media_type: str | None = None, parser_context: Mapping[str, Any] | None = None
    ) -> Any:
        """Raises ParseError for what is not UTF-8 JSON, names a key twice, or holds NaN or Infinity."""
        body = stream.read()
        if not body.strip():
            return {}
        try:
            value = json.loads(body.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise ParseError(f"We could not parse the JSON body of your request: {error}") from error
        _refuse_unstorable(value)
        return value


def read_body(data: Any, kind: type[T]) -> T:
    """Convert a parsed body to a struct. Raises InvalidValue or MissingParameter naming the field at fault."""
    try:
        return msgspec.convert(data, kind, strict=True)
    except msgspec.ValidationError as error:
        raise _explained(str(error), kind) from error


def _explained(message: str, kind: Any) -> DomainError:
    match = _AT_PATH.fullmatch(message)
    what, path = (match["what"], match["path"].lstrip(".")) if match else (message, "")
    if missing := _MISSING.fullmatch(what):
        name = f"{path}.{missing['name']}".lstrip(".")
        return MissingParameter(f"Missing required parameter: '{name}'.", param=name)
    if unknown := _UNKNOWN.fullmatch(what):
        name = f"{path}.{unknown['name']}".lstrip(".")
        return InvalidValue(f"Unknown parameter: '{name}'.{'' if path else _taken(kind)}", param=name)
    return InvalidValue(f"Invalid value for '{path}': {what}." if path else f"{what}.", param=path or None)


def _taken(kind: Any) -> str:
    names = [field.encode_name for field in msgspec.structs.fields(kind)]
    return f" This call takes {', '.join(names)}." if names else ""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a key given twice: readers disagree on which one counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice in one object")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _refuse_unstorable(value: Any, depth: int = 0) -> None:
    """Refuse what PostgreSQL cannot hold: NUL characters and lone surrogates; and nesting beyond reason."""
    if depth > _MAX_DEPTH:
        raise ParseError(f"The JSON body is nested deeper than {_MAX_DEPTH} levels.")
    match value:
        case str():
            if "\x00" in value or any("\ud800" <= character <= "\udfff" for character in value):
                raise ParseError("The JSON body holds a NUL character or a lone surrogate.")
        case dict():
            for key, item in value.items():
                _refuse_unstorable(key, depth + 1)
                _refuse_unstorable(item, depth + 1)
        case list():
            for item in value:
                _refuse_unstorable(item, depth + 1)
