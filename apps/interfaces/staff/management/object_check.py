"""Comparison of the object store with the rows that name its objects."""

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, TypeVar

from django.db.models import Model, QuerySet

from apps.accounts.models import Organization
from apps.adapters.models import AdapterVersion
from apps.batches.lifecycle import ACTIVE
from apps.batches.models import Batch, BatchFile
from apps.catalog.models import BaseModel
from apps.core.objects.orphans import ORPHAN_AGE
from apps.core.objects.store import object_key, store
from apps.core.objects.types import ObjectInfo, ObjectMissing
from apps.datasets.lifecycle import DatasetVersionStatus, UploadStatus
from apps.datasets.models import DatasetVersion, Upload, VersionInspection
from apps.finetuning.lifecycle import CONVERSION_OPEN
from apps.finetuning.models import Checkpoint, Conversion, RunUpload

Row = TypeVar("Row", bound=Model)


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
    """Compare rows and objects, an organization at a time.

    An object that was not listed is looked for again: it may be newer than the list. What is deleted meanwhile may
    count as missing.
    """
    before = (now - ORPHAN_AGE).timestamp()
    checked, missing, orphans, seen = 0, list[MissingObject](), list[str](), set[str]()
    owners = Organization.objects.values_list("pk", flat=True).iterator()
    for owner, found in chain(_stored(), ((owner, {}) for owner in owners if owner not in seen)):
        seen.add(owner)
        folders = set(_folders(owner))
        for key, size, row_id in _named(owner):
            checked += 1
            folders.add(_folder(key))
            info = found.get(key) or _stat(key)
            if info is None or size not in (None, info.bytes):
                missing.append(MissingObject(key, row_id))
        orphans += [key for key, info in found.items() if info.modified_at < before and not _is_below(key, folders)]
    return ObjectComparison(checked, missing, sorted(orphans))


def _stored() -> Iterator[tuple[str, dict[str, ObjectInfo]]]:
    """Yield each organization that has objects with them, and the platform as "". A store lists folder by folder."""
    for owner, listed in groupby(store().list_objects("org"), key=lambda item: item[0].split("/")[1]):
        yield owner, dict(listed)
    yield "", dict(store().list_objects("platform"))


def _stat(key: str) -> ObjectInfo | None:
    try:
        return store().stat(key)
    except ObjectMissing:
        return None


def _named(owner: str) -> Iterator[tuple[str, int | None, str]]:
    """Yield key, size if it is known, and row of each object that an organization, or the platform (""), must have."""
    if not owner:
        for model in BaseModel.objects.exclude(tokenizer_key="").only("tokenizer_key"):
            yield model.tokenizer_key, None, model.pk
        return
    # A repaired version has no hash before its file is written.
    versions = _of(owner, DatasetVersion).exclude(status=DatasetVersionStatus.DELETED).exclude(sha256="")
    for version in versions.only("object_key", "bytes", "rows_key", "rows_bytes").iterator():
        yield version.object_key, version.bytes, version.pk
        if version.rows_key:
            yield version.rows_key, version.rows_bytes, version.pk
    inspections = _of(owner, VersionInspection).exclude(version__status=DatasetVersionStatus.DELETED)
    for key, version_id in inspections.values_list("identities_key", "version_id").iterator():
        yield key, None, version_id
    for file in _of(owner, BatchFile).filter(deleted_at=None).only("object_key", "bytes").iterator():
        yield file.object_key, file.bytes, file.pk
    for adapter in _of(owner, AdapterVersion).filter(deleted_at=None).iterator(chunk_size=500):
        yield from _files(adapter.object_prefix, adapter.manifest, adapter.pk)
        for export in adapter.exports:
            yield from _files(export["object_prefix"], export["manifest"], adapter.pk)
    checkpoints = _of(owner, Checkpoint).filter(deleted_at=None, quarantined_at=None).select_related("upload")
    for checkpoint in checkpoints.iterator(chunk_size=500):
        yield from _files(checkpoint.upload.object_prefix, checkpoint.upload.manifest, checkpoint.pk)


def _of(owner: str, model: type[Row]) -> QuerySet[Row]:
    return model._default_manager.filter(organization_id=owner)


def _files(prefix: str, manifest: dict[str, Any], row_id: str) -> Iterator[tuple[str, int | None, str]]:
    for file in manifest["files"]:
        yield f"{prefix}/{file['name']}", file["bytes"], row_id


def _folders(owner: str) -> Iterator[str]:
    """Yield an organization's folders in which work in progress, or what follows from a row, may leave objects."""
    versions = _of(owner, DatasetVersion).exclude(status=DatasetVersionStatus.DELETED)
    for version in versions.only("object_key").iterator():
        yield _folder(version.object_key)
    for upload in _of(owner, Upload).filter(status=UploadStatus.PENDING).only("organization_id").iterator():
        yield object_key(upload.organization_id, "uploads", upload.pk)
    for batch in _of(owner, Batch).filter(status__in=ACTIVE).only("organization_id").iterator():
        yield object_key(batch.organization_id, "batches", batch.pk)
    for rows in (_of(owner, RunUpload), _of(owner, Conversion).filter(status__in=CONVERSION_OPEN)):
        yield from rows.values_list("object_prefix", flat=True).iterator()


def _is_below(key: str, folders: set[str]) -> bool:
    folder = _folder(key)
    while folder and folder not in folders:
        folder = _folder(folder)
    return bool(folder)


def _folder(key: str) -> str:
    return key.rpartition("/")[0]
