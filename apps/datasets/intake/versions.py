"""Incoming training data: streamed to the store, registered as a dataset's next version, sent to validation."""

import datetime
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from django.conf import settings
from django.db import transaction
from django.db.models import Max
from django.utils.module_loading import import_string
from django.utils.translation import gettext

from apps.accounts.members.projects import project_of_new
from apps.accounts.models import Organization
from apps.accounts.shares import get_share_holder
from apps.core import audit
from apps.core.database.clock import db_now
from apps.core.database.locks import lock
from apps.core.database.tenancy import id_of
from apps.core.errors import DomainError, InvalidValue, QuotaExceeded, Status
from apps.core.ids import new_id
from apps.core.messages import outbox
from apps.core.objects.store import StoredObject, bounded, object_key, store
from apps.datasets.intake.lanes import lane_of
from apps.datasets.models import Dataset, DatasetVersion
from apps.datasets.queries import list_kept
from apps.datasets.validation.formats import Mapping

PURPOSES = ("fine-tune", "evals")
MAX_FILE_BYTES = 512 * 1024 * 1024  # OpenAI's own limit for a file in one request
MAX_FILES = 10_000  # of an organization: what a file takes in the database does not count as its bytes
MIN_EXPIRY_SECONDS, MAX_EXPIRY_SECONDS = 3600, 2_592_000
FILENAME_LIMIT, NAME_LIMIT = 255, 120
EXTENSIONS = re.compile(r"\.(jsonl?|ndjson|csv|tsv|parquet|txt|text|md)?(\.gz)?$", re.IGNORECASE)


class FileTooLarge(DomainError):
    """The file exceeds the size limit; nothing of it was kept."""

    code = "file_too_large"
    status = Status.TOO_LARGE


class StorageFull(QuotaExceeded):
    """The file does not fit into the storage limit of the organization or the member."""


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of an incoming file. `upload_id` is the multi-part upload it is assembled from, if any.

    It becomes a version of the dataset with this name in its project.
    """

    project_id: str
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
    project: str = "",
) -> DatasetVersion:
    """Store a file and request its validation. A name known in its project makes it that dataset's next version.

    It is in the `project`, or else in that of `by`. The bytes are streamed; a failure leaves neither row nor object.
    Raises InvalidValue, FileTooLarge, StorageFull, and as `project_of_new`.
    """
    arrival = Arrival(
        project_id=project_of_new(organization=organization, by=by, wanted=project),
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
    stored = store().put_stream(version.object_key, limited(sent, organization=organization, by=by))
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
        created_at=arrival.now,  # from which the client counts the lifetime
        expires_at=_expiry(arrival.now, arrival.expires_after_seconds),
        given_mapping=msgspec.to_builtins(arrival.mapping) if arrival.mapping else None,
    )
    version.object_key = object_key(organization_id, "datasets", version.pk, "data.jsonl")
    return version


def register(*, version: DatasetVersion, stored: StoredObject, arrival: Arrival) -> DatasetVersion:
    """Save a version whose bytes are stored; delete the bytes if that fails. Raises StorageFull."""
    name = arrival.dataset_name or EXTENSIONS.sub("", version.filename)
    try:
        return _register(version, stored, clean_name(name, limit=NAME_LIMIT) or "dataset", arrival)
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
    return clean_name(filename, limit=FILENAME_LIMIT) or "file.jsonl"


def clean_name(name: str, *, limit: int) -> str:
    """Return a name that is safe to store and show: no folder, no control or bidi character, normal form C."""
    base = name.replace("\\", "/").rsplit("/", 1)[-1]
    kept = "".join(char for char in unicodedata.normalize("NFC", base) if unicodedata.category(char)[0] != "C")
    return " ".join(kept.split())[:limit].strip()


def storage_left(*, organization: Organization | str, but_upload: str = "") -> int | None:
    """Return the bytes that the organization may still store, None without a limit. `but_upload` is not counted.

    The limit and other stored objects belong to a higher layer, which settings.STORAGE_LEFT names.
    """
    left: int | None = import_string(settings.STORAGE_LEFT)(organization=organization, but_upload=but_upload)
    return left


def require_storage(*, organization: Organization | str, wanted_bytes: int, by: str, but_upload: str = "") -> None:
    """Raise StorageFull unless the organization, and the member behind `by`, may store this many more bytes."""
    left, full = _room(organization, by, but_upload)
    if left is not None and wanted_bytes > left:
        raise full


def limited(
    pieces: Iterable[bytes], *, organization: Organization | str, by: str, but_upload: str = ""
) -> Iterator[bytes]:
    """Return the pieces of a file. Once `require_storage` would refuse their bytes, they raise StorageFull."""
    left, full = _room(organization, by, but_upload)
    return bounded(pieces, left, full)


def _room(organization: Organization | str, by: str, but_upload: str) -> tuple[int | None, StorageFull]:
    """Return the bytes that both the organization and the member may still store, and the error for more.

    The error names the one of them that has less left. None is no limit.
    """
    left = storage_left(organization=organization, but_upload=but_upload)
    left_of_member = import_string(settings.STORAGE_LEFT_OF_MEMBER)
    own: int | None = left_of_member(organization=organization, by=by, but_upload=but_upload)
    if own is None or (left is not None and left <= own):
        return left, _storage_full(left or 0)
    text = gettext(
        "Of the storage that your organization allows you, %(left_bytes)s bytes are left, too little for this "
        "file: delete files or models that you made, or ask an owner for more."
    )
    return own, StorageFull(text % {"left_bytes": f"{own:,}"}, param="file")


def _expiry(now: datetime.datetime, seconds: int | None) -> datetime.datetime | None:
    check_expiry(seconds)
    return None if seconds is None else now + datetime.timedelta(seconds=seconds)


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
def _register(version: DatasetVersion, stored: StoredObject, name: str, arrival: Arrival) -> DatasetVersion:
    lock_storage(version.organization_id)
    require_storage(
        organization=version.organization_id, wanted_bytes=stored.bytes, by=version.created_by,
        but_upload=arrival.upload_id,
    )  # fmt: skip
    version.dataset = dataset_named(version, name, arrival.project_id)
    version.bytes, version.sha256 = stored.bytes, stored.sha256
    details = {"filename": version.filename, "bytes": stored.bytes, "sha256": stored.sha256}
    return save_next(version, "dataset.uploaded", by=arrival.by, **details)


def dataset_named(version: DatasetVersion, name: str, project_id: str) -> Dataset:
    """Return the project's dataset of this name, created for the version if there is none."""
    dataset, _ = Dataset.objects.get_or_create(
        organization_id=version.organization_id, project_id=project_id, name=name, deleted_at=None,
        defaults={"created_by": version.created_by},
    )  # fmt: skip
    return dataset


def save_next(version: DatasetVersion, action: str, *, by: str, **details: object) -> DatasetVersion:
    """Number the version, save it and request its validation. The caller has serialized uploads. Raises StorageFull."""
    if list_kept(organization=version.organization_id).count() >= MAX_FILES:
        text = gettext(
            "Your organization keeps %(max_files)s files, the most allowed: delete files you no longer need."
        ) % {"max_files": f"{MAX_FILES:,}"}
        raise StorageFull(text, param="file")
    version.number = (version.dataset.versions.aggregate(last=Max("number"))["last"] or 0) + 1
    version.save(force_insert=True)
    ask_for_validation(version)
    audit.record(organization=version.organization_id, by=by, action=action, target=version.pk, **details)
    version.refresh_from_db()
    return version


def ask_for_validation(version: DatasetVersion, attempt: str = "") -> None:
    """Have the file validated, again for each `attempt`."""
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
