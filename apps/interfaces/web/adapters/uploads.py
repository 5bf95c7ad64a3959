"""The page that uploads an adapter trained elsewhere."""

from django import forms
from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods

from apps.accounts.roles import Permission
from apps.catalog.queries import list_base_models
from apps.contracts.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from apps.core.database.clock import db_now
from apps.core.http.forms import domain_errors_on
from apps.core.messages.translation import later
from apps.core.objects.store import CHUNK_BYTES
from apps.finetuning.recipes.limits import SERVABLE_RANKS
from apps.finetuning.results.uploaded_adapters import MAX_BYTES, upload_adapter
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view
from apps.interfaces.web.shell.current_project import offer_projects


class AdapterUploadForm(forms.Form):
    name = forms.CharField(
        max_length=64, label=later("Name"), help_text=later("Part of the model's name, such as “support”.")
    )
    base_model = forms.ChoiceField(
        required=False,
        label=later("Base model"),
        help_text=later("The model that the adapter was trained on."),
        choices=lambda: [
            ("", gettext("As the configuration says")),
            *((each.name, each.display_name) for each in list_base_models(only_installed=True)),
        ],
    )
    project = forms.ChoiceField(
        label=later("Project"), required=False, help_text=later("A private project hides the model from others.")
    )
    adapter_config = forms.FileField(label=CONFIG_FILE, widget=forms.FileInput({"accept": ".json"}))
    weights = forms.FileField(label=WEIGHTS_FILE, widget=forms.FileInput({"accept": ".safetensors"}))

    def __init__(self, request: OrganizationRequest) -> None:
        data, files = (request.POST, request.FILES) if request.method == "POST" else (None, None)
        super().__init__(data, files)
        offer_projects(request, self.fields["project"])


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.ADAPTER_WRITE)
def upload(request: OrganizationRequest) -> HttpResponse:
    """Ask for the two files that PEFT writes; a POST checks them and serves the adapter."""
    form = AdapterUploadForm(request)
    if request.method == "POST" and form.is_valid():
        sent = form.cleaned_data
        with domain_errors_on(form):
            version = upload_adapter(
                organization=request.organization,
                name=sent["name"],
                config=sent["adapter_config"].chunks(CHUNK_BYTES),
                weights=sent["weights"].chunks(CHUNK_BYTES),
                base_model=sent["base_model"],
                project=sent["project"],
                by=request.membership.user_id,
                now=db_now(),
            )
            messages.success(
                request, gettext("The adapter is uploaded. A trainer examines it, and then an engine tries it.")
            )
            return redirect("web:adapter_detail", version_id=version.pk)
    context = {"form": form, "max_bytes": MAX_BYTES, "max_rank": max(SERVABLE_RANKS)}
    return render(request, "adapters/upload.html", context, status=422 if form.errors else 200)
