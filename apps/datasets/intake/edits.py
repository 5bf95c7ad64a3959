"""Edits of a dataset: one row replaced or deleted, or an earlier version restored. Each makes the next version."""

import datetime
import json

import msgspec
from django.db import transaction
from django.utils.translation import gettext

from apps.contracts.chat import Line
from apps.core.errors import InvalidState, InvalidValue, NotFound
from apps.core.messages.translation import translated
from apps.datasets.intake.revisions import NewerVersion, derive, newest_number
from apps.datasets.intake.versions import lock_storage
from apps.datasets.lifecycle import UNVALIDATED, DatasetVersionStatus
from apps.datasets.models import DatasetVersion
from apps.datasets.problems import MIN_ROWS
from apps.datasets.queries import iterate_lines
from apps.datasets.rows import kind_of
from apps.datasets.validation.layout import FileLayout
from apps.datasets.validation.repair import COPY, EDIT
from apps.datasets.validation.row_checks import check_line

MAX_EDITED_BYTES = 256 * 1024


class RowMissing(NotFound):
    """The version has no row at this line."""

    code = "row_not_found"


def read_editable_row(*, version: DatasetVersion, line: int) -> str:
    """Return one row as text, to be edited. Raises InvalidState and RowMissing."""
    if version.status != DatasetVersionStatus.READY and not version.has_bad_rows:
        raise InvalidState(
            gettext("%(filename)s has no rows that can be edited.") % {"filename": version.filename}, param="file_id"
        )
    found = next(iterate_lines(version=version, first_line=line), None)
    if found is None or found.number != line:
        raise RowMissing(
            gettext("%(filename)s has no row at line %(line)s.") % {"filename": version.filename, "line": line},
            param="line",
        )
    if found.is_too_long or len(found.data) > MAX_EDITED_BYTES:
        raise InvalidState(
            gettext("Line %(line)s is longer than %(kib)s KiB: download the file and edit it there.")
            % {"line": f"{line:,}", "kib": MAX_EDITED_BYTES // 1024},
            param="line",
        )
    return found.data.decode("utf-8", "replace")


@transaction.atomic
def edit_row(
    *, version: DatasetVersion, line: int, text: str | None, newest: int, by: str, now: datetime.datetime
) -> DatasetVersion:
    """Return a new version in which `text` replaces one row, or without the row if `text` is None; a task writes it.

    `newest` is the number of the newest version that the person has seen. Raises InvalidState, RowMissing,
    InvalidValue for a row that cannot be trained, NewerVersion and StorageFull.
    """
    old = read_editable_row(version=version, line=line)
    data = b"" if text is None else _checked(version, line, text, old)
    if text is None and version.status == DatasetVersionStatus.READY and (version.rows or 0) <= MIN_ROWS:
        raise InvalidValue(
            gettext("The file has %(rows)s rows, and fine-tuning needs at least %(min_rows)s.")
            % {"rows": version.rows, "min_rows": MIN_ROWS},
            param="row",
        )
    lock_storage(version.organization_id)
    if newest_number(version) != newest:
        raise NewerVersion(gettext("A newer version was saved after you opened this row. Nothing was changed."))
    return derive(version, EDIT, by=by, now=now, layout=FileLayout(edited_line=line), row=data)


def _checked(version: DatasetVersion, line: int, text: str, old: str) -> bytes:
    """Return the row as one line. Raises InvalidValue, which names the field at fault."""
    try:
        is_same = _exact(text) == _value_of(old)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidValue(
            gettext("The row is not valid JSON at %(where)s: %(msg)s.") % {"where": where, "msg": error.msg},
            param="row",
        ) from None
    except (ValueError, RecursionError):
        raise InvalidValue(
            gettext("The row is nested too deeply, or has a number that is too long."), param="row"
        ) from None
    if is_same:
        raise InvalidValue(gettext("The row is the same as before. Change it, or go back."), param="row")
    data = text.strip().encode("utf-8", "replace")
    if len(data) > MAX_EDITED_BYTES:
        raise InvalidValue(
            gettext("The row is longer than %(kib)s KiB. Shorten it.") % {"kib": MAX_EDITED_BYTES // 1024},
            param="row",
        )
    problem = check_line(Line(line, data), kind_of(version))
    if problem is None:
        return msgspec.json.format(data, indent=0)  # on one line, each value as it was written
    is_named = not problem.param or f"`{problem.param}" in problem.message
    message, fix = translated(problem.message), translated(problem.fix)
    named = message if is_named else f"`{problem.param}`: {message}"
    text = f"{named} {fix}".strip()
    raise InvalidValue(text, param="row")


def _exact(text: str) -> str:
    """Return a JSON value in a form that keeps 1, 1.0 and true apart, and repeated keys."""
    return repr(json.loads(text, object_pairs_hook=lambda pairs: ("object", pairs)))


def _value_of(row: str) -> object:
    """Return the exact JSON value of a stored row; a row that has none equals no other."""
    try:
        return _exact(row)
    except (ValueError, RecursionError):
        return object()


@transaction.atomic
def restore_version(
    *, version: DatasetVersion, by: str, now: datetime.datetime, newest: int | None = None
) -> DatasetVersion:
    """Return a copy of this version as the newest version of its dataset; a task writes it.

    Raises InvalidState and as `derive`.
    """
    if version.status in UNVALIDATED:
        raise InvalidState(gettext("The file is being checked; restore it in a moment."), param="file_id")
    if newest_number(version) == version.number:
        raise InvalidState(
            gettext("Version %(number)s is the newest version already.") % {"number": version.number}, param="file_id"
        )
    return derive(version, COPY, by=by, now=now, newest=newest)
