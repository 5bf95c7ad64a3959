"""Incoming training data: streamed to the store, registered as a dataset's next version, sent to validation."""

import datetime
import hashlib
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from django.conf import settings
from django.db import transaction
from django.db.models import Max
from django.utils.module_loading import import_string
from django.utils.translation import gettext

from apps.accounts.models import Organization
from apps.accounts.shares import get_share_holder
from apps.catalog.models import BaseModel
from apps.core import audit
from apps.core.database.clock import db_now
from apps.core.database.locks import lock
from apps.core.database.tenancy import id_of
from apps.core.database.transitions import advance
from apps.core.errors import DomainError, InvalidState, InvalidValue, QuotaExceeded, Status
from apps.core.ids import new_id
from apps.core.messages import outbox
from apps.core.objects.store import StoredObject, bounded, object_key, store
from apps.datasets.intake.lanes import lane_of
from apps.datasets.lifecycle import VERSION_TRANSITIONS, DatasetVersionStatus
from apps.datasets.models import Dataset, DatasetVersion
from apps.datasets.queries import list_versions
from apps.datasets.validation.formats import Mapping
from apps.datasets.validation.layout import FileLayout
from apps.datasets.validation.repair import COPY, FIT, RepairMode

PURPOSES = ("fine-tune", "evals")
MAX_FILE_BYTES = 512 * 1024 * 1024  # OpenAI's own limit for a file in one request
MAX_FILES = 10_000  # of an organization: what a file takes in the database does not count as its bytes
MIN_EXPIRY_SECONDS, MAX_EXPIRY_SECONDS = 3600, 2_592_000
_FILENAME_LIMIT, _NAME_LIMIT = 255, 120
_EXTENSIONS = re.compile(r"\.(jsonl?|ndjson|csv|tsv|parquet|txt|text|md)?(\.gz)?$", re.IGNORECASE)


class FileTooLarge(DomainError):
    """The file exceeds the size limit; nothing of it was kept."""

    code = "file_too_large"
    status = Status.TOO_LARGE


class StorageFull(QuotaExceeded):
    """The file does not fit into the organization's storage limit."""


