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

from apps.core.errors import DomainError, NotFound, PermissionDenied
from apps.core.http.asgi import error_headers, error_page, error_response

logger = logging.getLogger(__name__)

View = Callable[..., HttpResponseBase]


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
    """Redirect to the sign-in page and back. For htmx, the whole page is redirected.

    A form that was posted without a session is not replayed: the way back leads to the page of the form.
    """
    if request.method in ("GET", "HEAD"):
        response = redirect_to_login(request.get_full_path())
    else:
        messages.warning(request, gettext("You were signed out, so nothing was sent. Sign in and send it again."))
        response = redirect_to_login(_page_of_form(request))
    if getattr(request, "htmx", False):
        return HttpResponseClientRedirect(response.url)
    return response


def _page_of_form(request: HttpRequest) -> str:
    """Return the path of the page that the browser names as the sender; "/" if that is another site's or unnamed."""
    try:
        page = urlsplit(request.headers.get("Referer", ""))
    except ValueError:  # no address
        return "/"
    path = urlunsplit(page._replace(scheme="", netloc=""))
    is_ours = page.netloc == request.get_host() and url_has_allowed_host_and_scheme(path, None)
    return path if is_ours else "/"


def answer(request: HttpRequest, run: Callable[[], HttpResponseBase]) -> HttpResponseBase:
    """Run a view and convert unhandled errors to pages: Django's for 404 and 403, else a page with the message.

    A script that asks for JSON gets the message as JSON.
    """
    try:
        return run()
    except NotFound as error:
        raise Http404 from error
    except PermissionDenied as error:
        raise PageForbidden(error.message) from error
    except DataError as error:
        logger.warning("refused by the database: %s", error)
        text = gettext(
            "A value is too large, too long or holds a character that cannot be stored. Go back and change it."
        )
        return error_page(request, 400, message=text)
    except DomainError as error:
        if request.get_preferred_type(["text/html", "application/json"]) == "application/json":  # of a script
            return error_response(error)
        page = error_page(request, int(error.status), message=error.message)
        for name, value in error_headers(error).items():
            page.headers[name] = value
        return page
