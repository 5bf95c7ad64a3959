"""One pass over a file with bounded memory: its container, its rows in a stored kind, and every problem in it.

Only apps.contracts.chat checks rows; this module adds the problems of a whole file.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice

import msgspec

from apps.contracts.chat.errors import RowError
from apps.contracts.chat.lines import Line, keep_columns, parse_members
from apps.contracts.chat.rows import RowKind
from apps.datasets.problems import (
    MAX_LINE_BYTES,
    MIN_ROWS,
    SHOWN_CHARACTERS,
    FileErrorCode,
    LineError,
    Rejected,
    from_row_error,
    shown,
)
from apps.datasets.stream import UTF8_MARK, Hashed, LineOffsets, Peekable, without_long_blanks
from apps.datasets.validation.containers import GZIP_SIGNATURE, BadRow, Container, Row, gunzip, recognize, rows_of
from apps.datasets.validation.conversion import Unconvertible, convert
from apps.datasets.validation.findings import Findings, too_few_rows
from apps.datasets.validation.formats import OPTIONAL, Mapping, detect, stored_mapping
from apps.datasets.validation.row_checks import check_line, count_if_plain

_SAMPLED_ROWS = 64
_SHOWN_ROWS = 5
_MAX_COLUMNS, _MAX_COLUMN_NAME = 200, 200  # lists of files hold them
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")  # jsonb accepts neither
_HEAD_BYTES = 64 * 1024
_HEADS_BYTES = (_HEAD_BYTES, MAX_LINE_BYTES + _HEAD_BYTES, 4 * MAX_LINE_BYTES)  # read until there is a whole row
_OUTPUT_BYTES = 256 * 1024
_ROW_BYTES = 256  # the time for a row that does not depend on its length, in bytes of content

# A bad row and its problem -> the rows to keep in its place.
Repair = Callable[[Line, LineError, RowKind], bytes | None]


class ValidationReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a pass. `errors` holds the first of `error_count` errors."""

    rows: int
    error_count: int
    errors: tuple[LineError, ...]
    line_offsets: tuple[int, ...]
    sha256: str
    kind: str = ""
    container: str = ""
    is_gzip: bool = False
    mapping: Mapping | None = None
    columns: tuple[str, ...] = ()
    sample: tuple[str, ...] = ()
    is_rejected: bool = False
    repaired: int = 0
    dropped: int = 0

    @property
    def is_valid(self) -> bool:
        return self.error_count == 0


