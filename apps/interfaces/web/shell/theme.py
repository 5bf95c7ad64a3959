"""The reader's choice between light and dark, kept in a cookie so that the first paint uses it."""

from django.http import HttpRequest, HttpResponse, HttpResponseBadRequest
from django.shortcuts import redirect
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.http import require_POST

from apps.interfaces.web.shell.access import public_view
from apps.interfaces.web.shell.frame import THEME_COOKIE, THEMES

ONE_YEAR_SECONDS = 365 * 24 * 3600


@public_view
@require_POST
def switch(request: HttpRequest) -> HttpResponse:
    """Store `theme` (light, dark, or empty to follow the system) and return to the page it was chosen on."""
    theme = request.POST.get("theme", "")
    if theme and theme not in THEMES:
        return HttpResponseBadRequest("A theme is light, dark or empty.")
    response = _back(request)
    if theme:
        response.set_cookie(THEME_COOKIE, theme, max_age=ONE_YEAR_SECONDS, secure=request.is_secure(), samesite="Lax")
    else:
        response.delete_cookie(THEME_COOKIE, samesite="Lax")
    return response


def _back(request: HttpRequest) -> HttpResponse:
    if request.headers.get("Sec-Fetch-Mode") == "cors":  # app.js has already switched the page
        return HttpResponse(status=204)
    referrer = request.headers.get("Referer", "")
    is_ours = url_has_allowed_host_and_scheme(referrer, allowed_hosts={request.get_host()}, require_https=False)
    return redirect(referrer if is_ours else "/")
