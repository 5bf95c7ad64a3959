"""Conversions of a finished model: order one, and cancel it."""

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect
from django.utils.translation import gettext
from django.views.decorators.http import require_POST

from apps.accounts.roles import Permission
from apps.adapters.queries import get_version
from apps.core.database.clock import db_now
from apps.core.http.forms import domain_errors_shown
from apps.finetuning.conversions.orders import cancel, get_conversion, order
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view

_MAX_DIGITS = 18  # of the price that the page showed


@require_POST
@organization_view(Permission.ADAPTER_WRITE)
def convert(request: OrganizationRequest, version_id: str) -> HttpResponse:
    """Order a conversion at the price that the button showed. Without a price, order it only if it is free."""
    version = get_version(organization=request.organization, id=version_id)
    shown = request.POST.get("price_nano", "")
    with domain_errors_shown(request):
        order(
            version=version,
            kind=request.POST.get("kind", ""),
            shown_nano=int(shown) if shown.isascii() and shown.isdecimal() and len(shown) <= _MAX_DIGITS else 0,
            by=request.membership.user_id,
            now=db_now(),
        )
        messages.success(request, gettext("Ordered. An idle trainer makes it, and we notify you when it is ready."))
    return redirect("web:adapter_detail", version_id=version.pk)


@require_POST
@organization_view(Permission.ADAPTER_WRITE)
def stop(request: OrganizationRequest, version_id: str, conversion_id: str) -> HttpResponse:
    """Cancel an order that no trainer has taken."""
    version = get_version(organization=request.organization, id=version_id)
    conversion = get_conversion(version=version, id=conversion_id)
    with domain_errors_shown(request):
        cancel(conversion=conversion, by=request.membership.user_id)
        messages.success(request, gettext("The order is cancelled. You pay nothing."))
    return redirect("web:adapter_detail", version_id=version.pk)
