"""The organization itself: settings, switching between organizations, creating another."""

from django.conf import settings as site
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods, require_POST

from apps.accounts import operations, queries
from apps.accounts.login.second_factor import has_second_factor
from apps.accounts.models import User
from apps.accounts.roles import Permission, has_permission
from apps.billing.books.welcome import grant_welcome_credit
from apps.billing.lots import has_paid_lot
from apps.core.database.clock import db_now
from apps.core.database.tenancy import system
from apps.core.errors import NotFound, QuotaExceeded
from apps.core.http.forms import domain_errors_on
from apps.interfaces.web.account.forms import OrganizationForm
from apps.interfaces.web.shell.access import (
    SESSION_ORGANIZATION,
    OrganizationRequest,
    organization_view,
    person_view,
    require,
)


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.VIEW)
def settings(request: OrganizationRequest) -> HttpResponse:
    """Show the organization; a POST renames it."""
    form = OrganizationForm(request.POST or None, initial={"name": request.organization.name})
    if request.method == "POST":
        require(request.membership, Permission.ORGANIZATION_MANAGE)
        if form.is_valid():
            operations.rename_organization(
                organization=request.organization, name=form.cleaned_data["name"], by=request.membership.user
            )
            messages.success(request, gettext("Saved."))
            return redirect("web:organization_settings")
    context = {
        "form": form,
        "may_manage": has_permission(request.membership.role, Permission.ORGANIZATION_MANAGE),
        "may_manage_webhooks": has_permission(request.membership.role, Permission.WEBHOOK_MANAGE),
        "may_read_audit": has_permission(request.membership.role, Permission.AUDIT_READ),
    }
    return render(request, "account/organization/settings.html", context, status=422 if form.errors else 200)


@require_POST
@organization_view(Permission.ORGANIZATION_MANAGE, is_sensitive=True)
def second_factor(request: OrganizationRequest) -> HttpResponse:
    """Demand a second factor of every member, or stop demanding it.

    An owner without one must add one first, so that they do not lock themselves out.
    """
    is_required = request.POST.get("is_required") == "on"
    if is_required and not has_second_factor(request.membership.user):
        messages.error(request, gettext("Add a second factor to your own account first."))
        return redirect("mfa_index")
    operations.set_second_factor_policy(
        organization=request.organization, is_required=is_required, by=request.membership.user
    )
    messages.success(request, gettext("Saved."))
    return redirect("web:organization_settings")


@require_POST
@person_view
def switch(request: HttpRequest) -> HttpResponse:
    """Make another of the person's organizations the current one in this browser."""
    assert isinstance(request.user, User)
    wanted = request.POST.get("organization", "")
    memberships = queries.list_memberships_of(user=request.user)
    if all(membership.organization_id != wanted for membership in memberships):
        raise NotFound(gettext("No such organization."))
    request.session[SESSION_ORGANIZATION] = wanted
    return redirect("/")


@require_http_methods(["GET", "HEAD", "POST"])
@person_view
def create(request: HttpRequest) -> HttpResponse:
    """Create an organization and make it the current one."""
    assert isinstance(request.user, User)
    form = OrganizationForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        with domain_errors_on(form):
            with system():  # each organization has its own limits, so a person who never paid may found few
                founded = operations.list_founded(user=request.user)
                if len(founded) >= site.MAX_UNPAID_ORGANIZATIONS and not has_paid_lot(organizations=founded):
                    raise QuotaExceeded(
                        gettext("You have created %(count)s organizations. Pay into one of them to create more.")
                        % {"count": len(founded)},
                        param="name",
                    )
            organization = operations.create_organization(
                name=form.cleaned_data["name"], owner=request.user, now=db_now()
            )
            grant_welcome_credit(user=request.user)
            request.session[SESSION_ORGANIZATION] = organization.pk
            return redirect("/")
    return render(request, "account/organization/create.html", {"form": form}, status=422 if form.errors else 200)
