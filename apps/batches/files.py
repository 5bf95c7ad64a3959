"""Files of batches. They are stored as they arrive, read when a batch begins, and deleted with their bytes."""

import datetime
from collections.abc import Iterable

from django.db import transaction
from django.db.models import Q
from django.utils.translation import gettext

from apps.accounts.members.projects import project_of_new, require_work_in
from apps.accounts.models import Organization
from apps.batches.lifecycle import ACTIVE, INTERNAL_PURPOSE
from apps.batches.models import Batch, BatchFile
from apps.batches.queries import is_in_use, list_kept
from apps.core import audit
from apps.core.database.tenancy import id_of
from apps.core.errors import DomainError, InvalidState, InvalidValue, QuotaExceeded, Status
from apps.core.ids import new_id
from apps.core.messages import outbox
from apps.core.objects.orphans import sweep
from apps.core.objects.store import bounded, object_key, store
from apps.datasets.intake.versions import limited, lock_storage, require_storage

PURPOSE = "batch"
OUTPUT_PURPOSE, EVAL_PURPOSE = "batch_output", "evals"
MAX_FILE_BYTES = 200 * 1024 * 1024  # OpenAI's limit
MAX_FILES = 10_000  # of an organization
MIN_EXPIRY_SECONDS, MAX_EXPIRY_SECONDS = 3600, 2_592_000
_DELETED_AT_ONCE = 500


class BatchFileTooLarge(DomainError):
    """The file exceeds the size limit. Nothing of it was stored."""

    code = "file_too_large"
    status = Status.TOO_LARGE


def create_file(
    *,
    organization: Organization | str,
    filename: str,
    chunks: Iterable[bytes],
    by: str,
    now: datetime.datetime,
    expires_after_seconds: int | None = None,
    purpose: str = PURPOSE,
    upload_id: str = "",
    project_id: str = "",
    made_by: str = "",
) -> BatchFile:
    """Store the input of a batch, or the items of evals. If this fails, neither a row nor an object remains.

    `upload_id`, `project_id` and `made_by` are those of the upload that the bytes come from; they are not counted
    twice. Other files are in the project of `by`, and count as stored by it. Raises InvalidValue, BatchFileTooLarge,
    QuotaExceeded.
    """
    check_expiry(expires_after_seconds, param="expires_after.seconds")
    file = new_file(
        organization, purpose, filename, by=made_by or by, now=now, expires_after_seconds=expires_after_seconds,
        project_id=project_id or project_of_new(organization=organization, by=by),
    )  # fmt: skip
    sent = bounded(chunks, MAX_FILE_BYTES, too_large(param="file"))
    sent = limited(sent, organization=organization, by=file.created_by, but_upload=upload_id)
    try:
        file.bytes = store().put_stream(file.object_key, sent).bytes
        with transaction.atomic():
            lock_storage(organization)
            require_storage(
                organization=organization, wanted_bytes=file.bytes, by=file.created_by, but_upload=upload_id
            )
            if list_kept(organization=organization).exclude(purpose=INTERNAL_PURPOSE).count() >= MAX_FILES:
                text = gettext(
                    "Your organization keeps %(max_files)s files of batches, the most allowed: delete some."
                ) % {"max_files": f"{MAX_FILES:,}"}
                raise QuotaExceeded(text, param="file")
            file.save(force_insert=True)
            audit.record(organization=file.organization_id, by=by, action="batch_file.uploaded", target=file.pk)
    except BaseException:
        store().delete(file.object_key)
        raise
    file.refresh_from_db()
    return file


def too_large(*, param: str) -> BatchFileTooLarge:
    message = gettext("A batch file may have up to %(max_file_bytes)s MiB.")
    return BatchFileTooLarge(message % {"max_file_bytes": MAX_FILE_BYTES // 1024**2}, param=param)


def new_file(
    organization: Organization | str,
    purpose: str,
    filename: str,
    *,
    by: str,
    now: datetime.datetime,
    expires_after_seconds: int | None,
    project_id: str,
) -> BatchFile:
    """Return an unsaved file with the key for its bytes."""
    file = BatchFile(
        pk=new_id("file", "-"),
        organization_id=id_of(organization),
        project_id=project_id,
        purpose=purpose,
        filename=filename,
        created_by=by,
        created_at=now,
        expires_at=now + datetime.timedelta(seconds=expires_after_seconds) if expires_after_seconds else None,
    )
    file.object_key = object_key(file.organization_id, "batches", file.pk, "lines.jsonl")
    return file


def check_expiry(seconds: int | None, *, param: str) -> None:
    """Raise InvalidValue for a lifetime that OpenAI would not accept."""
    if seconds is not None and not MIN_EXPIRY_SECONDS <= seconds <= MAX_EXPIRY_SECONDS:
        limits = f"{MIN_EXPIRY_SECONDS} and {MAX_EXPIRY_SECONDS}"
        raise InvalidValue(
            gettext("A file must expire between %(limits)s seconds after it was made.") % {"limits": limits},
            param=param,
        )


@transaction.atomic
def delete_file(*, file: BatchFile, by: str, now: datetime.datetime) -> None:
    """Delete the file. It is hidden at once, and a task deletes its bytes.

    Raises InvalidState while a batch reads it, and PermissionDenied for a viewer of its project.
    """
    require_work_in(project_id=file.project_id, actor=by)
    file = BatchFile.objects.select_for_update().get(pk=file.pk)
    if is_in_use(file=file):
        raise InvalidState(
            gettext("A batch still reads this file: cancel the batch or wait for its end."),
            param="file_id",
            code="file_in_use",
        )
    if file.deleted_at is None:
        file.deleted_at = now
        file.save(update_fields=["deleted_at"])
        outbox.publish(
            topic="objects.delete",
            key=f"delete:{file.pk}",
            payload={"key": file.object_key},
            organization=file.organization_id,
        )
        audit.record(organization=file.organization_id, by=by, action="batch_file.deleted", target=file.pk)


def delete_expired(*, now: datetime.datetime) -> int:
    """Delete the expired files that no batch reads; return how many."""
    deleted = 0
    for file in BatchFile.objects.filter(expires_at__lt=now, deleted_at=None).order_by("?")[:_DELETED_AT_ONCE]:
        try:
            delete_file(file=file, by="system", now=now)
        except InvalidState:
            continue  # in use: the next run checks again
        deleted += 1
    return deleted


def sweep_orphans(*, now: datetime.datetime) -> int:
    """Delete objects that a killed upload or worker left without a row; return how many folders."""
    return sweep(kinds=("batches",), known=_known, now=now)


def _known(ids: list[str]) -> set[str]:
    kept = BatchFile.objects.filter(deleted_at=None)
    batches = Batch.objects.filter(Q(status__in=ACTIVE) | Q(output_file__in=kept) | Q(error_file__in=kept), pk__in=ids)
    return {*kept.filter(pk__in=ids).values_list("pk", flat=True), *batches.values_list("pk", flat=True)}
