"""Orphaned objects of files and uploads."""

import datetime

from apps.core.objects.orphans import sweep
from apps.datasets.lifecycle import DatasetVersionStatus, UploadStatus
from apps.datasets.models import DatasetVersion, Upload


def sweep_orphans(*, now: datetime.datetime) -> int:
    """Delete folders of files and uploads without a row that were last written a day ago; return how many.

    A row whose bytes are deleted does not count.
    """
    return sweep(kinds=("datasets", "uploads"), known=_known, now=now)


def _known(ids: list[str]) -> set[str]:
    versions = DatasetVersion.objects.filter(pk__in=ids).exclude(status=DatasetVersionStatus.DELETED)
    uploads = Upload.objects.filter(pk__in=ids, status=UploadStatus.PENDING)
    return {*versions.values_list("pk", flat=True), *uploads.values_list("pk", flat=True)}
