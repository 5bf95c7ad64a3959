"""Forms of the operator console."""

import itertools
from decimal import Decimal
from functools import partial
from operator import attrgetter

from django import forms
from django.http import QueryDict
from django.utils import timezone
from django.utils.translation import gettext, gettext_noop

from apps.accounts.models import Organization
from apps.accounts.queries import list_regions
from apps.catalog.pricing import Tier
from apps.catalog.queries import list_hub_models
from apps.core.ids import new_id
from apps.core.messages.translation import later
from apps.core.money import parse_usd
from apps.core.templatetags.ui import bytes_
from apps.finetuning.models import GpuPool
from apps.finetuning.pools.prices import list_skus
from apps.finetuning.usage.demand import Demand
from apps.finetuning.usage.quotas import LIMITS
from apps.interfaces.staff.quantities import BYTES, GPU_TIME, QuantityField, count_of, gpu_time

MONEY = {"max_digits": 15, "decimal_places": 9, "min_value": Decimal(0)}


class ReplicaRoomForm(forms.Form):
    capacity = forms.IntegerField(min_value=1, max_value=10_000)
    slots = forms.IntegerField(min_value=1, max_value=10_000)
    max_rank = forms.IntegerField(min_value=1, max_value=10_000)


def _hub_choices() -> list[tuple[str, str | list[tuple[str, str]]]]:
    """Return the repositories of the catalogue, by family."""
    groups = itertools.groupby(list_hub_models(), attrgetter("family"))
    families = [(family, [(row.repo, str(row)) for row in rows]) for family, rows in groups]
    return [("", gettext("Choose a model")), *families]


class LookupForm(forms.Form):
    choice = forms.ChoiceField(label=later("Family and size"), required=False, choices=_hub_choices)
    repo = forms.CharField(
        max_length=200, required=False, label=later("Or a hub repository"), help_text=later("Such as Qwen/Qwen3-8B.")
    )
    revision = forms.CharField(
        max_length=64,
        required=False,
        label=later("Revision"),
        help_text=later("A commit: 40 hex digits. Empty: the newest one."),
    )
    hub_token = forms.CharField(
        max_length=200,
        required=False,
        label=later("Token of a gated repository"),
        widget=forms.PasswordInput(attrs={"autocomplete": "off"}),
        help_text=later("Encrypted, and never shown again."),
    )

    def clean(self) -> dict[str, object]:
        data = super().clean() or {}
        if bool(data.get("choice")) == bool(data.get("repo")):
            self.add_error("repo", gettext("Choose a model from the list, or name a repository."))
        return data


class InstallForm(forms.Form):
    name = forms.CharField(max_length=80, label=later("Model ID"), help_text=later("What API requests put in model."))


class LocalModelForm(forms.Form):
    name = forms.CharField(max_length=80, label=later("Model ID"), help_text=later("What API requests put in model."))
    display_name = forms.CharField(max_length=120, label=later("Shown as"))
    path = forms.CharField(max_length=400, label=later("Path on the workers"))
    licence = forms.CharField(max_length=80, required=False, label=later("Licence"))


def _sku_choices() -> list[tuple[str, str | list[tuple[str, str]]]]:
    """Return every SKU that can be charged, in groups."""
    groups = itertools.groupby(list_skus(only_installed=True).values(), attrgetter("group"))
    return [
        ("", gettext("Choose what to price")),
        *((name, [(sku.code, str(sku)) for sku in skus]) for name, skus in groups),
    ]


class PriceForm(forms.Form):
    sku = forms.ChoiceField(
        label=later("What to price"),
        error_messages={
            "invalid_choice": later("%(value)s is not a SKU of this installation: choose one from the list.")
        },
        help_text=later("Add a pool or install a base model to price it."),
    )
    price_usd = forms.DecimalField(label=later("Price in dollars"), **MONEY)  # type: ignore[arg-type]
    organization = forms.ModelChoiceField(
        queryset=Organization.objects.none(),
        required=False,
        empty_label=later("Everybody"),
        label=later("For"),
        help_text=later("A price for one customer, or far below the usual, waits for a second operator."),
    )
    effective_from = forms.DateTimeField(
        required=False,
        label=later("From"),
        help_text=later("Leave empty to start at once."),
        widget=forms.DateTimeInput(attrs={"type": "datetime-local"}),
    )
    tiers = forms.CharField(
        required=False,
        max_length=2000,
        label=later("Volume tiers"),
        widget=forms.Textarea(attrs={"rows": 2}),
        help_text=later(
            "One tier per line: units in a month, a colon, the price beyond them. Example: 100000000: 0.05"
        ),
    )

    def __init__(self, data: QueryDict | None = None, *, initial: dict[str, object] | None = None) -> None:
        super().__init__(data, initial=initial)
        self.fields["effective_from"].label = gettext("From, {zone}").format(zone=timezone.get_current_timezone_name())
        self.fields["organization"].queryset = Organization.objects.order_by("name")  # type: ignore[attr-defined]
        self.fields["sku"].choices = _sku_choices  # type: ignore[attr-defined]

    def previewed(self) -> str:
        """Return a text that identifies these values, to recognise them on confirmation."""
        data = self.cleaned_data
        owner = data["organization"].pk if data["organization"] else ""
        return f"{data['sku']} {data['price_usd']:f} {owner} {data['effective_from'] or ''} {data['tiers']}"

    def clean_tiers(self) -> list[Tier]:
        tiers = []
        for line in self.cleaned_data["tiers"].split("\n"):
            units, colon, price = line.strip().partition(":")
            if not units and not colon:
                continue
            try:
                tiers.append(Tier(int(units), parse_usd(price.strip())))
            except (ValueError, ArithmeticError) as error:
                raise forms.ValidationError(
                    gettext("%(line)s is not units: dollars.") % {"line": repr(line.strip())}
                ) from error
        return tiers


