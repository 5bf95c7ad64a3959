"""/v1/files: OpenAI's surface over dataset versions, with our `validation` report, and over files of batches."""

from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
from django.core.files.uploadedfile import UploadedFile
from django.db.models import F
from django.http import HttpResponse
from msgspec import Meta
from rest_framework.request import Request

from apps.accounts.roles import Permission
from apps.batches import files as batch_files
from apps.batches.models import BatchFile
from apps.batches.queries import find_file, list_files, list_with_deleted
from apps.core import audit
from apps.core.database.clock import db_now
from apps.core.errors import InvalidState, InvalidValue
from apps.core.objects.store import CHUNK_BYTES, attachment
from apps.core.objects.views import object_response
from apps.datasets import operations, queries
from apps.datasets.intake import versions as intake
from apps.datasets.lifecycle import DatasetVersionStatus
from apps.datasets.models import DatasetVersion, TokenCount
from apps.datasets.validation.formats import read_mapping
from apps.finetuning.models import FineTuningJob
from apps.finetuning.results.result_file import (
    FILENAME,
    PURPOSE,
    find_job_of,
    list_jobs_with_file,
    result_bytes,
    result_csv,
    result_file_id,
)
from apps.interfaces.api.requests.handlers import Download
from apps.interfaces.api.requests.pagination import ListObject, PageQuery, Source, merged_page
from apps.interfaces.api.requests.parsers import PlainMultiPartParser
from apps.interfaces.api.requests.times import unix_seconds
from apps.interfaces.api.views import ApiView

LISTED_FILES = 1_000  # per page: each may come with many errors
LISTED_RESULTS = 100  # per page; the size of each is computed once and then cached
LISTED_ERRORS = 20  # per file; GET of a single file returns all stored errors
# OpenAI's words. A deleted version is not listed.
_STATUSES: dict[DatasetVersionStatus, Literal["uploaded", "processed", "error"]] = {
    DatasetVersionStatus.UPLOADED: "uploaded",
    DatasetVersionStatus.VALIDATING: "uploaded",
    DatasetVersionStatus.READY: "processed",
    DatasetVersionStatus.INVALID: "error",
}
_MAX_DIGITS = 20  # a longer number is above the limit as well
PURPOSES = (*intake.PURPOSES, batch_files.PURPOSE)  # of files that customers send


class FilesQuery(PageQuery):
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


class FileForm(msgspec.Struct, forbid_unknown_fields=True):
    """A file and what it is for, as multipart form data with the fields in any order."""

    purpose: Annotated[str, Meta(examples=["fine-tune", "evals", "batch"])]
    file: UploadedFile
    mapping: Annotated[str, Meta(description="How to read the columns, as JSON text.")] | None = None
    anchor: str | None = msgspec.field(name="expires_after[anchor]", default=None)
    seconds: str | None = msgspec.field(name="expires_after[seconds]", default=None)


class FileValidation(TypedDict):
    """`errors` has the first ones, each with line, code, message, param and fix.

    `tokens` has the count for each base model, or the `refusal` of a row by its chat template.
    """

    rows: int | None
    tokens: dict[str, Any] | None
    error_count: int
    errors: list[dict[str, Any]]


