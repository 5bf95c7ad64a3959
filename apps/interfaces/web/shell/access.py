"""Access to pages: every view of an organization's data goes through `organization_view`."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import Concatenate, ParamSpec, cast

from django.db import InternalError
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import redirect
from django.utils.translation import gettext
from django_htmx.middleware import HtmxDetails
from psycopg.errors import ReadOnlySqlTransaction

from apps.accounts.login.second_factor import require_second_factor
from apps.accounts.login.sessions import require_recent_sign_in
from apps.accounts.login.viewing import viewing_of
from apps.accounts.members.projects import may_work_in
from apps.accounts.members.visibility import seeing, sight_of_member
from apps.accounts.models import Membership, Organization, User
from apps.accounts.queries import get_organization, list_memberships_of
from apps.accounts.roles import Permission, Viewer, has_permission
from apps.core.database.tenancy import refuse_writes, set_organization, tenant
from apps.core.errors import InvalidState, PermissionDenied
from apps.core.http.access import Access, View, answer, public_view, redirect_to_sign_in

__all__ = [
    "SESSION_ORGANIZATION",
    "OrganizationRequest",
    "may_write",
    "organization_view",
    "person_view",
    "public_view",
    "require",
]

SESSION_ORGANIZATION, SESSION_PROJECT = "organization_id", "project_id"
_SELECTION_FIELD = "selection"  # of a form, or of the query in an address that a script calls
_SELECTION_HEADER = "X-Selection"  # of htmx and of uploads

P = ParamSpec("P")


class PersonRequest(HttpRequest):
    """The request of a signed-in person, as a `person_view` gets it."""

    user: User
    htmx: HtmxDetails
    memberships: list[Membership]
    is_inside: bool  # the rows of the current organization are visible


class OrganizationRequest(PersonRequest):
    """The request of a member, as an `organization_view` gets it, with the person's current organization."""

    organization: Organization
    membership: Membership


def person_view(view: Callable[Concatenate[PersonRequest, P], HttpResponseBase]) -> View:
    """Require a signed-in person, with or without an organization. The current one, if any, is set on the request."""

    @wraps(view)
    def guarded(request: HttpRequest, *args: P.args, **kwargs: P.kwargs) -> HttpResponseBase:
        if not request.user.is_authenticated:
            return redirect_to_sign_in(request)
        run = partial(view, cast(PersonRequest, request), *args, **kwargs)
        return answer(request, partial(_as_person, request, run))

    guarded.access = Access("person")  # type: ignore[attr-defined]
    return guarded


def organization_view(
    permission: Permission, *, is_sensitive: bool = False, is_of_any_project: bool = False
) -> Callable[[Callable[Concatenate[OrganizationRequest, P], HttpResponseBase]], View]:
    """Require membership with `permission`; the view sees only the rows of its request's organization.

    The whole view is one transaction, so an error undoes its changes. A POST to a sensitive view asks for the password
    again if the person signed in some time ago. A page of another selection is refused; of another project only unless
    the view `is_of_any_project`: it chooses the project, or is about one object, whose project stays.
    """

    def decorate(view: Callable[Concatenate[OrganizationRequest, P], HttpResponseBase]) -> View:
        @wraps(view)
        def guarded(request: HttpRequest, *args: P.args, **kwargs: P.kwargs) -> HttpResponseBase:
            if not request.user.is_authenticated:
                return redirect_to_sign_in(request)
            if is_sensitive and request.method == "POST":
                require_recent_sign_in(request)
            run = partial(view, cast(OrganizationRequest, request), *args, **kwargs)
            return answer(request, partial(_as_member, request, permission, run, is_of_any_project))

        guarded.access = Access("organization", permission)  # type: ignore[attr-defined]
        return guarded

    return decorate


def require(membership: Membership, permission: Permission) -> None:
    """Raise PermissionDenied unless the member's role grants `permission` and the organization is not suspended."""
    if membership.organization.suspended_at:
        raise PermissionDenied(gettext("This organization is suspended. Write to the operator of this installation."))
    if not has_permission(membership.role, permission):
        text = gettext("Your role, %(role)s, does not allow this. An owner or admin can change it.")
        if permission == Permission.ORGANIZATION_MANAGE:
            text = gettext("Your role, %(role)s, does not allow this. Ask an owner.")
        raise PermissionDenied(text % {"role": gettext(membership.role)})


def may_write(request: OrganizationRequest, permission: Permission, project_id: str) -> bool:
    """Return whether the member's role grants `permission`, and they may change the work in the project."""
    member = request.membership
    return has_permission(member.role, permission) and may_work_in(project_id=project_id, membership=member)