class NotRepairable(InvalidState):
    """The file has no bad rows that could be dropped or repaired."""

    code = "file_not_repairable"


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of an incoming file. `upload_id` is the multi-part upload it is assembled from, if any."""

    filename: str
    purpose: str
    by: str
    now: datetime.datetime
    dataset_name: str | None = None
    expires_after_seconds: int | None = None
    mapping: Mapping | None = None
    upload_id: str = ""


def create_version(
    *,
    organization: Organization | str,
    filename: str,
    purpose: str,
    chunks: Iterable[bytes],
    by: str,
    now: datetime.datetime,
    dataset_name: str | None = None,
    expires_after_seconds: int | None = None,
    mapping: Mapping | None = None,
) -> DatasetVersion:
    """Store a file and request its validation. A known dataset name makes it the dataset's next version.

    The bytes are streamed; a failure leaves neither row nor object. Raises InvalidValue, FileTooLarge, StorageFull.
    """
    arrival = Arrival(
        filename=filename,
        purpose=purpose,
        by=by,
        now=now,
        dataset_name=dataset_name,
        expires_after_seconds=expires_after_seconds,
        mapping=mapping,
    )
    version = new_version(organization=organization, arrival=arrival)
    limit = f"{MAX_FILE_BYTES // 1024**2} MiB"
    too_large = FileTooLarge(
        gettext("A file sent at once may have up to %(limit)s; send it in parts.") % {"limit": limit}, param="file"
    )
    sent = bounded(chunks, MAX_FILE_BYTES, too_large)
    stored = store().put_stream(version.object_key, limited(sent, organization=organization))
    return register(version=version, stored=stored, arrival=arrival)


def new_version(*, organization: Organization | str, arrival: Arrival) -> DatasetVersion:
    """Return an unsaved version with the object key for its bytes. Raises InvalidValue."""
    check_purpose(arrival.purpose)
    organization_id = id_of(organization)
    version = DatasetVersion(
        pk=new_id("file", "-"),
        organization_id=organization_id,
        purpose=arrival.purpose,
        filename=clean_filename(arrival.filename),
        created_by=arrival.by,
        expires_at=_expiry(arrival.now, arrival.expires_after_seconds),
        given_mapping=msgspec.to_builtins(arrival.mapping) if arrival.mapping else None,
    )
    version.object_key = object_key(organization_id, "datasets", version.pk, "data.jsonl")
    return version


def register(*, version: DatasetVersion, stored: StoredObject, arrival: Arrival) -> DatasetVersion:
    """Save a version whose bytes are stored; delete the bytes if that fails. Raises StorageFull."""
    name = arrival.dataset_name or _EXTENSIONS.sub("", version.filename)
    try:
        return _register(version, stored, clean_name(name, limit=_NAME_LIMIT) or "dataset", arrival.upload_id)
    except BaseException:
        store().delete(version.object_key)
        raise


def check_purpose(purpose: str, accepted: Sequence[str] = PURPOSES) -> None:
    if purpose not in accepted:
        *most, last = (f"'{each}'" for each in accepted)
        raise InvalidValue(
            gettext("'%(purpose)s' is not accepted; use %(most)s or %(last)s.")
            % {"purpose": purpose[:40], "most": ", ".join(most), "last": last},
            param="purpose",
        )


def check_expiry(seconds: int | None) -> None:
    if seconds is not None and not MIN_EXPIRY_SECONDS <= seconds <= MAX_EXPIRY_SECONDS:
        limits = f"{MIN_EXPIRY_SECONDS} and {MAX_EXPIRY_SECONDS}"
        raise InvalidValue(
            gettext("A file must expire between %(limits)s seconds after upload.") % {"limits": limits},
            param="expires_after.seconds",
        )


def clean_filename(filename: str) -> str:
    return clean_name(filename, limit=_FILENAME_LIMIT) or "file.jsonl"


def clean_name(name: str, *, limit: int) -> str:
    """Return a name that is safe to store and show: no folder, no control or bidi character, normal form C."""
    base = name.replace("\\", "/").rsplit("/", 1)[-1]
    kept = "".join(char for char in unicodedata.normalize("NFC", base) if unicodedata.category(char)[0] != "C")
    return " ".join(kept.split())[:limit].strip()


def storage_left_bytes(*, organization: Organization | str, but_upload: str = "") -> int | None:
    """Return the bytes that the organization may still store, None without a limit. `but_upload` is not counted.

    The limit and other stored objects belong to a higher layer, which settings.STORAGE_LEFT names.
    """
    left: int | None = import_string(settings.STORAGE_LEFT)(organization=organization, but_upload=but_upload)
    return left


def require_storage(*, organization: Organization | str, wanted_bytes: int, but_upload: str = "") -> None:
    """Raise StorageFull unless this many more bytes may be stored."""
    left = storage_left_bytes(organization=organization, but_upload=but_upload)
    if left is not None and wanted_bytes > left:
        raise _storage_full(left)


def _expiry(now: datetime.datetime, seconds: int | None) -> datetime.datetime | None:
    check_expiry(seconds)
    return None if seconds is None else now + datetime.timedelta(seconds=seconds)


def limited(pieces: Iterable[bytes], *, organization: Organization | str) -> Iterator[bytes]:
    """Return the pieces of a file; they raise StorageFull once the organization may not store them."""
    left = storage_left_bytes(organization=organization)
    return bounded(pieces, left, _storage_full(left or 0))


def _storage_full(left_bytes: int) -> StorageFull:
    return StorageFull(
        gettext(
            "Your organization has %(left_bytes)s bytes of storage left, too little for this file: delete "
            "files you no longer need, or ask the operator for more."
        )
        % {"left_bytes": f"{left_bytes:,}"},
        param="file",
    )


@transaction.atomic
def _register(version: DatasetVersion, stored: StoredObject, name: str, upload_id: str) -> DatasetVersion:
    lock_storage(version.organization_id)
    require_storage(organization=version.organization_id, wanted_bytes=stored.bytes, but_upload=upload_id)
    version.dataset = _dataset(version, name)
    version.bytes, version.sha256 = stored.bytes, stored.sha256
    return _save_next(version, "dataset.uploaded", filename=version.filename, bytes=stored.bytes, sha256=stored.sha256)


def _dataset(version: DatasetVersion, name: str) -> Dataset:
    """Return the organization's dataset of this name, created for the version if there is none."""
    dataset, _ = Dataset.objects.get_or_create(
        organization_id=version.organization_id, name=name, deleted_at=None, defaults={"created_by": version.created_by}
    )
    return dataset


def _save_next(version: DatasetVersion, action: str, **details: object) -> DatasetVersion:
    """Number the version, save it and request its validation. The caller has serialized uploads. Raises StorageFull."""
    if list_versions(organization=version.organization_id).count() >= MAX_FILES:
        text = gettext(
            "Your organization keeps %(max_files)s files, the most allowed: delete files you no longer need."
        ) % {"max_files": f"{MAX_FILES:,}"}
        raise StorageFull(text, param="file")
    version.number = (version.dataset.versions.aggregate(last=Max("number"))["last"] or 0) + 1
    version.save(force_insert=True)
    _ask_for_validation(version)
    audit.record(
        organization=version.organization_id, by=version.created_by, action=action, target=version.pk, **details
    )
    version.refresh_from_db()
    return version


def _ask_for_validation(version: DatasetVersion, attempt: str = "") -> None:
    source = version.derived_from
    outbox.publish(
        topic="dataset.validate",
        key=":".join(filter(None, ["validate", version.pk, attempt])),
        payload={"version_id": version.pk},
        organization=version.organization_id,
        lane=lane_of(max(version.bytes, source.bytes if source else 0)),
    )


