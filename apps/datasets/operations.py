"""Uploading, validating, counting and deleting training data."""

import datetime
import re
import time
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

from django.db import transaction
from django.db.models import Max

from apps.catalog.models import BaseModel
from apps.catalog.queries import chat_renderer
from apps.contracts.chat import RowError, parse_line, split_lines
from apps.core import audit, outbox
from apps.core.clock import db_now
from apps.core.errors import DomainError, InvalidState, InvalidValue, QuotaExceeded, Status
from apps.core.ids import new_id
from apps.core.locks import lock
from apps.core.object_store import ObjectMissing, StoredObject, object_key, read_chunks, store
from apps.core.transitions import advance, try_advance
from apps.datasets.counting import count_rows
from apps.datasets.models import VERSION_TRANSITIONS, Dataset, DatasetVersion, TokenCount
from apps.datasets.queries import storage_used_bytes
from apps.datasets.validation import (
    MAX_LINE_BYTES,
    FileErrorCode,
    LineError,
    Report,
    as_json,
    from_row_error,
    validate_lines,
)

PURPOSES = ("fine-tune", "evals")
MAX_FILE_BYTES = 512 * 1024 * 1024  # OpenAI's own limit for a file
# Up to this size tokens are counted while somebody waits: about 15,000 short rows, measured at 3,000 to 6,000 a second.
COUNT_NOW_BYTES = 4_000_000
MIN_EXPIRY_SECONDS, MAX_EXPIRY_SECONDS = 3600, 2_592_000
LEASE = datetime.timedelta(seconds=60)
_RENEW_SECONDS = 10
_FILENAME_LIMIT, _NAME_LIMIT = 255, 120


class FileTooLarge(DomainError):
    """The file is longer than a file may be; nothing of it was kept."""

    code = "file_too_large"
    status = Status.TOO_LARGE


class StorageFull(QuotaExceeded):
    """The organization's storage limit does not hold this file."""


class FileInUse(InvalidState):
    """A job that has not ended still reads the file."""

    code = "file_in_use"


class NotReady(InvalidState):
    """The file is not validated yet, has errors, or is deleted."""

    code = "file_not_ready"


class RowRefused(DomainError):
    """The base model's chat template cannot render a row of the file."""

    code = "invalid_training_file"


# --- uploading --------------------------------------------------------------------------------------------------------


def create_version(
    *,
    organization: Any,
    filename: str,
    purpose: str,
    chunks: Iterable[bytes],
    by: str,
    now: datetime.datetime,
    dataset_name: str | None = None,
    expires_after_seconds: int | None = None,
    storage_limit_bytes: int | None = None,
) -> DatasetVersion:
    """Store an upload and ask for its validation. The same dataset name again makes the next version of it.

    The bytes are streamed; a failure leaves neither row nor object. Raises InvalidValue, FileTooLarge, StorageFull.
    """
    if purpose not in PURPOSES:
        raise InvalidValue(f"'{purpose[:40]}' is not accepted; use 'fine-tune' or 'evals'.", param="purpose")
    filename = clean_name(filename, limit=_FILENAME_LIMIT) or "file.jsonl"
    name = clean_name(dataset_name or re.sub(r"\.jsonl?$", "", filename), limit=_NAME_LIMIT) or "dataset"
    organization_id = getattr(organization, "pk", organization)
    version = DatasetVersion(
        pk=new_id("file", "-"),
        organization_id=organization_id,
        purpose=purpose,
        filename=filename,
        created_by=by,
        expires_at=_expiry(now, expires_after_seconds),
    )
    version.object_key = object_key(organization_id, "datasets", version.pk, "data.jsonl")
    stored = _store(version.object_key, chunks, organization_id, storage_limit_bytes)
    try:
        return _register(version, stored, name, storage_limit_bytes)
    except BaseException:
        store().delete(version.object_key)
        raise


def clean_name(name: str, *, limit: int) -> str:
    """Return a name that is safe to store and show: no folder, control or bidi character, normal form C."""
    base = name.replace("\\", "/").rsplit("/", 1)[-1]
    kept = "".join(char for char in unicodedata.normalize("NFC", base) if unicodedata.category(char)[0] != "C")
    return " ".join(kept.split())[:limit].strip()


def _expiry(now: datetime.datetime, seconds: int | None) -> datetime.datetime | None:
    if seconds is None:
        return None
    if not MIN_EXPIRY_SECONDS <= seconds <= MAX_EXPIRY_SECONDS:
        limits = f"{MIN_EXPIRY_SECONDS} and {MAX_EXPIRY_SECONDS}"
        raise InvalidValue(f"A file may expire between {limits} seconds after upload.", param="expires_after.seconds")
    return now + datetime.timedelta(seconds=seconds)


def _store(key: str, chunks: Iterable[bytes], organization_id: str, storage_limit_bytes: int | None) -> StoredObject:
    left = None
    if storage_limit_bytes is not None:
        left = max(0, storage_limit_bytes - storage_used_bytes(organization=organization_id))
    return store().put_stream(key, _limited(chunks, left))


