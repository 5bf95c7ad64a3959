"""A preview of a repair: the rows with errors, before and after it."""

import msgspec

from apps.contracts.chat import Line
from apps.datasets.models import DatasetVersion
from apps.datasets.problems import FileErrorCode, LineError, shown
from apps.datasets.queries import iterate_lines
from apps.datasets.rows import kind_of
from apps.datasets.validation.repair import REPAIRS, RepairMode
from apps.datasets.validation.row_checks import check_line

_OF_THE_FILE = (FileErrorCode.EMPTY_FILE, FileErrorCode.TOO_FEW_ROWS)


class RepairedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row with an error, cut for display. `after` is None for a row that the repair leaves out."""

    problem: LineError
    before: str
    after: str | None


class RepairPreview(msgspec.Struct, frozen=True, kw_only=True):
    """Some of the `total` rows that a repair changes or leaves out. The first `listed` of them can be previewed."""

    rows: tuple[RepairedRow, ...]
    total: int
    listed: int


def preview_repair(*, version: DatasetVersion, mode: RepairMode, skip: int = 0, limit: int = 10) -> RepairPreview:
    """Return what a repair would do to the rows with errors, without doing it."""
    errors = msgspec.convert(version.errors if version.has_bad_rows else [], list[LineError])
    problems = [error for error in errors if error.code not in _OF_THE_FILE]
    others = len(errors) - len(problems)
    rows = tuple(_repaired(version, problem, mode) for problem in problems[skip : skip + limit])
    return RepairPreview(rows=rows, total=version.error_count - others if problems else 0, listed=len(problems))


def _repaired(version: DatasetVersion, problem: LineError, mode: RepairMode) -> RepairedRow:
    kind = kind_of(version)
    line = next(iterate_lines(version=version, first_line=problem.line), None)
    if line is None or line.number != problem.line:
        line = Line(problem.line, b"")
    cause = problem
    if problem.code == FileErrorCode.TRUNCATED_LAST_LINE:  # a repair knows only what is wrong with the line itself
        cause = check_line(line, kind) or problem
    after = None if line.is_too_long else REPAIRS[mode](line, cause, kind)
    return RepairedRow(problem=problem, before=shown(line.data), after=None if after is None else shown(after))
