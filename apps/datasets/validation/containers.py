"""Files as numbered rows of JSON text, from JSONL, a JSON array, CSV, Parquet or plain text, each also as gzip.

Everything is streamed with bounded memory. Excessive expansion is refused while the file is read.
"""

import codecs
import csv
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import NoReturn

import msgspec

from apps.contracts.chat.errors import RowErrorCode
from apps.contracts.chat.lines import Line, split_lines
from apps.datasets.problems import MAX_LINE_BYTES, FileErrorCode, LineError, Rejected, too_long
from apps.datasets.stream import CHUNK_BYTES, UTF8_MARK, limited_expansion
from apps.datasets.validation.parquet import parquet_lines

# The csv module's limit is global to the process; a field is never longer than a line may be.
csv.field_size_limit(MAX_LINE_BYTES)


class Container(StrEnum):
    JSONL = "jsonl"
    JSON = "json"
    CSV = "csv"
    PARQUET = "parquet"
    TEXT = "text"


class BadRow(msgspec.Struct, frozen=True):
    """A row that could not be read; `data` is JSON text to show in its place."""

    number: int
    error: LineError
    data: bytes = b"{}"


Row = Line | BadRow


def rows_of(container: Container, chunks: Iterable[bytes], *, head: bytes = b"") -> Iterator[Row]:
    """Yield the rows of an opened container in order. Raises Rejected where it cannot be read further."""
    match container:
        case Container.JSONL:
            return iter(split_lines(chunks, max_line_bytes=MAX_LINE_BYTES))
        case Container.JSON:
            return _Array(chunks).rows()
        case Container.CSV:
            return _table_rows(chunks, head)
        case Container.PARQUET:
            return iter(split_lines(parquet_lines(chunks), max_line_bytes=MAX_LINE_BYTES))
        case Container.TEXT:
            return _documents(chunks)


# --- recognition ------------------------------------------------------------------------------------------------------

GZIP_SIGNATURE = b"\x1f\x8b"
_PARQUET_SIGNATURE = b"PAR1"
_SIGNATURES = (
    (b"PK\x03\x04", "The file is a ZIP archive (or an Office document), not training data."),
    (GZIP_SIGNATURE, "The file is a gzip archive inside another, not training data."),
    (b"\x89PNG", "The file is a PNG image, not training data."),
    (b"\xff\xd8\xff", "The file is a JPEG image, not training data."),
    (b"%PDF", "The file is a PDF document, not training data."),
    (b"ARROW1", "The file is an Arrow file, not training data."),
    (b"SQLite format 3", "The file is a SQLite database, not training data."),
    (b"\x28\xb5\x2f\xfd", "The file is a Zstandard archive, not training data."),
    (b"BZh", "The file is a bzip2 archive, not training data."),
    (b"\xfd7zXZ", "The file is an xz archive, not training data."),
    (b"7z\xbc\xaf", "The file is a 7-Zip archive, not training data."),
    (b"\x7fELF", "The file is a program, not training data."),
    (b"MZ\x90", "The file is a program, not training data."),
    (b"\x80\x02", "The file is a Python pickle, not training data."),
    (b"\x80\x04", "The file is a Python pickle, not training data."),
    (b"\x80\x05", "The file is a Python pickle, not training data."),
    (b"<!doctype", "The file is an HTML document, not training data."),
    (b"<html", "The file is an HTML document, not training data."),
    (b"<?xml", "The file is an XML document, not training data."),
)
_CONTROL = bytes(code for code in range(32) if code not in b"\t\n\r\f\x1b")  # logs contain ESC
_MAX_CONTROL, _JUDGED_BYTES = 0.05, 1024
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_ACCEPTED = "Use JSONL, a JSON array, CSV, Parquet or plain text, each also as gzip."
_DELIMITERS = (",", "\t", ";", "|")
# Text may begin with a bracket too: a link, a time stamp, a placeholder. A quote may be that of a Python dict.
_JSON_START = re.compile(rb"""\[\s*\{|\{\s*["'}]""")
_TEXT_NAMES = (".txt", ".md", ".text")


def recognize(head: bytes, filename: str) -> Container:
    """Return a file's container by its first bytes; the name decides only between kinds of text. Raises Rejected."""
    if head.startswith(_UTF16_MARKS):
        raise Rejected(FileErrorCode.NOT_UTF8, "The file is UTF-16 text, not UTF-8.", "Save it as UTF-8.")
    if head.startswith(_PARQUET_SIGNATURE):
        return Container.PARQUET
    for signature, message in _SIGNATURES:
        if head[: len(signature)].lower() == signature.lower():
            raise Rejected(FileErrorCode.NOT_TRAINING_DATA, message, _ACCEPTED)
    _require_text(head)
    text = head.removeprefix(UTF8_MARK).lstrip()
    name = re.sub(r"\.gz$", "", filename.lower())
    if name.endswith((".csv", ".tsv")):
        return Container.CSV
    if name.endswith(_TEXT_NAMES) and not _JSON_START.match(text):
        return Container.TEXT
    return Container.JSON if text.startswith(b"[") else Container.JSONL