def _limited(chunks: Iterable[bytes], left_bytes: int | None) -> Iterator[bytes]:
    size = 0
    for chunk in chunks:
        size += len(chunk)
        if size > MAX_FILE_BYTES:
            raise FileTooLarge(f"A file may have up to {MAX_FILE_BYTES // 1024**2} MiB; split it.", param="file")
        if left_bytes is not None and size > left_bytes:
            raise _storage_full(left_bytes)
        yield chunk


def _storage_full(left_bytes: int) -> StorageFull:
    return StorageFull(
        f"Your organization has {left_bytes:,} bytes of storage left, too little for this file: "
        "delete files you no longer need, or ask the operator for more.",
        param="file",
    )


@transaction.atomic
def _register(
    version: DatasetVersion, stored: StoredObject, name: str, storage_limit_bytes: int | None
) -> DatasetVersion:
    _serialize_uploads(version.organization_id)
    used = storage_used_bytes(organization=version.organization_id)
    if storage_limit_bytes is not None and used + stored.bytes > storage_limit_bytes:
        raise _storage_full(max(0, storage_limit_bytes - used))
    version.dataset, _ = Dataset.objects.get_or_create(
        organization_id=version.organization_id, name=name, deleted_at=None, defaults={"created_by": version.created_by}
    )
    version.number = (version.dataset.versions.aggregate(last=Max("number"))["last"] or 0) + 1
    version.bytes, version.sha256 = stored.bytes, stored.sha256
    version.save(force_insert=True)
    outbox.publish(topic="dataset.validate", key=f"validate:{version.pk}", payload={"version_id": version.pk})
    audit.record(
        organization=version.organization_id, by=version.created_by, action="dataset.uploaded", target=version.pk,
        filename=version.filename, bytes=version.bytes, sha256=version.sha256,
    )  # fmt: skip
    version.refresh_from_db()
    return version


def _serialize_uploads(organization_id: str) -> None:
    """This function will let one upload of an organization register at a time: version numbers and storage add up."""
    lock(f"uploads:{organization_id}")


# --- validating -------------------------------------------------------------------------------------------------------


def validate_version(*, version_id: str, now: datetime.datetime) -> DatasetVersion | None:
    """Read the file once and mark it ready or invalid; return None when it is another's turn or was done already.

    Whoever validates holds a lease in the row; one that is not renewed has died, and the next caller starts over.
    """
    version = DatasetVersion.objects.filter(pk=version_id).first()
    if version is None:
        return None
    _take_over_from_the_dead(version, now)
    lease = _Lease(version, now)
    if not lease.take():
        return None
    try:
        with store().open_stream(version.object_key) as stream:
            report = validate_lines(read_chunks(stream), on_progress=lease.renew)
    except ObjectMissing:
        report = _lost_report()
    except LeaseLost:
        return None
    return _record_report(version, report, lease)


class LeaseLost(Exception):
    """Somebody else has taken over the validation."""


class _Lease:
    """The right to validate one version. Its end is written into the row and is also its fencing token."""

    def __init__(self, version: DatasetVersion, now: datetime.datetime) -> None:
        self._version, self._renewed = version, time.monotonic()
        self.expires_at = now + LEASE

    def take(self) -> bool:
        return try_advance(
            self._version,
            to="validating",
            transitions=VERSION_TRANSITIONS,
            validation_lease_expires_at=self.expires_at,
        )

    def renew(self) -> None:
        if time.monotonic() - self._renewed < _RENEW_SECONDS:
            return
        self._renewed, expires_at = time.monotonic(), db_now() + LEASE
        held = DatasetVersion.objects.filter(
            pk=self._version.pk, status="validating", validation_lease_expires_at=self.expires_at
        )
        if not held.update(validation_lease_expires_at=expires_at):
            raise LeaseLost
        self.expires_at = expires_at


def _take_over_from_the_dead(version: DatasetVersion, now: datetime.datetime) -> None:
    try_advance(
        version,
        to="uploaded",
        transitions=VERSION_TRANSITIONS,
        guard={"validation_lease_expires_at__lt": now},
        validation_lease_expires_at=None,
    )


def _lost_report() -> Report:
    error = LineError(
        line=1, code=FileErrorCode.CONTENT_CHANGED, message="The stored file is gone.", fix="Upload it again."
    )
    return Report(rows=0, error_count=1, errors=(error,), line_offsets=(), sha256="")


