"""The keys of experiment trackers: list, store, delete."""

from django import forms
from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods, require_POST

from apps.accounts.roles import Permission, has_permission
from apps.core.database.clock import db_now
from apps.core.http.forms import domain_errors_on
from apps.core.messages.translation import later
from apps.finetuning.runs.trackers import NAMES, list_tracker_keys, remove_tracker_key, store_tracker_key
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view, require


class TrackerForm(forms.Form):
    kind = forms.ChoiceField(label=later("Tracker"), choices=list(NAMES.items()))
    key = forms.CharField(
        label=later("Key or token"),
        max_length=400,
        widget=forms.PasswordInput({"autocomplete": "off"}),
        help_text=later("Stored encrypted, sent only to the tracker, and never shown again."),
    )
    url = forms.CharField(
        label=later("Tracking server"),
        max_length=400,
        required=False,
        help_text=later("For MLflow only, such as https://mlflow.example.com."),
    )


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.VIEW)
def index(request: OrganizationRequest) -> HttpResponse:
    """Show which keys are stored; a POST stores one."""
    form = TrackerForm(request.POST or None)
    if request.method == "POST":
        require(request.membership, Permission.JOB_WRITE)
        if form.is_valid():
            given = form.cleaned_data
            with domain_errors_on(form):
                store_tracker_key(
                    organization=request.organization,
                    kind=given["kind"],
                    secret=given["key"],
                    url=given["url"],
                    by=request.membership.user_id,
                    now=db_now(),
                )
                messages.success(request, gettext("The key of %(kind)s is stored.") % {"kind": NAMES[given["kind"]]})
                return redirect("web:tracker_list")
    context = {
        "form": form,
        "trackers": [
            {"row": row, "name": NAMES[row.kind]} for row in list_tracker_keys(organization=request.organization)
        ],
        "may_change": has_permission(request.membership.role, Permission.JOB_WRITE),
    }
    return render(request, "account/organization/trackers.html", context, status=422 if form.errors else 200)


@require_POST
@organization_view(Permission.JOB_WRITE)
def remove(request: OrganizationRequest, kind: str) -> HttpResponse:
    remove_tracker_key(organization=request.organization, kind=kind, by=request.membership.user_id)
    messages.success(request, gettext("The key of %(kind)s is removed.") % {"kind": NAMES[kind]})
    return redirect("web:tracker_list")
