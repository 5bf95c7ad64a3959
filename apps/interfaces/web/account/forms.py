"""Forms of members, API keys and organizations."""

import datetime
from collections.abc import Iterable
from dataclasses import fields

from django import forms
from django.conf import settings
from django.http import QueryDict
from django.utils.translation import gettext

from apps.accounts.models import Membership, Project, default_project_id
from apps.accounts.queries import KeyLimits
from apps.accounts.roles import ROLES, SCOPES, Permission, has_permission
from apps.core.http.forms import LARGEST_INTEGER
from apps.core.messages.translation import later
from apps.interfaces.web.shell.preferences import time_zones

ROLE_WORDS = {
    "viewer": later("Read-only access"),
    "member": later("Works with datasets, jobs and adapters, calls models, and creates own keys"),
    "admin": later(
        "Everything a member can do, plus manage members and webhooks, delete adapters and read the audit log"
    ),
    "owner": later("Full control, including organization settings"),
}
SCOPE_WORDS = {
    Permission.VIEW: later("Read everything except other private projects and the audit log"),
    Permission.DATASET_WRITE: later("Upload and delete datasets"),
    Permission.JOB_WRITE: later("Start and stop fine-tunes and retraining, accept licences, and store tracker keys"),
    Permission.ADAPTER_WRITE: later("Upload, deploy, convert and push adapters, and move aliases"),
    Permission.ADAPTER_DELETE: later("Delete adapters"),
    Permission.INFERENCE: later("Call models, and run batches and evals"),
    Permission.AUDIT_READ: later("Read the audit log"),
    Permission.KEY_MANAGE: later("Create, rotate and revoke API keys that may do no more than this one"),
    Permission.MEMBER_MANAGE: later("Manage members, service accounts and projects"),
    Permission.ORGANIZATION_MANAGE: later("Set budgets and allowances, and see all private projects"),
    Permission.WEBHOOK_MANAGE: later("Manage webhooks"),
}
EXPIRY_DAYS = {"30": later("30 days"), "90": later("90 days"), "365": later("One year"), "": later("Never")}


class PersonForm(forms.Form):
    name = forms.CharField(
        max_length=120, required=False, label=later("Your name"), widget=forms.TextInput({"autocomplete": "name"})
    )
    time_zone = forms.ChoiceField(
        required=False,
        label=later("Time zone"),
        choices=lambda: [
            ("", gettext("The zone of this browser")),
            *((name, name.replace("_", " ")) for name in time_zones()),
        ],
        help_text=later("For the times on all pages. The API and exports stay in UTC."),
    )
    language = forms.ChoiceField(
        required=False,
        label=later("Language"),
        choices=lambda: [("", gettext("The language of this browser")), *settings.LANGUAGES],
        help_text=later("For pages and emails. The API and logs stay in English."),
    )
    wants_job_mail = forms.BooleanField(
        required=False,
        label=later("Fine-tunes that you created"),
        help_text=later("When one succeeds, fails or is paused."),
    )
    wants_balance_mail = forms.BooleanField(
        required=False,
        label=later("Low balance"),
        help_text=later("When the balance is below 3 days of spending. For owners and admins, at most daily."),
    )
    wants_budget_mail = forms.BooleanField(
        required=False, label=later("Budgets"), help_text=later("At each threshold of a budget. For owners and admins.")
    )
    wants_invoice_mail = forms.BooleanField(
        required=False, label=later("Invoices"), help_text=later("After each month with charges. For owners.")
    )

    def clean_name(self) -> str:
        return " ".join(self.cleaned_data["name"].split())


class OrganizationForm(forms.Form):
    name = forms.CharField(max_length=80, label=later("Name"), widget=forms.TextInput({"autocomplete": "organization"}))