class FileValidator:
    """A file being read once. After `start`, iterating yields its rows as JSONL; after that, `report` is complete.

    `is_verbatim`: the rows are the file itself, so the yielded rows need not be stored. A repairing pass drops or
    replaces bad rows; any other pass yields them as they are, so that line numbers agree. A file that was
    `written_as` rows of a kind is JSONL of this kind, even if its first rows look different, unless a mapping is given.
    """

    def __init__(
        self,
        chunks: Iterable[bytes],
        *,
        filename: str = "",
        mapping: Mapping | None = None,
        written_as: str = "",
        repair: Repair | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._source = Hashed(watched(chunks, on_progress))
        self._filename, self._given, self._repair, self._on_progress = filename, mapping, repair, on_progress
        self._written_as = "" if mapping else written_as
        self._offsets = LineOffsets()
        self._findings = Findings()
        self._rejection: LineError | None = None
        self._rows: Iterator[Row] = iter(())
        self._text = Peekable(())
        self.container = Container.JSONL
        self.is_gzip = False
        self.mapping: Mapping | None = None
        self.columns: tuple[str, ...] = ()
        self._sample: tuple[str, ...] = ()
        self.is_verbatim = False
        self._is_ended = True  # after a line break, or else not in lines

    def start(self) -> None:
        """Recognize the file, reading no more of it than necessary."""
        try:
            self._open()
        except Rejected as rejected:
            self._rejection = rejected.error

    def __iter__(self) -> Iterator[bytes]:
        """Read the whole file regardless of its problems, so that its hash is always known."""
        try:
            if self._rejection is None:
                pieces = self._check_blocks() if self._takes_blocks else self._check_rows()
                yield from (self._offsets.note(piece) for piece in pieces)
                found = self._findings
                found.finish(is_ended=self._is_ended)
                if found.rows < MIN_ROWS:
                    found.add(
                        too_few_rows(found.rows, max(1, found.last_line), is_text=self.container is Container.TEXT)
                    )
        except Rejected as rejected:
            self._rejection = rejected.error
        if self._rejection is not None:
            self._findings.add(self._rejection)
        for _ in self._source:
            pass

    @property
    def kind(self) -> RowKind:
        return self.mapping.kind if self.mapping else RowKind.CHAT

    @property
    def rejection(self) -> LineError | None:
        """Why the file was not read to its end, if it was not."""
        return self._rejection

    @property
    def report(self) -> ValidationReport:
        found = self._findings
        return ValidationReport(
            rows=found.rows,
            error_count=found.count,
            errors=tuple(found.kept),
            line_offsets=tuple(self._offsets.offsets),
            sha256=self._source.sha256,
            kind=str(self.kind) if self.mapping or not found.count else "",
            container=self.container,
            is_gzip=self.is_gzip,
            mapping=self.mapping,
            columns=self.columns,
            sample=self._sample,
            is_rejected=self._rejection is not None,
            repaired=found.repaired,
            dropped=found.dropped,
        )

    # --- opening ---

    def _open(self) -> None:
        self._text = Peekable(self._source)
        if self._text.peek(2) == GZIP_SIGNATURE:
            self.is_gzip, self._text = True, Peekable(watched(gunzip(self._text), self._on_progress))
        head = self._text.peek(_HEAD_BYTES)
        self.container = Container.JSONL if self._written_as else recognize(head, self._filename)
        if self.container is not Container.PARQUET:
            self._text = Peekable(without_long_blanks(self._text))
        if self.container is Container.JSONL:
            sample = self._first_lines()
        else:
            rows = rows_of(self.container, self._text, head=head)
            first = list(islice(rows, _SAMPLED_ROWS))
            self._rows = chain(first, rows)
            sample = [row.data for row in first if isinstance(row, Line) and not row.is_too_long]
        self._choose_mapping(sample)
        has_mark = head.startswith(UTF8_MARK)
        is_plain = self.container is Container.JSONL and not self.is_gzip and not has_mark and not self._repair
        self.is_verbatim = is_plain and self._passes_unchanged
        if self.container is Container.JSONL:
            if has_mark:
                self._text = Peekable(_without_mark(self._text))
            if not self._takes_blocks:
                self._rows = rows_of(self.container, self._text)

    def _first_lines(self) -> list[bytes]:
        """Return the first rows of a JSONL file, from further on where those before are too long."""
        for size in _HEADS_BYTES:
            head = self._text.peek(size)
            if lines := _lines_of(head, is_whole=len(head) < size):
                return lines
        return []

    def _choose_mapping(self, sample: list[bytes]) -> None:
        # The character beyond the limit says that the row is longer.
        self._sample = tuple(shown(data, limit=SHOWN_CHARACTERS + 1) for data in sample[:_SHOWN_ROWS])
        names = [found for data in sample if (found := _columns_of(data)) is not None]
        all_names = (name for row in names for name in row)
        kept = (name for name in all_names if len(name) <= _MAX_COLUMN_NAME and not _UNSTORABLE.search(name))
        self.columns = tuple(dict.fromkeys(kept))[:_MAX_COLUMNS]
        if self._written_as:
            self.mapping = stored_mapping(RowKind(self._written_as), self.columns)
            return
        self.mapping = self._given or detect(names)
        if self._given:
            _require_columns(self._given, names, self.columns)
        elif self.mapping is None and names:
            listed = ", ".join(f"`{name[:40]}`" for name in self.columns[:12]) or "no columns at all"
            raise Rejected(
                FileErrorCode.UNKNOWN_COLUMNS,
                f"We couldn't tell which columns to train on. Found: {listed}.",
                "Map the columns, or provide a `messages` column.",
            )

    @property
    def _passes_unchanged(self) -> bool:
        """Whether rows are in a stored kind already.

        Tables name other columns too, so their rows never are.
        """
        is_table = self.container in (Container.CSV, Container.PARQUET)
        return not is_table and not self._given and (self.mapping is None or self.mapping.is_verbatim)

    @property
    def _takes_blocks(self) -> bool:
        return self.container is Container.JSONL and self._passes_unchanged and not self._repair

    # --- reading ---

    def _check_blocks(self) -> Iterator[bytes]:
        """Check a JSONL file of stored rows, many lines at once where possible."""
        line_number = 1
        pending = b""
        for chunk in self._text:
            end = chunk.rfind(b"\n") + 1
            if not end:
                pending += chunk
                if len(pending) > 2 * MAX_LINE_BYTES:
                    pending = b" " * (2 * MAX_LINE_BYTES)  # too long already: its content no longer matters
                yield chunk
                continue
            block, pending = pending + chunk[:end], chunk[end:]
            self._check_block(block, line_number)
            line_number += block.count(b"\n")
            yield chunk
        if pending:
            self._is_ended = False
            self._check_block(pending, line_number)

    def _check_block(self, block: bytes, first: int) -> None:
        rows = count_if_plain(block, self.kind)
        if rows is not None:
            self._findings.release()
            self._findings.rows += rows
        else:
            for line in rows_of(Container.JSONL, [block]):
                assert isinstance(line, Line)
                line = Line(line.number + first - 1, line.data, line.is_too_long)
                self._findings.row(line.number, check_line(line, self.kind))
        self._findings.require_few(first)

    def _check_rows(self) -> Iterator[bytes]:
        """Check rows one by one, each converted first; yield them in pieces."""
        out, size, last, work = list[bytes](), 0, 0, 0
        for row in self._rows:
            data = self._judge(row)
            work += _ROW_BYTES + len(row.data)
            if work >= _OUTPUT_BYTES:
                work = 0
                self._on_progress()
                self._findings.require_few(row.number)
            if data is not None:
                gap = 0 if self._repair else row.number - last - 1  # blank lines: line numbers must not change
                out.append(b"\n" * gap + data + b"\n")
                size += len(out[-1])
            last = row.number
            if size >= _OUTPUT_BYTES:
                yield b"".join(out)
                out, size = [], 0
        yield b"".join(out)

    def _judge(self, row: Row) -> bytes | None:
        if isinstance(row, BadRow):
            return self._bad(Line(row.number, row.data), row.error)
        try:
            line = row if self._passes_unchanged or row.is_too_long else self._converted(row)
        except Unconvertible as error:
            return self._bad(row, error.at(row.number))
        except RowError as error:
            return self._bad(row, from_row_error(error))
        problem = check_line(line, self.kind)
        if problem:
            return self._bad(line, problem)
        self._findings.row(row.number, None)
        return line.data

    def _converted(self, row: Line) -> Line:
        # Strict: conversion would silently take one of two equal keys. Columns that are left out may hold anything.
        data = keep_columns(row.data, row.number, self.mapping.columns.values() if self.mapping else ())
        data = convert(data, self.mapping) if self.mapping else data
        return Line(row.number, data, is_too_long=len(data) > MAX_LINE_BYTES)

    def _bad(self, line: Line, problem: LineError) -> bytes | None:
        if self._repair is None:
            self._findings.row(line.number, problem)
            return b"{}" if line.is_too_long else line.data
        data = self._repair(line, problem, self.kind)
        if data is None:
            self._findings.dropped += 1
        else:
            self._findings.repaired += 1
            self._findings.row(line.number, None)
        return data


def validate_file(chunks: Iterable[bytes], *, filename: str = "", mapping: Mapping | None = None) -> ValidationReport:
    """Check a file from its bytes in order and keep nothing of it."""
    reading = FileValidator(chunks, filename=filename, mapping=mapping)
    reading.start()
    for _ in reading:
        pass
    return reading.report


def watched(chunks: Iterable[bytes], on_progress: Callable[[], None]) -> Iterator[bytes]:
    """Yield the chunks and report progress before each."""
    for chunk in chunks:
        on_progress()
        yield chunk


def _lines_of(head: bytes, *, is_whole: bool) -> list[bytes]:
    """Return the first lines of a JSONL file that are not too long; the last one is cut off unless `is_whole`."""
    lines = head.removeprefix(UTF8_MARK).split(b"\n")
    complete = lines if is_whole else lines[:-1]
    return list(islice((line for line in complete if line.strip() and len(line) <= MAX_LINE_BYTES), _SAMPLED_ROWS))


def _columns_of(data: bytes) -> dict[str, msgspec.Raw] | None:
    try:
        return msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        pass
    try:  # a value may be one that is refused where it is trained
        members = parse_members(data, 1)
    except RowError:
        return None
    return {name: msgspec.Raw(text) for name, text in members.items()} or None


def _require_columns(mapping: Mapping, rows: list[dict[str, msgspec.Raw]], columns: tuple[str, ...]) -> None:
    """Raise Rejected for a mapping with a column that no row has."""
    for field, column in mapping.columns.items():
        is_own = column == field  # a format chosen without columns: its optional ones may be missing
        if rows and column not in columns and not (is_own and field in OPTIONAL[mapping.format]):
            message = f"No column is called `{column[:80]}`, which was chosen for `{field}`."
            listed = ", ".join(f"`{name[:40]}`" for name in columns[:12])
            raise Rejected(FileErrorCode.MISSING_COLUMN, message, f"Choose one of {listed}.")


def _without_mark(chunks: Iterable[bytes]) -> Iterator[bytes]:
    pieces = iter(chunks)
    yield next(pieces, b"").removeprefix(UTF8_MARK)
    yield from pieces
