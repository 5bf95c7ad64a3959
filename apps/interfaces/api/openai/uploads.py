"""/v1/uploads: OpenAI's uploads in parts, for files too large for one request."""

from codecs import BOM_UTF8
from collections.abc import Iterator
from itertools import chain
from typing import Any, Literal, TypedDict

import msgspec
from django.core.files.uploadedfile import UploadedFile
from rest_framework.request import Request

from apps.accounts.roles import Permission
from apps.batches import files as batch_files
from apps.batches.queries import find_file
from apps.core.database.clock import db_now
from apps.core.errors import InvalidValue
from apps.core.objects.store import CHUNK_BYTES
from apps.datasets.intake import uploads
from apps.datasets.lifecycle import DatasetVersionStatus
from apps.datasets.models import Upload, UploadPart
from apps.datasets.validation.formats import read_mapping
from apps.interfaces.api.openai.files import PURPOSES, FileObject, batch_object, file_object, is_for_batches
from apps.interfaces.api.requests.parsers import PlainMultiPartParser
from apps.interfaces.api.views import ApiView


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    anchor: str
    seconds: int


class CreateUpload(msgspec.Struct, forbid_unknown_fields=True):
    bytes: int
    filename: str
    purpose: str
    mime_type: str = "application/octet-stream"
    expires_after: ExpiresAfter | None = None
    mapping: dict[str, Any] | None = None  # our own field


class CompleteRequest(msgspec.Struct, forbid_unknown_fields=True):
    part_ids: list[str]
    md5: str | None = None


class PartForm(msgspec.Struct):
    """One part of a file, as multipart form data."""

    data: UploadedFile


class UploadObject(TypedDict):
    id: str
    object: Literal["upload"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str
    file: FileObject | None


class PartObject(TypedDict):
    id: str
    object: Literal["upload.part"]
    created_at: int
    upload_id: str


class UploadList(ApiView):
    """Create an upload."""

    required_scope = {"POST": Permission.DATASET_WRITE}
    examples = {
        "POST": {"bytes": 70_000_000, "filename": "a.jsonl", "mime_type": "application/jsonl", "purpose": "fine-tune"}
    }

    def post(self, request: Request, body: CreateUpload) -> UploadObject:
        if body.expires_after and body.expires_after.anchor != "created_at":
            raise InvalidValue("'expires_after.anchor' must be 'created_at'.", param="expires_after.anchor")
        if body.purpose == batch_files.PURPOSE and body.bytes > batch_files.MAX_FILE_BYTES:
            raise batch_files.too_large(param="bytes")
        upload = uploads.create_upload(
            organization=self.organization,
            filename=body.filename,
            purpose=body.purpose,
            bytes=body.bytes,
            mime_type=body.mime_type,
            mapping=read_mapping(body.mapping),
            expires_after_seconds=body.expires_after.seconds if body.expires_after else None,
            by=self.actor,
            now=db_now(),
            purposes=PURPOSES,
        )
        upload.refresh_from_db()
        return upload_object(upload)


class UploadParts(ApiView):
    """Store one part, sent as multipart form data."""

    required_scope = {"POST": Permission.DATASET_WRITE}
    parser_classes = [PlainMultiPartParser]

    def post(self, request: Request, upload_id: str, form: PartForm) -> PartObject:
        upload = uploads.get_upload(organization=self.organization, id=upload_id)
        chunks = form.data.chunks(CHUNK_BYTES)
        part = uploads.add_part(upload=upload, chunks=chunks, by=self.actor, now=db_now())
        return part_object(part)


class UploadComplete(ApiView):
    """Combine the parts into a file, in the order in which they are named."""

    required_scope = {"POST": Permission.DATASET_WRITE}
    examples = {"POST": {"part_ids": ["part_01", "part_02"]}}

    def post(self, request: Request, upload_id: str, body: CompleteRequest) -> UploadObject:
        completed = uploads.complete_upload(
            upload=uploads.get_upload(organization=self.organization, id=upload_id),
            part_ids=body.part_ids,
            md5=body.md5 or None,
            by=self.actor,
            now=db_now(),
            keep=self._keep,
        )
        return upload_object(completed)

    def _keep(self, upload: Upload, chunks: Iterator[bytes]) -> str:
        """Store what is for batches or evals, as /v1/files does; return "" for the rows of a dataset."""
        if upload.purpose not in (batch_files.PURPOSE, batch_files.EVAL_PURPOSE):
            return ""
        head = b""
        for chunk in chunks:  # parts may be shorter than the first line
            head += chunk
            if b"\n" in head.removeprefix(BOM_UTF8).lstrip() or len(head) >= CHUNK_BYTES:
                break
        if not is_for_batches(upload.purpose, head):
            return ""
        file = batch_files.create_file(
            organization=self.organization,
            filename=upload.filename,
            chunks=chain([head], chunks),
            by=self.actor,
            now=db_now(),
            expires_after_seconds=upload.file_expires_after_seconds,
            purpose=upload.purpose,
            upload_id=upload.pk,
            project_id=upload.project_id,
            made_by=upload.created_by,
        )
        return file.pk


class UploadCancel(ApiView):
    """Cancel an upload and delete its parts."""

    required_scope = {"POST": Permission.DATASET_WRITE}

    def post(self, request: Request, upload_id: str) -> UploadObject:
        upload = uploads.get_upload(organization=self.organization, id=upload_id)
        return upload_object(uploads.cancel_upload(upload=upload, by=self.actor))


def upload_object(upload: Upload) -> UploadObject:
    """Return OpenAI's upload object, with the file once there is one and until it is deleted."""
    kept = find_file(organization=upload.organization_id, id=upload.file_id) if upload.file_id else None
    is_there = upload.version is not None and upload.version.status != DatasetVersionStatus.DELETED
    file = file_object(upload.version) if upload.version and is_there else None
    return {
        "id": upload.pk,
        "object": "upload",
        "bytes": upload.bytes,
        "created_at": int(upload.created_at.timestamp()),
        "expires_at": int(upload.expires_at.timestamp()),
        "filename": upload.filename,
        "purpose": upload.purpose,
        "status": upload.status,
        "file": batch_object(kept) if kept else file,
    }


def part_object(part: UploadPart) -> PartObject:
    return {
        "id": part.pk,
        "object": "upload.part",
        "created_at": int(part.created_at.timestamp()),
        "upload_id": part.upload_id,
    }
