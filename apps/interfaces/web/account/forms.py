"""Forms of members, API keys and organizations."""

import datetime
from dataclasses import fields

from django import forms
from django.conf import settings
from django.http import QueryDict

from apps.accounts.models import Membership
from apps.accounts.queries import KeyLimits
from apps.accounts.roles import ROLES, SCOPES, Permission, has_permission
from apps.core.http.forms import LARGEST_INTEGER
from apps.interfaces.web.shell.preferences import time_zones

ROLE_WORDS = {
    "viewer": "Read-only access",
    "member": "Works with datasets, jobs and adapters, calls models, and creates own keys",
    "admin": "Everything a member can do, plus manage members, delete adapters and read the audit log",
    "owner": "Full control, including organization settings",
}
SCOPE_WORDS = {
    Permission.VIEW: "Read everything",
    Permission.DATASET_WRITE: "Upload and delete datasets",
    Permission.JOB_WRITE: "Create and cancel fine-tuning jobs",
    Permission.ADAPTER_WRITE: "Deploy and undeploy adapters",
    Permission.ADAPTER_DELETE: "Delete adapters",
    Permission.INFERENCE: "Call models: chat and completions",
    Permission.AUDIT_READ: "Read the audit log",
}
EXPIRY_DAYS = {"30": "30 days", "90": "90 days", "365": "One year", "": "Never"}


class PersonForm(forms.Form):
    name = forms.CharField(
        max_length=120, required=False, label="Your name", widget=forms.TextInput({"autocomplete": "name"})
    )
    time_zone = forms.ChoiceField(
        required=False,
        label="Time zone",
        choices=lambda: [("", "The zone of this browser"), *((name, name.replace("_", " ")) for name in time_zones())],
        help_text="For the times on all pages. The API and exports stay in UTC.",
    )
    language = forms.ChoiceField(
        required=False,
        label="Language",
        choices=lambda: [("", "The language of this browser"), *settings.LANGUAGES],
        help_text="For pages and emails. The API and logs stay in English.",
    )
    wants_job_mail = forms.BooleanField(
        required=False,
        label="Fine-tunes that you created",
        help_text="When one succeeds, fails or is paused.",
    )
    wants_balance_mail = forms.BooleanField(
        required=False,
        label="Low balance",
        help_text="When the balance is below 3 days of spending. For owners and admins, at most daily.",
    )
    wants_budget_mail = forms.BooleanField(
        required=False, label="Budgets", help_text="At each threshold of a budget. For owners and admins."
    )
    wants_invoice_mail = forms.BooleanField(
        required=False, label="Invoices", help_text="After each month with charges. For owners."
    )

    def clean_name(self) -> str:
        return " ".join(self.cleaned_data["name"].split())


class OrganizationForm(forms.Form):
    name = forms.CharField(max_length=80, label="Name", widget=forms.TextInput({"autocomplete": "organization"}))


class InviteForm(forms.Form):
    email = forms.EmailField(label="Email", widget=forms.EmailInput({"autocomplete": "off"}))
    role = forms.ChoiceField(label="Role", initial="member")
    accepted_by = forms.ChoiceField(
        label="Who can accept",
        required=False,
        choices=[("address", "Only the owner of this address"), ("anyone", "Anyone with the link, once")],
    )

    def only_for_address(self) -> bool | None:
        """Return the choice made; return None to decide by the role."""
        chosen = self.cleaned_data["accepted_by"]
        return chosen == "address" if chosen else None

    def __init__(self, data: QueryDict | None = None, *, by: Membership) -> None:
        super().__init__(data)
        self.fields["role"].choices = [(role, role.capitalize()) for role in grantable_roles(by)]  # type: ignore[attr-defined]


def grantable_roles(by: Membership) -> list[str]:
    """Return the roles that a member may give: those without any permission that the member lacks."""
    return [name for name, role in ROLES.items() if role.permissions <= ROLES[by.role].permissions]


_NOT_AT_FIRST = {Permission.ADAPTER_DELETE, Permission.AUDIT_READ}
_OWN_LIMIT = "For model calls with this key. Leave empty to use only the organization's limits."


class KeyForm(forms.Form):
    name = forms.CharField(max_length=80, label="Name", help_text="Such as “nightly evaluation”.")
    scopes = forms.MultipleChoiceField(
        label="Permissions", widget=forms.CheckboxSelectMultiple, error_messages={"required": "Choose at least one."}
    )
    expires = forms.ChoiceField(label="Expires after", required=False, choices=list(EXPIRY_DAYS.items()), initial="90")
    requests_per_minute = forms.IntegerField(
        min_value=1, max_value=LARGEST_INTEGER, required=False, label="Requests per minute", help_text=_OWN_LIMIT
    )
    tokens_per_minute = forms.IntegerField(
        min_value=1, max_value=LARGEST_INTEGER, required=False, label="Tokens per minute"
    )
    concurrent_requests = forms.IntegerField(
        min_value=1, max_value=LARGEST_INTEGER, required=False, label="Concurrent requests"
    )

    def __init__(self, data: QueryDict | None = None, *, by: Membership) -> None:
        super().__init__(data)
        held = [scope for scope in SCOPES if has_permission(by.role, Permission(scope))]
        self.fields["scopes"].choices = [(scope, SCOPE_WORDS[Permission(scope)]) for scope in held]  # type: ignore[attr-defined]
        self.fields["scopes"].initial = [scope for scope in held if scope not in _NOT_AT_FIRST]

    def expires_at(self, now: datetime.datetime) -> datetime.datetime | None:
        """Return the chosen moment; return None for never."""
        days = self.cleaned_data["expires"]
        return now + datetime.timedelta(days=int(days)) if days else None

    def limits(self) -> KeyLimits:
        return KeyLimits(**{field.name: self.cleaned_data[field.name] for field in fields(KeyLimits)})