class InviteForm(forms.Form):
    email = forms.EmailField(label=later("Email"), widget=forms.EmailInput({"autocomplete": "off"}))
    role = forms.ChoiceField(label=later("Role"), initial="member")
    accepted_by = forms.ChoiceField(
        label=later("Who can accept"),
        required=False,
        choices=[("address", later("Only the owner of this address")), ("anyone", later("Anyone with the link, once"))],
    )

    def only_for_address(self) -> bool | None:
        """Return the choice made; return None to decide by the role."""
        chosen = self.cleaned_data["accepted_by"]
        return chosen == "address" if chosen else None

    def __init__(self, data: QueryDict | None = None, *, by: Membership) -> None:
        super().__init__(data)
        self.fields["role"].choices = [(role, gettext(role).capitalize()) for role in grantable_roles(by)]  # type: ignore[attr-defined]


def grantable_roles(by: Membership) -> list[str]:
    """Return the roles that a member may give: those without any permission that the member lacks."""
    return [name for name, role in ROLES.items() if role.permissions <= ROLES[by.role].permissions]


_NOT_AT_FIRST = {
    Permission.ADAPTER_DELETE,
    Permission.AUDIT_READ,
    Permission.KEY_MANAGE,
    Permission.MEMBER_MANAGE,
    Permission.ORGANIZATION_MANAGE,
    Permission.WEBHOOK_MANAGE,
}
_OWN_LIMIT = later("For model calls with this key. Leave empty to use only the organization's limits.")


class KeyForm(forms.Form):
    project = forms.ChoiceField(
        label=later("Project"), required=False, help_text=later("Everything created with this key is in this project.")
    )
    service_account = forms.ChoiceField(
        label=later("Acts for"),
        required=False,
        help_text=later(
            "Your own keys end when you leave. Keys of a service account stay, unless they manage members, keys or the "
            "organization."
        ),
    )
    name = forms.CharField(max_length=80, label=later("Name"), help_text=later("Such as “nightly evaluation”."))
    scopes = forms.MultipleChoiceField(
        label=later("Permissions"),
        widget=forms.CheckboxSelectMultiple,
        error_messages={"required": later("Choose at least one.")},
    )
    expires = forms.ChoiceField(
        label=later("Expires after"), required=False, choices=list(EXPIRY_DAYS.items()), initial="90"
    )
    requests_per_minute = forms.IntegerField(
        min_value=1, max_value=LARGEST_INTEGER, required=False, label=later("Requests per minute"), help_text=_OWN_LIMIT
    )
    tokens_per_minute = forms.IntegerField(
        min_value=1, max_value=LARGEST_INTEGER, required=False, label=later("Tokens per minute")
    )
    concurrent_requests = forms.IntegerField(
        min_value=1, max_value=LARGEST_INTEGER, required=False, label=later("Concurrent requests")
    )

    def __init__(
        self,
        data: QueryDict | None = None,
        *,
        by: Membership,
        service_accounts: Iterable[Membership] = (),
        projects: Iterable[Project] = (),
        project: Project | None = None,
    ) -> None:
        super().__init__(data)
        self.fields["project"].choices = [(each.pk, each.name) for each in projects]  # type: ignore[attr-defined]
        self.fields["project"].initial = project.pk if project else default_project_id(by.organization_id)
        may_manage, grantable = has_permission(by.role, Permission.MEMBER_MANAGE), grantable_roles(by)
        offered = [(each.pk, str(each.user)) for each in service_accounts if may_manage and each.role in grantable]
        self.fields["service_account"].choices = [("", gettext("You")), *offered]  # type: ignore[attr-defined]
        held = [scope for scope in SCOPES if has_permission(by.role, Permission(scope))]
        self.fields["scopes"].choices = [(scope, SCOPE_WORDS[Permission(scope)]) for scope in held]  # type: ignore[attr-defined]
        self.fields["scopes"].initial = [scope for scope in held if scope not in _NOT_AT_FIRST]

    def expires_at(self, now: datetime.datetime) -> datetime.datetime | None:
        """Return the chosen moment; return None for never."""
        days = self.cleaned_data["expires"]
        return now + datetime.timedelta(days=int(days)) if days else None

    def limits(self) -> KeyLimits:
        return KeyLimits(**{field.name: self.cleaned_data[field.name] for field in fields(KeyLimits)})
