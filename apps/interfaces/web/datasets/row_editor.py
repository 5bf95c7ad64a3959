"""The page that edits or deletes one row, and the buttons that restore or split a version. Each makes a new version."""

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods, require_POST

from apps.accounts.queries import name_of_actor
from apps.accounts.roles import Permission
from apps.contracts.splits.split import Split
from apps.core.database.clock import db_now
from apps.core.errors import DomainError, NotFound
from apps.core.http.confirmation import say_undoable
from apps.core.http.forms import LARGEST_INTEGER, domain_errors_shown
from apps.datasets import queries
from apps.datasets.intake import edits, splits
from apps.interfaces.web.datasets.address import seen_newest, viewer_url
from apps.interfaces.web.datasets.viewer import pretty
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.DATASET_WRITE)
def edit(request: OrganizationRequest, file_id: str) -> HttpResponse:
    """Show one row as JSON. A POST makes a new version with the edited row, or without it."""
    version = queries.get_version(organization=request.organization, id=file_id)
    line, text, problem = _number(request.GET.get("line", "1")), request.POST.get("row"), ""
    if request.method == "POST":
        try:
            edited = edits.edit_row(
                version=version,
                line=line,
                text=None if request.POST.get("action") == "delete" else text or "",
                newest=_number(request.POST.get("newest", "")),
                by=request.membership.user_id,
                now=db_now(),
            )
            say_undoable(
                request,
                gettext("Version %(number)s has your change. Version %(number2)s is kept.")
                % {"number": edited.number, "number2": version.number},
                url=reverse("web:dataset_restore", args=[version.pk]),
                newest=str(edited.number),
            )
            return redirect(viewer_url(edited.pk, request.GET, line))
        except NotFound:
            raise
        except DomainError as error:
            problem = error.message
    if text is None:
        try:
            text = pretty(edits.read_editable_row(version=version, line=line))
        except NotFound:
            raise
        except DomainError as error:
            problem = error.message
    newest = queries.list_siblings(version=version).first() or version
    context = {
        "version": version,
        "line": line,
        "text": text,
        "problem": problem,
        "newest": newest,
        "newest_by": name_of_actor(organization=request.organization, actor=newest.created_by),
        "newest_url": viewer_url(newest.pk, request.GET, line),
        "back_url": viewer_url(version.pk, request.GET, line),
    }
    return render(request, "datasets/row.html", context, status=422 if problem else 200)


@require_POST
@organization_view(Permission.DATASET_WRITE)
def restore(request: OrganizationRequest, file_id: str) -> HttpResponse:
    """Copy an earlier version, so that the copy is the newest."""
    version = queries.get_version(organization=request.organization, id=file_id)
    with domain_errors_shown(request):
        restored = edits.restore_version(
            version=version,
            by=request.membership.user_id,
            now=db_now(),
            newest=seen_newest(request),
        )
        messages.success(
            request,
            gettext("Version %(number)s is a copy of version %(number2)s.")
            % {"number": restored.number, "number2": version.number},
        )
        return redirect("web:dataset_detail", restored.pk)
    return redirect("web:dataset_detail", version.pk)


@require_POST
@organization_view(Permission.DATASET_WRITE)
def split(request: OrganizationRequest, file_id: str) -> HttpResponse:
    """Save the training rows and the validation rows as two datasets, and show the first beside the second."""
    version = queries.get_version(organization=request.organization, id=file_id)
    share, seed = (_number(request.POST.get(name, "")) for name in ("share", "seed"))
    with domain_errors_shown(request):
        trained, held = splits.split_version(
            version=version, split=Split(share / 100, seed), by=request.membership.user_id, now=db_now()
        )
        messages.success(
            request,
            gettext("The rows are in two new datasets: %(name)s and %(name2)s.")
            % {"name": trained.dataset.name, "name2": held.dataset.name},
        )
        return redirect(f"{reverse('web:dataset_detail', args=[trained.pk])}?share=0&against={held.pk}")
    return redirect("web:dataset_detail", version.pk)


def _number(text: str) -> int:
    return min(int(text), LARGEST_INTEGER) if text.isascii() and text.isdigit() and len(text) < 12 else 0
