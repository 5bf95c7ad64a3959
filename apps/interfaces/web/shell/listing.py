"""The lists of the dashboard: those of apps/core/database/listing.py, with the views that a member saves."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from django.http import HttpResponse

from apps.accounts.queries import list_saved_views
from apps.core.database import listing
from apps.core.database.listing import NEWEST_FIRST, Filter, Listing, ListPage
from apps.interfaces.web.shell.access import OrganizationRequest

__all__ = ["NEWEST_FIRST", "Filter", "Listing", "render_list"]


def render_list(
    request: OrganizationRequest,
    template: str,
    page: ListPage[Any],
    context: Mapping[str, object],
    *,
    status: int = 200,
) -> HttpResponse:
    """Return the page of a list, with its member's views; for htmx, only its partial `table`."""
    views = list_saved_views(membership=request.membership, listing=page.listing.url_name)
    return listing.render_list(request, template, replace(page, views=views), context, status=status)
