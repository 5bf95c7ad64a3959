"""The pages that assign a file's columns, with a preview of its first rows, and that repair bad rows."""

from django.http import HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.utils.translation import gettext, gettext_noop
from django.views.decorators.http import require_http_methods, require_POST

from apps.accounts.roles import Permission
from apps.core.database.clock import db_now
from apps.core.errors import DomainError
from apps.core.http.forms import domain_errors_shown
from apps.core.messages.translation import translated
from apps.datasets import operations, queries
from apps.datasets.inspection.repair_preview import RepairPreview, preview_repair
from apps.datasets.intake import revisions
from apps.datasets.models import DatasetVersion
from apps.datasets.validation.formats import FIELDS, LABELS, Format, Mapping, check_mapping
from apps.datasets.validation.preview import preview, suggest
from apps.datasets.validation.repair import RepairMode
from apps.interfaces.web.datasets.address import seen_newest
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view

_ROWS_PREVIEWED = 10
# The fields of all formats, as readers of other languages see them.
FIELD_WORDS = (
    gettext_noop("messages"), gettext_noop("tools"), gettext_noop("parallel tool calls"), gettext_noop("conversations"),
    gettext_noop("system"), gettext_noop("input"), gettext_noop("preferred output"),
    gettext_noop("non preferred output"), gettext_noop("prompt"), gettext_noop("chosen"), gettext_noop("rejected"),
    gettext_noop("instruction"), gettext_noop("output"), gettext_noop("completion"), gettext_noop("text"),
)  # fmt: skip


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.DATASET_WRITE)
def columns(request: OrganizationRequest, file_id: str) -> HttpResponse:
    """Show the columns under the chosen format; a POST converts the file, unless it only asks for a preview."""
    version = queries.get_version(organization=request.organization, id=file_id)
    data = request.POST if request.method == "POST" else request.GET
    mapping = _chosen(version, data)
    problem = ""
    if request.method == "POST" and data.get("action") != "preview":
        try:
            mapped = revisions.remap_version(
                version=version,
                mapping=check_mapping(mapping),
                by=request.membership.user_id,
                now=db_now(),
            )
            return redirect("web:dataset_detail", mapped.pk)
        except DomainError as error:
            problem = translated(error.message)
    context = _context(version, mapping) | {"problem": problem}
    return render(request, "datasets/columns.html", context, status=422 if problem else 200)


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.DATASET_WRITE)
def repair(request: OrganizationRequest, file_id: str) -> HttpResponse:
    """Show what a repair would do; a POST creates a new version without the bad rows, or with them fixed."""
    version = queries.get_version(organization=request.organization, id=file_id)
    data = request.POST if request.method == "POST" else request.GET
    mode = RepairMode.DROP if data.get("mode") == RepairMode.DROP else RepairMode.REPAIR
    if request.method != "POST":
        return render(request, "datasets/repair.html", _repair_context(version, mode, request.GET.get("skip", "")))
    with domain_errors_shown(request):
        repaired = revisions.repair_version(
            version=version,
            mode=mode,
            by=request.membership.user_id,
            now=db_now(),
            newest=seen_newest(request),
        )
        return redirect("web:dataset_detail", repaired.pk)
    return redirect("web:dataset_detail", version.pk)


def _repair_context(version: DatasetVersion, mode: RepairMode, skip: str) -> dict[str, object]:
    skipped = int(skip) if skip.isascii() and skip.isdigit() and len(skip) < 6 else 0
    shown = preview_repair(version=version, mode=mode, skip=skipped, limit=_ROWS_PREVIEWED)
    after = skipped + _ROWS_PREVIEWED
    tabs = [
        {"label": label, "url": f"?mode={each}", "current": each == mode}
        for each, label in (
            (RepairMode.REPAIR, gettext("Fix what can be fixed")),
            (RepairMode.DROP, gettext("Remove bad rows")),
        )
    ]
    return {
        "version": version,
        "newest": revisions.newest_number(version),
        "mode": mode,
        "tabs": tabs,
        "preview": shown,
        "save_text": _save_text(shown, mode),
        "first": skipped + 1,
        "previous_url": f"?mode={mode}&skip={max(0, skipped - _ROWS_PREVIEWED)}" if skipped else "",
        "next_url": f"?mode={mode}&skip={after}" if after < shown.listed else "",
    }


def _save_text(shown: RepairPreview, mode: RepairMode) -> str:
    """Return the button's text: how many rows it changes and removes, as far as they are known."""
    if mode is RepairMode.DROP:
        return gettext("Save as new version: %(removed)s removed") % {"removed": f"{shown.total:,}"}
    if shown.fixed is None or shown.listed < shown.total:
        return gettext("Save as new version: %(rows)s fixed or removed") % {"rows": f"{shown.total:,}"}
    return gettext("Save as new version: %(fixed)s fixed, %(removed)s removed") % {
        "fixed": f"{shown.fixed:,}",
        "removed": f"{shown.total - shown.fixed:,}",
    }


@require_POST
@organization_view(Permission.DATASET_WRITE)
def dismiss(request: OrganizationRequest, file_id: str) -> HttpResponse:
    """Remove a file with errors from the overview."""
    version = queries.get_version(organization=request.organization, id=file_id)
    operations.dismiss_errors(version=version, by=request.membership.user_id, now=db_now())
    return redirect("web:overview")


def _chosen(version: DatasetVersion, data: QueryDict) -> Mapping:
    """Return the form's mapping. If it has none for its format, return the stored mapping or suggest one."""
    known = version.layout.mapping
    wanted = data.get("format", "")
    if wanted not in FIELDS:
        return known or suggest(version, Format.PROMPT_COMPLETION)
    format = Format(wanted)
    if data.get("for") != format:  # the format was changed: its columns have not been asked for yet
        return known if known and known.format == format else suggest(version, format)
    present = version.layout.columns
    columns = {field.name: data.get(f"column.{field.name}", "") for field in FIELDS[format]}
    return Mapping(format=format, columns={name: column for name, column in columns.items() if column in present})


def _label(name: str) -> str:
    """Return a field's name in the reader's language, with the name in files if that differs."""
    words = name.replace("_", " ")
    shown = gettext(words)
    return shown if shown.lower() == words else f"{shown} ({name})"


def _context(version: DatasetVersion, mapping: Mapping) -> dict[str, object]:
    fields = FIELDS[mapping.format]
    is_complete = all(field.name in mapping.columns for field in fields if field.is_required)
    shown = preview(version=version, mapping=mapping if is_complete else None)
    names = [(name, name) for name in shown.columns]
    return {
        "version": version,
        "mapping": mapping,
        "formats": [(str(format), translated(label)) for format, label in LABELS.items()],
        "fields": [
            {
                "name": field.name,
                "label": _label(field.name),
                "is_required": field.is_required,
                "value": mapping.columns.get(field.name, ""),
            }
            for field in fields
        ],
        "columns": names,
        "preview": shown,
        "is_complete": is_complete,
    }
