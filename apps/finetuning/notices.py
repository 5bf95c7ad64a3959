"""Notices of jobs: to the creator at a success, failure or pause, to operators when a firm price is overrun."""

from django.conf import settings
from django.utils.functional import lazy
from django.utils.translation import gettext

from apps.accounts.models import User
from apps.accounts.notices.events import announce
from apps.billing.budgets import attribution_of_actor
from apps.core.messages import outbox
from apps.core.messages.mail import render_mail, send_mail
from apps.finetuning.lifecycle import JobStatus
from apps.finetuning.models import FineTuningJob
from apps.finetuning.queries import latest_checkpoint


def publish_end(*, job: FineTuningJob, by: str = "") -> None:
    """Announce the state that the job has just reached. Its creator is notified and gets a mail, unless they caused it.

    Run it in the transaction of the change.
    """
    is_own = job.status == JobStatus.CANCELLED or by == job.created_by
    announce(
        organization=job.organization_id,
        type=f"fine_tuning.job.{job.status}",
        subject=job.pk,
        title=lambda: _title(job),
        path=_path(job),
        key=f"job-ended:{job.pk}:{job.status}:{job.last_event_sequence}",
        users=[] if is_own else [_creator_id(job)],
        mail=None if is_own else ("job.ended", {"job_id": job.pk, "status": job.status}),
    )


def alert_of_overrun(*, job: FineTuningJob) -> None:
    """Queue a mail to the operators: the job paused at the limit of its firm price. Run it in that transaction."""
    address = f"{settings.PUBLIC_URL}/staff/jobs/{job.pk}"
    subject = "A job with a firm price was paused: it takes much longer than quoted"
    body = f"{job.pk} paused at step {job.step} of {job.total_steps}. The customer pays nothing for this run.\n"
    body += f"\nContinue it at your expense, or cancel it: {address}\n"
    outbox.publish(
        topic="mail",
        key=f"job-overrun:{job.pk}:{job.firm_limit_nano}",
        payload={"kind": "operators", "subject": subject, "body": body},
        organization=job.organization_id,
    )


def send(*, job_id: str, status: str) -> None:
    """Send one mail, unless the job has moved on or its creator wants none."""
    jobs = FineTuningJob.objects.select_related("base_model", "training_file__dataset", "adapter_version")
    job = jobs.filter(pk=job_id, status=status).first()
    if job is None:
        return
    user = User.objects.filter(pk=_creator_id(job), is_active=True, wants_job_mail=True).first()
    if user is None:
        return
    title = lazy(_title, str)(job)
    kept = latest_checkpoint(job=job)
    mail = render_mail(
        "job_ended", to=[user.email], language=user.language, job=job, title=title, path=_path(job), checkpoint=kept
    )
    send_mail(mail)


def _title(job: FineTuningJob) -> str:
    match job.status:
        case JobStatus.SUCCEEDED:
            title = gettext("Your fine-tune is ready: %(name)s")
        case JobStatus.PAUSED:
            title = gettext("Your fine-tune is paused: %(name)s")
        case JobStatus.CANCELLED:
            title = gettext("Your fine-tune is cancelled: %(name)s")
        case _:
            title = gettext("Your fine-tune failed: %(name)s")
    return title % {"name": job.suffix or job.training_file.dataset.name}


def _path(job: FineTuningJob) -> str:
    return f"/jobs/{job.pk}"


def _creator_id(job: FineTuningJob) -> str:
    """Return the id of the person who created the job, with a key or in the dashboard."""
    return attribution_of_actor(organization=job.organization_id, by=job.created_by, labels={}).member_id