@transaction.atomic
def _record_report(version: DatasetVersion, report: Report, lease: _Lease) -> DatasetVersion | None:
    is_intact = report.sha256 == version.sha256
    is_ready = report.is_valid and is_intact
    errors = as_json(report.errors)
    if report.is_valid and not is_intact:
        message = "The stored file is not the one that was uploaded."
        errors = as_json(
            [LineError(line=1, code=FileErrorCode.CONTENT_CHANGED, message=message, fix="Upload it again.")]
        )
    is_mine = try_advance(
        version,
        to="ready" if is_ready else "invalid",
        transitions=VERSION_TRANSITIONS,
        guard={"validation_lease_expires_at": lease.expires_at},
        rows=report.rows,
        error_count=report.error_count or (0 if is_intact else 1),
        errors=errors,
        line_offsets=list(report.line_offsets),
        validated_at=db_now(),
        validation_lease_expires_at=None,
    )
    if not is_mine:
        return None
    audit.record(
        organization=version.organization_id, by="system", action="dataset.validated", target=version.pk,
        status=version.status, rows=report.rows, error_count=version.error_count,
    )  # fmt: skip
    return version


# --- counting ---------------------------------------------------------------------------------------------------------


def count_tokens(*, version: DatasetVersion, base_model: BaseModel) -> TokenCount:
    """Return the version's tokens under a model's tokenizer and template, counting them the first time.

    Raises NotReady, ModelNotInstalled, and RowRefused for the first row that the template cannot render.
    """
    counts = TokenCount.objects.filter(version=version, base_model=base_model)
    found = counts.filter(chat_template_sha256=base_model.chat_template_sha256).first()
    if found:
        return found
    if version.status != "ready":
        raise NotReady(f"{version.pk} is {version.status}; tokens are counted once it is ready.", param="training_file")
    renderer = chat_renderer(base_model=base_model)
    try:
        with store().open_stream(version.object_key) as stream:
            lines = split_lines(read_chunks(stream), max_line_bytes=MAX_LINE_BYTES)
            lengths = count_rows(renderer.render_many(parse_line(line) for line in lines))
    except RowError as error:
        found_error = from_row_error(error)
        raise RowRefused(
            f"Line {error.line}: {found_error.message} {found_error.fix}", param="training_file",
            line=error.line, row_code=found_error.code,
        ) from error  # fmt: skip
    count, _ = counts.get_or_create(
        chat_template_sha256=base_model.chat_template_sha256,
        defaults={
            "organization_id": version.organization_id,
            "version": version,
            "base_model": base_model,
            "tokens": lengths.tokens,
            "trained_tokens": lengths.trained_tokens,
            "longest_row_tokens": lengths.longest_row_tokens,
            "histogram": lengths.histogram,
        },
    )
    return count


@transaction.atomic
def request_count(*, version: DatasetVersion, base_model: BaseModel) -> None:
    """Have a task count the tokens of a file too large to count while somebody waits.

    Asking again is harmless: one count is asked for in an hour, in case the one before was lost with its worker.
    """
    hour = db_now().strftime("%Y%m%d%H")
    outbox.publish(
        topic="dataset.count",
        key=f"count:{version.pk}:{base_model.pk}:{base_model.chat_template_sha256[:16]}:{hour}",
        payload={"version_id": version.pk, "base_model_id": base_model.pk},
    )


# --- deleting ---------------------------------------------------------------------------------------------------------


@transaction.atomic
def delete_version(*, version: DatasetVersion, by: str, now: datetime.datetime) -> DatasetVersion:
    """Delete the file for good: at once out of sight, its bytes right after. Raises FileInUse, InvalidState.

    The row stays with name and hash, so that jobs and adapters still say what they were trained on.
    """
    version = DatasetVersion.objects.select_for_update(of=("self",)).select_related("dataset").get(pk=version.pk)
    _take_over_from_the_dead(version, now)
    if version.status == "validating":
        raise InvalidState("The file is being validated; delete it in a moment.", param="file_id")
    _require_unused(version)
    advance(version, to="deleted", transitions=VERSION_TRANSITIONS, deleted_at=now, errors=[], line_offsets=[])
    if not version.dataset.versions.exclude(status="deleted").exists():
        Dataset.objects.filter(pk=version.dataset_id).update(deleted_at=now)
    prefix = version.object_key.rsplit("/", 1)[0]
    outbox.publish(topic="objects.delete", key=f"delete:{version.pk}", payload={"prefix": prefix})
    audit.record(
        organization=version.organization_id, by=by, action="dataset.deleted", target=version.pk, sha256=version.sha256
    )
    return version


def _require_unused(version: DatasetVersion) -> None:
    """Raise FileInUse while a job reads the file. Jobs lie above this layer: they are reached by their relation."""
    for jobs in (version.jobs, version.validating_jobs):
        job = jobs.filter(finished_at=None).first()
        if job:
            raise FileInUse(f"The job {job.pk} still uses this file: cancel it or wait for its end.", param="file_id")


def delete_expired(*, now: datetime.datetime) -> int:
    """Delete the files whose time has come and that no job uses; return how many."""
    deleted = 0
    for version in DatasetVersion.objects.filter(expires_at__lt=now, status__in=("uploaded", "ready", "invalid")):
        try:
            delete_version(version=version, by="system", now=now)
        except InvalidState:
            continue  # in use: tried again later
        deleted += 1
    return deleted
