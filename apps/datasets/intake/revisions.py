"""New versions of stored files: with bad rows repaired, rows left out, a row edited, or columns read another way."""

import datetime
import hashlib

import msgspec
from django.db import transaction
from django.utils.translation import gettext

from apps.accounts.members.projects import require_work_in
from apps.catalog.models import BaseModel
from apps.core import audit
from apps.core.database.transitions import advance
from apps.core.errors import InvalidState
from apps.core.objects.store import object_key, store
from apps.datasets.intake.versions import (
    EXTENSIONS,
    FILENAME_LIMIT,
    NAME_LIMIT,
    Arrival,
    ask_for_validation,
    dataset_named,
    lock_storage,
    new_version,
    register,
    require_storage,
    save_next,
)
from apps.datasets.lifecycle import VERSION_TRANSITIONS, DatasetVersionStatus
from apps.datasets.models import DatasetVersion
from apps.datasets.queries import list_siblings, require_none_unwritten
from apps.datasets.rows import kind_of
from apps.datasets.validation.formats import Mapping
from apps.datasets.validation.layout import FileLayout
from apps.datasets.validation.repair import COPY, FIT, RepairMode


class NotRepairable(InvalidState):
    """The file has no bad rows that could be dropped or repaired."""

    code = "file_not_repairable"


class NewerVersion(InvalidState):
    """The dataset has a version that the person has not seen."""

    code = "newer_version"


def newest_number(version: DatasetVersion) -> int:
    """Return the number of the newest version of the same dataset, 0 if all are deleted."""
    return list_siblings(version=version).values_list("number", flat=True).first() or 0


@transaction.atomic
def repair_version(
    *,
    version: DatasetVersion,
    mode: RepairMode,
    by: str,
    now: datetime.datetime,
    newest: int | None = None,
) -> DatasetVersion:
    """Return a new version in which bad rows of this one are repaired or dropped; a task writes it.

    Raises NotRepairable and as `derive`.
    """
    if version.status != DatasetVersionStatus.INVALID:
        raise NotRepairable(
            gettext("%(version)s is %(status)s: only a file with bad rows can be repaired.")
            % {"version": version.pk, "status": version.status}
        )
    if version.layout.is_rejected:
        raise NotRepairable(
            gettext("The file cannot be read as rows, so there are no rows to repair. See its first problem.")
        )
    if not version.has_bad_rows:
        raise NotRepairable(gettext("The file has no bad rows, but too few rows: add more and upload it again."))
    return derive(version, mode, by=by, now=now, newest=newest)


@transaction.atomic
def fit_version(
    *,
    version: DatasetVersion,
    base_model: BaseModel,
    by: str,
    now: datetime.datetime,
) -> DatasetVersion:
    """Return a new version without the rows that the model's chat template refuses; a task writes it.

    Raises NotRepairable and as `derive`.
    """
    if version.status != DatasetVersionStatus.READY:
        raise NotRepairable(
            gettext("%(version)s is %(status)s: repair its own bad rows first.")
            % {"version": version.pk, "status": version.status}
        )
    return derive(version, FIT, by=by, now=now, layout=FileLayout(fits=base_model.pk))


