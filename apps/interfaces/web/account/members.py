"""The members of an organization: list, invite, change role, remove, and the page of a mailed invitation."""

from allauth.account.adapter import get_adapter
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from apps.accounts import invitations, operations, queries
from apps.accounts.login.forms import SESSION_INVITATION
from apps.accounts.models import User
from apps.accounts.roles import Permission, has_permission
from apps.core.database.clock import db_now
from apps.core.database.tenancy import system
from apps.core.errors import DomainError, InvalidState, InvalidValue, NotFound
from apps.core.http.forms import domain_errors_on
from apps.interfaces.web.account.forms import ROLE_WORDS, InviteForm, grantable_roles
from apps.interfaces.web.shell.access import SESSION_ORGANIZATION, OrganizationRequest, organization_view, public_view


@require_safe
@organization_view(Permission.VIEW)
def index(request: OrganizationRequest) -> HttpResponse:
    return _page(request, InviteForm(by=request.membership))


def _page(request: OrganizationRequest, form: InviteForm, status: int = 200) -> HttpResponse:
    may_manage = has_permission(request.membership.role, Permission.MEMBER_MANAGE)
    grantable = grantable_roles(request.membership) if may_manage else []
    context = {
        "members": queries.list_members(organization=request.organization),
        "invitations": queries.list_open_invitations(organization=request.organization, now=db_now()),
        "form": form,
        "may_manage": may_manage,
        "grantable": grantable,
        "role_options": [(role, role.capitalize()) for role in grantable],
        "role_words": ROLE_WORDS.items(),
    }
    return render(request, "organization/members.html", context, status=status)


@require_POST
@organization_view(Permission.MEMBER_MANAGE, is_sensitive=True)
def invite(request: OrganizationRequest) -> HttpResponse:
    form = InviteForm(request.POST, by=request.membership)
    if form.is_valid():
        with domain_errors_on(form):
            invitations.invite_member(
                organization=request.organization,
                email=form.cleaned_data["email"],
                role=form.cleaned_data["role"],
                only_for_address=form.only_for_address(),
                by=request.membership.user,
                now=db_now(),
            )
            messages.success(request, f"Invitation sent to {form.cleaned_data['email']}.")
            return redirect("web:member_list")
    return _page(request, form, status=422)


@require_POST
@organization_view(Permission.MEMBER_MANAGE, is_sensitive=True)
def change_role(request: OrganizationRequest, membership_id: str) -> HttpResponse:
    try:
        changed = operations.change_role(
            organization=request.organization,
            membership_id=membership_id,
            role=request.POST.get("role", ""),
            by=request.membership.user,
            now=db_now(),
        )
    except (InvalidState, InvalidValue) as error:
        messages.error(request, error.message)
    else:
        messages.success(request, f"The role is now {changed.role}.")
    return redirect("web:member_list")


@require_POST
@organization_view(Permission.VIEW, is_sensitive=True)
def remove(request: OrganizationRequest, membership_id: str) -> HttpResponse:
    """Remove a member, or leave. Removing another member needs the right to manage members."""
    try:
        operations.remove_member(
            organization=request.organization, membership_id=membership_id, by=request.membership.user, now=db_now()
        )
    except InvalidState as error:
        messages.error(request, error.message)
        return redirect("web:member_list")
    if membership_id == request.membership.pk:
        messages.success(request, f"You have left {request.organization.name}.")
        return redirect("/")
    messages.success(request, "Member removed. Their API keys and open invitations no longer work.")
    return redirect("web:member_list")


@require_POST
@organization_view(Permission.MEMBER_MANAGE)
def revoke_invitation(request: OrganizationRequest, invitation_id: str) -> HttpResponse:
    try:
        invitations.revoke_invitation(
            organization=request.organization, invitation_id=invitation_id, by=request.membership.user, now=db_now()
        )
    except InvalidState as error:
        messages.error(request, error.message)
    else:
        messages.success(request, "Invitation withdrawn.")
    return redirect("web:member_list")


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
@public_view
def accept_invitation(request: HttpRequest, token: str) -> HttpResponse:
    """Show what an invitation offers; a POST by a signed-in person accepts it.

    The page shows only the organization's name, because anyone who has the link can open it.
    """
    with system():
        try:
            invitation = invitations.find_invitation(token=token)
        except NotFound:
            return render(request, "organization/invitation_closed.html", {"reason": ""}, status=404)
        if request.method == "POST" and isinstance(request.user, User):
            return _join(request, token, request.user)
        is_open = invitation.is_open(now=db_now())
        if is_open and not request.user.is_authenticated:
            request.session[SESSION_INVITATION] = token
            # The link was mailed to this address only, so a visitor who opens it can read mail there.
            get_adapter().stash_verified_email(request, invitation.email)
    template = "organization/invitation.html" if is_open else "organization/invitation_closed.html"
    return render(request, template, {"invitation": invitation, "next": request.path})


def _join(request: HttpRequest, token: str, user: User) -> HttpResponse:
    try:
        membership = invitations.accept_invitation(token=token, user=user, now=db_now())
    except DomainError as error:
        return render(request, "organization/invitation_closed.html", {"reason": error.message}, status=error.status)
    request.session.pop(SESSION_INVITATION, None)
    request.session[SESSION_ORGANIZATION] = membership.organization_id
    messages.success(request, f"Welcome to {membership.organization.name}.")
    return redirect("/")
