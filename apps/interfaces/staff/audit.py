"""The audit logs of the platform and of any organization, chosen by its id."""

from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_safe

from apps.accounts.audit_page import page_context
from apps.accounts.models import Organization
from apps.core.audit_log import PAGE
from apps.core.objects.page_tables import rows_at_once
from apps.interfaces.staff.access import operator_view

_PAGES = {
    "ftjob": "staff:job_detail",
    "org": "staff:organization_detail",
    "pool": "staff:pool_detail",
    "rep": "staff:replica_detail",
    "worker": "staff:worker_detail",
}


@require_safe
@operator_view
def index(request: HttpRequest) -> HttpResponse:
    wanted = request.GET.get("organization", "")
    tenant = get_object_or_404(Organization, pk=wanted) if wanted else None
    size = rows_at_once(request, "audit-log", PAGE)
    context = page_context(request.GET, organization=tenant, pages=_PAGES, size=size) | {"tenant": tenant}
    return render(request, "staff/tenants/audit.html", context, status=422 if context["error"] else 200)