def selection_of(request: OrganizationRequest) -> str:
    """Return what the reader has chosen: an organization, which they are in, perhaps a project, and their account.

    The session keeps these choices, so a switch in one tab moves the other tabs too. Each form and each script of a
    page therefore names the selection in which the page was rendered.
    """
    return f"{request.organization.pk}/{request.session.get(SESSION_PROJECT, '')}/{request.user.pk}"


def _require_selection(request: OrganizationRequest, *, is_of_any_project: bool) -> None:
    """Raise InvalidState if the request is from a page of another selection. One that names none is from no page."""
    named = (
        request.headers.get(_SELECTION_HEADER)
        or request.POST.get(_SELECTION_FIELD)
        or request.GET.get(_SELECTION_FIELD)
    )
    present = selection_of(request)
    if not named or named == present:
        return
    if named.rpartition("/")[2] != present.rpartition("/")[2]:
        raise InvalidState(
            gettext("You opened this page with another account. Nothing was changed. Reload the page and try again.")
        )
    old, new = named.partition("/")[0], present.partition("/")[0]
    if old != new:
        names = {each.organization_id: each.organization.name for each in request.memberships}
        if old not in names:
            raise InvalidState(
                gettext("This page is from another organization, in which you do not work now. Nothing was changed.")
            )
        raise InvalidState(
            gettext(
                "This page is from %(old)s, but you work in %(new)s now. Nothing was changed. Switch back to %(old)s, "
                "return to the page and try again."
            )
            % {"old": names[old], "new": names[new]}
        )
    if not is_of_any_project:
        raise InvalidState(
            gettext("You chose another project after you opened this page. Nothing was changed. Reload the page.")
        )


def _as_person(request: HttpRequest, run: Callable[[], HttpResponseBase]) -> HttpResponseBase:
    with _entering(request):
        return run()


def _as_member(
    request: HttpRequest, permission: Permission, run: Callable[[], HttpResponseBase], is_of_any_project: bool
) -> HttpResponseBase:
    with _entering(request) as membership:
        if membership is None:
            is_operator = getattr(request.user, "is_operator", False)
            return redirect("staff:home" if is_operator else "web:organization_create")
        if membership.organization.requires_second_factor:
            why = gettext("%(name)s asks its members for a second factor.") % {"name": membership.organization.name}
            if elsewhere := require_second_factor(request, why=why):
                return elsewhere
        if viewing_of(request) and not has_permission(membership.role, permission):
            raise PermissionDenied(
                gettext("You see what viewers of the organization see, and this page is not for them.")
            )
        require(membership, permission)
        _require_selection(cast(OrganizationRequest, request), is_of_any_project=is_of_any_project)
        with seeing(sight_of_member(membership)):
            return run()


@contextmanager
def _entering(request: HttpRequest) -> Iterator[Membership | None]:
    """Make the rows of the reader's current organization visible. `is_inside` tells the page's frame that they are."""
    with seeing_memberships(request):
        membership = find_membership(request)
        if membership is not None:
            set_organization(membership.organization_id)
        if viewing_of(request):
            refuse_writes()
        request.is_inside = True  # type: ignore[attr-defined]
        try:
            yield membership
        except InternalError as error:
            if isinstance(error.__cause__, ReadOnlySqlTransaction):
                raise PermissionDenied(
                    gettext("You are viewing an organization. You cannot change anything or download its files.")
                ) from error
            raise
        finally:
            request.is_inside = False  # type: ignore[attr-defined]


def seeing_memberships(request: HttpRequest) -> AbstractContextManager[None]:
    """Return a transaction that sees the rows for `find_membership`: memberships, or the viewed organization."""
    viewing = viewing_of(request)
    return tenant(organization=viewing.organization_id) if viewing else tenant(user=request.user)


def viewing_membership(*, organization: Organization, operator: User) -> Membership:
    """Return the membership, in no table, with which an operator views an organization."""
    return Membership(organization=organization, user=operator, role=Viewer.name)


def find_membership(request: HttpRequest) -> Membership | None:
    """Return the membership in the session's organization, or else in the person's first one.

    An operator who views an organization has the role of a viewer in it, and is in no other. Both the membership and
    its organization are set on the request.
    """
    assert isinstance(request.user, User)
    if viewing := viewing_of(request):
        viewed = get_organization(id=viewing.organization_id)
        memberships = [viewing_membership(organization=viewed, operator=request.user)]
    else:
        memberships = list_memberships_of(user=request.user)
    request.memberships = memberships  # type: ignore[attr-defined]
    if not memberships:
        return None
    wanted = request.session.get(SESSION_ORGANIZATION)
    membership = next((each for each in memberships if each.organization_id == wanted), memberships[0])
    request.organization = membership.organization  # type: ignore[attr-defined]
    request.membership = membership  # type: ignore[attr-defined]
    return membership
