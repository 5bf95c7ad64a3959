"""One organization and one job as operators see them: figures, events, logs, and the way to act on them."""

from django.contrib import messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_POST, require_safe

from apps.accounts.models import Organization
from apps.accounts.queries import list_keys, list_members
from apps.billing.books.credit_requests import list_requests
from apps.billing.queries import get_balance, get_spending
from apps.core.database.clock import db_now
from apps.core.http.forms import domain_errors_shown
from apps.datasets.queries import list_versions
from apps.finetuning.jobs import control
from apps.finetuning.lifecycle import JOB_TERMINAL
from apps.finetuning.models import FineTuningJob
from apps.finetuning.queries import list_events, list_jobs
from apps.finetuning.usage.quotas import get_quota, used_gpu_seconds
from apps.finetuning.usage.storage import stored_bytes
from apps.interfaces.staff.access import operator_id, operator_view

_JOBS_SHOWN = 20
_REQUESTS_SHOWN = 5
_EVENTS_SHOWN = 200


@require_safe
@operator_view
def organization(request: HttpRequest, organization_id: str) -> HttpResponse:
    """Show one organization: balance, spending, use against its limits, members, and its newest jobs."""
    tenant = get_object_or_404(Organization, pk=organization_id)
    context = {
        "tenant": tenant,
        "balance": get_balance(organization=tenant),
        "spending": get_spending(organization=tenant),
        "quota": get_quota(organization=tenant),
        "used_gpu_seconds": used_gpu_seconds(organizations=[tenant.pk], now=db_now()).get(tenant.pk, 0.0),
        "storage_bytes": stored_bytes(organizations=[tenant.pk])[tenant.pk],
        "people": list(list_members(organization=tenant)),
        "key_count": list_keys(organization=tenant).filter(revoked_at=None).count(),
        "dataset_count": list_versions(organization=tenant).count(),
        "jobs": list(list_jobs(organization=tenant)[:_JOBS_SHOWN]),
        "requests": list(list_requests(organization=tenant)[:_REQUESTS_SHOWN]),
    }
    return render(request, "staff/tenants/organization.html", context)


@require_safe
@operator_view
def job(request: HttpRequest, job_id: str) -> HttpResponse:
    """Show one job: its attempts with their logs, its events, and what it cost."""
    shown = get_object_or_404(_jobs(), pk=job_id)
    context = {
        "job": shown,
        "runs": list(shown.runs.order_by("-attempt").select_related("worker", "pool")),
        "events": [
            {"level": event.level, "message": event.message, "detail": "", "at": event.created_at}
            for event in list_events(job=shown).exclude(type="metrics")[:_EVENTS_SHOWN]
        ],
        "billed_seconds": shown.billed_gpu_ms / 1000,
        "may_cancel": shown.status not in JOB_TERMINAL,
    }
    return render(request, "staff/tenants/job.html", context)


@require_POST
@operator_view
def cancel_job(request: HttpRequest, job_id: str) -> HttpResponse:
    """Cancel a customer's job; the worker keeps its checkpoint."""
    shown = get_object_or_404(_jobs(), pk=job_id)
    with domain_errors_shown(request):
        control.request_cancellation(job=shown, by=operator_id(request), now=db_now())
        messages.success(request, "The job is being cancelled.")
    return redirect("staff:job_detail", job_id=shown.pk)


def _jobs() -> QuerySet[FineTuningJob]:
    return FineTuningJob.objects.select_related("organization", "base_model", "pool", "training_file__dataset")
