"""Mails to the person who created a job: it succeeded, failed or was paused, with its cost and the next step."""

from apps.accounts.models import User
from apps.billing.budgets import attribution_of_actor
from apps.core.messages import outbox
from apps.core.messages.mail import render_mail
from apps.finetuning.lifecycle import JobStatus
from apps.finetuning.models import FineTuningJob


def publish_end(*, job: FineTuningJob, by: str = "") -> None:
    """Queue the mail about the state that the job has just reached; no mail about what its creator did.

    Run it in the transaction of the change.
    """
    if job.status == JobStatus.CANCELLED or by == job.created_by:
        return
    outbox.publish(
        topic="job.ended",
        key=f"job-ended:{job.pk}:{job.status}:{job.last_event_sequence}",
        payload={"job_id": job.pk, "status": job.status},
        organization=job.organization_id,
    )


def send(*, job_id: str, status: str) -> None:
    """Send one mail, unless the job has moved on or its creator wants none."""
    jobs = FineTuningJob.objects.select_related("base_model", "training_file__dataset", "adapter_version")
    job = jobs.filter(pk=job_id, status=status).first()
    user = _creator(job) if job else None
    if job is None or user is None or not user.wants_job_mail:
        return
    render_mail("job_ended", to=[user.email], job=job, title=_title(job), path=f"/jobs/{job.pk}").send()


def _title(job: FineTuningJob) -> str:
    states = {JobStatus.SUCCEEDED: "is ready", JobStatus.PAUSED: "is paused"}
    name = job.suffix or job.training_file.dataset.name
    return f"Your fine-tune {states.get(JobStatus(job.status), 'failed')}: {name}"


def _creator(job: FineTuningJob) -> User | None:
    """Return the person who created the job, with a key or in the dashboard, while their account is open."""
    member_id = attribution_of_actor(organization=job.organization_id, by=job.created_by, labels={}).member_id
    return User.objects.filter(pk=member_id, is_active=True).first()
