"""The audit logs of the platform and of any organization, chosen by its id."""

import re

from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.urls import reverse
from django.views.decorators.http import require_safe

from apps.accounts.audit_page import page_context
from apps.accounts.models import Organization
from apps.interfaces.staff.access import operator_view

_PAGES = {
    "ftjob": "job_detail",
    "org": "organization_detail",
    "pool": "pool_detail",
    "rep": "replica_detail",
    "worker": "worker_detail",
}


@require_safe
@operator_view
def index(request: HttpRequest) -> HttpResponse:
    wanted = request.GET.get("organization", "")
    tenant = get_object_or_404(Organization, pk=wanted) if wanted else None
    context = page_context(request.GET, organization=tenant) | {"tenant": tenant}
    for row in context["rows"]:
        row["url"] = _url_of(row["entry"].target)
    return render(request, "staff/tenants/audit.html", context, status=422 if context["error"] else 200)


def _url_of(target: str) -> str:
    """Return the console's page of an id; "" if it has none."""
    found = re.fullmatch("([a-z]+)[-_][0-9a-z]+", target)
    page = _PAGES.get(found[1]) if found else None
    return reverse(f"staff:{page}", args=[target]) if page else ""
