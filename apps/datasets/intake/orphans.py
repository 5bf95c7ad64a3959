"""Orphaned objects: left by requests that failed after storing their bytes, and by killed processes."""

import datetime
from collections.abc import Iterator
from itertools import islice

from apps.core.objects.store import store
from apps.datasets.lifecycle import DatasetVersionStatus, UploadStatus
from apps.datasets.models import DatasetVersion, Upload

# Longer than any request or validation. A younger object may belong to one that still runs.
ORPHAN_AGE = datetime.timedelta(days=1)
_BATCH = 500


def sweep_orphans(*, now: datetime.datetime) -> int:
    """Delete folders of files and uploads without a row that were last written a day ago; return how many.

    A row whose bytes are deleted does not count.
    """
    swept = 0
    folders = iter(_old_folders((now - ORPHAN_AGE).timestamp()))
    while batch := list(islice(folders, _BATCH)):
        known = _known([folder.rsplit("/", 1)[1] for folder in batch])
        for folder in batch:
            if folder.rsplit("/", 1)[1] not in known:
                store().delete_prefix(folder)
                swept += 1
    return swept


def _old_folders(before: float) -> Iterator[str]:
    newest: dict[str, float] = {}
    for key, info in store().list_objects("org"):
        parts = key.split("/")
        if len(parts) > 4 and parts[2] in ("datasets", "uploads"):
            folder = "/".join(parts[:4])
            newest[folder] = max(newest.get(folder, 0.0), info.modified_at)
    yield from (folder for folder, modified_at in newest.items() if modified_at < before)


def _known(ids: list[str]) -> set[str]:
    versions = DatasetVersion.objects.filter(pk__in=ids).exclude(status=DatasetVersionStatus.DELETED)
    uploads = Upload.objects.filter(pk__in=ids, status=UploadStatus.PENDING)
    return {*versions.values_list("pk", flat=True), *uploads.values_list("pk", flat=True)}
