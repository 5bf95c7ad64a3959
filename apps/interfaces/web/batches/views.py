"""Batches: the list, the same rows as CSV, the page of one with its files, and the action that cancels some of them."""

from collections.abc import Sequence

from django.db.models import Q
from django.http import HttpResponse, HttpResponseBase, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.utils.cache import patch_vary_headers
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods, require_safe

from apps.accounts.queries import name_of_actor
from apps.accounts.roles import Permission, has_permission
from apps.adapters.queries import list_versions
from apps.batches import queries
from apps.batches.lifecycle import ACTIVE, BATCH_TRANSITIONS, BatchStatus
from apps.batches.models import Batch
from apps.batches.operations import cancel_batch
from apps.core import audit
from apps.core.database.clock import db_now
from apps.core.errors import NotFound
from apps.core.http.confirmation import AffectedRow, ConfirmedAction, confirm
from apps.core.messages.translation import later
from apps.core.templatetags.ui import number
from apps.interfaces.web.shell.access import OrganizationRequest, may_write, organization_view
from apps.interfaces.web.shell.code_samples import batch_samples
from apps.interfaces.web.shell.current_project import find_current_project, of_project
from apps.interfaces.web.shell.listing import NEWEST_FIRST, Filter, Listing, render_list

_STATES = {
    BatchStatus.COMPLETED: later("Completed"),
    BatchStatus.FAILED: later("Failed"),
    BatchStatus.EXPIRED: later("Expired"),
    BatchStatus.CANCELLED: later("Cancelled"),
}
_LIST = Listing[Batch](
    name=later("batches"),
    hint=later("File, model or ID"),
    url_name="web:batch_list",
    export_url_name="web:batch_export",
    searched=("input_file__filename", "model_name", "id"),
    filters={
        "status": Filter(
            later("State"),
            {"": (later("All"), Q()), "active": (later("In progress"), Q(status__in=ACTIVE))}
            | {status.value: (label, Q(status=status)) for status, label in _STATES.items()},
        )
    },
    orders=NEWEST_FIRST,
)
_EXPORTED = (
    "id", "file", "status", "endpoint", "model", "total", "completed", "failed", "input_tokens", "cached_tokens",
    "output_tokens", "created_at",
)  # fmt: skip


@require_safe
@organization_view(Permission.VIEW)
def index(request: OrganizationRequest) -> HttpResponse:
    project = find_current_project(request)
    page = _LIST.page(request, of_project(project, queries.list_batches(organization=request.organization)))
    context: dict[str, object] = {
        "project": project,
        "may_write": has_permission(request.membership.role, Permission.INFERENCE),
        "has_live": any(batch.status in ACTIVE for batch in page.rows),
    }
    if not request.htmx:
        newest = list_versions(organization=request.organization).first()
        context["samples"] = batch_samples(model=newest.model_name if newest else "…")
    return render_list(request, "batches/list.html", page, context)


@require_safe
@organization_view(Permission.VIEW)
def export(request: OrganizationRequest) -> HttpResponseBase:
    batches = of_project(find_current_project(request), queries.list_batches(organization=request.organization))
    return _LIST.export(request, batches, header=_EXPORTED, cells=_exported)


def _exported(batch: Batch) -> tuple[object, ...]:
    return (
        batch.pk, batch.input_file.filename, batch.status, batch.endpoint, batch.model_name, batch.total,
        batch.completed, batch.failed, batch.input_tokens, batch.cached_tokens, batch.output_tokens,
        batch.created_at.isoformat(),
    )  # fmt: skip


@require_safe
@organization_view(Permission.VIEW, is_of_any_project=True)
def detail(request: OrganizationRequest, batch_id: str) -> HttpResponse:
    """Show one batch. htmx reloads its state until it has ended."""
    batch = queries.get_batch(organization=request.organization, id=batch_id)
    answered = batch.completed + batch.failed
    files = (
        (gettext("Requests"), batch.input_file),
        (gettext("Answers"), batch.output_file),
        (gettext("Errors"), batch.error_file),
    )
    context = {
        "batch": batch,
        "owner": name_of_actor(organization=request.organization, actor=batch.created_by),
        "percent": 100 * answered // batch.total if batch.total else 0,
        "files": [(label, file) for label, file in files if file is not None],
        "is_live": batch.status in ACTIVE,
        "can_be_cancelled": _can_be_cancelled(batch) and may_write(request, Permission.INFERENCE, batch.project_id),
    }
    response = render(request, "batches/detail.html" + ("#state" if request.htmx else ""), context)
    patch_vary_headers(response, ["HX-Request"])
    return response


def _can_be_cancelled(batch: Batch) -> bool:
    return BatchStatus.CANCELLING in BATCH_TRANSITIONS[BatchStatus(batch.status)]


@require_safe
@organization_view(Permission.VIEW)
def download(request: OrganizationRequest, file_id: str) -> HttpResponse:
    """Redirect the browser to a link that is valid for a few minutes."""
    file = queries.find_file(organization=request.organization, id=file_id)
    if file is None:
        raise NotFound(gettext("No such %(nouns)s.") % {"nouns": gettext("file")})
    audit.record(
        organization=request.organization, by=request.membership.user_id, action="batch_file.downloaded",
        target=file.pk,
    )  # fmt: skip
    response = HttpResponseRedirect(queries.download_url(file=file))
    response.headers["Cache-Control"] = "no-store"
    return response


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.INFERENCE)
def cancel(request: OrganizationRequest) -> HttpResponse:
    """Cancel one or several batches, after the user typed the file's name or the number of batches."""
    return confirm(request, _CANCEL)


def _find(request: OrganizationRequest, ids: Sequence[str]) -> list[AffectedRow]:
    return [
        AffectedRow(
            batch.pk, batch.input_file.filename, _effect_of(batch), reverse("web:batch_detail", args=[batch.pk])
        )
        for batch in queries.list_batches(organization=request.organization).filter(pk__in=ids)
    ]


def _effect_of(batch: Batch) -> str:
    if not _can_be_cancelled(batch):
        return gettext("It can no longer be cancelled. Nothing changes.")
    if not batch.total:
        return gettext("No request is sent, and you pay nothing.")
    return gettext(
        "%(answered)s of %(total)s requests are done. You pay for them and get their file. The others are not sent."
    ) % {"answered": number(batch.completed + batch.failed), "total": number(batch.total)}


def _cancel(request: OrganizationRequest, batch_id: str) -> None:
    batch = queries.get_batch(organization=request.organization, id=batch_id)
    cancel_batch(batch=batch, by=request.membership.user_id, now=db_now())


_CANCEL = ConfirmedAction[OrganizationRequest](
    parameter="batch",
    verb=later("Cancel"),
    nouns=(later("batch"), later("batches")),
    warning=later("A cancelled batch cannot be continued."),
    done=later("Cancelling"),
    list_url_name="web:batch_list",
    list_title=later("Batches"),
    find=_find,
    act=_cancel,
)
