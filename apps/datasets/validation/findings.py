"""The problems of a whole file, collected while its rows are read."""

from apps.contracts.chat.errors import RowErrorCode
from apps.datasets.problems import KEPT_PROBLEMS, MAX_ROWS, MIN_ROWS, FileErrorCode, LineError, too_many_rows


class Findings:
    """The problems so far. The latest is held back: being the last line changes its code."""

    def __init__(self) -> None:
        self.rows = self.count = self.repaired = self.dropped = self.last_line = 0
        self.kept: list[LineError] = []
        self._held: LineError | None = None

    def row(self, number: int, problem: LineError | None) -> None:
        self.release()
        self.rows += 1
        self.last_line = number
        self._held = problem

    def release(self) -> None:
        if self._held is not None:
            self.add(self._held)
            self._held = None

    def add(self, error: LineError) -> None:
        self.count += 1
        if len(self.kept) < KEPT_PROBLEMS:
            self.kept.append(error)

    def finish(self, *, is_ended: bool) -> None:
        if self._held is not None and not is_ended:
            self._held = _name_last_error(self._held)
        self.release()

    def require_few(self, line: int) -> None:
        if self.rows > MAX_ROWS:
            raise too_many_rows(line)


def _name_last_error(error: LineError) -> LineError:
    if error.code not in (RowErrorCode.INVALID_JSON, RowErrorCode.NOT_UTF8):
        return error
    return LineError(
        line=error.line,
        code=FileErrorCode.TRUNCATED_LAST_LINE,
        message="The file ends in the middle of its last line: it was cut off during upload.",
        fix="Upload the whole file again.",
    )


def too_few_rows(rows: int, line: int, *, is_text: bool) -> LineError:
    if not rows:
        return LineError(
            line=line,
            code=FileErrorCode.EMPTY_FILE,
            message="The file is empty.",
            fix=f"Write at least {MIN_ROWS} rows, one JSON object per line.",
        )
    return LineError(
        line=line,
        code=FileErrorCode.TOO_FEW_ROWS,
        message=f"The file has {rows} {'row' if rows == 1 else 'rows'}; fine-tuning needs at least {MIN_ROWS}.",
        fix="Put a blank line between rows, or add more text." if is_text else "Add more examples.",
    )
