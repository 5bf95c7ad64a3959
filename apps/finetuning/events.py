"""Job events, in order. A sequence is taken under the job's row lock, so readers never miss one."""

from django.db.models import F

from apps.core.audit import require_transaction
from apps.core.ids import ulid_of
from apps.core.messages import live
from apps.finetuning.models import FineTuningJob, JobEvent


def append(job: FineTuningJob, *, message: str, type: str = "message", level: str = "info", **data: object) -> JobEvent:
    """Add one event to the job and notify its watchers after commit."""
    require_transaction()
    FineTuningJob.objects.filter(pk=job.pk).update(last_event_sequence=F("last_event_sequence") + 1)
    job.refresh_from_db(fields=["last_event_sequence"])
    event = JobEvent.objects.create(
        pk=f"ftevent-{ulid_of(job.pk)}-{job.last_event_sequence:08d}",
        organization_id=job.organization_id,
        job=job,
        sequence=job.last_event_sequence,
        type=type,
        level=level,
        message=message[:1000],
        data=data,
    )
    live.announce_after_commit(channel=f"job:{job.pk}", payload=str(event.sequence))
    return event
