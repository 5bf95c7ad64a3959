"""Upload, download and deletion of a dataset's file."""

from django import forms
from django.conf import settings
from django.contrib import messages
from django.http import HttpResponse, HttpResponseRedirect
from django.shortcuts import redirect, render
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods, require_safe

from apps.accounts.roles import Permission
from apps.core import audit
from apps.core.database.clock import db_now
from apps.core.errors import DomainError
from apps.core.http.forms import domain_errors_on
from apps.core.messages.translation import later
from apps.core.objects.store import CHUNK_BYTES
from apps.datasets import operations, queries
from apps.datasets.intake import versions as intake
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view
from apps.interfaces.web.shell.current_project import offer_projects

IN_PARTS_FROM_BYTES = 32 * 1024**2  # smaller files go in one request: it is quicker, and sending it again costs little


class UploadForm(forms.Form):
    """One file with an optional name. The default is the file's own name; an existing name makes its next version."""

    name = forms.CharField(
        required=False,
        max_length=120,
        label=later("Name"),
        help_text=later("Defaults to the file name. Reuse a name to add a new version."),
        widget=forms.TextInput(attrs={"autocomplete": "off"}),
    )
    project = forms.ChoiceField(
        label=later("Project"), required=False, help_text=later("A private project hides the file from others.")
    )
    file = forms.FileField(label=later("File"), allow_empty_file=True, max_length=1000)

    def __init__(self, request: OrganizationRequest) -> None:
        data, files = (request.POST, request.FILES) if request.method == "POST" else (None, None)
        super().__init__(data, files)
        offer_projects(request, self.fields["project"])


def upload_command(separator: str = " ") -> str:
    """Return the shell command for the same upload, with its arguments joined by `separator`."""
    arguments = [
        f"curl {settings.PUBLIC_URL}/v1/files",
        '-H "Authorization: Bearer $ANNEAL_API_KEY"',
        "-F purpose=fine-tune",
        "-F file=@train.jsonl",
    ]
    return separator.join(arguments)


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.DATASET_WRITE)
def upload(request: OrganizationRequest) -> HttpResponse:
    """Accept a file from a form. It streams from disk to the store, and a task validates it."""
    form = UploadForm(request)
    if request.method == "POST" and form.is_valid():
        file = form.cleaned_data["file"]
        with domain_errors_on(form):
            version = intake.create_version(
                organization=request.organization,
                filename=file.name,
                purpose="fine-tune",
                chunks=file.chunks(CHUNK_BYTES),
                dataset_name=form.cleaned_data["name"] or None,
                by=request.membership.user_id,
                now=db_now(),
                project=form.cleaned_data["project"],
            )
            return redirect("web:dataset_detail", version.pk)
    context = {
        "form": form,
        "command": upload_command(" \\\n  "),
        "parts_from_bytes": IN_PARTS_FROM_BYTES,
        "max_upload_bytes": settings.MAX_UPLOAD_BYTES,
    }
    return render(request, "datasets/upload.html", context, status=422 if form.is_bound else 200)


# --- Download and delete ----------------------------------------------------------------------------------------------


@require_safe
@organization_view(Permission.VIEW)
def download(request: OrganizationRequest, file_id: str) -> HttpResponse:
    """Redirect the browser to a link that is valid for a few minutes."""
    version = queries.get_version(organization=request.organization, id=file_id)
    audit.record(
        organization=request.organization, by=request.membership.user_id, action="dataset.downloaded", target=version.pk
    )
    response = HttpResponseRedirect(queries.download_url(version=version))
    response.headers["Cache-Control"] = "no-store"
    return response


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.DATASET_WRITE, is_sensitive=True)
def delete(request: OrganizationRequest, file_id: str) -> HttpResponse:
    """Require the file's name typed in full, then delete it."""
    version = queries.get_version(organization=request.organization, id=file_id)
    context: dict[str, object] = {"version": version, "typed": version.filename}
    if request.method != "POST":
        return render(request, "datasets/delete.html", context)
    if request.POST.get("confirm", "").strip() != version.filename:
        context["problem"] = gettext("Type %(filename)s to confirm.") % {"filename": version.filename}
        return render(request, "datasets/delete.html", context, status=422)
    try:
        operations.delete_version(version=version, by=request.membership.user_id, now=db_now())
    except DomainError as error:
        context["problem"] = error.message
        return render(request, "datasets/delete.html", context, status=422)
    messages.success(request, gettext("%(filename)s was deleted.") % {"filename": version.filename})
    return redirect("web:dataset_list")
