"""Organizations, their limits and credit, and the jobs of all of them."""

from collections.abc import Callable
from functools import partial

from django.contrib import messages
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from apps.accounts.models import Organization
from apps.accounts.suspension import reinstate_organization, suspend_organization
from apps.billing.queries import get_balance
from apps.core.database.clock import db_now
from apps.core.errors import DomainError
from apps.finetuning.lifecycle import JobStatus
from apps.finetuning.models import FineTuningJob
from apps.finetuning.usage.quotas import LIMITS, get_quota, set_quota, used_gpu_seconds
from apps.finetuning.usage.storage import stored_bytes
from apps.interfaces.staff.access import operator_id, operator_view
from apps.interfaces.staff.forms import QuotaForm

_PAGE = 50
_STATES = [("", "All")] + [
    (status.value, status.capitalize())
    for status in (JobStatus.QUEUED, JobStatus.RUNNING, JobStatus.SUCCEEDED, JobStatus.FAILED)
]


@require_safe
@operator_view
def jobs(request: HttpRequest) -> HttpResponse:
    """List the jobs of all tenants, newest first."""
    rows = FineTuningJob.objects.select_related("organization", "base_model", "pool").order_by("-created_at", "-id")
    if status := request.GET.get("status"):
        rows = rows.filter(status=status)
    page = Paginator(rows, _PAGE).get_page(request.GET.get("page"))
    context = {
        "page": page,
        "jobs": [{"job": job, "billed_seconds": job.billed_gpu_ms / 1000} for job in page.object_list],
        "status": status or "",
        "states": _STATES,
        "previous": f"?status={status or ''}&page={page.previous_page_number()}" if page.has_previous() else "",
        "next": f"?status={status or ''}&page={page.next_page_number()}" if page.has_next() else "",
    }
    return render(request, "staff/tenants/jobs.html", context)


@require_safe
@operator_view
def organizations(request: HttpRequest) -> HttpResponse:
    rows = [
        {
            "organization": each,
            "balance": get_balance(organization=each),
            "storage_bytes": stored_bytes(organization=each),
        }
        for each in Organization.objects.order_by("name")
    ]
    return render(request, "staff/tenants/organizations.html", {"rows": rows})


@require_POST
@operator_view
def suspend(request: HttpRequest, organization_id: str) -> HttpResponse:
    """Close one organization, with a reason."""
    organization = get_object_or_404(Organization, pk=organization_id)
    return _moved(
        request,
        partial(suspend_organization, organization=organization, now=db_now()),
        f"{organization.name} is suspended.",
    )


@require_POST
@operator_view
def reinstate(request: HttpRequest, organization_id: str) -> HttpResponse:
    """Open one organization again, with a reason."""
    organization = get_object_or_404(Organization, pk=organization_id)
    return _moved(
        request, partial(reinstate_organization, organization=organization), f"{organization.name} is open again."
    )


def _moved(request: HttpRequest, move: Callable[..., None], done: str) -> HttpResponse:
    try:
        move(by=operator_id(request), reason=request.POST.get("reason", ""))
    except DomainError as refused:
        messages.error(request, refused.message)
    else:
        messages.success(request, done)
    return redirect("staff:organization_list")


@require_safe
@operator_view
def quotas(request: HttpRequest) -> HttpResponse:
    now = db_now()
    rows = [
        {
            "organization": each,
            "quota": get_quota(organization=each),
            "used_gpu_seconds": used_gpu_seconds(organization=each, now=now),
            "storage_bytes": stored_bytes(organization=each),
        }
        for each in Organization.objects.order_by("name")
    ]
    return render(request, "staff/tenants/quotas.html", {"rows": rows})


@require_http_methods(["GET", "HEAD", "POST"])
@operator_view
def quota(request: HttpRequest, organization_id: str) -> HttpResponse:
    """Edit the limits of one organization."""
    organization = get_object_or_404(Organization, pk=organization_id)
    current = get_quota(organization=organization)
    form = QuotaForm(request.POST or None, initial={name: getattr(current, name) for name in LIMITS})
    if request.method == "POST" and form.is_valid():
        set_quota(organization=organization, by=operator_id(request), now=db_now(), **form.limits())
        messages.success(request, f"The limits of {organization.name} were saved.")
        return redirect("staff:quota_list")
    context = {"tenant": organization, "form": form}
    return render(request, "staff/tenants/quota.html", context, status=422 if request.method == "POST" else 200)
