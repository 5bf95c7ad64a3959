"""Lines of a file and strict parsing of their JSON: text that parsers interpret differently is refused."""

import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import msgspec

from apps.contracts.chat.errors import RowError, RowErrorCode, short

MAX_LINE_BYTES = 4 * 1024 * 1024
MAX_DEPTH = 32


class Line(msgspec.Struct, frozen=True, gc=False):
    """One non-blank line of a file; `data` is empty when the line was too long to keep."""

    number: int
    data: bytes
    is_too_long: bool = False


def split_lines(chunks: Iterable[bytes], *, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Line]:
    """Split a stream into numbered lines without blank ones, holding at most one line and one chunk."""
    number, pending, is_too_long = 1, bytearray(), False
    for chunk in chunks:
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            if not (piece or pending or is_too_long):
                number += 1
                continue
            line = _join_line(number, pending, piece, is_too_long, max_line_bytes)
            if line is not None:
                yield line
            number, is_too_long = number + 1, False
            pending.clear()
        if len(pending) + len(rest) > max_line_bytes + 1:  # one more for a "\r"
            is_too_long = True
            pending.clear()
        if not is_too_long:
            pending += rest
    line = _join_line(number, pending, b"", is_too_long, max_line_bytes)
    if line is not None:
        yield line


def _join_line(number: int, pending: bytearray, piece: bytes, is_too_long: bool, limit: int) -> Line | None:
    data = (bytes(pending) + piece).rstrip(b"\r")
    if is_too_long or len(data) > limit:
        return Line(number, b"", is_too_long=True)
    return Line(number, data) if data.strip() else None


def raise_too_long(line_number: int) -> NoReturn:
    """Raise the error of a line that is too long."""
    raise RowError(
        line_number,
        RowErrorCode.LINE_TOO_LONG,
        f"The line is longer than {MAX_LINE_BYTES // (1024 * 1024)} MiB.",
        fix="Put one conversation on each line, separated by newlines; split very long conversations.",
    )


class _Duplicate(Exception):
    pass


class _BadNumber(Exception):
    pass


def parse_json(line: bytes, number: int) -> Any:
    """Return the one JSON value of a line. Raises RowError for text that parsers interpret differently."""
    value = _load_json(_decode(line, number), number, decoder=_STRICT)
    may_hide_bad_text = b"\\u" in line
    if may_hide_bad_text or line.count(b"{") + line.count(b"[") > MAX_DEPTH:
        _check_values(value, number)
    return value


def _decode(line: bytes, number: int) -> str:
    if b"\x00" in line:
        raise RowError(
            number,
            RowErrorCode.NUL_CHARACTER,
            "The line holds NUL bytes; the file looks binary or UTF-16.",
            fix="Save the file as UTF-8 text, one JSON object per line.",
        )
    try:
        return line.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"Byte {error.start + 1} of the line is not UTF-8."
        raise RowError(number, RowErrorCode.NOT_UTF8, message, fix="Save the file as UTF-8 text.") from None


_OF_A_VALUE = (RowErrorCode.INVALID_NUMBER, RowErrorCode.LONE_SURROGATE, RowErrorCode.NUL_CHARACTER)
_NEXT_KEY, _COLON = re.compile(r'[{,\s]*(?=")'), re.compile(r"\s*:\s*")


def parse_members(line: bytes, number: int) -> dict[str, bytes]:
    """Return the JSON text of each member of an object, also of those with a number or character that is refused.

    A value that is no object has none. Raises RowError for other text that parsers interpret differently.
    """
    text = _decode(line, number)
    if not isinstance(_load_json(text, number, decoder=_LENIENT), dict):
        return {}
    found, at = dict[str, bytes](), 0
    while key := _NEXT_KEY.match(text, at):
        name, at = _LENIENT.raw_decode(text, key.end())
        colon = _COLON.match(text, at)
        assert colon is not None
        _, at = _LENIENT.raw_decode(text, colon.end())
        found[name] = text[colon.end() : at].encode()
    return found


def keep_columns(line: bytes, number: int, names: Iterable[str]) -> bytes:
    """Return the row, or only these columns if another one has a number or character that is refused.

    Raises RowError as `parse_json` does; its `param` names a column whose value is refused.
    """
    try:
        parse_json(line, number)
        return line
    except RowError as error:
        members = parse_members(line, number) if error.code in _OF_A_VALUE else {}
        if not members:
            raise
    kept = {name: members[name] for name in names if name in members}
    for name, text in kept.items():
        try:
            parse_json(text, number)
        except RowError as error:
            error.param = name
            raise
    return msgspec.json.encode({name: msgspec.Raw(text) for name, text in kept.items()})


def _load_json(text: str, number: int, *, decoder: json.JSONDecoder) -> Any:
    try:
        return decoder.decode(text)
    except _Duplicate as error:
        message = f"The key {short(str(error))} appears twice in one object."
        raise RowError(number, RowErrorCode.DUPLICATE_KEY, message, fix="Keep each key once.") from None
    except _BadNumber as error:
        message = f"{short(str(error))} is not a number JSON allows here."
        fix = "Use finite numbers of ordinary size."
        raise RowError(number, RowErrorCode.INVALID_NUMBER, message, fix=fix) from None
    except RecursionError:
        _raise_too_deep(number)
    except json.JSONDecodeError as error:
        message = f"Not valid JSON at column {error.colno}: {error.msg}."
        fix = "Write each row as one complete JSON object on one line; the line may be cut off."
        raise RowError(number, RowErrorCode.INVALID_JSON, message, fix=fix) from None


def _unique_object(pairs: list[tuple[str, object]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Duplicate(key)
            seen.add(key)
    return value


def _reject_number(text: str) -> NoReturn:
    raise _BadNumber(text)


def _small_int(text: str) -> int:
    if len(text) > 18:
        raise _BadNumber(text)
    return int(text)


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _BadNumber(text)
    return value


_STRICT = json.JSONDecoder(
    object_pairs_hook=_unique_object, parse_constant=_reject_number, parse_int=_small_int, parse_float=_finite_float
)
_LENIENT = json.JSONDecoder(object_pairs_hook=_unique_object, parse_constant=len, parse_int=len, parse_float=len)


def _check_values(value: object, number: int) -> None:
    """Refuse nesting beyond MAX_DEPTH, and characters that only escapes can contain: NUL and lone surrogates."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, str):
                if "\x00" in item:
                    raise RowError(
                        number,
                        RowErrorCode.NUL_CHARACTER,
                        "A string holds the NUL character (\\u0000).",
                        fix="Remove \\u0000 from the text.",
                    )
                if _SURROGATE.search(item):
                    raise RowError(
                        number,
                        RowErrorCode.LONE_SURROGATE,
                        "A string holds half of a surrogate pair (\\ud800–\\udfff), which is not a character.",
                        fix="Write the character itself in UTF-8, or both halves of the pair.",
                    )
            elif isinstance(item, dict):
                deeper += item.keys()
                deeper += item.values()
            elif isinstance(item, list):
                deeper += item
        if not deeper:
            return
        level = deeper
    _raise_too_deep(number)


_SURROGATE = re.compile("[\ud800-\udfff]")


def _raise_too_deep(number: int) -> NoReturn:
    message = f"Values are nested deeper than {MAX_DEPTH} levels."
    raise RowError(number, RowErrorCode.TOO_DEEP, message, fix='A row is {"messages": [...]} with flat messages.')
