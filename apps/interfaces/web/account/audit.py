"""The audit log of an organization, as a page and as a file: who did what, when and from where."""

from django.http import HttpResponse, HttpResponseBase
from django.shortcuts import render
from django.views.decorators.http import require_safe

from apps.accounts.audit_page import page_context, with_last_day
from apps.accounts.roles import Permission
from apps.core import audit
from apps.core.audit_log import export, list_entries, read_filter
from apps.core.objects.downloads import stream_download
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view

_PAGES = {
    "adpv": "web:adapter_detail",
    "batch": "web:batch_detail",
    "eval": "web:eval_detail",
    "file": "web:dataset_detail",
    "ftjob": "web:job_detail",
    "proj": "web:project_detail",
    "we": "web:webhook_detail",
}


@require_safe
@organization_view(Permission.AUDIT_READ)
def index(request: OrganizationRequest) -> HttpResponse:
    context = page_context(request.GET, organization=request.organization, pages=_PAGES)
    return render(request, "account/organization/audit.html", context, status=422 if context["error"] else 200)


@require_safe
@organization_view(Permission.AUDIT_READ)
def download(request: OrganizationRequest) -> HttpResponseBase:
    """Send the newest matching entries as CSV or JSON lines. The download itself is audited."""
    kind = request.GET.get("export", "csv")
    rows = list_entries(organization=request.organization, chosen=read_filter(with_last_day(request.GET)))
    chunks, content_type = export(rows, kind=kind)
    audit.record(
        organization=request.organization,
        by=request.membership.user_id,
        action="audit.exported",
        target=request.organization.pk,
    )
    return stream_download(
        request, chunks, filename=f"audit-{request.organization.slug}.{kind}", content_type=content_type
    )
