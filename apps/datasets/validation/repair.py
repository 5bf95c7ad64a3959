"""Repair of bad rows: fixed where only one fix is possible, otherwise dropped."""

import json
import re
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from apps.contracts.chat import Line, RowErrorCode, RowKind
from apps.datasets.problems import LineError
from apps.datasets.validation.row_checks import check_line


class RepairMode(StrEnum):
    DROP = "drop"  # drop every bad row
    REPAIR = "repair"  # fix what can be fixed without guessing, drop the rest


# Other values of `repair`:
FIT = "fit"  # without the rows that a base model's chat template refuses
EDIT = "edit"  # one row replaced or deleted
COPY = "copy"  # the same file again, restored as the newest version
TRAINED, HELD = "trained", "held"  # the rows that a split trains on, and those that it holds out
_MAX_REPAIRS = 16  # of one row, each for another problem
_Change = Callable[[Any, str], bool]
_UTF8_LETTER = re.compile(rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}")


def drop(line: Line, problem: LineError, kind: RowKind) -> bytes | None:
    """Drop the row."""
    return None


def repair_line(line: Line, problem: LineError, kind: RowKind) -> bytes | None:
    """Return the row without its problems, or None when that would need a guess."""
    data = line.data
    current: LineError | None = problem
    for _ in range(_MAX_REPAIRS):
        if current is None:
            return data
        fixed = _fixed(data, current)
        if fixed is None or fixed == data:
            return None
        data, current = fixed, check_line(Line(line.number, fixed), kind)
    return None


REPAIRS = {RepairMode.DROP: drop, RepairMode.REPAIR: repair_line}


def _fixed(data: bytes, problem: LineError) -> bytes | None:
    match problem.code:
        case RowErrorCode.NOT_UTF8:
            return _as_utf8(data)
        case RowErrorCode.NUL_CHARACTER if b"\x00" in data:
            return data.replace(b"\x00", b"")
        case RowErrorCode.NUL_CHARACTER | RowErrorCode.LONE_SURROGATE:
            return _rewritten(data, lambda row, _: _clean_texts(row), problem)
        case RowErrorCode.INVALID_JSON if data.rstrip().endswith(b"},"):
            return data.rstrip()[:-1]  # a line cut out of an array
        case RowErrorCode.DUPLICATE_KEY:
            return _without_repeats(data)
        case code if code in _CHANGES:
            return _rewritten(data, _CHANGES[RowErrorCode(code)], problem)
    return None


def _as_utf8(data: bytes) -> bytes | None:
    """Decode the line as Windows-1252, the encoding of nearly every text that is not UTF-8.

    A line that is partly UTF-8 is left: each of its letters that are not ASCII would become two wrong ones.
    """
    if _UTF8_LETTER.search(data):
        return None
    try:
        return data.decode("cp1252").encode()
    except UnicodeDecodeError:
        return None


def _rewritten(data: bytes, change: _Change, problem: LineError) -> bytes | None:
    try:
        row = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return _dumped(row) if change(row, problem.param or "") else None


def _dumped(row: object) -> bytes | None:
    try:
        return json.dumps(row, ensure_ascii=False, separators=(", ", ": ")).encode()
    except UnicodeEncodeError:
        return None


class _Differs(Exception):
    pass


def _without_repeats(data: bytes) -> bytes | None:
    """Keep one of two equal members. Two different ones are ambiguous and cannot be fixed."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found and json.dumps(found[key]) != json.dumps(value):  # 1 is not true
                raise _Differs
            found[key] = value
        return found

    try:
        return _dumped(json.loads(data, object_pairs_hook=unique))
    except (_Differs, ValueError, RecursionError):
        return None


def _clean_texts(value: object) -> bool:
    """Remove NUL from every string and replace lone surrogates with the replacement character."""
    if isinstance(value, dict):
        for key in list(value):
            value[key] = _clean(value[key])
    elif isinstance(value, list):
        value[:] = [_clean(item) for item in value]
    return True


def _clean(value: object) -> Any:
    if isinstance(value, str):
        return re.sub("[\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", value.replace("\x00", ""))
    _clean_texts(value)
    return value


# --- one member, found by its path ------------------------------------------------------------------------------------

_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "assistant": "assistant",
    "system": "system",
    "developer": "developer",
}


def _parent(row: Any, param: str) -> tuple[Any, str]:
    """Return the object that contains the end of a path, and the path's last name; None when it does not exist."""
    path: list[Any] = [name or int(index) for name, index in _STEP.findall(param)] or [""]
    *steps, last = path
    for step in steps:
        try:
            row = row[step]
        except (KeyError, IndexError, TypeError):
            return None, ""
    return (row, last) if isinstance(row, dict) and last in row else (None, "")


def _remove_key(row: object, param: str) -> bool:
    holder, name = _parent(row, param)
    if holder is None:
        return False
    del holder[name]
    return True


def _mend_weight(row: object, param: str) -> bool:
    holder, name = _parent(row, param)
    if holder is None:
        return False
    if holder.get("role") != "assistant" or holder[name] is None:
        del holder[name]
        return True
    number = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "false": 0, "true": 1}.get(str(holder[name]).lower())
    if number is not None:
        holder[name] = number
    return number is not None


def _mend_role(row: object, param: str) -> bool:
    holder, name = _parent(row, param)
    role = _ROLES.get(str(holder[name]).strip().lower()) if holder is not None else None
    if holder is not None and role:
        holder[name] = role
    return bool(role)


def _mend_content(row: object, param: str) -> bool:
    """Turn a number in place of text into its text; labels often are numbers."""
    holder, name = _parent(row, param)
    if holder is None or isinstance(holder[name], bool) or not isinstance(holder[name], int):
        return False
    holder[name] = str(holder[name])
    return True


def _end_with_assistant(row: object, param: str) -> bool:
    """Remove the messages after the last answer."""
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list):
        return False
    while messages and not (isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant"):
        messages.pop()
    return bool(messages)


_CHANGES: dict[RowErrorCode, _Change] = {
    RowErrorCode.UNKNOWN_KEY: _remove_key,
    RowErrorCode.INVALID_WEIGHT: _mend_weight,
    RowErrorCode.INVALID_ROLE: _mend_role,
    RowErrorCode.INVALID_CONTENT: _mend_content,
    RowErrorCode.LAST_MESSAGE_NOT_ASSISTANT: _end_with_assistant,
}