_AT_ONCE = (gettext_noop("at once"), "at a time", "at the same time")
_A_MINUTE = ("a minute", gettext_noop("per minute"))


class QuotaForm(forms.Form):
    """The limits of one organization, each with what it uses. An empty field lifts its limit."""

    concurrent_gpus = QuantityField(
        count_of("GPUs", example=later("2 GPUs"), tails=_AT_ONCE), label=later("GPUs at the same time")
    )
    queued_jobs = QuantityField(
        count_of("jobs", example=later("20 jobs"), tails=_AT_ONCE), label=later("Unfinished jobs")
    )
    gpu_seconds_per_month = QuantityField(GPU_TIME, label=later("GPU time a month"))
    storage_bytes = QuantityField(BYTES, label=later("Storage"))
    requests_per_minute = QuantityField(
        count_of("requests", example=later("6,000 requests"), tails=_A_MINUTE), label=later("Requests per minute")
    )
    tokens_per_minute = QuantityField(
        count_of("tokens", example=later("2 million tokens"), tails=_A_MINUTE), label=later("Tokens per minute")
    )
    concurrent_requests = QuantityField(
        count_of("requests", example=later("256 requests"), tails=_AT_ONCE), label=later("Requests at the same time")
    )
    weight = forms.IntegerField(
        min_value=1,
        max_value=100,
        label=later("Scheduling weight"),
        initial=1,
        help_text=later("With 2, its jobs get twice the share of a busy pool."),
    )
    regions = forms.MultipleChoiceField(
        required=False,
        label=later("Regions"),
        widget=forms.CheckboxSelectMultiple,
        help_text=later("Its files, jobs, models and requests stay in these. If you tick none, it may use all."),
    )

    def __init__(
        self, data: QueryDict | None = None, *, initial: dict[str, object] | None = None, demand: Demand
    ) -> None:
        super().__init__(data, initial=initial)
        regions = list_regions().values_list("pk", flat=True)
        self.fields["regions"].choices = [(name, name) for name in regions]  # type: ignore[attr-defined]
        if len(regions) < 2:
            del self.fields["regions"]
        for name, words in _use_in_words(demand).items():
            self.fields[name].help_text = words

    def limits(self) -> dict[str, int | None]:
        """Return every limit; an empty field lifts its limit."""
        return {name: self.cleaned_data[name] for name in LIMITS}


def _use_in_words(demand: Demand) -> dict[str, str]:
    """Return the use of each limit, now and in the last 30 days."""
    days = gettext("in the last 30 days")
    month, recent = gpu_time(demand.gpu_seconds_of_month), gpu_time(demand.gpu_seconds)
    return {
        "concurrent_gpus": gettext("Now %(gpus)s. At most %(most_gpus)s %(days)s.")
        % {"gpus": demand.gpus, "most_gpus": demand.most_gpus, "days": days},
        "queued_jobs": gettext("Now %(jobs)s. At most %(most_jobs)s %(days)s.")
        % {"jobs": demand.jobs, "most_jobs": demand.most_jobs, "days": days},
        "gpu_seconds_per_month": gettext("%(month)s this month. %(recent)s %(days)s.")
        % {"month": month, "recent": recent, "days": days},
        "storage_bytes": gettext("Now %(storage_bytes)s. At most %(most_storage_bytes)s %(days)s.")
        % {
            "storage_bytes": bytes_(demand.storage_bytes),
            "most_storage_bytes": bytes_(demand.most_storage_bytes),
            "days": days,
        },
        "requests_per_minute": gettext("%(requests)s %(days)s. At most %(most_requests_of_day)s on one day.")
        % {
            "requests": f"{demand.requests:,}",
            "days": days,
            "most_requests_of_day": f"{demand.most_requests_of_day:,}",
        },
        "tokens_per_minute": gettext("%(tokens)s %(days)s. At most %(most_tokens_of_day)s on one day.")
        % {"tokens": f"{demand.tokens:,}", "days": days, "most_tokens_of_day": f"{demand.most_tokens_of_day:,}"},
    }


class AdjustmentForm(forms.Form):
    once = forms.RegexField(r"^adj_[0-9a-z]{26}$", widget=forms.HiddenInput, initial=partial(new_id, "adj"))
    amount_usd = forms.DecimalField(
        label=later("Amount in dollars"),
        max_digits=15,
        decimal_places=9,
        help_text=later("A negative amount takes credit away. Above $100 in 24 hours, a second operator must approve."),
    )
    refund_of = forms.CharField(
        max_length=64,
        required=False,
        label=later("Refund of a job"),
        help_text=later("The ID of the job whose cost you refund."),
    )
    reason = forms.CharField(
        max_length=300, label=later("Reason"), help_text=later("Kept in the ledger and shown to the customer.")
    )


class PoolCostForm(forms.Form):
    pool = forms.ModelChoiceField(queryset=GpuPool.objects.none(), label=later("Pool"))
    cost_usd = forms.DecimalField(label=later("Cost of one GPU-hour"), **MONEY)  # type: ignore[arg-type]
    from_day = forms.DateField(label=later("From"), widget=forms.DateInput(attrs={"type": "date"}))

    def __init__(self, data: QueryDict | None = None, *, initial: dict[str, object] | None = None) -> None:
        super().__init__(data, initial=initial)
        self.fields["pool"].queryset = GpuPool.objects.order_by("name")  # type: ignore[attr-defined]
