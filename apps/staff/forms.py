"""Forms of the operator console."""

from decimal import Decimal
from typing import Any

from django import forms

from apps.catalog.models import BaseModel, GpuType
from apps.catalog.queries import list_base_models, list_gpu_types
from apps.finetuning.quotas import LIMITS

GIB = 2**30
_MONEY = {"max_digits": 15, "decimal_places": 9, "min_value": Decimal(0)}


class PoolForm(forms.Form):
    name = forms.SlugField(max_length=40, label="Name", help_text="Names the queue and the price; cannot change later.")
    gpu_type = forms.ModelChoiceField(queryset=GpuType.objects.none(), label="GPU type")
    region = forms.CharField(max_length=40, label="Region", initial="local")
    memory_gib = forms.FloatField(min_value=0.1, label="Memory one job may use, GiB", help_text="Usable, per GPU.")
    is_spot = forms.BooleanField(required=False, label="Spot: machines may be taken away")
    interruptions_per_hour = forms.FloatField(
        required=False,
        label="Expected interruptions an hour",
        help_text="Of one machine; 0.05 is one in twenty hours. Quotes add the work they undo.",
    )

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.fields["gpu_type"].queryset = list_gpu_types()  # type: ignore[attr-defined]

    def clean(self) -> dict[str, Any]:
        cleaned: dict[str, Any] = super().clean() or self.cleaned_data
        is_unsaid = not cleaned.get("interruptions_per_hour") and "interruptions_per_hour" not in self.errors
        if cleaned.get("is_spot") and is_unsaid:
            self.add_error("interruptions_per_hour", "Say how often a machine of a spot pool is taken away.")
        return cleaned

    @property
    def memory_bytes(self) -> int:
        return int(self.cleaned_data["memory_gib"] * GIB)

    @property
    def spot_interruptions(self) -> float | None:
        """Return the interruptions an hour of a spot pool, None of any other."""
        return self.cleaned_data["interruptions_per_hour"] if self.cleaned_data["is_spot"] else None


class PoolEditForm(PoolForm):
    """The part of a pool that may change."""

    is_open = forms.BooleanField(required=False, label="Accepts new jobs")

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        del self.fields["name"], self.fields["gpu_type"]


class WorkerTokenForm(forms.Form):
    kind = forms.ChoiceField(
        choices=[("trainer", "Trainer: takes fine-tuning runs"), ("replica", "Replica: serves one base model")],
        label="What joins",
        widget=forms.RadioSelect,
        initial="trainer",
    )
    base_model = forms.ModelChoiceField(
        queryset=BaseModel.objects.none(), required=False, label="Base model", help_text="For a replica."
    )

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.fields["base_model"].queryset = list_base_models(only_installed=True)  # type: ignore[attr-defined]


class BaseModelForm(forms.Form):
    name = forms.SlugField(max_length=80, label="Name", help_text="What customers put in `model`.")
    display_name = forms.CharField(max_length=120, label="Shown as")
    path = forms.CharField(max_length=400, required=False, label="Path on the workers")
    repo = forms.CharField(max_length=160, required=False, label="Hub repository", help_text="organization/name")
    revision = forms.CharField(max_length=64, required=False, label="Revision", help_text="A commit: 40 hex digits.")
    config = forms.JSONField(required=False, label="config.json", help_text="Of the repository, for its dimensions.")
    hub_token = forms.CharField(
        max_length=200,
        required=False,
        label="Token of a gated repository",
        widget=forms.PasswordInput(attrs={"autocomplete": "off"}),
        help_text="Encrypted, and never shown again.",
    )
    licence = forms.CharField(max_length=80, required=False, label="Licence")


class PriceForm(forms.Form):
    sku = forms.CharField(max_length=120, label="SKU", help_text="training:<pool>, inference:input:<model>, …")
    price_usd = forms.DecimalField(label="Price in dollars", **_MONEY)  # type: ignore[arg-type]

    @property
    def is_training(self) -> bool:
        return self.cleaned_data["sku"].startswith("training:")


class QuotaForm(forms.Form):
    concurrent_gpus = forms.IntegerField(min_value=0, required=False, label="Concurrent GPUs")
    queued_jobs = forms.IntegerField(min_value=0, required=False, label="Unfinished jobs")
    gpu_seconds_per_month = forms.IntegerField(min_value=0, required=False, label="GPU-seconds a month")
    storage_bytes = forms.IntegerField(min_value=0, required=False, label="Storage, bytes")
    requests_per_minute = forms.IntegerField(min_value=0, required=False, label="Requests a minute")
    tokens_per_minute = forms.IntegerField(min_value=0, required=False, label="Tokens a minute")
    concurrent_requests = forms.IntegerField(min_value=0, required=False, label="Requests at once")
    weight = forms.IntegerField(min_value=1, max_value=100, label="Share of a busy pool", initial=1)

    def limits(self) -> dict[str, int | None]:
        """Return every limit; an empty field lifts it."""
        return {name: self.cleaned_data[name] for name in LIMITS}


class CreditForm(forms.Form):
    amount_usd = forms.DecimalField(label="Amount in dollars", **(_MONEY | {"min_value": Decimal("0.01")}))  # type: ignore[arg-type]
    reason = forms.CharField(max_length=300, label="Reason", help_text="Kept in the ledger and shown to the customer.")