def ask_for_long_validation(version: DatasetVersion) -> None:
    """Have a small file validated in the lane of middle files."""
    outbox.publish(
        topic="dataset.validate",
        key=f"validate:{version.pk}:long:{db_now().timestamp()}",
        payload={"version_id": version.pk, "is_long": True},
        organization=version.organization_id,
        lane="data-middle",
    )


def lock_storage(organization: Organization | str) -> None:
    """Serialize the uploads that count toward one limit, so that version numbers and storage add up."""
    lock(f"uploads:{get_share_holder(organization=organization)}")


# --- new versions of stored files -------------------------------------------------------------------------------------


@transaction.atomic
def repair_version(
    *,
    version: DatasetVersion,
    mode: RepairMode,
    by: str,
    now: datetime.datetime,
) -> DatasetVersion:
    """Return a new version in which bad rows of this one are repaired or dropped; a task writes it.

    Raises NotRepairable, StorageFull.
    """
    if version.status != DatasetVersionStatus.INVALID:
        raise NotRepairable(
            gettext("%(version)s is %(status)s: only a file with bad rows can be repaired.")
            % {"version": version.pk, "status": version.status}
        )
    if version.layout.is_rejected:
        raise NotRepairable(
            gettext("The file cannot be read as rows, so there are none to repair: see its first problem.")
        )
    if not version.has_bad_rows:
        raise NotRepairable(gettext("The file has no bad rows, only too few: add more and upload it again."))
    return derive(version, mode, by=by, now=now)


@transaction.atomic
def fit_version(
    *,
    version: DatasetVersion,
    base_model: BaseModel,
    by: str,
    now: datetime.datetime,
) -> DatasetVersion:
    """Return a new version without the rows that the model's chat template refuses; a task writes it.

    Raises NotRepairable, StorageFull.
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
) -> DatasetVersion:
    """Save the dataset's next version, which a task writes from this one in the way that `mode` says.

    `row` is the new text of an edited row, empty for a deleted one. A `part` of a version belongs to a dataset of its
    own, whose name ends with this word. Raises StorageFull.
    """
    lock_storage(version.organization_id)
    is_copy = mode == COPY
    require_storage(organization=version.organization_id, wanted_bytes=version.bytes if is_copy else version.data_bytes)
    filename = version.filename
    if not is_copy:
        filename = _EXTENSIONS.sub("", filename)[: _FILENAME_LIMIT - 30] + (part and f"-{part}") + ".jsonl"
    arrival = Arrival(filename=filename, purpose=version.purpose, by=by, now=now)
    derived = new_version(organization=version.organization_id, arrival=arrival)
    derived.dataset, derived.derived_from, derived.repair = version.dataset, version, mode
    if part:
        name = f"{version.dataset.name[: _NAME_LIMIT - len(part) - 1]} {part}"
        derived.dataset = _dataset(derived, name)
    derived.expires_at, derived.bytes, derived.layout = version.expires_at, 0, layout or FileLayout()
    derived.given_mapping = version.given_mapping if is_copy else None
    if row is not None:  # if the transaction fails, the sweep of orphans deletes it
        store().put_stream(row_key(derived), [row + b"\n" if row else b""])
    return _save_next(derived, "dataset.repaired", source=version.pk, mode=mode)


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

    Raises InvalidState while the file is being validated, and StorageFull.
    """
    if version.status == DatasetVersionStatus.INVALID:
        return _read_again(version, mapping, by, now)
    if version.status != DatasetVersionStatus.READY:
        raise InvalidState(gettext("The file is being validated; choose its columns in a moment."), param="file_id")
    arrival = Arrival(
        filename=version.filename,
        purpose=version.purpose,
        by=by,
        now=now,
        dataset_name=version.dataset.name,
        mapping=mapping,
    )
    copy = new_version(organization=version.organization_id, arrival=arrival)
    copy.derived_from = version
    require_storage(organization=version.organization_id, wanted_bytes=version.bytes)
    stored = store().compose(copy.object_key, [version.object_key])
    return register(version=copy, stored=stored, arrival=arrival)


@transaction.atomic
def _read_again(version: DatasetVersion, mapping: Mapping, by: str, now: datetime.datetime) -> DatasetVersion:
    given = msgspec.to_builtins(mapping)
    advance(
        version, to=DatasetVersionStatus.UPLOADED, transitions=VERSION_TRANSITIONS,
        given_mapping=given, errors=[], error_count=0, line_offsets=[],
        validated_at=None, validation_attempts=0, dismissed_at=None,
    )  # fmt: skip
    digest = hashlib.sha256(msgspec.json.encode(given) + str(now).encode()).hexdigest()
    _ask_for_validation(version, digest[:16])
    audit.record(
        organization=version.organization_id, by=by, action="dataset.mapped", target=version.pk,
        format=str(mapping.format), columns=mapping.columns,
    )  # fmt: skip
    return version
