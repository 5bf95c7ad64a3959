"""Statuses of dataset versions and uploads, and their legal transitions."""

from enum import StrEnum

from apps.core.database.transitions import Transitions


class DatasetVersionStatus(StrEnum):
    """Where a version is between its upload and its use."""

    UPLOADED = "uploaded"
    VALIDATING = "validating"
    READY = "ready"
    INVALID = "invalid"
    DELETED = "deleted"


VERSION_TRANSITIONS: Transitions = {
    DatasetVersionStatus.UPLOADED: frozenset({DatasetVersionStatus.VALIDATING, DatasetVersionStatus.DELETED}),
    DatasetVersionStatus.VALIDATING: frozenset(
        {DatasetVersionStatus.READY, DatasetVersionStatus.INVALID, DatasetVersionStatus.UPLOADED}
    ),
    DatasetVersionStatus.READY: frozenset({DatasetVersionStatus.DELETED}),
    # To uploaded: it is read again with other columns.
    DatasetVersionStatus.INVALID: frozenset({DatasetVersionStatus.UPLOADED, DatasetVersionStatus.DELETED}),
    DatasetVersionStatus.DELETED: frozenset(),
}

UNVALIDATED = (DatasetVersionStatus.UPLOADED, DatasetVersionStatus.VALIDATING)


class UploadStatus(StrEnum):
    """Where a file that arrives in parts is."""

    PENDING = "pending"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


UPLOAD_TRANSITIONS: Transitions = {
    UploadStatus.PENDING: frozenset({UploadStatus.COMPLETED, UploadStatus.CANCELLED, UploadStatus.EXPIRED}),
    UploadStatus.COMPLETED: frozenset(),
    UploadStatus.CANCELLED: frozenset(),
    UploadStatus.EXPIRED: frozenset(),
}
