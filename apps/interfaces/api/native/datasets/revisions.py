"""New versions of a dataset from one of its versions: a row edited, an earlier version restored, rows split in two."""

from typing import Annotated, Literal, TypedDict

import msgspec
from msgspec import Meta
from rest_framework.request import Request

from apps.accounts.roles import Permission
from apps.contracts.splits.split import Split
from apps.core.database.clock import db_now
from apps.core.http.forms import LARGEST_INTEGER
from apps.datasets import queries
from apps.datasets.inspection.changes import find_changes, request_changes
from apps.datasets.intake import edits, splits
from apps.datasets.models import DatasetVersion
from apps.interfaces.api.openai.files import FileObject, file_object
from apps.interfaces.api.views import ApiView

_Line = Annotated[int, Meta(ge=1, le=LARGEST_INTEGER)]
_Since = Annotated[
    str,
    Meta(max_length=64, description="Another version. Left out: the one before; for the first version, the newest."),
]


class VersionView(ApiView):
    """The base of the calls on one version."""

    def version(self, file_id: str) -> DatasetVersion:
        return queries.get_version(organization=self.organization, id=file_id)


class EditRow(msgspec.Struct, forbid_unknown_fields=True):
    """`row` is the row as JSON text, in place of the one at `line`. null deletes the row."""

    line: _Line
    row: Annotated[str, Meta(max_length=edits.MAX_EDITED_BYTES)] | None


class FileRowEdits(VersionView):
    required_scope = {"POST": Permission.DATASET_WRITE}
    examples = {"POST": {"line": 3, "row": '{"prompt": "2 + 2?", "completion": "4"}'}}

    def post(self, request: Request, file_id: str, body: EditRow) -> FileObject:
        """Make the next version of a dataset, with one row edited or deleted. Poll it like any upload.

        Only the newest version can be edited: `newer_version` means that there is a newer one.
        """
        version = self.version(file_id)
        edited = edits.edit_row(
            version=version, line=body.line, text=body.row, newest=version.number, by=self.actor, now=db_now()
        )
        return file_object(edited)


class FileRestore(VersionView):
    required_scope = {"POST": Permission.DATASET_WRITE}

    def post(self, request: Request, file_id: str) -> FileObject:
        """Copy an earlier version of a dataset, so that the copy is its newest version. Poll it like any upload."""
        return file_object(edits.restore_version(version=self.version(file_id), by=self.actor, now=db_now()))


class SplitFile(msgspec.Struct, forbid_unknown_fields=True):
    """`share` of the rows is held out. The same seed always holds out the same rows."""

    share: Annotated[float, Meta(gt=0, le=splits.LARGEST_SHARE)]
    seed: Annotated[int, Meta(ge=0, le=LARGEST_INTEGER)] = 0


class SplitObject(TypedDict):
    object: Literal["file.split"]
    training_file: FileObject
    validation_file: FileObject


class FileSplit(VersionView):
    required_scope = {"POST": Permission.DATASET_WRITE}
    examples = {"POST": {"share": 0.1, "seed": 42}}

    def post(self, request: Request, file_id: str, body: SplitFile) -> SplitObject:
        """Save the rows to train on and the rows that are held out as two datasets. Poll both like any upload.

        Copies of a row are on the same side, so the file's inspection must be done.
        """
        split = Split(body.share, body.seed)
        trained, held = splits.split_version(
            version=self.version(file_id), split=split, by=self.actor, now=db_now()
        )  # fmt: skip
        return {
            "object": "file.split",
            "training_file": file_object(trained),
            "validation_file": file_object(held),
        }


class ChangesQuery(msgspec.Struct):
    since: _Since | None = None


class CompareVersions(msgspec.Struct, forbid_unknown_fields=True):
    since: _Since | None = None


class RowChangeObject(TypedDict):
    """The row's line in each version; null in the version that lacks the row."""

    old_line: int | None
    new_line: int | None


class ChangesObject(TypedDict):
    """What changed from the version `since`; null for the only version. The lists have the first 200 of each kind.

    While `is_compared` is false there are no changes to show: a POST has large files compared.
    """

    object: Literal["file.changes"]
    id: str
    since: str | None
    is_compared: bool
    changed: int
    added: int
    removed: int
    first_changed: list[RowChangeObject]
    first_added: list[RowChangeObject]
    first_removed: list[RowChangeObject]


class FileChanges(VersionView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.VIEW}
    examples = {"POST": {}}

    def get(self, request: Request, file_id: str, query: ChangesQuery) -> ChangesObject:
        """Compare a version with another of its dataset: how many rows changed, and where."""
        version = self.version(file_id)
        return _changes_object(version, _compared(version, query.since))

    def post(self, request: Request, file_id: str, body: CompareVersions) -> ChangesObject:
        """Have two large versions compared. Read the result with GET."""
        version = self.version(file_id)
        since = _compared(version, body.since)
        if since and find_changes(version=version, since=since) is None:
            request_changes(version=version, since=since)
        return _changes_object(version, since)


def _compared(version: DatasetVersion, since: str | None) -> DatasetVersion | None:
    return queries.find_compared(version=version, since=since or "")


def _changes_object(version: DatasetVersion, since: DatasetVersion | None) -> ChangesObject:
    found = find_changes(version=version, since=since) if since else None
    first: dict[str, list[RowChangeObject]] = {
        kind: [
            {"old_line": row.old_line or None, "new_line": row.new_line or None}
            for row in (getattr(found, f"first_{kind}") if found else [])
        ]
        for kind in ("changed", "added", "removed")
    }
    return {
        "object": "file.changes",
        "id": version.pk,
        "since": since.pk if since else None,
        "is_compared": found is not None,
        "changed": found.changed if found else 0,
        "added": found.added if found else 0,
        "removed": found.removed if found else 0,
        "first_changed": first["changed"],
        "first_added": first["added"],
        "first_removed": first["removed"],
    }
