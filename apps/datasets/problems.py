"""Problems of a file: their codes and wording, as stored and shown."""

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

import msgspec

from apps.contracts.chat.errors import RowError, RowErrorCode

MIN_ROWS = 10
MAX_ROWS = 2_000_000
MAX_LINE_BYTES = 1024 * 1024
KEPT_PROBLEMS = 1_000
SHOWN_CHARACTERS = 4_000


class FileErrorCode(StrEnum):
    """Problems of a whole file, or of a row before it is parsed. Parsed rows have RowErrorCode too."""

    EMPTY_FILE = "empty_file"
    NOT_TRAINING_DATA = "not_jsonl"
    NOT_UTF8 = "not_utf8"
    TRUNCATED_LAST_LINE = "truncated_last_line"
    TRUNCATED_FILE = "truncated_file"
    TOO_FEW_ROWS = "too_few_rows"
    TOO_MANY_ROWS = "too_many_rows"
    TOO_MANY_BLANKS = "too_many_blanks"
    TOO_LARGE_INSIDE = "too_large_inside"
    TOO_SLOW = "too_slow"
    STORAGE_FULL = "storage_full"
    NOT_READ = "not_read"
    CONTENT_CHANGED = "content_changed"
    UNKNOWN_COLUMNS = "unknown_columns"
    MISSING_COLUMN = "missing_column"
    INVALID_TABLE = "invalid_table"
    INVALID_ARRAY = "invalid_array"
    MISSING_VALUE = "missing_value"
    INVALID_VALUE = "invalid_value"


# Problems that are no row's.
OF_THE_FILE = (FileErrorCode.EMPTY_FILE, FileErrorCode.TOO_FEW_ROWS)


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """One problem to fix, as stored and shown. `line` is the line in a JSONL file, otherwise the row's number."""

    line: int
    code: str
    message: str
    param: str | None = None
    fix: str = ""


class Rejected(Exception):
    """The file is so unlike training data that a list of bad lines would not help."""

    def __init__(self, code: FileErrorCode, message: str, fix: str, *, line: int = 1) -> None:
        super().__init__(message)
        self.error = LineError(line=line, code=code, message=storable(message), fix=storable(fix))


def too_many_rows(line: int) -> Rejected:
    message = f"The file has more than {MAX_ROWS:,} rows."
    return Rejected(FileErrorCode.TOO_MANY_ROWS, message, "Split it into several files.", line=line)


def too_long(line: int) -> LineError:
    return LineError(
        line=line,
        code=RowErrorCode.LINE_TOO_LONG,
        message=f"The line is longer than {MAX_LINE_BYTES // 1024**2} MiB.",
        fix="Put one conversation on each line, separated by newlines; split very long conversations.",
    )


def from_row_error(error: RowError) -> LineError:
    """Return a row's error in its stored form."""
    return LineError(
        line=error.line,
        code=str(error.code),
        message=storable(error.message),
        param=error.param and storable(error.param),
        fix=storable(error.fix),
    )


# PostgreSQL's jsonb accepts neither NUL nor a lone surrogate, and a page should not obey bidi controls.
_UNSTORABLE = re.compile("[\x00-\x1f\x7f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def storable(text: str) -> str:
    """Return the text as the database and a page can hold it, at most 500 characters."""
    return _UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", text)[:500]


def shown(data: bytes, *, limit: int = SHOWN_CHARACTERS) -> str:
    """Return the text of a row for people, cut to `limit` characters for the database."""
    return data[: 4 * limit].decode("utf-8", "replace").replace("\x00", "\N{REPLACEMENT CHARACTER}")[:limit]


def as_json(errors: Iterable[LineError]) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(error) for error in errors]
