"""Uploads in parts: OpenAI's Uploads API and the browser's resumable uploads over the same objects.

A part is an object under `org/<organization>/uploads/<upload>/`. API clients send parts through the API and give their
order at the end. A browser gets a plan of parts of equal size and sends each straight to the store by a signed URL. The
store's listing shows which parts have arrived, so a reload or restart loses nothing.
"""

import datetime
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
from django.conf import settings
from django.db import transaction
from django.db.models import Count, Sum
from django.utils.translation import gettext

from apps.accounts.members.projects import project_of_new, require_work_in
from apps.accounts.members.visibility import visible
from apps.accounts.models import Organization
from apps.core import audit
from apps.core.database.tenancy import id_of
from apps.core.database.transitions import advance, try_advance
from apps.core.errors import InvalidValue, NotFound, QuotaExceeded
from apps.core.ids import new_id
from apps.core.messages import outbox
from apps.core.objects.store import bounded, store
from apps.datasets.intake.parts import (
    MAX_PART_BYTES,
    UploadClosed,
    checked_bytes,
    compose,
    part_key,
    planned_keys,
    require_open,
    sent_keys,
)
from apps.datasets.intake.versions import (
    PURPOSES,
    Arrival,
    FileTooLarge,
    check_expiry,
    check_purpose,
    clean_filename,
    lock_storage,
    new_version,
    register,
    require_storage,
)
from apps.datasets.lifecycle import UPLOAD_TRANSITIONS, UploadStatus
from apps.datasets.models import DatasetVersion, Upload, UploadPart
from apps.datasets.validation.formats import Mapping, read_mapping

LIFETIME = datetime.timedelta(hours=1)  # OpenAI's
BROWSER_LIFETIME = datetime.timedelta(days=3)
BROWSER_PART_BYTES = 8 * 1024**2
MAX_BROWSER_PARTS = 1_000
MAX_PARTS, MAX_OPEN = 10_000, 1_000  # of an upload, as a bucket joins at most; and uploads of an organization
# A store checks a signature when a request begins: a slow one may still store its part this long after the end.
_SLOWEST_PUT = datetime.timedelta(hours=1)
_CLOSED_AT_ONCE = 500  # the rest minutes later: the task also serves other tenants
_MIME_LIMIT, _DATASET_NAME_LIMIT = 120, 120


# Stores the bytes of an upload if they are no dataset: returns the file's id, and "" if they are one.
Keep = Callable[[Upload, Iterator[bytes]], str]


@transaction.atomic
def create_upload(
    *,
    organization: Organization | str,
    filename: str,
    purpose: str,
    bytes: int,
    mime_type: str,
    by: str,
    now: datetime.datetime,
    is_planned: bool = False,
    dataset_name: str = "",
    expires_after_seconds: int | None = None,
    mapping: Mapping | None = None,
    purposes: Sequence[str] = PURPOSES,
    project: str = "",
) -> Upload:
    """Announce a file of this many bytes, for one of the `purposes`, in the `project` or else in that of `by`.

    Raises InvalidValue, FileTooLarge, QuotaExceeded, StorageFull, and as `project_of_new`.
    """
    project_id = project_of_new(organization=organization, by=by, wanted=project)
    check_purpose(purpose, purposes)
    check_expiry(expires_after_seconds)
    if bytes < 1:
        raise InvalidValue(gettext("'bytes' must be at least 1."), param="bytes")
    limit = settings.MAX_UPLOAD_BYTES
    if bytes > limit:
        message = gettext(
            "The file has %(bytes)s bytes; one file may have up to %(limit)s here, a limit the operator "
            "sets. Send it as gzip, or split it into several files."
        ) % {"bytes": f"{bytes:,}", "limit": f"{limit:,}"}
        raise FileTooLarge(message, param="bytes")
    lock_storage(organization)
    require_storage(organization=organization, wanted_bytes=bytes, by=by)
    if Upload.objects.for_organization(organization).filter(status=UploadStatus.PENDING).count() >= MAX_OPEN:
        raise QuotaExceeded(
            gettext("Your organization has %(max_open)s uploads open: complete or cancel some.")
            % {"max_open": f"{MAX_OPEN:,}"}
        )
    upload = Upload.objects.create(
        organization_id=id_of(organization),
        project_id=project_id,
        filename=clean_filename(filename),
        purpose=purpose,
        bytes=bytes,
        mime_type=mime_type[:_MIME_LIMIT],
        part_bytes=max(BROWSER_PART_BYTES, math.ceil(bytes / MAX_BROWSER_PARTS)) if is_planned else None,
        dataset_name=dataset_name[:_DATASET_NAME_LIMIT],
        given_mapping=msgspec.to_builtins(mapping) if mapping else None,
        file_expires_after_seconds=expires_after_seconds,
        created_by=by,
        created_at=now,
        expires_at=now + (BROWSER_LIFETIME if is_planned else LIFETIME),
    )
    audit.record(organization=organization, by=by, action="upload.announced", target=upload.pk, bytes=bytes)
    return upload


