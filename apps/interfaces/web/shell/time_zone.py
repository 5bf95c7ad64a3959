"""The time zone in which pages show times: the reader's choice, else that of the reader's browser."""

import datetime
import zoneinfo
from functools import cache

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.deprecation import MiddlewareMixin

_AREAS = ("Africa/", "America/", "Antarctica/", "Asia/", "Atlantic/", "Australia/", "Europe/", "Indian/", "Pacific/")


@cache
def time_zones() -> tuple[str, ...]:
    """Return the names of the zones that a person can choose."""
    return "UTC", *sorted(name for name in zoneinfo.available_timezones() if name.startswith(_AREAS))


class UseTimeZone(MiddlewareMixin):
    """Activate the time zone that the signed-in person has chosen, while the request is answered."""

    def process_request(self, request: HttpRequest) -> None:
        timezone.deactivate()
        if settings.SESSION_COOKIE_NAME in request.COOKIES:
            name = getattr(request.user, "time_zone", "")
            if name and name in time_zones():
                # Not ZoneInfo("UTC"), which is the default zone: no choice.
                timezone.activate(datetime.UTC if name == "UTC" else zoneinfo.ZoneInfo(name))

    def process_response(self, request: HttpRequest, response: HttpResponse) -> HttpResponse:
        timezone.deactivate()
        return response
