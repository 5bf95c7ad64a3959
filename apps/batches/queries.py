"""Queries on batches and their files."""

import datetime

from django.db import connection
from django.db.models import F, Q, QuerySet
from django.utils.translation import gettext

from apps.accounts.members.visibility import visible
from apps.accounts.models import Organization
from apps.batches.lifecycle import ACTIVE, INTERNAL_PURPOSE
from apps.batches.models import Batch, BatchFile
from apps.core.errors import NotFound
from apps.core.objects.store import store

_DOWNLOAD_SECONDS = 300
WORK_LOCK = "batches.work"  # of the database session that works on batches
_IS_HELD = """
    SELECT EXISTS (SELECT FROM pg_locks JOIN pg_database ON pg_database.oid = pg_locks.database
                    WHERE locktype = 'advisory' AND datname = current_database() AND objsubid = 1
                      AND (classid::bigint << 32 | objid::bigint) = hashtextextended(%s, 0))
"""


def list_batches(*, organization: Organization | str) -> QuerySet[Batch]:
    """Return the batches that the request sees with their files, newest first."""
    own = visible(Batch.objects.for_organization(organization).filter(eval_run=""))
    batches = own.select_related("input_file", "output_file", "error_file")
    return batches.order_by("-created_at", "-id")


def get_batch(*, organization: Organization | str, id: str) -> Batch:
    """Return one batch. Raises NotFound, the same for unknown and foreign ids."""
    found = list_batches(organization=organization).filter(pk=id).first() if "\x00" not in id else None
    if found is None:
        raise NotFound(gettext("No such batch: %(id)s.") % {"id": id[:80]}, param="batch_id", code="batch_not_found")
    return found


def oldest_pending(*, now: datetime.datetime) -> datetime.datetime | None:
    """Return when the oldest batch was created on which a worker should work and none does; None without such a one."""
    with connection.cursor() as cursor:
        cursor.execute(_IS_HELD, [WORK_LOCK])
        if cursor.fetchone()[0]:
            return None
    due = Batch.objects.filter(Q(retry_at=None) | Q(retry_at__lte=now), status__in=ACTIVE)
    return due.order_by("created_at").values_list("created_at", flat=True).first()


def list_files(*, organization: Organization | str, purpose: str | None = None) -> QuerySet[BatchFile]:
    """Return the files of batches that the request sees, with `listed_at` and `listed_id` for merged pages."""
    files = list_with_deleted(organization=organization).filter(deleted_at=None)
    return files if purpose is None else files.filter(purpose=purpose)


def list_with_deleted(*, organization: Organization | str) -> QuerySet[BatchFile]:
    """Return what `list_files` does, and the files that are deleted."""
    files = visible(BatchFile.objects.for_organization(organization)).exclude(purpose=INTERNAL_PURPOSE)
    return files.annotate(listed_at=F("created_at"), listed_id=F("id"))


def list_kept(*, organization: Organization | str) -> QuerySet[BatchFile]:
    """Return all stored files of the organization, even those that the request does not see."""
    return BatchFile.objects.for_organization(organization).filter(deleted_at=None)


def find_file(*, organization: Organization | str, id: str) -> BatchFile | None:
    """Return one file of a batch; None if no such file has this id."""
    return list_files(organization=organization).filter(pk=id).first() if "\x00" not in id else None


def download_url(*, file: BatchFile) -> str:
    """Return a URL with which a browser can download the file for five minutes."""
    return store().signed_url(
        file.object_key, "GET", expires_seconds=_DOWNLOAD_SECONDS, base="public", filename=file.filename
    )


def is_in_use(*, file: BatchFile) -> bool:
    """Return whether a batch that has not ended reads the file."""
    return Batch.objects.filter(input_file=file, status__in=ACTIVE).exists()
