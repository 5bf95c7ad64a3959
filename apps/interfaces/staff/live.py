"""Pages of the console that stay current: htmx asks for their partial `now` every few seconds.

A page shows `as_of` in that partial. An answer to a reader who has the same partial already holds only the time.
"""

import datetime
import hashlib
import re
from collections.abc import Mapping

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.template.loader import render_to_string
from django.utils.cache import patch_vary_headers
from django.utils.html import format_html
from django.utils.safestring import SafeString

_VERSION = "version"  # the parameter with the version of the partial that the reader has
_VERSION_LENGTH = 16
_TOKEN = re.compile('name="csrfmiddlewaretoken" value="[^"]*"')  # masked anew in each form
_TIME = SafeString("<!--time-->")  # in place of the time, which differs in each answer


def render_live(
    request: HttpRequest,
    template: str,
    context: Mapping[str, object],
    *,
    now: datetime.datetime,
    url: str = "",
    status: int = 200,
) -> HttpResponse:
    """Return the page, or for a poll its partial `now`; only the time if the reader has the same one.

    `url` is the page's address, if a form of it has another one.
    """
    query = request.GET.copy()
    known = "".join(query.pop(_VERSION, []))
    context = {**context, "live_url": f"{url or request.path}?{query.urlencode()}".rstrip("?")}
    if is_poll(request):
        part = render_to_string(f"{template}#now", {**context, "as_of": _TIME}, request)
        version = hashlib.sha256(_TOKEN.sub("", part).encode()).hexdigest()[:_VERSION_LENGTH]
        time = _as_of(now, version)
        partial = format_html('<hx-partial hx-target="#as-of" hx-swap="outerHTML">{}</hx-partial>', time)
        response = HttpResponse(partial if known == version else part.replace(_TIME, time))
    else:
        response = render(request, template, {**context, "as_of": _as_of(now)}, status=status)
    patch_vary_headers(response, ["HX-Request"])
    return response


def is_poll(request: HttpRequest) -> bool:
    """Return whether an open page asks for what has changed."""
    return request.method == "GET" and bool(request.headers.get("HX-Request"))


def _as_of(now: datetime.datetime, version: str = "") -> str:
    return render_to_string("staff/_as_of.html", {"now": now, "version": version})
