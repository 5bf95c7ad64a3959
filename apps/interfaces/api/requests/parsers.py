"""Parsing of request bodies into msgspec types. OpenAI clients send an empty body where they have nothing to send."""

import json
import math
from collections.abc import Mapping
from typing import IO, Any, NoReturn, TypeVar

import msgspec
from django.core.exceptions import RequestDataTooBig, TooManyFieldsSent, TooManyFilesSent
from rest_framework.exceptions import ParseError
from rest_framework.parsers import DataAndFiles, JSONParser, MultiPartParser

from apps.core.errors import DomainError, InvalidJson
from apps.core.http.asgi import TooLarge
from apps.core.http.json_bodies import MAX_VALUES, explain, has_many_values

T = TypeVar("T")
_MAX_DEPTH = 64
_MAX_INTEGER = 2**63 - 1  # the maximum of the database's columns
_MAX_DIGITS = 400
_MAX_PARAM = 200


class InvalidForm(DomainError):
    code = "invalid_multipart"


class EmptyTolerantJSONParser(JSONParser):
    """Reads strict JSON. An empty body is an empty object (openai sends one on cancel, pause and resume)."""

    def parse(
        self, stream: IO[bytes], media_type: str | None = None, parser_context: Mapping[str, object] | None = None
    ) -> Any:
        """Return the parsed body.

        Raises TooLarge for too many values, and InvalidJson if it is not UTF-8 JSON, names a key twice, or holds a
        value that cannot be stored.
        """
        body = stream.read()
        if has_many_values(body):
            raise TooLarge(f"The body holds more than {MAX_VALUES:,} values or commas. Send less in one request.")
        if not body.strip():
            return {}
        try:
            value = json.loads(
                body.decode("utf-8"),
                object_pairs_hook=_unique_keys,
                parse_constant=_refuse_constant,
                parse_int=_integer,
            )
        except UnicodeDecodeError as error:
            raise _unreadable(f"byte {error.start + 1} is not UTF-8") from error
        except json.JSONDecodeError as error:
            if error.doc.startswith("\ufeff"):
                raise _unreadable("it begins with a byte order mark", "Remove it.") from error
            raise _unreadable(f"line {error.lineno}, column {error.colno}: {error.msg.lower()}") from error
        except RecursionError as error:
            raise _unreadable(f"it is nested deeper than {_MAX_DEPTH} levels", "Flatten it.") from error
        if found := _find_unstorable(value):
            param = found[0].lstrip(".")[:_MAX_PARAM]
            subject = f"'{param}'" if param else "The body"
            raise InvalidJson(f"{subject} {found[1]}: send another value.", param=param or None)
        return value


class PlainMultiPartParser(MultiPartParser):
    """Reads multipart form data. Raises InvalidForm."""

    def parse(
        self, stream: IO[bytes], media_type: str | None = None, parser_context: Mapping[str, object] | None = None
    ) -> DataAndFiles:
        try:
            return super().parse(stream, media_type, parser_context)
        except ParseError as error:
            text = "The form could not be read. Send multipart/form-data with the boundary that the header names."
            raise InvalidForm(text) from error
        except (TooManyFieldsSent, TooManyFilesSent, RequestDataTooBig) as error:  # such as a field for each byte
            text = "The form has too many or too long fields. Send a file as one part with a filename."
            raise InvalidForm(text) from error


def read_body(data: object, kind: type[T]) -> T:
    """Convert a parsed body to a struct. Raises DomainErrors that name the field at fault."""
    try:
        return msgspec.convert(data, kind, strict=True)
    except msgspec.ValidationError as error:
        raise explain(data, kind) from error


def _unreadable(why: str, fix: str = "Send one JSON object in UTF-8.") -> InvalidJson:
    return InvalidJson(f"The body is not valid JSON: {why}. {fix}")


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Refuse a repeated key, because parsers disagree on which one counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _unreadable(f"the key '{twice[:60]}' appears twice in one object", "Remove one.")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise _unreadable(f"{name} is not a number of JSON", "Send null, or a number.")


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise _unreadable(f"a number has more than {_MAX_DIGITS} digits", "Send a shorter one.")
    return int(text)


def _find_unstorable(value: object, depth: int = 0) -> tuple[str, str] | None:
    """Return the place and fault of a value that PostgreSQL cannot store or that is nested too deeply.

    None means that there is no such value.
    """
    if depth > _MAX_DEPTH:
        return "", f"is nested deeper than {_MAX_DEPTH} levels"
    match value:
        case str() if "\x00" in value or any("\ud800" <= character <= "\udfff" for character in value):
            return "", "has a NUL character or half of a surrogate pair"
        case int() if abs(value) > _MAX_INTEGER:
            return "", f"is beyond {_MAX_INTEGER:,}"
        case float() if not math.isfinite(value):
            return "", "is larger than any number that can be kept"
        case dict():
            for key, item in value.items():
                if _find_unstorable(key):
                    return "", "has a key with a NUL character or half of a surrogate pair"
                if found := _find_unstorable(item, depth + 1):
                    return f".{key}{found[0]}", found[1]
        case list():
            for index, item in enumerate(value):
                if found := _find_unstorable(item, depth + 1):
                    return f"[{index}]{found[0]}", found[1]
    return None
