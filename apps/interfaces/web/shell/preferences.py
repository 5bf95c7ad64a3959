"""The time zone and language in which the reader sees pages: their own choice, or else the browser's."""

import datetime
import zoneinfo
from functools import cache

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.utils import timezone, translation
from django.utils.cache import patch_vary_headers
from django.utils.deprecation import MiddlewareMixin

from apps.core.http.asgi import is_machine_path

_AREAS = ("Africa/", "America/", "Antarctica/", "Asia/", "Atlantic/", "Australia/", "Europe/", "Indian/", "Pacific/")


@cache
def time_zones() -> tuple[str, ...]:
    """Return the names of the zones that a person can choose."""
    return "UTC", *sorted(name for name in zoneinfo.available_timezones() if name.startswith(_AREAS))


class UsePreferences(MiddlewareMixin):
    """Activate the reader's time zone and language while the request is answered. APIs stay in UTC and English."""

    def process_request(self, request: HttpRequest) -> None:
        _deactivate()
        if is_machine_path(request.path):
            return
        zone = language = ""
        if settings.SESSION_COOKIE_NAME in request.COOKIES:
            zone, language = getattr(request.user, "time_zone", ""), getattr(request.user, "language", "")
        if zone and zone in time_zones():
            # Not ZoneInfo("UTC"), which is the default zone: no choice.
            timezone.activate(datetime.UTC if zone == "UTC" else zoneinfo.ZoneInfo(zone))
        translation.activate(language or translation.get_language_from_request(request))

    def process_response(self, request: HttpRequest, response: HttpResponse) -> HttpResponse:
        if response.headers.get("Content-Type", "").startswith("text/html"):
            response.headers.setdefault("Content-Language", translation.get_language())
            patch_vary_headers(response, ["Accept-Language"])
        _deactivate()
        return response


def _deactivate() -> None:
    timezone.deactivate()
    translation.deactivate()
