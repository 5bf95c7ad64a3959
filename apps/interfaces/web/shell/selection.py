"""The selection of a page: the organization and the project that its reader had chosen when it was rendered.

The session keeps both choices, so a switch in one tab moves the other tabs too. Each form and each script of a page
therefore names the page's selection, and a request from another selection than the present one is refused.
"""

from django.http import HttpRequest
from django.utils.translation import gettext

from apps.core.errors import InvalidState

SESSION_PROJECT = "project_id"
_FIELD = "selection"  # of a form, or of the query in an address that a script calls
_HEADER = "X-Selection"  # of htmx and of uploads


def selection_of(request: HttpRequest) -> str:
    """Return the present selection of a reader who is in an organization."""
    return f"{request.organization.pk}/{request.session.get(SESSION_PROJECT, '')}"  # type: ignore[attr-defined]


def require_selection(request: HttpRequest, *, may_change_project: bool) -> None:
    """Raise InvalidState if the request is from a page of another selection. One that names none is from no page."""
    named = request.headers.get(_HEADER) or request.POST.get(_FIELD) or request.GET.get(_FIELD)
    present = selection_of(request)
    if not named or named == present:
        return
    old, new = named.partition("/")[0], present.partition("/")[0]
    if old != new:
        names = {each.organization_id: each.organization.name for each in request.memberships}  # type: ignore[attr-defined]
        raise InvalidState(
            gettext(
                "This page is from %(old)s, but you work in %(new)s now. Nothing was changed. Switch back to %(old)s, "
                "return to the page and try again."
            )
            % {"old": names.get(old, gettext("another organization")), "new": names[new]}
        )
    if not may_change_project:
        raise InvalidState(
            gettext("You chose another project after you opened this page. Nothing was changed. Reload the page.")
        )
