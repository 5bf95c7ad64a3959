"""One pass over a JSONL file with bounded memory: rows counted, every bad line named, page offsets noted.

Rows are judged by apps.contracts.chat alone; this module adds what only a whole file can have wrong with it.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import Any

import msgspec

from apps.contracts.chat import Line, RowError, RowErrorCode, parse_line, split_lines

MIN_ROWS = 10
MAX_ROWS = 2_000_000
MAX_LINE_BYTES = 1024 * 1024
KEPT_ERRORS = 100
LINES_PER_OFFSET = 256
_SNIFFED_BYTES = 512
_PROGRESS_ROWS = 1_000


class FileErrorCode(StrEnum):
    """What can be wrong with a file as a whole; lines have the codes of RowErrorCode."""

    EMPTY_FILE = "empty_file"
    NOT_JSONL = "not_jsonl"
    JSON_ARRAY = "json_array"
    BYTE_ORDER_MARK = "byte_order_mark"
    NOT_UTF8 = "not_utf8"
    TRUNCATED_LAST_LINE = "truncated_last_line"
    TOO_FEW_ROWS = "too_few_rows"
    TOO_MANY_ROWS = "too_many_rows"
    CONTENT_CHANGED = "content_changed"


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to fix, as it is stored and shown."""

    line: int
    code: str
    message: str
    param: str | None = None
    fix: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a pass found. `errors` holds the first of `error_count`."""

    rows: int
    error_count: int
    errors: tuple[LineError, ...]
    line_offsets: tuple[int, ...]
    sha256: str

    @property
    def is_valid(self) -> bool:
        return self.error_count == 0


class _Rejected(Exception):
    """The file is so unlike JSONL that naming each line would help nobody."""

    def __init__(self, error: LineError) -> None:
        super().__init__(error.message)
        self.error = error


def validate_lines(chunks: Iterable[bytes], *, on_progress: Callable[[], None] = lambda: None) -> Report:
    """Judge a file from its bytes in order; `on_progress` is called every thousand rows.

    The whole stream is read even when the file is rejected at its first bytes, so that its hash is always known.
    """
    tap = _Tap(chunks)
    findings = _Findings()
    try:
        _judge(tap, findings, on_progress)
    except _Rejected as rejected:
        findings.add(rejected.error)
        tap.drain(on_progress)
    return Report(
        rows=findings.rows,
        error_count=findings.count,
        errors=tuple(findings.kept),
        line_offsets=tuple(tap.offsets),
        sha256=tap.digest.hexdigest(),
    )


def too_long(line: int) -> LineError:
    return LineError(
        line=line,
        code=RowErrorCode.LINE_TOO_LONG,
        message=f"The line is longer than {MAX_LINE_BYTES // 1024**2} MiB.",
        fix="Put one conversation on each line, separated by newlines; split very long conversations.",
    )


def from_row_error(error: RowError) -> LineError:
    """Return a row's error as it is stored."""
    return LineError(
        line=error.line,
        code=str(error.code),
        message=_storable(error.message),
        param=error.param and _storable(error.param),
        fix=_storable(error.fix),
    )


