"""The context of every page's frame: the reader's organizations, the balance, what is running, the theme."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import cast

from django.conf import settings
from django.http import HttpRequest

from apps.accounts.login.viewing import viewing_of
from apps.accounts.members.visibility import seeing, sight_of_member
from apps.accounts.models import Organization
from apps.billing.queries import get_balance
from apps.core.database.tenancy import tenant
from apps.finetuning.lifecycle import JOB_ACTIVE
from apps.finetuning.queries import list_jobs
from apps.interfaces.web.shell.access import OrganizationRequest, find_membership, seeing_memberships, selection_of

THEME_COOKIE = "theme"
THEMES = ("light", "dark")


def context(request: HttpRequest) -> dict[str, object]:
    """Return the template context. Queries run only on pages that show their results.

    Pages of the operator console and error pages belong to no organization: they show the reader's current one.
    """
    user = getattr(request, "user", None)
    is_signed_in = bool(user and user.is_authenticated)
    if is_signed_in and not hasattr(request, "memberships"):
        with seeing_memberships(request):
            find_membership(request)
    organization = getattr(request, "organization", None)
    return {
        "theme": theme_of(request),
        "frame": "layouts/shell.html" if is_signed_in else "layouts/solo.html",
        "mail_folder": settings.MAIL_FOLDER,
        "organization": organization,
        "selection": selection_of(cast(OrganizationRequest, request)) if organization else "",
        "viewing": viewing_of(request),
        "membership": getattr(request, "membership", None),
        "memberships": getattr(request, "memberships", []),
    } | _figures(organization, lambda: _as_reader(request, organization))


def theme_of(request: HttpRequest) -> str:
    """Return the chosen theme; return "" to follow the system."""
    theme = request.COOKIES.get(THEME_COOKIE, "")
    return theme if theme in THEMES else ""


@contextmanager
def _as_reader(request: HttpRequest, organization: Organization | None) -> Iterator[None]:
    """Make the organization's rows visible, as far as the reader may see them.

    The organization's own views did so already.
    """
    membership = getattr(request, "membership", None)
    rows = nullcontext() if getattr(request, "is_inside", False) else tenant(organization=organization)
    with seeing(sight_of_member(membership) if membership else None), rows:
        yield


def _figures(
    organization: Organization | None, as_reader: Callable[[], AbstractContextManager[None]]
) -> dict[str, object]:
    if organization is None:
        return {"balance_nano": None, "nav_running_count": None}

    @cache
    def balance_nano() -> int:
        with as_reader():
            return get_balance(organization=organization).available_nano

    @cache
    def nav_running_count() -> int:
        with as_reader():
            return list_jobs(organization=organization).filter(status__in=JOB_ACTIVE).count()

    return {"balance_nano": balance_nano, "nav_running_count": nav_running_count}
