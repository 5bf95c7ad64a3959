"""The members of an organization: list, CSV, invite, change role, remove, and the page of a mailed invitation."""

from collections.abc import Sequence

from allauth.account.adapter import get_adapter
from django.contrib import messages
from django.db.models import CharField, Q, QuerySet, Value
from django.db.models.functions import Coalesce, Lower, NullIf
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect, render
from django.utils.functional import lazy
from django.utils.translation import gettext
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from apps.accounts import queries
from apps.accounts.login.forms import SESSION_INVITATION
from apps.accounts.members import invitations, memberships
from apps.accounts.models import Membership, User
from apps.accounts.roles import ROLES, Permission, has_permission
from apps.core.database.clock import db_now
from apps.core.database.tenancy import system
from apps.core.errors import DomainError, InvalidState, InvalidValue, NotFound
from apps.core.http.confirmation import AffectedRow, ConfirmedAction, confirm, say_undoable
from apps.core.http.forms import domain_errors_on
from apps.core.messages.translation import later
from apps.interfaces.web.account.forms import ROLE_WORDS, InviteForm, grantable_roles
from apps.interfaces.web.shell.access import SESSION_ORGANIZATION, OrganizationRequest, organization_view, public_view
from apps.interfaces.web.shell.listing import Filter, Listing, render_list

_capitalized = lazy(lambda role: gettext(role).capitalize(), str)
_LIST = Listing[Membership](
    name=later("members"),
    hint=later("Name or email"),
    url_name="web:member_list",
    export_url_name="web:member_export",
    searched=("user__name", "user__email"),
    filters={
        "role": Filter(
            later("Role"), {"": (later("All"), Q())} | {role: (_capitalized(role), Q(role=role)) for role in ROLES}
        )
    },
    orders={
        "": (later("Oldest first"), ("created_at", "id")),
        "newest": (later("Newest first"), ("-created_at", "-id")),
        "name": (later("By name"), ("sorted_name", "id")),
    },
)


@require_safe
@organization_view(Permission.VIEW)
def index(request: OrganizationRequest) -> HttpResponse:
    return _page(request, InviteForm(by=request.membership))


def _page(request: OrganizationRequest, form: InviteForm, status: int = 200) -> HttpResponse:
    may_manage = has_permission(request.membership.role, Permission.MEMBER_MANAGE)
    grantable = grantable_roles(request.membership) if may_manage else []
    page = _LIST.page(request, _listed(request))
    context = {
        "members": page.rows,
        "invitations": queries.list_open_invitations(organization=request.organization, now=db_now()),
        "form": form,
        "may_manage": may_manage,
        "grantable": grantable,
        "role_options": [(role, gettext(role).capitalize()) for role in grantable],
        "role_words": ROLE_WORDS.items(),
    }
    return render_list(request, "account/organization/members.html", page, context, status=status)


def _listed(request: OrganizationRequest) -> QuerySet[Membership]:
    name = Lower(Coalesce(NullIf("user__name", Value("")), "user__email", output_field=CharField()))
    return queries.list_members(organization=request.organization).annotate(sorted_name=name)


@require_safe
@organization_view(Permission.VIEW)
def export(request: OrganizationRequest) -> HttpResponseBase:
    def cells(member: Membership) -> tuple[object, ...]:
        return member.user.name, member.user.email, member.role, member.created_at.isoformat()

    return _LIST.export(request, _listed(request), header=("name", "email", "role", "joined_at"), cells=cells)


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
            messages.success(request, gettext("Invitation sent to %(email)s.") % {"email": form.cleaned_data["email"]})
            return redirect("web:member_list")
    return _page(request, form, status=422)


@require_POST
@organization_view(Permission.MEMBER_MANAGE, is_sensitive=True)
def change_role(request: OrganizationRequest, membership_id: str) -> HttpResponse:
    try:
        before = queries.get_membership(organization=request.organization, id=membership_id).role
        changed = memberships.change_role(
            organization=request.organization,
            membership_id=membership_id,
            role=request.POST.get("role", ""),
            by=request.membership.user,
            now=db_now(),
        )
    except (InvalidState, InvalidValue) as error:
        messages.error(request, error.message)
    else:
        text = gettext("The role is now %(role)s.") % {"role": gettext(changed.role)}
        if changed.user_id == request.membership.user_id:
            messages.success(request, text)
        else:
            say_undoable(request, text, url=request.path, role=before)
    return redirect("web:member_list")


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.VIEW, is_sensitive=True)
def remove(request: OrganizationRequest) -> HttpResponse:
    """Remove a member, or leave. Removing another member needs the right to manage members."""
    return confirm(request, _REMOVE)


def _find(request: OrganizationRequest, ids: Sequence[str]) -> list[AffectedRow]:
    members = queries.list_members(organization=request.organization).filter(pk__in=ids)
    return [AffectedRow(member.pk, str(member.user), _effect_of(request, member)) for member in members]


def _effect_of(request: OrganizationRequest, member: Membership) -> str:
    who = gettext("You lose") if member.pk == request.membership.pk else gettext("They lose")
    return gettext("%(who)s access to %(name)s. API keys and open invitations of this member stop working.") % {
        "who": who,
        "name": request.organization.name,
    }


def _remove(request: OrganizationRequest, membership_id: str) -> None:
    memberships.remove_member(
        organization=request.organization, membership_id=membership_id, by=request.membership.user, now=db_now()
    )


_REMOVE = ConfirmedAction[OrganizationRequest](
    parameter="member",
    verb=later("Remove"),
    nouns=(later("member"), later("members")),
    warning=later("To bring the member back, send an invitation. Revoked keys never work again."),
    done=later("Removed"),
    list_url_name="web:member_list",
    list_title=later("Members"),
    find=_find,
    act=_remove,
)


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
        messages.success(request, gettext("Invitation withdrawn."))
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
            return render(request, "account/organization/invitation_closed.html", {"reason": ""}, status=404)
        if request.method == "POST" and isinstance(request.user, User):
            return _join(request, token, request.user)
        is_open = invitation.is_open(now=db_now())
        if is_open and not request.user.is_authenticated:
            request.session[SESSION_INVITATION] = token
            # The link was mailed to this address only, so a visitor who opens it can read mail there.
            get_adapter().stash_verified_email(request, invitation.email)
    template = "account/organization/invitation.html" if is_open else "account/organization/invitation_closed.html"
    return render(request, template, {"invitation": invitation, "next": request.path})


def _join(request: HttpRequest, token: str, user: User) -> HttpResponse:
    try:
        membership = invitations.accept_invitation(token=token, user=user, now=db_now())
    except DomainError as error:
        context = {"reason": error.message, "code": error.code, "next": request.path}
        if error.code == "wrong_address":
            context["email"] = invitations.find_invitation(token=token).email
        return render(request, "account/organization/invitation_closed.html", context, status=error.status)
    request.session.pop(SESSION_INVITATION, None)
    request.session[SESSION_ORGANIZATION] = membership.organization_id
    messages.success(request, gettext("Welcome to %(name)s.") % {"name": membership.organization.name})
    return redirect("/")
