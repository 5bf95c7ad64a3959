"""A preview of a repair: the rows with errors, before and after it."""

from collections.abc import Iterator, Sequence

import msgspec

from apps.contracts.chat import Line
from apps.datasets.models import DatasetVersion
from apps.datasets.problems import OF_THE_FILE, FileErrorCode, LineError, shown
from apps.datasets.queries import iterate_lines
from apps.datasets.rows import kind_of
from apps.datasets.stream import LINES_PER_OFFSET
from apps.datasets.validation.repair import REPAIRS, RepairMode
from apps.datasets.validation.row_checks import check_line

_MAX_COUNTED = 50  # rows that one view may read; each may be at another place of a large file


class RepairedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row with an error, cut for display. `after` is None for a row that the repair leaves out."""

    problem: LineError
    before: str
    after: str | None


class RepairPreview(msgspec.Struct, frozen=True, kw_only=True):
    """Some of the `total` rows that a repair changes or leaves out.

    The first `listed` of them can be previewed; of these, `fixed` are changed and the others are left out. It is
    None if they are too many to count.
    """

    rows: tuple[RepairedRow, ...]
    total: int
    listed: int
    fixed: int | None


def preview_repair(*, version: DatasetVersion, mode: RepairMode, skip: int = 0, limit: int = 10) -> RepairPreview:
    """Return what a repair would do to the rows with errors, without doing it."""
    errors = msgspec.convert(version.errors if version.has_bad_rows else [], list[LineError])
    problems = [error for error in errors if error.code not in OF_THE_FILE]
    shown_problems = problems[skip : skip + limit]
    is_counted = mode is RepairMode.DROP or len(problems) <= _MAX_COUNTED
    counted = problems if is_counted and mode is RepairMode.REPAIR else shown_problems  # DROP fixes none
    repaired = {id(problem): row for problem, row in zip(counted, _repaired(version, counted, mode), strict=True)}
    return RepairPreview(
        rows=tuple(repaired[id(problem)] for problem in shown_problems),
        total=version.bad_row_count,
        listed=len(problems),
        fixed=sum(row.after is not None for row in repaired.values()) if is_counted else None,
    )


def _repaired(version: DatasetVersion, problems: Sequence[LineError], mode: RepairMode) -> Iterator[RepairedRow]:
    lines, read = iterate_lines(version=version), 0
    for problem in problems:
        if not read < problem.line <= read + LINES_PER_OFFSET:  # else it is near in the stream that is open
            lines = iterate_lines(version=version, first_line=problem.line)
        line = next((each for each in lines if each.number >= problem.line), None)
        read = line.number if line else 0
        yield _repaired_row(version, problem, mode, line)


def _repaired_row(version: DatasetVersion, problem: LineError, mode: RepairMode, line: Line | None) -> RepairedRow:
    kind = kind_of(version)
    if line is None or line.number != problem.line:
        line = Line(problem.line, b"")
    cause = problem
    if problem.code == FileErrorCode.TRUNCATED_LAST_LINE:  # a repair knows only what is wrong with the line itself
        cause = check_line(line, kind) or problem
    after = None if line.is_too_long else REPAIRS[mode](line, cause, kind)
    return RepairedRow(problem=problem, before=shown(line.data), after=None if after is None else shown(after))
