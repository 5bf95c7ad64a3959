"""The parts of an upload: their keys and sizes, the addresses to send them to, and the file that they make together."""

import datetime
import hashlib
import math
from collections.abc import Iterator, Sequence

from django.utils.translation import gettext, ngettext

from apps.accounts.members.projects import require_work_in
from apps.core.errors import InvalidState, InvalidValue
from apps.core.objects.store import CHUNK_BYTES, StoredObject, object_key, store
from apps.datasets.lifecycle import UploadStatus
from apps.datasets.models import Upload

MAX_PART_BYTES = 64 * 1024**2  # OpenAI's limit
SIGNED_SECONDS = 300
MAX_SIGNED_AT_ONCE = 32
_CLOCKS_APART = datetime.timedelta(seconds=60)  # between the database and the host that checks a signature


class UploadClosed(InvalidState):
    """The upload was completed or cancelled, or it has expired."""

    code = "upload_closed"


def require_open(upload: Upload, now: datetime.datetime) -> None:
    """Raise UploadClosed unless the upload still accepts parts."""
    if upload.status != UploadStatus.PENDING:
        raise UploadClosed(gettext("The upload is %(status)s.") % {"status": upload.status}, param="upload_id")
    if upload.expires_at <= now:
        raise UploadClosed(gettext("The upload has expired; start a new one."), param="upload_id")


def part_key(upload: Upload, *name: str) -> str:
    """Return the key of a part, or the folder of all without a name."""
    return object_key(upload.organization_id, "uploads", upload.pk, *name)


def count_parts(upload: Upload) -> int:
    return math.ceil(upload.bytes / (upload.part_bytes or MAX_PART_BYTES))


def part_size(upload: Upload, number: int) -> int:
    """Return the bytes of the part with this number (from 1): all are equal except the last."""
    size = upload.part_bytes or MAX_PART_BYTES
    return min(size, upload.bytes - (number - 1) * size)


def list_present(*, upload: Upload) -> list[int]:
    """Return the numbers of the parts that arrived complete, ascending."""
    found = {key: info.bytes for key, info in store().list_objects(part_key(upload))}
    numbers = range(1, count_parts(upload) + 1)
    return [number for number in numbers if found.get(planned_key(upload, number)) == part_size(upload, number)]


def sign_parts(*, upload: Upload, numbers: Sequence[int], by: str, now: datetime.datetime) -> dict[int, str]:
    """Return a URL for each part that accepts exactly its bytes for five minutes.

    The upload counts as stored until the last URL has expired, even when completed or cancelled. Raises UploadClosed,
    InvalidValue, and PermissionDenied for a viewer of the upload's project.
    """
    require_work_in(project_id=upload.project_id, actor=by)
    require_open(upload, now)
    if len(numbers) > MAX_SIGNED_AT_ONCE or not all(1 <= number <= count_parts(upload) for number in numbers):
        raise InvalidValue(gettext("The upload has no such part."), param="numbers")
    until = now + datetime.timedelta(seconds=SIGNED_SECONDS) + _CLOCKS_APART
    if not Upload.objects.filter(pk=upload.pk, status=UploadStatus.PENDING).update(signed_until=until):
        raise UploadClosed(gettext("The upload was closed meanwhile."), param="upload_id")
    return {
        number: store().signed_url(
            planned_key(upload, number), "PUT",
            expires_seconds=SIGNED_SECONDS, base="public", content_bytes=part_size(upload, number),
        )
        for number in numbers
    }  # fmt: skip


def planned_keys(upload: Upload) -> list[str]:
    """Return the keys of all planned parts, in order. Raises InvalidValue if one is missing."""
    missing = count_parts(upload) - len(list_present(upload=upload))
    if missing:
        raise InvalidValue(
            ngettext("%(missing)s part is missing.", "%(missing)s parts are missing.", missing) % {"missing": missing},
            param="parts",
        )
    return [planned_key(upload, number) for number in range(1, count_parts(upload) + 1)]


def planned_key(upload: Upload, number: int) -> str:
    """Return the key of the planned part with this number (from 1)."""
    return part_key(upload, f"p{number:05d}")


def sent_keys(upload: Upload, part_ids: Sequence[str]) -> list[str]:
    """Return the keys of these parts. Raises InvalidValue unless they are parts that add up to the upload."""
    sizes = dict(upload.parts.values_list("pk", "bytes"))
    if len(set(part_ids)) != len(part_ids):
        raise InvalidValue(gettext("A part is named twice."), param="part_ids")
    for part_id in part_ids:
        if part_id not in sizes:
            raise InvalidValue(
                gettext("The upload has no part %(part_id)s.") % {"part_id": part_id[:80]}, param="part_ids"
            )
    total = sum(sizes[part_id] for part_id in part_ids)
    if total != upload.bytes:
        message = gettext("The parts have %(total)s bytes together; %(bytes)s were announced.") % {
            "total": f"{total:,}",
            "bytes": f"{upload.bytes:,}",
        }
        raise InvalidValue(message, param="part_ids")
    return [part_key(upload, part_id) for part_id in part_ids]


def compose(key: str, part_keys: Sequence[str], md5: str | None) -> StoredObject:
    """Join the parts to one object. Raises InvalidValue if its MD5 is not the one announced."""
    digest = hashlib.md5(usedforsecurity=False)
    stored = store().compose(key, part_keys, on_chunk=digest.update if md5 else lambda _: None)
    if md5 and digest.hexdigest() != md5.lower():
        store().delete(key)
        raise _wrong_md5(digest.hexdigest())
    return stored


def checked_bytes(part_keys: Sequence[str], md5: str | None) -> Iterator[bytes]:
    """Yield the bytes of the parts; raise InvalidValue at their end if their MD5 is not the one announced."""
    digest = hashlib.md5(usedforsecurity=False)
    for key in part_keys:
        with store().open_stream(key) as part:
            while chunk := part.read(CHUNK_BYTES):
                if md5:
                    digest.update(chunk)
                yield chunk
    if md5 and digest.hexdigest() != md5.lower():
        raise _wrong_md5(digest.hexdigest())


def _wrong_md5(found: str) -> InvalidValue:
    message = gettext("The file has the MD5 %(digest)s, not the one announced: send its parts again.")
    return InvalidValue(message % {"digest": found}, param="md5", code="invalid_checksum")
