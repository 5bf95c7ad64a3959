"""The page that compares two versions of a dataset: its changed, added and removed rows."""

from urllib.parse import urlencode

from django.http import HttpResponse
from django.shortcuts import render
from django.utils.cache import patch_vary_headers
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods

from apps.accounts.roles import Permission
from apps.datasets import queries
from apps.datasets.inspection.changes import Changes, find_changes, request_changes
from apps.datasets.models import DatasetVersion
from apps.interfaces.web.datasets.viewer import pretty
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view

_ROWS_SHOWN = 10


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.VIEW)
def changes(request: OrganizationRequest, file_id: str) -> HttpResponse:
    """Compare a version with the one that the address names, or else with the one before it.

    A POST has a task compare large files.
    """
    version = queries.get_version(organization=request.organization, id=file_id)
    others = queries.list_others(version=version)
    since = queries.find_compared(version=version, since=request.GET.get("since", ""))
    found = find_changes(version=version, since=since) if since else None
    is_waiting = since is not None and found is None
    if request.method == "POST" and since and is_waiting:
        request_changes(version=version, since=since)
    context: dict[str, object] = {
        "version": version,
        "since": since,
        "others": [
            (each.pk, gettext("Version %(number)s, %(filename)s") % {"number": each.number, "filename": each.filename})
            for each in others
        ],
        "is_waiting": is_waiting,
    }
    if since and found:
        context |= _listed(request, version, since, found)
    part = "#changes" if request.htmx else ""
    response = render(request, "datasets/changes.html" + part, context)
    patch_vary_headers(response, ["HX-Request"])
    return response


def _listed(
    request: OrganizationRequest, version: DatasetVersion, since: DatasetVersion, found: Changes
) -> dict[str, object]:
    kinds = {
        "changed": (gettext("Changed"), found.changed, found.first_changed),
        "added": (gettext("Added"), found.added, found.first_added),
        "removed": (gettext("Removed"), found.removed, found.first_removed),
    }
    asked = request.GET.get("show", "")
    show = asked if asked in kinds else next((kind for kind, (_, count, _) in kinds.items() if count), "changed")
    _, count, rows = kinds[show]
    skip = request.GET.get("skip", "")
    skipped = min(int(skip) if skip.isascii() and skip.isdigit() and len(skip) < 6 else 0, len(rows))

    def url(**query: object) -> str:
        return "?" + urlencode({"since": since.pk, "show": show} | query)

    return {
        "tabs": [
            {"label": label, "count": f"{number:,}", "url": url(show=kind), "current": kind == show}
            for kind, (label, number, _) in kinds.items()
        ],
        "rows": [
            {
                "old_line": row.old_line,
                "new_line": row.new_line,
                "before": _text(since, row.old_line),
                "after": _text(version, row.new_line),
            }
            for row in rows[skipped : skipped + _ROWS_SHOWN]
        ],
        "count": count,
        "listed_count": len(rows),
        "first": skipped + 1,
        "previous_url": url(skip=max(0, skipped - _ROWS_SHOWN)) if skipped else "",
        "next_url": url(skip=skipped + _ROWS_SHOWN) if skipped + _ROWS_SHOWN < len(rows) else "",
    }


def _text(version: DatasetVersion, line: int) -> str:
    rows = queries.read_rows(version=version, first_line=line, limit=1) if line else []
    return pretty(rows[0].raw) if rows else ""
