"""Forms for budgets, quotas and spending."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from django import forms
from django.db.models import QuerySet
from django.db.models.functions import Now
from django.http import QueryDict
from django.utils.translation import gettext

from apps.accounts.members.projects import list_projects
from apps.accounts.models import ApiKey, Organization
from apps.accounts.queries import list_keys, names_of_creators
from apps.billing.budget_settings import DEFAULT_THRESHOLDS
from apps.billing.models import BudgetMode, BudgetScope
from apps.core.http.forms import LARGEST_INTEGER
from apps.core.messages.translation import later
from apps.core.templatetags.ui import bytes_, duration, number
from apps.finetuning.models import AllowanceScope
from apps.finetuning.usage.allowances import ALLOWED
from apps.finetuning.usage.quota_use import RecentUse, TargetUse

_ASKED_FOR: dict[str, str] = {
    BudgetScope.KEY: later("Choose an API key."),
    BudgetScope.MEMBER: later("Choose a member."),
    BudgetScope.PROJECT: later("Choose a project."),
    BudgetScope.LABEL: later("Enter a label as name=value, such as team=search."),
}
# Limits of an allowance that are entered in a larger unit: the field, how many units it is, and its decimal places.
IN_UNITS = {"gpu_seconds_per_month": ("gpu_hours", 3600, 4), "storage_bytes": ("storage_gb", 10**9, 9)}


def _from_address(asked: Mapping[str, str] | None) -> dict[str, str]:
    return {name: value for name, value in (asked or {}).items() if name in ("scope", "project")}


def _usable_keys(organization: Organization) -> QuerySet[ApiKey]:
    """Return the keys that are neither revoked nor expired. Their number is limited, so all can be listed."""
    return list_keys(organization=organization).filter(revoked_at=None).exclude(expires_at__lte=Now())


class _ScopedForm(forms.Form):
    """The target of a limit. The field `scope` decides which of the other fields names it."""

    member = forms.ChoiceField(required=False, label=later("Member"))
    project = forms.ChoiceField(required=False, label=later("Project"))
    label = forms.CharField(
        max_length=577, required=False, label=later("Label"), help_text=later("name=value, such as team=search")
    )

    def __init__(self, data: QueryDict | None, *, organization: Organization, initial: Mapping[str, object]) -> None:
        super().__init__(data, initial=dict(initial))
        creators = names_of_creators(organization=organization).items()
        projects = ((each.pk, each.name) for each in list_projects(organization=organization))
        self.fields["member"].choices = [("", "–"), *creators]  # type: ignore[attr-defined]
        self.fields["project"].choices = [("", "–"), *projects]  # type: ignore[attr-defined]

    def clean(self) -> dict[str, Any]:
        """Require the field of the chosen scope; the page shows only this one."""
        cleaned: dict[str, Any] = super().clean() or self.cleaned_data
        scope = cleaned.get("scope", "")
        if scope in _ASKED_FOR and not cleaned.get(scope) and scope not in self.errors:
            self.add_error(scope, _ASKED_FOR[scope])
        return cleaned


class BudgetForm(_ScopedForm):
    """A budget. A checked form has its `target`: `name=value` of a label, or the id of a key, member or project.

    `asked` is the query of the address, which may choose the scope and a project.
    """

    field_order = ("scope", "key", "member", "project", "label")

    scope = forms.ChoiceField(choices=[(each.value, later(each.label)) for each in BudgetScope], label=later("For"))
    key = forms.ChoiceField(required=False, label=later("Key"))
    limit_usd = forms.DecimalField(
        label=later("Monthly limit"), min_value=Decimal("0.01"), max_digits=12, decimal_places=2
    )
    mode = forms.ChoiceField(
        choices=[(each.value, later(each.label)) for each in BudgetMode],
        label=later("At the limit"),
        initial=BudgetMode.BLOCK,
    )
    thresholds = forms.CharField(
        max_length=200,
        label=later("Alert at, percent"),
        initial=", ".join(map(str, DEFAULT_THRESHOLDS)),
        help_text=later("Each alert is sent once a month."),
    )

    def __init__(
        self, data: QueryDict | None = None, *, organization: Organization, asked: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(data, organization=organization, initial=_from_address(asked))
        keys = [(key.pk, f"{key.name} ({key.prefix}…)") for key in _usable_keys(organization)]
        self.fields["key"].choices = [("", "–"), *keys]  # type: ignore[attr-defined]

    def clean_thresholds(self) -> tuple[int, ...]:
        try:
            return tuple(int(part) for part in self.cleaned_data["thresholds"].replace("%", "").split(",") if part)
        except ValueError as error:
            raise forms.ValidationError(gettext("Whole percentages, with commas between: 50, 80, 100.")) from error

    @property
    def target(self) -> str:
        scope = self.cleaned_data["scope"]
        return "" if scope == BudgetScope.ORGANIZATION else self.cleaned_data[scope].strip()


class AllowanceForm(_ScopedForm):
    """The allowance of a member, label or project. An empty field sets no limit.

    If one is `chosen`, the form shows its use in the last 30 days.

    `asked` is the query of the address, which may choose the scope and a project.
    """

    field_order = ("scope",)

    scope = forms.ChoiceField(choices=[(each.value, later(each.label)) for each in AllowanceScope], label=later("For"))
    concurrent_gpus = forms.IntegerField(
        required=False, min_value=0, max_value=LARGEST_INTEGER, label=later("GPUs at once")
    )
    gpu_hours = forms.DecimalField(
        required=False, min_value=Decimal(0), max_digits=12, decimal_places=4, label=later("GPU time a month")
    )
    queued_jobs = forms.IntegerField(
        required=False, min_value=0, max_value=LARGEST_INTEGER, label=later("Unfinished jobs")
    )
    storage_gb = forms.DecimalField(
        required=False, min_value=Decimal(0), max_digits=18, decimal_places=9, label=later("Storage")
    )
    requests_per_minute = forms.IntegerField(
        required=False, min_value=0, max_value=LARGEST_INTEGER, label=later("Requests per minute")
    )
    tokens_per_minute = forms.IntegerField(
        required=False, min_value=0, max_value=LARGEST_INTEGER, label=later("Tokens per minute")
    )

    def __init__(
        self,
        data: QueryDict | None = None,
        *,
        organization: Organization,
        chosen: TargetUse | None = None,
        asked: Mapping[str, str] | None = None,
    ) -> None:
        initial: Mapping[str, object] = _initial_of(chosen) if chosen else _from_address(asked)
        super().__init__(data, organization=organization, initial=initial)
        for name, words in (_recent_in_words(chosen.recent) if chosen else {}).items():
            self.fields[name].help_text = words

    @property
    def target(self) -> str:
        found: str = self.cleaned_data[self.cleaned_data["scope"]].strip()
        return found

    @property
    def limits(self) -> dict[str, int | None]:
        """Return each limit; GPU time in seconds, storage in bytes."""
        limits: dict[str, int | None] = {name: self.cleaned_data.get(name) for name in ALLOWED}
        for name, (field, unit, _) in IN_UNITS.items():
            entered = self.cleaned_data[field]
            limits[name] = None if entered is None else round(entered * unit)
        return limits


def _initial_of(chosen: TargetUse) -> dict[str, object]:
    limits = {each.name: each.limit for each in chosen.limits}
    entered = {
        field: None if (limit := limits[name]) is None else f"{round(Decimal(limit) / unit, places).normalize():f}"
        for name, (field, unit, places) in IN_UNITS.items()
    }
    return {**limits, **entered, "scope": chosen.scope, chosen.scope.value: chosen.target}


def _recent_in_words(recent: RecentUse) -> dict[str, str]:
    """Return the use of each limit in the last 30 days."""
    known = {"gpus": recent.gpus, "time": duration(recent.gpu_seconds), "jobs": recent.jobs}
    requests, hourly = recent.requests, gettext("%(count)s in the last 30 days. At most %(most)s in one hour.")
    return {
        "concurrent_gpus": gettext("At most %(gpus)s in the last 30 days.") % known,
        "gpu_hours": gettext("%(time)s in the last 30 days.") % known,
        "queued_jobs": gettext("At most %(jobs)s in the last 30 days.") % known,
        "storage_gb": gettext("%(bytes)s stored in the last 30 days.") % {"bytes": bytes_(recent.stored_bytes)},
        "requests_per_minute": hourly
        % {"count": number(requests.requests), "most": number(requests.most_requests_of_hour)},
        "tokens_per_minute": hourly % {"count": number(requests.tokens), "most": number(requests.most_tokens_of_hour)},
    }


class CreditRequestForm(forms.Form):
    amount_usd = forms.DecimalField(label=later("Amount"), min_value=Decimal("0.01"), max_digits=12, decimal_places=2)
    note = forms.CharField(
        max_length=300,
        required=False,
        label=later("What for"),
        help_text=later("The operator reads it."),
        widget=forms.Textarea(attrs={"rows": 3}),
    )


class KeyLabelsForm(forms.Form):
    key = forms.ChoiceField(label=later("Key"))
    labels = forms.CharField(
        required=False,
        max_length=2000,
        label=later("Labels"),
        help_text=later("name=value, with commas between: team=search"),
    )

    def __init__(self, data: QueryDict | None = None, *, organization: Organization) -> None:
        super().__init__(data)
        keys = _usable_keys(organization)
        self.fields["key"].choices = [(key.pk, f"{key.name} ({key.prefix}…)") for key in keys]  # type: ignore[attr-defined]

    def clean_labels(self) -> dict[str, str]:
        pairs = [part.partition("=") for part in self.cleaned_data["labels"].split(",") if part.strip()]
        return {name: value for name, _, value in pairs}


class ProfileForm(forms.Form):
    legal_name = forms.CharField(max_length=200, required=False, label=later("Billed to"))
    address = forms.CharField(
        max_length=1000, required=False, label=later("Address"), widget=forms.Textarea(attrs={"rows": 3})
    )
    chargeback_label = forms.SlugField(
        max_length=64,
        label=later("Group invoices by label"),
        help_text=later("Later invoices show a total for each value of this label."),
    )
    is_daily_report_wanted = forms.BooleanField(
        required=False, label=later("Send a daily cost email to owners and admins")
    )