class _Tap:
    """The stream on its way to the parser: hashed, its line starts noted, its first and last bytes remembered."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self.digest = hashlib.sha256()
        self.offsets: list[int] = [0]
        self.last_byte = b""
        self._chunks = iter(chunks)
        self._first: bytes | None = None
        self._size = self._lines = 0

    def peek(self) -> bytes:
        """Return the first bytes of the file without consuming them."""
        parts: list[bytes] = []
        while sum(map(len, parts)) < _SNIFFED_BYTES and (chunk := next(self._chunks, b"")):
            parts.append(chunk)
        self._first = b"".join(parts)
        return self._first[:_SNIFFED_BYTES]

    def __iter__(self) -> Iterator[bytes]:
        if self._first:
            yield self._take(self._first)
        for chunk in self._chunks:
            yield self._take(chunk)

    def drain(self, on_progress: Callable[[], None]) -> None:
        for _ in self:
            on_progress()

    def _take(self, chunk: bytes) -> bytes:
        self._first = None
        self.digest.update(chunk)
        self._note_offsets(chunk)
        self._size += len(chunk)
        self.last_byte = chunk[-1:] or self.last_byte
        return chunk

    def _note_offsets(self, chunk: bytes) -> None:
        ends, position = chunk.count(b"\n"), -1
        left = ends
        while left >= (missing := LINES_PER_OFFSET - self._lines):
            for _ in range(missing):
                position = chunk.index(b"\n", position + 1)
            self.offsets.append(self._size + position + 1)
            left, self._lines = left - missing, 0
        self._lines += left


class _Findings:
    def __init__(self) -> None:
        self.rows = self.count = 0
        self.kept: list[LineError] = []

    def add(self, error: LineError) -> None:
        self.count += 1
        if len(self.kept) < KEPT_ERRORS:
            self.kept.append(error)


def _judge(tap: _Tap, findings: _Findings, on_progress: Callable[[], None]) -> None:
    _reject_other_formats(tap.peek())
    # One line is held back: whether it is the last decides what its error is called.
    held: tuple[Line, LineError] | None = None
    last_line = 0
    for line in split_lines(tap, max_line_bytes=MAX_LINE_BYTES):
        if held:
            findings.add(held[1])
        findings.rows += 1
        last_line = line.number
        error = _check(line)
        held = (line, error) if error else None
        if findings.rows % _PROGRESS_ROWS == 0:
            on_progress()
        if findings.rows > MAX_ROWS:
            raise _Rejected(_too_many_rows(line.number))
    if held:
        findings.add(_name_last_error(held[1], is_ended=tap.last_byte == b"\n"))
    if findings.rows < MIN_ROWS:
        findings.add(_too_few_rows(findings.rows, last_line or 1))


def _check(line: Line) -> LineError | None:
    if line.is_too_long:
        return too_long(line.number)
    try:
        parse_line(line)
    except RowError as error:
        return from_row_error(error)
    return None


def _name_last_error(error: LineError, *, is_ended: bool) -> LineError:
    if is_ended or error.code not in (RowErrorCode.INVALID_JSON, RowErrorCode.NOT_UTF8):
        return error
    return LineError(
        line=error.line,
        code=FileErrorCode.TRUNCATED_LAST_LINE,
        message="The file ends in the middle of its last line: it was cut off on the way.",
        fix="Upload the whole file again.",
    )


def _too_few_rows(rows: int, line: int) -> LineError:
    if not rows:
        return LineError(
            line=line,
            code=FileErrorCode.EMPTY_FILE,
            message="The file is empty.",
            fix=f"Write at least {MIN_ROWS} rows, one JSON object a line.",
        )
    return LineError(
        line=line,
        code=FileErrorCode.TOO_FEW_ROWS,
        message=f"The file has {rows} {'row' if rows == 1 else 'rows'}; fine-tuning needs at least {MIN_ROWS}.",
        fix="Add more examples.",
    )


def _too_many_rows(line: int) -> LineError:
    return LineError(
        line=line,
        code=FileErrorCode.TOO_MANY_ROWS,
        message=f"The file has more than {MAX_ROWS:,} rows.",
        fix="Split it into several files.",
    )


# --- what a file is by its first bytes --------------------------------------------------------------------------------

_SIGNATURES = (
    (b"PK\x03\x04", "a ZIP archive (or an Office document)"),
    (b"PAR1", "a Parquet file"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"%PDF", "a PDF document"),
    (b"ARROW1", "an Arrow file"),
    (b"SQLite format 3", "a SQLite database"),
    (b"\x28\xb5\x2f\xfd", "a Zstandard archive"),
    (b"BZh", "a bzip2 archive"),
    (b"\xfd7zXZ", "an xz archive"),
    (b"7z\xbc\xaf", "a 7-Zip archive"),
    (b"\x7fELF", "a program"),
    (b"<", "an HTML or XML document"),
)
_UTF8_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_JSONL_FIX = 'Save it as JSONL: UTF-8 text with one object like {"messages": [...]} on each line.'


def _reject_other_formats(head: bytes) -> None:
    """Raise _Rejected for a file that is not what it says; one error is worth more than one for each line."""
    if head.startswith(_UTF16_MARKS):
        raise _rejected(FileErrorCode.NOT_UTF8, "The file is UTF-16 text, not UTF-8.", "Save it as UTF-8.")
    if head.startswith(_UTF8_MARK):
        fix = "Save it as UTF-8 without a byte order mark (BOM)."
        raise _rejected(FileErrorCode.BYTE_ORDER_MARK, "The file starts with a byte order mark.", fix)
    for signature, kind in _SIGNATURES:
        if head.startswith(signature):
            raise _rejected(FileErrorCode.NOT_JSONL, f"The file is {kind}, not JSONL.", _JSONL_FIX)
    if head.lstrip()[:1] == b"[":
        fix = "Write each object of the array on a line of its own, without the brackets around them."
        raise _rejected(FileErrorCode.JSON_ARRAY, "The file is one JSON array, not JSONL.", fix)


def _rejected(code: FileErrorCode, message: str, fix: str) -> _Rejected:
    return _Rejected(LineError(line=1, code=code, message=message, fix=fix))


# PostgreSQL's jsonb takes neither NUL nor half a surrogate pair, and a page should not obey bidi controls.
_UNSTORABLE = re.compile("[\x00-\x1f\x7f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def _storable(text: str) -> str:
    return _UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", text)[:500]


def as_json(errors: Iterable[LineError]) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(error) for error in errors]
