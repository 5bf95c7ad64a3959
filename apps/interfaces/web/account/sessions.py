"""The sessions in which the reader is signed in: list them, and sign out of the others."""

import ipaddress

from django import forms
from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext, ngettext
from django.views.decorators.http import require_http_methods

from apps.accounts.login.sessions import end_sessions, list_sessions, require_recent_sign_in
from apps.core.http.forms import LARGEST_INTEGER
from apps.interfaces.web.shell.access import PersonRequest, person_view

# What a user agent holds -> its name. The first match counts: most browsers also claim to be Chrome or Safari.
_BROWSERS = {
    "Edg": "Edge",
    "OPR/": "Opera",
    "Firefox/": "Firefox",
    "FxiOS/": "Firefox",
    "Chrome/": "Chrome",
    "CriOS/": "Chrome",
    "Safari/": "Safari",
}
_SYSTEMS = {
    "Windows": "Windows",
    "Android": "Android",
    "iPhone": "iPhone",
    "iPad": "iPad",
    "Macintosh": "Mac",
    "CrOS": "ChromeOS",
    "Linux": "Linux",
}


class EndSessionForm(forms.Form):
    session = forms.IntegerField(required=False, min_value=1, max_value=LARGEST_INTEGER)


@require_http_methods(["GET", "HEAD", "POST"])
@person_view
def index(request: PersonRequest) -> HttpResponse:
    """List the sessions. A POST ends the session that it names, or all but the current one."""
    if request.method == "POST":
        return _end(request)
    rows = [
        {
            "session": row,
            "device": describe_device(row.user_agent),
            "network": shorten_address(row.ip),
            "is_current": row.session_key == request.session.session_key,
        }
        for row in list_sessions(user=request.user)
    ]
    return render(request, "account/sessions.html", {"rows": rows})


def _end(request: PersonRequest) -> HttpResponse:
    require_recent_sign_in(request)
    form = EndSessionForm(request.POST)
    if form.is_valid():
        chosen = form.cleaned_data["session"]
        ended = end_sessions(user=request.user, but=request.session.session_key or "", session_id=chosen)
        messages.success(
            request,
            ngettext("Signed out of %(ended)s session.", "Signed out of %(ended)s sessions.", ended) % {"ended": ended},
        )
    else:
        messages.error(request, gettext("There is no such session. Choose one from the list."))
    return redirect("web:session_list")


def describe_device(user_agent: str) -> str:
    """Return the browser and the system in words."""
    browser = next((name for mark, name in _BROWSERS.items() if mark in user_agent), gettext("Unknown browser"))
    system = next((name for mark, name in _SYSTEMS.items() if mark in user_agent), "")
    return gettext("%(browser)s on %(system)s") % {"browser": browser, "system": system} if system else browser


def shorten_address(address: str) -> str:
    """Return the network of an address: its /24, or its /48 of IPv6."""
    version = ipaddress.ip_address(address).version
    return str(ipaddress.ip_network((address, 24 if version == 4 else 48), strict=False))