class FileObject(TypedDict):
    """OpenAI's file. Results of jobs and files of batches lack the members that describe uploads."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["uploaded", "processed", "error"]
    status_details: str | None
    sha256: NotRequired[str | None]
    kind: NotRequired[str | None]
    format: NotRequired[str | None]
    container: NotRequired[str | None]
    derived_from: NotRequired[str | None]
    validation: NotRequired[FileValidation]


class DeletedFile(TypedDict):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class FileList(ApiView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.DATASET_WRITE}
    parser_classes = [PlainMultiPartParser]

    def get(self, request: Request, query: FilesQuery) -> ListObject[FileObject]:
        """List files and the result files of jobs."""
        return merged_page(query, self._sources(query.purpose), is_descending=query.order == "desc")

    def _sources(self, purpose: str | None) -> list[Source]:
        organization, place = self.organization, {"listed_at": F("created_at"), "listed_id": F("id")}
        versions = queries.list_versions(organization=organization, purpose=purpose)
        listed = queries.with_first_errors(versions, most=LISTED_ERRORS).annotate(**place)
        places = queries.list_with_deleted(organization=organization).annotate(**place)
        batches = list_files(organization=organization, purpose=purpose)
        sources = [
            Source(listed, listed_object, LISTED_FILES, places),
            Source(batches, batch_object, LISTED_FILES, list_with_deleted(organization=organization)),
        ]
        if purpose in (None, PURPOSE):
            results = list_jobs_with_file(organization=organization)
            sources.append(Source(results, _result_object, LISTED_RESULTS, results))
        return sources

    def post(self, request: Request, form: FileForm) -> FileObject:
        """Upload a file. It is checked at once; poll its status."""
        intake.check_purpose(form.purpose, PURPOSES)
        upload = form.file
        head = next(iter(upload.chunks(CHUNK_BYTES)), b"")
        if is_for_batches(form.purpose, head):
            file = batch_files.create_file(
                organization=self.organization,
                filename=intake.clean_filename(upload.name or ""),
                chunks=upload.chunks(CHUNK_BYTES),
                by=self.actor,
                now=db_now(),
                expires_after_seconds=_expires_after(form),
                purpose=form.purpose,
            )
            return batch_object(file)
        if (upload.size or 0) > intake.MAX_FILE_BYTES:
            message = "A file sent at once may have up to 512 MiB; send a longer one in parts, by /v1/uploads."
            raise intake.FileTooLarge(message, param="file")
        version = intake.create_version(
            organization=self.organization,
            filename=upload.name or "",
            purpose=form.purpose,
            chunks=upload.chunks(CHUNK_BYTES),
            mapping=read_mapping(form.mapping),
            by=self.actor,
            now=db_now(),
            expires_after_seconds=_expires_after(form),
        )
        return file_object(version)


class FileDetail(ApiView):
    required_scope = {"GET": Permission.VIEW, "DELETE": Permission.DATASET_WRITE}

    def get(self, request: Request, file_id: str) -> FileObject:
        """Return a file with its check and token counts."""
        if job := find_job_of(organization=self.organization, file_id=file_id):
            return _result_object(job)
        if file := find_file(organization=self.organization, id=file_id):
            return batch_object(file)
        version = queries.get_version(organization=self.organization, id=file_id)
        counts = queries.list_current_counts(version=version)
        tokens: dict[str, object] = {count.base_model.name: _tokens_of(count) for count in counts}
        return file_object(version, tokens=tokens, errors=version.errors)

    def delete(self, request: Request, file_id: str) -> DeletedFile:
        """Delete a file. Jobs that used it keep their results."""
        if find_job_of(organization=self.organization, file_id=file_id):
            raise InvalidState("A result file is kept with its job and cannot be deleted alone.", param="file_id")
        if file := find_file(organization=self.organization, id=file_id):
            batch_files.delete_file(file=file, by=self.actor, now=db_now())
        else:
            version = queries.get_version(organization=self.organization, id=file_id)
            operations.delete_version(version=version, by=self.actor, now=db_now())
        return {"id": file_id, "object": "file", "deleted": True}


class FileContent(ApiView):
    required_scope = {"GET": Permission.VIEW}

    def get(self, request: Request, file_id: str) -> Download:
        """Stream the file as it was uploaded, or a job's metrics as CSV."""
        if job := find_job_of(organization=self.organization, file_id=file_id):
            headers = {"Content-Disposition": attachment(FILENAME), "Cache-Control": "private, no-store"}
            return HttpResponse(result_csv(job=job), content_type="text/csv; charset=utf-8", headers=headers)
        if file := find_file(organization=self.organization, id=file_id):
            self._note("batch_file.downloaded", file.pk)
            return object_response(request._request, file.object_key, filename=file.filename)
        version = queries.get_version(organization=self.organization, id=file_id)
        if not version.sha256:
            text = "This repaired file is not written yet. Send the request again once its status is processed."
            raise operations.NotReady(text, param="file_id")
        self._note("dataset.downloaded", version.pk)
        return object_response(request._request, version.object_key, filename=version.filename)

    def _note(self, action: str, target: str) -> None:
        if self.request.method == "GET":  # HEAD sends no content
            audit.record(organization=self.organization, by=self.actor, action=action, target=target)


