"""Deletion of unneeded objects of runs: old checkpoints of ended jobs, and results never published."""

import datetime

from django.db import transaction
from django.db.models import Exists, OuterRef

from apps.adapters.models import AdapterVersion
from apps.core.messages import outbox
from apps.finetuning.lifecycle import JOB_TERMINAL
from apps.finetuning.models import Checkpoint, RunUpload
from apps.finetuning.results.checkpoints import started_from

# For this long, a new job can start from a checkpoint, and its model can be requested for the first time.
CHECKPOINT_RETENTION = datetime.timedelta(days=30)
# Longer than a run takes to publish after its last upload, and longer than any signed URL is valid.
UPLOAD_RETENTION = datetime.timedelta(days=1)
_BATCH = 200


@transaction.atomic
def sweep_checkpoints(*, now: datetime.datetime) -> int:
    """Delete checkpoints of jobs that ended longer ago than the retention time; return the number. Served models stay.

    A checkpoint that an unfinished job started from stays until that job ends.
    """
    stale = (
        Checkpoint.objects.select_for_update(of=("self",), skip_locked=True)
        .select_related("upload")
        .filter(
            deleted_at=None,
            job__status__in=sorted(JOB_TERMINAL),
            job__finished_at__lt=now - CHECKPOINT_RETENTION,
        )
        .exclude(pk__in=started_from())
        .order_by("created_at")[:_BATCH]
    )
    swept = list(stale)
    for checkpoint in swept:
        prefix = checkpoint.upload.object_prefix
        outbox.publish(topic="objects.delete", key=f"delete:{checkpoint.pk}", payload={"prefix": prefix})
    Checkpoint.objects.filter(pk__in=[checkpoint.pk for checkpoint in swept]).update(deleted_at=now)
    return len(swept)


@transaction.atomic
def sweep_uploads(*, now: datetime.datetime) -> int:
    """Delete uploads of ended runs that no checkpoint, version or export refers to; return the number.

    These are results of runs that failed after their upload, and checkpoints that were never reported.
    """
    ended = RunUpload.objects.filter(run__finished_at__lt=now - UPLOAD_RETENTION, created_at__lt=now - UPLOAD_RETENTION)
    unused = ended.exclude(Exists(Checkpoint.objects.filter(upload=OuterRef("pk")))).exclude(
        # these uploads are the version and its exports
        Exists(AdapterVersion.objects.filter(source=OuterRef("run_id")))
    )
    stale = list(unused.select_for_update(of=("self",), skip_locked=True).order_by("created_at")[:_BATCH])
    for upload in stale:
        delete_upload(upload)
    return len(stale)


def delete_upload(upload: RunUpload) -> None:
    """Delete the upload, and its files after commit."""
    outbox.publish(
        topic="objects.delete",
        key=f"delete:{upload.pk}",
        payload={"prefix": upload.object_prefix},
        organization=upload.organization_id,
    )
    upload.delete()
