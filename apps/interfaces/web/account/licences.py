"""The view that accepts a base model's licence for the organization."""

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.translation import gettext
from django.views.decorators.http import require_POST

from apps.accounts.roles import Permission
from apps.catalog.licences import accept_licence
from apps.catalog.queries import get_base_model
from apps.core.database.clock import db_now
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view


@require_POST
@organization_view(Permission.JOB_WRITE)
def accept(request: OrganizationRequest) -> HttpResponse:
    """Accept the licence and return to the page that asked for it."""
    base_model = get_base_model(name=request.POST.get("model", ""))
    accept_licence(
        organization=request.organization,
        base_model=base_model,
        licence=request.POST.get("licence", ""),
        by=request.membership.user_id,
        now=db_now(),
    )
    messages.success(
        request,
        gettext("%(licence)s is accepted for %(name)s.")
        % {"licence": base_model.licence or gettext("The licence"), "name": request.organization.name},
    )
    back = request.POST.get("next", "")
    is_ours = url_has_allowed_host_and_scheme(back, allowed_hosts={request.get_host()}, require_https=False)
    return redirect(back if is_ours else "web:job_new")
