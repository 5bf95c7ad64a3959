"""What the frame of every page shows: the organizations of the reader, the balance, what is running, the theme."""

from functools import cache
from typing import Any

from django.conf import settings
from django.http import HttpRequest

from apps.accounts.models import Organization
from apps.billing.queries import get_balance
from apps.finetuning.models import FineTuningJob

THEME_COOKIE = "theme"
THEMES = ("light", "dark")
_ACTIVE = ("validating_files", "queued", "running", "pausing")


def context(request: HttpRequest) -> dict[str, Any]:
    """Template context processor; what needs a query is asked only by a page that shows it."""
    organization = getattr(request, "organization", None)
    return {
        "theme": theme_of(request),
        "mail_folder": settings.MAIL_FOLDER,
        "organization": organization,
        "membership": getattr(request, "membership", None),
        "memberships": getattr(request, "memberships", []),
    } | _figures(organization)


def theme_of(request: HttpRequest) -> str:
    """Return the chosen theme, "" to follow the system."""
    theme = request.COOKIES.get(THEME_COOKIE, "")
    return theme if theme in THEMES else ""


def _figures(organization: Organization | None) -> dict[str, Any]:
    if organization is None:
        return {"balance_nano": None, "nav_running_count": None}

    @cache
    def balance_nano() -> int:
        return get_balance(organization=organization).available_nano

    @cache
    def nav_running_count() -> int:
        return FineTuningJob.objects.for_organization(organization).filter(status__in=_ACTIVE).count()

    return {"balance_nano": balance_nano, "nav_running_count": nav_running_count}
