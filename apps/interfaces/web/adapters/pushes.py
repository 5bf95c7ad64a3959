"""Pushes of a model to the customer's repository on the hub: the form, and their state on the model's page."""

from collections.abc import Sequence
from dataclasses import dataclass

from django import forms
from django.conf import settings
from django.contrib import messages
from django.http import HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods

from apps.accounts.roles import Permission
from apps.adapters.models import AdapterVersion
from apps.adapters.queries import get_version
from apps.contracts.hyperparameters import Method
from apps.core.database.clock import db_now
from apps.core.http.forms import domain_errors_on
from apps.core.messages.translation import later
from apps.core.templatetags.statuses import StatusLabel
from apps.finetuning.conversions.orders import LABELS
from apps.finetuning.lifecycle import ConversionStatus
from apps.finetuning.models import HubPush
from apps.finetuning.results.hub_pushes import list_pushes, request_push
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view

_SHOWN = 5
_STATES = {
    ConversionStatus.WAITING: StatusLabel(later("Waiting"), "", "clock"),
    ConversionStatus.RUNNING: StatusLabel(later("Sending"), "info", live=True),
    ConversionStatus.SUCCEEDED: StatusLabel(later("Pushed"), "ok", "check"),
    ConversionStatus.FAILED: StatusLabel(later("Failed"), "bad", "circle-alert"),
    ConversionStatus.CANCELLED: StatusLabel(later("Cancelled"), "line", "ban"),
}
_PLAIN = {"autocomplete": "off", "autocapitalize": "off", "spellcheck": "false"}


@dataclass(frozen=True, kw_only=True)
class ShownPush:
    push: HubPush
    label: str
    state: StatusLabel
    url: str


class PushForm(forms.Form):
    repository = forms.CharField(
        max_length=200,
        label=later("Repository"),
        help_text=later("owner/name, as on the hub. If it does not exist, we create a private one."),
        widget=forms.TextInput(attrs=_PLAIN),
    )
    export = forms.ChoiceField(required=False, label=later("Files"))
    token = forms.CharField(
        max_length=400,
        label=later("Token of the hub"),
        help_text=later("A token that may write to the repository. It is used for this push, then erased."),
        widget=forms.PasswordInput(attrs=_PLAIN),
    )

    def __init__(self, data: QueryDict | None = None, *, version: AdapterVersion) -> None:
        super().__init__(data)
        kinds = ["", *(export["kind"] for export in version.exports)]
        self.fields["export"].choices = [  # type: ignore[attr-defined]
            (kind, _label(version, kind)) for kind in kinds
        ]


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.ADAPTER_WRITE)
def push(request: OrganizationRequest, version_id: str) -> HttpResponse:
    """Ask for the repository and a token that may write to it; a POST accepts the push."""
    version = get_version(organization=request.organization, id=version_id)
    form = PushForm(request.POST if request.method == "POST" else None, version=version)
    if form.is_valid():
        with domain_errors_on(form):
            request_push(version=version, by=request.membership.user_id, now=db_now(), **form.cleaned_data)
            messages.success(request, gettext("Accepted. This page shows when the files have arrived."))
            return redirect("web:adapter_detail", version_id=version.pk)
    context = {"form": form, "version": version, "hub_url": settings.HUB_URL, "is_on": settings.HUB_PUSHES}
    return render(request, "adapters/push.html", context, status=422 if form.errors else 200)


def shown_pushes(version: AdapterVersion) -> Sequence[ShownPush]:
    """Return the latest pushes of a version, newest first."""
    return [
        ShownPush(
            push=row,
            label=_label(version, row.export),
            state=_STATES[ConversionStatus(row.status)],
            url=f"{settings.HUB_URL}/{row.repository}",
        )
        for row in list_pushes(version=version)[:_SHOWN]
    ]


def _label(version: AdapterVersion, kind: str) -> str:
    if kind:
        return gettext(LABELS[kind])
    return gettext("Model") if version.method == Method.FULL else gettext("Adapter")