def get_upload(*, organization: Organization | str, id: str) -> Upload:
    """Return one upload that the request sees. Raises NotFound, the same for unknown and foreign ids."""
    uploads = visible(Upload.objects.for_organization(organization)).select_related("version")
    found = uploads.filter(pk=id).first() if "\x00" not in id else None
    if found is None:
        raise NotFound(gettext("No such upload: %(id)s.") % {"id": id[:80]}, param="upload_id", code="upload_not_found")
    return found


@transaction.atomic
def add_part(*, upload: Upload, chunks: Iterable[bytes], by: str, now: datetime.datetime) -> UploadPart:
    """Store one part; parts may come in any order and concurrently.

    Raises UploadClosed, FileTooLarge, and PermissionDenied for a viewer of the upload's project.
    """
    require_work_in(project_id=upload.project_id, actor=by)
    require_open(upload, now)
    part = UploadPart(pk=new_id("part"), organization_id=upload.organization_id, upload=upload)
    key = part_key(upload, part.pk)
    too_large = FileTooLarge(
        gettext("A part may have up to %(max_part_bytes)s MiB.") % {"max_part_bytes": MAX_PART_BYTES // 1024**2},
        param="data",
    )
    try:
        part.bytes = store().put_stream(key, bounded(chunks, MAX_PART_BYTES, too_large)).bytes
        locked = _locked(upload)
        lock_storage(upload.organization_id)
        require_open(locked, now)
        # Refuse parts that could never be assembled. A part sent twice by a retry is no error.
        found = locked.parts.aggregate(total=Sum("bytes"), count=Count("pk"))
        sent = found["total"] or 0
        if found["count"] >= MAX_PARTS:
            raise InvalidValue(
                gettext("An upload has at most %(max_parts)s parts: send larger ones.")
                % {"max_parts": f"{MAX_PARTS:,}"},
                param="data",
            )
        if part.bytes > locked.bytes or sent + part.bytes > 2 * locked.bytes + MAX_PART_BYTES:
            message = gettext("The parts are longer than the %(bytes)s bytes announced.") % {
                "bytes": f"{locked.bytes:,}"
            }
            raise InvalidValue(message, param="data")
        # Only the bytes beyond what the upload already counts for need room.
        beyond = max(0, sent + part.bytes - max(locked.bytes, sent))
        require_storage(organization=upload.organization_id, wanted_bytes=beyond, by=upload.created_by)
        part.save(force_insert=True)
    except BaseException:
        store().delete(key)
        raise
    part.refresh_from_db()
    return part


@transaction.atomic
def complete_upload(
    *,
    upload: Upload,
    now: datetime.datetime,
    by: str,
    part_ids: Sequence[str] = (),
    md5: str | None = None,
    keep: Keep | None = None,
) -> Upload:
    """Assemble the parts, in the given or planned order, into a new file; repeating the call changes nothing.

    Raises UploadClosed, InvalidValue, StorageFull, PermissionDenied for a viewer of the upload's project, and what
    `keep` raises; the upload then stays unchanged.
    """
    require_work_in(project_id=upload.project_id, actor=by)
    locked = _locked(upload)
    if locked.status == UploadStatus.COMPLETED and locked.part_ids == list(part_ids):
        return get_upload(organization=locked.organization_id, id=locked.pk)
    require_open(locked, now)
    keys = planned_keys(locked) if locked.part_bytes else sent_keys(locked, part_ids)
    advance(locked, to=UploadStatus.COMPLETED, transitions=UPLOAD_TRANSITIONS, part_ids=list(part_ids))
    if keep:
        locked.file_id = keep(locked, checked_bytes(keys, md5))
    if not locked.file_id:
        locked.version = _assemble(locked, keys, md5, by=by, now=now)
    locked.save(update_fields=["version", "file_id"])
    _forget_parts(locked)
    return locked


@transaction.atomic
def cancel_upload(*, upload: Upload, by: str) -> Upload:
    """Cancel the upload; its parts are deleted next. Cancelling again changes nothing.

    Raises UploadClosed, and PermissionDenied for a viewer of the upload's project.
    """
    require_work_in(project_id=upload.project_id, actor=by)
    if upload.status == UploadStatus.CANCELLED:
        return upload
    if not try_advance(upload, to=UploadStatus.CANCELLED, transitions=UPLOAD_TRANSITIONS):
        raise UploadClosed(gettext("The upload is %(status)s.") % {"status": upload.status}, param="upload_id")
    _forget_parts(upload)
    audit.record(organization=upload.organization_id, by=by, action="upload.cancelled", target=upload.pk)
    return upload


def expire_uploads(*, now: datetime.datetime) -> int:
    """Close the expired uploads and have their parts deleted; return how many were closed.

    Parts of uploads closed earlier are deleted again and again, from the end of the last signature until an hour later.
    """
    closed = Upload.objects.exclude(status=UploadStatus.PENDING).filter(signed_until__lt=now)
    for upload in closed.order_by("?")[:_CLOSED_AT_ONCE]:
        store().delete_prefix(part_key(upload))
        Upload.objects.filter(pk=upload.pk, signed_until__lt=now - _SLOWEST_PUT).update(signed_until=None)
    expired = Upload.objects.filter(status=UploadStatus.PENDING, expires_at__lt=now)
    return sum(_expire(upload) for upload in expired.order_by("expires_at")[:_CLOSED_AT_ONCE])


def delete_parts(*, upload_id: str) -> None:
    """Delete the parts of a closed upload, and their rows.

    A store that can refuse later writes needs no second deletion.
    """
    upload = Upload.objects.get(pk=upload_id)
    is_refused = store().close_prefix(part_key(upload))
    store().delete_prefix(part_key(upload))
    upload.parts.all().delete()
    if is_refused:
        Upload.objects.filter(pk=upload.pk).update(signed_until=None)


@transaction.atomic
def _expire(upload: Upload) -> bool:
    is_mine = try_advance(upload, to=UploadStatus.EXPIRED, transitions=UPLOAD_TRANSITIONS)
    if is_mine:
        _forget_parts(upload)
    return is_mine


def _locked(upload: Upload) -> Upload:
    return Upload.objects.select_for_update(of=("self",)).get(pk=upload.pk)


def _assemble(
    upload: Upload,
    keys: Sequence[str],
    md5: str | None,
    *,
    by: str,
    now: datetime.datetime,
) -> DatasetVersion:
    arrival = Arrival(
        project_id=upload.project_id,
        filename=upload.filename,
        purpose=upload.purpose,
        by=by,
        now=now,
        dataset_name=upload.dataset_name or None,
        expires_after_seconds=upload.file_expires_after_seconds,
        mapping=read_mapping(upload.given_mapping),
        upload_id=upload.pk,
    )
    version = new_version(organization=upload.organization_id, arrival=arrival)
    version.created_by = upload.created_by  # as its parts, the file counts as stored by who announced it
    stored = compose(version.object_key, keys, md5)
    return register(version=version, stored=stored, arrival=arrival)


def _forget_parts(upload: Upload) -> None:
    payload = {"upload_id": upload.pk}
    outbox.publish(
        topic="upload.closed", key=f"parts:{upload.pk}", payload=payload, organization=upload.organization_id
    )
