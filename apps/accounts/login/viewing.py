"""Viewing as an organization: an operator sees its pages as a viewer does, for half an hour, and can change nothing.

The operator's session holds the organization. Until viewing ends, the session may only read, on every address, and
each request is audited. apps/interfaces/web/shell/access.py shows the organization's rows, in read-only transactions.
"""

import datetime
import time
from dataclasses import dataclass

from django.conf import settings
from django.contrib import messages
from django.contrib.sessions.backends.base import SessionBase
from django.core.exceptions import PermissionDenied as PageForbidden
from django.http import HttpRequest
from django.urls import reverse
from django.utils.deprecation import MiddlewareMixin
from django.utils.translation import gettext

from apps.accounts.models import Organization, User
from apps.core import audit
from apps.core.database.tenancy import system
from apps.core.http.access import asks_by_itself

VIEWING_SECONDS = 30 * 60
_SESSION = "viewing"
_READS = ("GET", "HEAD")
_ALWAYS_OPEN = ("staff:viewing_stop", "account_logout")


@dataclass(frozen=True)
class Viewing:
    """The organization that an operator views, and the time when the viewing ends."""

    organization_id: str
    ends_at: datetime.datetime


def viewing_of(request: HttpRequest) -> Viewing | None:
    """Return the organization that the operator of this request views; None for everyone else."""
    return getattr(request, "viewing", None)


def find_viewing(*, session: SessionBase, user: object) -> Viewing | None:
    """Return what an operator views in a session; None if the viewing has ended, or another person began it."""
    kept = session.get(_SESSION)
    if kept is None or time.time() >= kept["ends_at"]:
        return None
    if not isinstance(user, User) or not user.is_operator or kept["operator"] != user.pk:
        return None
    return Viewing(kept["organization"], datetime.datetime.fromtimestamp(kept["ends_at"], datetime.UTC))


def start_viewing(*, request: HttpRequest, organization: Organization) -> None:
    """View the organization in this session. The caller has checked that the person is an operator."""
    audit.record_in_each(
        organizations=[None, organization],
        by=str(request.user.pk),
        action="organization.view_started",
        target=organization.pk,
    )
    request.session[_SESSION] = {
        "operator": request.user.pk,
        "organization": organization.pk,
        "ends_at": time.time() + VIEWING_SECONDS,
    }


def stop_viewing(*, request: HttpRequest) -> str | None:
    """End the viewing of this session; return the id of the organization, or None if there was none."""
    kept = request.session.pop(_SESSION, None)
    if kept is None:
        return None
    organization_id: str = kept["organization"]
    _record(request, organization_id, "organization.view_stopped")
    return organization_id


class LimitViewing(MiddlewareMixin):
    """Ends a viewing in time, refuses every request that does more than read, and audits every request.

    The console shows the same with and without a viewing: what its open pages ask for again is not audited.
    """

    def process_request(self, request: HttpRequest) -> None:
        if settings.SESSION_COOKIE_NAME not in request.COOKIES or _SESSION not in request.session:
            return
        is_read, is_always_open = request.method in _READS, request.path_info in map(reverse, _ALWAYS_OPEN)
        viewing = find_viewing(session=request.session, user=request.user)
        if viewing is None:
            del request.session[_SESSION]
            if not (is_read or is_always_open):  # it was meant for the page of the viewed organization
                raise PageForbidden(gettext("You no longer view the organization. Go back and reload the page."))
            messages.info(request, gettext("Viewing has ended."))
            return
        request.viewing = viewing  # type: ignore[attr-defined]
        is_of_console = is_read and request.path_info.startswith(reverse("staff:home"))
        if is_always_open or (is_of_console and asks_by_itself(request)):  # an open page asks again
            return
        action = "organization.viewed" if is_read else "organization.view_refused"
        _record(request, viewing.organization_id, action, method=request.method, path=request.path)
        if not is_read:
            raise PageForbidden(
                gettext("You are viewing an organization and cannot change anything. Stop viewing first.")
            )


def _record(request: HttpRequest, organization_id: str, action: str, **details: object) -> None:
    with system():
        audit.record_in_each(
            organizations=[None, organization_id],
            by=str(request.user.pk),
            action=action,
            target=organization_id,
            **details,
        )
