"""The look of the pages: the reader's light or dark theme, and the operator's own logo and accent colour.

The theme is kept in a cookie, so that the first paint uses it.
"""

from csp.decorators import csp
from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBadRequest
from django.shortcuts import redirect
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.cache import cache_control
from django.views.decorators.http import require_POST, require_safe

from apps.interfaces.web.shell.access import public_view
from apps.interfaces.web.shell.frame import THEME_COOKIE, THEMES

ONE_YEAR_SECONDS = 365 * 24 * 3600
# The accents of static/css/00-tokens.css: lightness, and so contrast, stay the same at every hue.
_ACCENTS = (
    ":root{{--accent:light-dark(oklch(0.530 0.190 {0}),oklch(0.735 0.130 {0}));"
    "--accent-soft:light-dark(oklch(0.960 0.020 {0}),oklch(0.262 0.052 {0}));"
    "--accent-line:light-dark(oklch(0.800 0.085 {0}),oklch(0.420 0.095 {0}))}}"
)


@public_view
@require_POST
def switch(request: HttpRequest) -> HttpResponse:
    """Store `theme` (light, dark, or empty to follow the system) and redirect to the page where it was chosen."""
    theme = request.POST.get("theme", "")
    if theme and theme not in THEMES:
        return HttpResponseBadRequest("A theme is light, dark or empty.")
    response = _back(request)
    if theme:
        response.set_cookie(THEME_COOKIE, theme, max_age=ONE_YEAR_SECONDS, secure=request.is_secure(), samesite="Lax")
    else:
        response.delete_cookie(THEME_COOKIE, samesite="Lax")
    return response


@public_view
@require_safe
@cache_control(public=True, max_age=3600)
@csp({"default-src": ["'none'"], "style-src": ["'unsafe-inline'"], "sandbox": True})
def logo(request: HttpRequest) -> HttpResponse:
    """Send the operator's SVG file. It is shown as an image, and its own policy keeps it from running anything."""
    if settings.BRAND_LOGO is None:
        raise Http404
    return HttpResponse(settings.BRAND_LOGO.read_bytes(), content_type="image/svg+xml")


@public_view
@require_safe
@cache_control(public=True, max_age=3600)
def accent(request: HttpRequest) -> HttpResponse:
    """Send the style sheet with the accents of the operator's hue."""
    if settings.BRAND_HUE is None:
        raise Http404
    return HttpResponse(_ACCENTS.format(settings.BRAND_HUE), content_type="text/css")


def _back(request: HttpRequest) -> HttpResponse:
    if request.headers.get("Sec-Fetch-Mode") == "cors":  # app.js has already switched the page
        return HttpResponse(status=204)
    referrer = request.headers.get("Referer", "")
    is_ours = url_has_allowed_host_and_scheme(referrer, allowed_hosts={request.get_host()}, require_https=False)
    return redirect(referrer if is_ours else "/")
