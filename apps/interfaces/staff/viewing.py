"""Viewing as an organization: starting and stopping it."""

from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.views.decorators.http import require_POST

from apps.accounts.login.viewing import start_viewing, stop_viewing
from apps.accounts.models import Organization
from apps.interfaces.staff.access import operator_view, sensitive_operator_view


@require_POST
@sensitive_operator_view
def start(request: HttpRequest, organization_id: str) -> HttpResponse:
    """Open the pages of an organization, read-only, in this session."""
    start_viewing(request=request, organization=get_object_or_404(Organization, pk=organization_id))
    return redirect("/")


@require_POST
@operator_view
def stop(request: HttpRequest) -> HttpResponse:
    """Return to the console."""
    organization_id = stop_viewing(request=request)
    return redirect("staff:organization_detail", organization_id) if organization_id else redirect("staff:home")