def derive(
    version: DatasetVersion,
    mode: str,
    *,
    by: str,
    now: datetime.datetime,
    layout: FileLayout | None = None,
    row: bytes | None = None,
    part: str = "",
    newest: int | None = None,
) -> DatasetVersion:
    """Save the dataset's next version, which a task writes from this one in the way that `mode` says.

    `row` is the new text of an edited row, empty for a deleted one. A `part` of a version belongs to a dataset of its
    own, whose name ends with this word. `newest` is the number of the newest version that the person has seen, None if
    that does not matter. Raises StorageFull, NewerVersion, InvalidState for a file that is deleted or read again
    meanwhile, and PermissionDenied for a viewer of the dataset's project.
    """
    require_work_in(project_id=version.dataset.project_id, actor=by)
    lock_storage(version.organization_id)
    if not DatasetVersion.objects.filter(pk=version.pk, status=version.status).exists():
        raise InvalidState(gettext("The file was changed or deleted meanwhile. Load the page again."), param="file_id")
    if newest is not None and newest_number(version) != newest:
        raise NewerVersion(gettext("A newer version was saved meanwhile. Look at it first."))
    is_copy = mode == COPY
    wanted_bytes = version.bytes if is_copy else version.data_bytes
    require_storage(organization=version.organization_id, wanted_bytes=wanted_bytes, by=by)
    filename = version.filename
    if not is_copy:
        filename = EXTENSIONS.sub("", filename)[: FILENAME_LIMIT - 30] + (part and f"-{part}") + ".jsonl"
    project_id = version.dataset.project_id
    arrival = Arrival(project_id=project_id, filename=filename, purpose=version.purpose, by=by, now=now)
    derived = new_version(organization=version.organization_id, arrival=arrival)
    derived.dataset, derived.derived_from, derived.repair = version.dataset, version, mode
    if part:
        name = f"{version.dataset.name[: NAME_LIMIT - len(part) - 1]} {part}"
        derived.dataset = dataset_named(derived, name, project_id)
    derived.expires_at = version.expires_at
    derived.bytes = version.bytes if is_copy else 0
    written_as = version.layout.written_as if is_copy else kind_of(version)
    derived.layout = msgspec.structs.replace(layout or FileLayout(), written_as=written_as)
    derived.given_mapping = version.given_mapping if is_copy else None
    if row is not None:  # if the transaction fails, the sweep of orphans deletes it
        store().put_stream(row_key(derived), [row + b"\n" if row else b""])
    return save_next(derived, "dataset.repaired", by=by, source=version.pk, mode=mode)


def row_key(version: DatasetVersion) -> str:
    """Return the object with the row that replaces the edited one."""
    return object_key(version.organization_id, "datasets", version.pk, "row.jsonl")


def remap_version(
    *,
    version: DatasetVersion,
    mapping: Mapping,
    by: str,
    now: datetime.datetime,
) -> DatasetVersion:
    """Read a file again with these columns. A file that was never ready is read itself, else a copy as next version.

    Raises InvalidState while the file is being validated or another is made from it, StorageFull, and PermissionDenied
    for a viewer of the project.
    """
    require_work_in(project_id=version.dataset.project_id, actor=by)
    if version.status == DatasetVersionStatus.INVALID:
        return _read_again(version, mapping, by, now)
    if version.status != DatasetVersionStatus.READY:
        raise InvalidState(gettext("The file is being validated; choose its columns in a moment."), param="file_id")
    arrival = Arrival(
        project_id=version.dataset.project_id,
        filename=version.filename,
        purpose=version.purpose,
        by=by,
        now=now,
        dataset_name=version.dataset.name,
        mapping=mapping,
    )
    copy = new_version(organization=version.organization_id, arrival=arrival)
    copy.derived_from = version
    require_storage(organization=version.organization_id, wanted_bytes=version.bytes, by=by)
    stored = store().compose(copy.object_key, [version.object_key])
    return register(version=copy, stored=stored, arrival=arrival)


@transaction.atomic
def _read_again(version: DatasetVersion, mapping: Mapping, by: str, now: datetime.datetime) -> DatasetVersion:
    lock_storage(version.organization_id)
    require_none_unwritten(version)
    given = msgspec.to_builtins(mapping)
    advance(
        version, to=DatasetVersionStatus.UPLOADED, transitions=VERSION_TRANSITIONS,
        given_mapping=given, errors=[], error_count=0, line_offsets=[],
        validated_at=None, validation_attempts=0, dismissed_at=None,
    )  # fmt: skip
    digest = hashlib.sha256(msgspec.json.encode(given) + str(now).encode()).hexdigest()
    ask_for_validation(version, digest[:16])
    audit.record(
        organization=version.organization_id, by=by, action="dataset.mapped", target=version.pk,
        format=str(mapping.format), columns=mapping.columns,
    )  # fmt: skip
    return version
