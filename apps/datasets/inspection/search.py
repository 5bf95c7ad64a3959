"""Search for a text in a version's rows, a bounded part of the file at a time."""

from collections.abc import Sequence

import msgspec

from apps.contracts.chat import Line, RowError, RowKind, parse_line_as
from apps.contracts.splits.split import row_contents
from apps.datasets.models import DatasetVersion
from apps.datasets.problems import MAX_LINE_BYTES
from apps.datasets.queries import RowPreview, iterate_lines, lines_at, preview_of
from apps.datasets.rows import kind_of

# The most that one search reads: half a second of processor time if every line has to be parsed.
SEARCHED_BYTES = 8_000_000
SEARCHED_LINES = 10_000
SEARCHED_AMONG = 50  # single lines; each is found through the index of lines


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The rows that contain the text, and the last line that was searched. `is_whole`: no line is left to search."""

    rows: list[RowPreview]
    last_line: int
    is_whole: bool


def search_rows(
    *, version: DatasetVersion, text: str, first_line: int = 1, among: Sequence[int] | None = None, limit: int = 20
) -> SearchResult:
    """Return up to `limit` rows from `first_line` on that contain the text in any case.

    It reads a bounded part of the file. `among` are the only lines to search, in ascending order. A line that is no
    valid row is searched as it stands.
    """
    kind, needle = kind_of(version), text.casefold()
    rows: list[RowPreview] = []
    last_line, read_lines, read_bytes = first_line - 1, 0, 0
    wanted = None if among is None else [line for line in among if line >= first_line]
    lines = (
        iterate_lines(version=version, first_line=first_line)
        if wanted is None
        else lines_at(version=version, numbers=wanted)
    )
    most_lines = SEARCHED_LINES if wanted is None else SEARCHED_AMONG
    for line in lines:
        if len(rows) == limit or read_lines == most_lines or read_bytes >= SEARCHED_BYTES:
            return SearchResult(rows=rows, last_line=last_line, is_whole=False)
        if _contains(line, kind, needle):
            rows.append(preview_of(line, kind))
        last_line, read_lines = line.number, read_lines + 1
        read_bytes += MAX_LINE_BYTES if line.is_too_long else len(line.data)
    return SearchResult(rows=rows, last_line=last_line, is_whole=True)


def _contains(line: Line, kind: RowKind, needle: str) -> bool:
    written = line.data.decode("utf-8", "replace").casefold()
    is_written = needle in written
    is_escaped = "\\u" in written or ("\\" in written and any(each in needle for each in '"\\/\t'))
    if not is_written and not is_escaped:
        return False  # the texts of the row stand in the line as they are, but for line breaks
    try:
        return needle in "\n".join(row_contents(parse_line_as(line, kind))).casefold()
    except RowError:
        return is_written
