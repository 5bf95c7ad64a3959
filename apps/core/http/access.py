"""Code shared by the dashboard and the operator console: the access mark of a view, and pages for failures."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

from django.contrib import messages
from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import PermissionDenied as PageForbidden
from django.db import DataError
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.translation import gettext
from django_htmx.http import HttpResponseClientRedirect

from apps.core.errors import DomainError, NotFound, PermissionDenied, Status
from apps.core.http.asgi import error_headers, error_page, error_response, wants_json
from apps.core.objects.page_tables import answer_with_table

logger = logging.getLogger(__name__)

View = Callable[..., HttpResponseBase]


class SignedOut(DomainError):
    """A script of a page calls without a session, so no page can be shown instead."""

    code = "signed_out"
    status = Status.UNAUTHENTICATED


@dataclass(frozen=True)
class Access:
    """The access that a view requires. Guard tests read it from the view's `access` attribute."""

    audience: Literal["public", "person", "organization", "operator"]
    permission: str | None = None


def public_view(view: View) -> View:
    """Mark a view that is open to all and shows no organization's data."""
    view.access = Access("public")  # type: ignore[attr-defined]
    return view


def redirect_to_sign_in(request: HttpRequest) -> HttpResponse:
    """Redirect to the sign-in page and back. For htmx, the whole page is redirected; another script gets an error.

    A form that was posted without a session is not replayed: the way back leads to the page of the form, and for htmx
    to the page that asked.
    """
    if wants_json(request):
        text = gettext("You were signed out, so nothing was sent. Sign in in another tab, return here and try again.")
        return error_response(SignedOut(text))
    is_read = request.method in ("GET", "HEAD")
    if not is_read and not asks_by_itself(request):
        messages.warning(request, gettext("You were signed out, so nothing was sent. Sign in and send it again."))
    if getattr(request, "htmx", False):
        page = _own_path(request, request.headers.get("HX-Current-URL", ""))
        return HttpResponseClientRedirect(redirect_to_login(page).url)
    return redirect_to_login(
        request.get_full_path() if is_read else _own_path(request, request.headers.get("Referer", ""))
    )


def asks_by_itself(request: HttpRequest) -> bool:
    """Return whether an open page asks without an act of a person, as polls do; app.js marks these requests."""
    return "X-Poll" in request.headers


def _own_path(request: HttpRequest, address: str) -> str:
    """Return the path of a page that the browser names as the sender; "/" if that is another site's or unnamed."""
    try:
        page = urlsplit(address)
    except ValueError:  # no address
        return "/"
    path = urlunsplit(page._replace(scheme="", netloc=""))
    is_ours = page.netloc == request.get_host() and url_has_allowed_host_and_scheme(path, None)
    return path if is_ours else "/"


def answer(request: HttpRequest, run: Callable[[], HttpResponseBase]) -> HttpResponseBase:
    """Run a view, and convert unhandled errors to pages: Django's for 404 and 403, else a page with the message.

    A script gets the error object instead.
    """
    try:
        return answer_with_table(request, run)
    except DataError as error:
        logger.warning("refused by the database: %s", error)
        text = gettext(
            "A value is too large, too long or holds a character that cannot be stored. Go back and change it."
        )
        return error_page(request, 400, message=text)
    except DomainError as error:
        if wants_json(request):
            return error_response(error)
        if isinstance(error, NotFound):
            raise Http404 from error
        if isinstance(error, PermissionDenied):
            raise PageForbidden(error.message) from error
        page = error_page(request, int(error.status), message=error.message)
        for name, value in error_headers(error).items():
            page.headers[name] = value
        return page