def _tokens_of(count: TokenCount) -> dict[str, object]:
    """Return a count, or the row that the model's chat template refuses."""
    if count.refusal:
        return {"refusal": count.refusal}
    return {
        "tokens": count.tokens,
        "trained_tokens": count.trained_tokens,
        "longest_row_tokens": count.longest_row_tokens,
    }


def listed_object(version: DatasetVersion) -> FileObject:
    """Return the file object of a version that `with_first_errors` found."""
    return file_object(version, errors=version.first_errors)  # type: ignore[attr-defined]  # annotated


def file_object(
    version: DatasetVersion,
    *,
    tokens: dict[str, object] | None = None,
    errors: Sequence[Mapping[str, object]] | None = None,
) -> FileObject:
    """Return OpenAI's file object. `validation` is ours; its errors are named as in OpenAI's batch errors.

    By default, it has the first errors of the file.
    """
    if errors is None:
        errors = version.errors[:LISTED_ERRORS]
    first = errors[0] if errors else None
    return {
        "id": version.pk,
        "object": "file",
        "bytes": version.bytes,
        "created_at": int(version.created_at.timestamp()),
        "expires_at": unix_seconds(version.expires_at),
        "filename": version.filename,
        "purpose": version.purpose,
        "status": _STATUSES[DatasetVersionStatus(version.status)],
        "status_details": f"Line {first['line']}: {first['message']} {first['fix']}" if first else None,
        "sha256": version.sha256 or None,
        "kind": version.kind or None,
        "format": version.layout.mapping.format if version.layout.mapping else None,
        "container": version.layout.container or None,
        "derived_from": version.derived_from_id,
        "validation": {
            "rows": version.rows,
            "tokens": tokens,
            "error_count": version.error_count,
            "errors": [dict(error) for error in errors],
        },
    }


def _result_object(job: FineTuningJob) -> FileObject:
    return {
        "id": str(result_file_id(job)),  # a job with results has one
        "object": "file",
        "bytes": result_bytes(job=job),
        "created_at": int((job.finished_at or job.created_at).timestamp()),
        "expires_at": None,
        "filename": FILENAME,
        "purpose": PURPOSE,
        "status": "processed",
        "status_details": None,
    }


def batch_object(file: BatchFile) -> FileObject:
    return {
        "id": file.pk,
        "object": "file",
        "bytes": file.bytes,
        "created_at": int(file.created_at.timestamp()),
        "expires_at": unix_seconds(file.expires_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def is_for_batches(purpose: str, head: bytes) -> bool:
    """Return whether a file that begins with `head` is for batches or has items of evals, `{"item": …}`.

    Otherwise, it has the rows of a dataset.
    """
    if purpose != batch_files.EVAL_PURPOSE:
        return purpose == batch_files.PURPOSE
    first = head.removeprefix(BOM_UTF8).lstrip().partition(b"\n")[0]
    try:
        return "item" in msgspec.json.decode(first, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def _expires_after(form: FileForm) -> int | None:
    """Return `expires_after[seconds]` of the form. Raises InvalidValue that names the invalid part."""
    anchor, seconds = form.anchor, form.seconds
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidValue("'expires_after[anchor]' must be 'created_at'.", param="expires_after.anchor")
    if seconds is None or not (seconds.isascii() and seconds.isdigit()):
        text = "'expires_after[seconds]' must be a whole number, such as 86400."
        raise InvalidValue(text, param="expires_after.seconds")
    return int(seconds[:_MAX_DIGITS])