def _require_text(head: bytes) -> None:
    """Raise Rejected for binary bytes and for lines that end in carriage returns alone.

    Both would fill pages with errors that name no cause.
    """
    start = head[:_JUDGED_BYTES]
    if len(start.translate(None, _CONTROL)) < (1 - _MAX_CONTROL) * len(start):
        raise Rejected(
            FileErrorCode.NOT_TRAINING_DATA, "The file is binary data (or UTF-16 text without a mark).", _ACCEPTED
        )
    if b"\n" not in head and head.count(b"\r") > 1:
        message = "The lines end with only a carriage return, as on an old Mac."
        raise Rejected(FileErrorCode.NOT_TRAINING_DATA, message, "Save the file with Unix or Windows line ends.")


def gunzip(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Decompress every member of a gzip stream in pieces of bounded size. Raises Rejected, also for a bomb."""
    return limited_expansion(_inflate, chunks)


def _inflate(chunks: Iterable[bytes]) -> Iterator[bytes]:
    decoder = zlib.decompressobj(31)
    for chunk in chunks:
        rest = chunk
        while rest:
            if decoder.eof:
                decoder = zlib.decompressobj(31)
            try:
                piece = decoder.decompress(rest, CHUNK_BYTES)
            except zlib.error:
                fix = "Compress the file again and upload it."
                raise Rejected(FileErrorCode.TRUNCATED_FILE, "The gzip archive is damaged.", fix) from None
            rest = decoder.unused_data.lstrip(b"\0") if decoder.eof else decoder.unconsumed_tail
            if piece:
                yield piece
    if not decoder.eof:
        message = "The gzip archive is incomplete: it was cut off during upload."
        raise Rejected(FileErrorCode.TRUNCATED_FILE, message, "Upload the whole file again.")


# --- text -------------------------------------------------------------------------------------------------------------


def _decoded(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield UTF-8 text without its byte order mark. Raises Rejected for other encodings."""
    decoder, position = codecs.getincrementaldecoder("utf-8-sig")(), 0
    try:
        for chunk in chunks:
            yield decoder.decode(chunk)
            position += len(chunk)
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        message = f"Near byte {position + error.start + 1:,} the file is not UTF-8."
        raise Rejected(FileErrorCode.NOT_UTF8, message, "Save it as UTF-8.") from None


def _text_lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield lines with their line ends. Raises Rejected for a line that is too long."""
    pending, number = "", 1
    for text in _decoded(chunks):
        *lines, pending = (pending + text).split("\n")
        for line in lines:
            yield line + "\n"
        number += len(lines)
        if len(pending) > MAX_LINE_BYTES:
            error = too_long(number)
            raise Rejected(FileErrorCode.INVALID_TABLE, error.message, "Split it into shorter lines.", line=number)
    if pending:
        yield pending


def _documents(chunks: Iterable[bytes]) -> Iterator[Row]:
    """Yield a row for each block of text between blank lines; a very long block is cut at a line end."""
    number, lines, size = 1, list[str](), 0
    for line in _text_lines(chunks):
        is_blank = not line.strip()
        if lines and (is_blank or size + len(line) > MAX_LINE_BYTES // 4):
            yield _document(number, lines)
            number, lines, size = number + 1, [], 0
        if not is_blank:
            lines.append(line)
            size += len(line)
    if lines:
        yield _document(number, lines)


def _document(number: int, lines: list[str]) -> Line:
    return _sized(number, msgspec.json.encode({"text": "".join(lines).rstrip("\r\n")}))


# --- CSV --------------------------------------------------------------------------------------------------------------


_MAX_RECORD_CHARACTERS = 2 * MAX_LINE_BYTES
_MAX_TABLE_COLUMNS = 5_000


class _RecordLines:
    """Lines of a table for its reader, which takes those of one row together. Raises Rejected for a row of too many."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines = lines
        self._number = self._characters = 0

    def begin(self, number: int) -> None:
        """Say that the next line begins this row. Lines before the first row are those of the header."""
        self._number, self._characters = number, 0

    def __iter__(self) -> Iterator[str]:
        for line in self._lines:
            self._characters += len(line)
            if self._characters > _MAX_RECORD_CHARACTERS:
                what = f"Row {self._number}" if self._number else "The header"
                message = f"{what} is longer than {_MAX_RECORD_CHARACTERS // 1024**2} MiB: probably a quote is wrong."
                fix = 'Close it, write a quote in a value as "", and upload again.'
                raise Rejected(FileErrorCode.INVALID_TABLE, message, fix, line=max(1, self._number))
            yield line


def _table_rows(chunks: Iterable[bytes], head: bytes) -> Iterator[Row]:
    first = head.removeprefix(UTF8_MARK).split(b"\n", 1)[0].decode("utf-8", "replace")
    lines = _RecordLines(_text_lines(chunks))
    reader = csv.reader(lines, delimiter=max(_DELIMITERS, key=first.count), strict=True)
    names = _header(reader)
    number = 0
    while True:
        number += 1
        lines.begin(number)
        try:
            values = next(reader, None)
        except csv.Error as error:
            if "limit" in str(error):  # an unclosed quote swallows all that follows
                message = f"A value of row {number} is longer than 1 MiB: probably a quote is not closed."
                fix = "Close it and upload again."
                raise Rejected(FileErrorCode.INVALID_TABLE, message, fix, line=number) from None
            yield _bad_table_row(number, f"The row is not CSV: {error}.")
            continue
        if values is None:
            return
        if not values:  # a blank line
            number -= 1
        elif len(values) != len(names):
            yield _bad_table_row(number, f"The row has {len(values)} values; the header names {len(names)} columns.")
        else:
            yield _sized(number, msgspec.json.encode(dict(zip(names, values, strict=True))))


def _sized(number: int, data: bytes) -> Line:
    return Line(number, data) if len(data) <= MAX_LINE_BYTES else Line(number, b"", is_too_long=True)


def _header(reader: Iterator[list[str]]) -> list[str]:
    try:
        names = [name.strip() for name in next(reader, [])]
    except csv.Error as error:
        raise Rejected(FileErrorCode.INVALID_TABLE, f"The header is not CSV: {error}.", "Quote its names.") from None
    if len(names) > _MAX_TABLE_COLUMNS:
        message = f"The header names {len(names):,} columns; a table may have {_MAX_TABLE_COLUMNS:,}."
        raise Rejected(FileErrorCode.INVALID_TABLE, message, "Remove those that are not trained on.")
    if names and (len(set(names)) != len(names) or not all(names)):
        fix = "Give each column its own name in the first line."
        raise Rejected(FileErrorCode.INVALID_TABLE, "The header names a column twice, or not at all.", fix)
    return names


def _bad_table_row(number: int, message: str) -> BadRow:
    fix = 'Put values with commas, quotes or line breaks in double quotes, and write a quote as "".'
    return BadRow(number, LineError(line=number, code=FileErrorCode.INVALID_TABLE, message=message, fix=fix))


# --- a JSON array -----------------------------------------------------------------------------------------------------

_BLANK = re.compile(r"[ \t\r\n]*")


class _Array:
    """The objects of one large array, cut out as they are; memory holds one object and a chunk."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._pieces = _decoded(chunks)
        self._text, self._at, self._number = "", 0, 0
        # Only the end of an element matters here; its numbers are not parsed.
        self._json = json.JSONDecoder(parse_int=len, parse_float=len, parse_constant=len)

    def rows(self) -> Iterator[Row]:
        if self._next_character() != "[":
            self._reject("The file does not start with an array.")
        self._at += 1
        if self._next_character() == "]":
            self._at += 1
        else:
            yield from self._elements()
        if self._next_character():
            self._reject("Something follows the array.")

    def _elements(self) -> Iterator[Row]:
        while True:
            self._number += 1
            yield self._element()
            separator = self._next_character()
            self._at += 1
            if separator == "]":
                return
            if separator != ",":
                self._reject(f"After row {self._number} a comma or the end of the array is missing.")
            self._next_character()

    def _element(self) -> Row:
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
            except RecursionError:
                self._reject(f"Row {self._number} is nested too deep.")
            except ValueError as error:
                what = getattr(error, "msg", "a number is too long")
                if len(self._text) - self._at > MAX_LINE_BYTES:
                    self._reject(f"Row {self._number} is longer than 1 MiB or is not valid JSON: {what}.")
                if not self._read_more():
                    self._reject(f"Row {self._number} is not valid JSON: {what}.")
                continue
            start, self._at = self._at, end
            return self._cut(value, start, end)

    def _cut(self, value: object, start: int, end: int) -> Row:
        # Line breaks occur only between tokens: JSON requires them to be escaped inside strings.
        data = self._text[start:end].replace("\r", " ").replace("\n", " ").encode()
        if isinstance(value, dict):
            return _sized(self._number, data)
        error = LineError(
            line=self._number,
            code=RowErrorCode.NOT_AN_OBJECT,
            message=f"Element {self._number} of the array is not an object.",
            fix="Write every row as an object.",
        )
        return BadRow(self._number, error)

    def _next_character(self) -> str:
        """Skip blanks; return the next character, "" at the end of the file."""
        while True:
            blank = _BLANK.match(self._text, self._at)
            self._at = blank.end() if blank else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_more():
                return ""

    def _read_more(self) -> bool:
        for piece in self._pieces:
            if piece:
                self._text, self._at = self._text[self._at :] + piece, 0
                return True
        return False

    def _reject(self, message: str) -> NoReturn:
        fix = "Write one complete JSON array of objects, or JSONL: an object on each line."
        raise Rejected(FileErrorCode.INVALID_ARRAY, message, fix, line=max(1, self._number))
