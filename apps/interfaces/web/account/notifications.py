"""The reader's notifications in the current organization: a list, and marking them as read."""

from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_POST, require_safe

from apps.accounts.notices.notifications import KEPT, list_notifications, mark_read
from apps.accounts.roles import Permission
from apps.core.database.clock import db_now
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view

_PAGE = 25
_ICONS = {
    "job": "workflow",
    "balance": "wallet",
    "budget": "gauge",
    "invoice": "receipt",
    "credit": "coins",
    "member": "user-plus",
}


@require_safe
@organization_view(Permission.VIEW)
def index(request: OrganizationRequest) -> HttpResponse:
    before = request.GET.get("before", "")
    rows = list_notifications(organization=request.organization, user=request.user)
    found = list((rows.filter(pk__lt=before) if before else rows)[: _PAGE + 1])
    shown = found[:_PAGE]
    context = {
        "rows": [
            {"notification": each, "icon": _ICONS.get(each.kind, "bell"), "tone": "" if each.read_at else "warn"}
            for each in shown
        ],
        "older": f"?before={shown[-1].pk}" if len(found) > _PAGE else "",
        "newest": request.path if before else "",
        "page_size": _PAGE,
        "kept_days": KEPT.days,
    }
    return render(request, "account/notifications.html", context)


@require_POST
@organization_view(Permission.VIEW)
def read(request: OrganizationRequest) -> HttpResponse:
    """Mark one notification as read, and open it if `open` is set. If the form names none, mark all of them."""
    chosen = request.POST.get("notification", "")
    mark_read(organization=request.organization, user=request.user, now=db_now(), notification_id=chosen)
    if chosen and "open" in request.POST:
        found = list_notifications(organization=request.organization, user=request.user).get(pk=chosen)
        return redirect(found.path)
    return redirect("web:notification_list")
