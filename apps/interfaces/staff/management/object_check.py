"""Comparison of the object store with the rows that name its objects."""

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from apps.adapters.models import AdapterVersion
from apps.batches.lifecycle import ACTIVE
from apps.batches.models import Batch, BatchFile
from apps.catalog.models import BaseModel
from apps.core.objects.orphans import ORPHAN_AGE
from apps.core.objects.store import object_key, store
from apps.datasets.lifecycle import DatasetVersionStatus, UploadStatus
from apps.datasets.models import DatasetVersion, Upload, VersionInspection
from apps.finetuning.lifecycle import CONVERSION_OPEN
from apps.finetuning.models import Checkpoint, Conversion, RunUpload

_ROOTS = ("org", "platform")


@dataclass(frozen=True)
class MissingObject:
    """An object that a row names, and that is not there or has another size."""

    key: str
    row_id: str


@dataclass(frozen=True)
class ObjectComparison:
    """`orphans` are the keys of objects that no row names, last written a day ago."""

    checked: int
    missing: list[MissingObject]
    orphans: list[str]


def compare_objects(*, now: datetime.datetime) -> ObjectComparison:
    """Compare rows and objects. What is deleted during the comparison may count as missing."""
    named, folders = list(_named()), set(_folders())
    found = {key: info for root in _ROOTS for key, info in store().list_objects(root)}
    missing = [
        MissingObject(key, row_id)
        for key, size, row_id in named
        if key not in found or size not in (None, found[key].bytes)
    ]
    folders |= {_folder(key) for key, *_ in named}
    before = (now - ORPHAN_AGE).timestamp()
    orphans = [key for key, info in found.items() if info.modified_at < before and not _is_below(key, folders)]
    return ObjectComparison(len(named), missing, sorted(orphans))


def _named() -> Iterator[tuple[str, int | None, str]]:
    """Yield key, size if it is known, and row of each object that must be there."""
    # A repaired version has no hash before its file is written.
    versions = DatasetVersion.objects.exclude(status=DatasetVersionStatus.DELETED).exclude(sha256="")
    for version in versions.only("object_key", "bytes", "rows_key", "rows_bytes").iterator():
        yield version.object_key, version.bytes, version.pk
        if version.rows_key:
            yield version.rows_key, version.rows_bytes, version.pk
    inspections = VersionInspection.objects.exclude(version__status=DatasetVersionStatus.DELETED)
    for key, version_id in inspections.values_list("identities_key", "version_id").iterator():
        yield key, None, version_id
    for file in BatchFile.objects.filter(deleted_at=None).only("object_key", "bytes").iterator():
        yield file.object_key, file.bytes, file.pk
    for adapter in AdapterVersion.objects.filter(deleted_at=None).iterator(chunk_size=500):
        yield from _files(adapter.object_prefix, adapter.manifest, adapter.pk)
        for export in adapter.exports:
            yield from _files(export["object_prefix"], export["manifest"], adapter.pk)
    checkpoints = Checkpoint.objects.filter(deleted_at=None, quarantined_at=None).select_related("upload")
    for checkpoint in checkpoints.iterator(chunk_size=500):
        yield from _files(checkpoint.upload.object_prefix, checkpoint.upload.manifest, checkpoint.pk)
    for model in BaseModel.objects.exclude(tokenizer_key="").only("tokenizer_key"):
        yield model.tokenizer_key, None, model.pk


def _files(prefix: str, manifest: dict[str, Any], row_id: str) -> Iterator[tuple[str, int | None, str]]:
    for file in manifest["files"]:
        yield f"{prefix}/{file['name']}", file["bytes"], row_id


def _folders() -> Iterator[str]:
    """Yield the folders in which work in progress, or what follows from a row, may leave objects."""
    for version in DatasetVersion.objects.exclude(status=DatasetVersionStatus.DELETED).only("object_key").iterator():
        yield _folder(version.object_key)
    for upload in Upload.objects.filter(status=UploadStatus.PENDING).only("organization_id").iterator():
        yield object_key(upload.organization_id, "uploads", upload.pk)
    for batch in Batch.objects.filter(status__in=ACTIVE).only("organization_id").iterator():
        yield object_key(batch.organization_id, "batches", batch.pk)
    for rows in (RunUpload.objects.all(), Conversion.objects.filter(status__in=CONVERSION_OPEN)):
        yield from rows.values_list("object_prefix", flat=True).iterator()


def _is_below(key: str, folders: set[str]) -> bool:
    folder = _folder(key)
    while folder and folder not in folders:
        folder = _folder(folder)
    return bool(folder)


def _folder(key: str) -> str:
    return key.rpartition("/")[0]
