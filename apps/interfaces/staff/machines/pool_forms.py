"""Forms of pools and of the machines that join them."""

from decimal import Decimal

from django import forms
from django.http import QueryDict
from django.utils.translation import gettext

from apps.accounts.queries import list_regions
from apps.adapters.models import AdapterVersion
from apps.catalog.models import BaseModel, GpuType
from apps.catalog.queries import list_base_models, list_gpu_types
from apps.core.messages.translation import later
from apps.estimates.physics.gpus import GIB
from apps.finetuning.models import GpuPool, PricePolicy, WorkerKind
from apps.finetuning.pools.operations import FIRM_FACTOR, MAX_FIRM_FACTOR
from apps.finetuning.queries import list_pools
from apps.interfaces.staff.forms import MONEY


class PoolForm(forms.Form):
    name = forms.SlugField(
        max_length=40, label=later("Name"), help_text=later("Used for the queue and price. Can't be changed.")
    )
    gpu_type = forms.ModelChoiceField(
        queryset=GpuType.objects.none(), label=later("GPU type"), empty_label=later("Choose a type")
    )
    region = forms.ChoiceField(label=later("Region"))
    memory_gib = forms.FloatField(
        min_value=0.1, max_value=100_000, label=later("Memory one job may use, GiB"), help_text=later("For each GPU.")
    )
    is_spot = forms.BooleanField(required=False, label=later("Spot (interruptible)"))
    interruptions_per_hour = forms.FloatField(
        required=False,
        max_value=3600,
        label=later("Expected interruptions an hour"),
        help_text=later("For one machine: 0.05 is one in twenty hours. Estimates include expected rework."),
    )
    price_policy = forms.ChoiceField(
        choices=[(policy.value, later(policy.label)) for policy in PricePolicy],
        label=later("If a run is slower than quoted"),
        widget=forms.RadioSelect,
        initial=PricePolicy.FIRM,
    )
    firm_factor = forms.DecimalField(
        required=False,
        min_value=1,
        max_value=MAX_FIRM_FACTOR,
        max_digits=4,
        decimal_places=2,
        initial=FIRM_FACTOR,
        label=later("Longest run at a firm price"),
        help_text=later(
            "A multiple of the quoted maximum. A run that reaches it pauses unbilled, and you get an email."
        ),
    )

    def __init__(self, data: QueryDict | None = None, *, initial: dict[str, object] | None = None) -> None:
        super().__init__(data, initial=initial)
        self.fields["gpu_type"].queryset = list_gpu_types()  # type: ignore[attr-defined]
        regions = list(list_regions())
        self.fields["region"].choices = [(region.pk, region.pk) for region in regions]  # type: ignore[attr-defined]
        self.fields["region"].initial = next(region.pk for region in regions if region.is_home)

    def clean(self) -> dict[str, object]:
        cleaned: dict[str, object] = super().clean() or self.cleaned_data
        is_unsaid = not cleaned.get("interruptions_per_hour") and "interruptions_per_hour" not in self.errors
        if cleaned.get("is_spot") and is_unsaid:
            self.add_error("interruptions_per_hour", gettext("Say how often a machine of a spot pool is taken away."))
        return cleaned

    def clean_firm_factor(self) -> Decimal:
        return self.cleaned_data["firm_factor"] or FIRM_FACTOR

    @property
    def memory_bytes(self) -> int:
        return int(self.cleaned_data["memory_gib"] * GIB)

    @property
    def spot_interruptions(self) -> float | None:
        """Return the interruptions per hour of a spot pool; return None for other pools."""
        return self.cleaned_data["interruptions_per_hour"] if self.cleaned_data["is_spot"] else None


class NewPoolForm(PoolForm):
    """A pool with its first price, so that one form opens it."""

    price_usd = forms.DecimalField(
        required=False,
        label=later("Price of a GPU-hour in dollars"),
        help_text=later("You can set it later. Nothing can start on the pool before."),
        **MONEY,  # type: ignore[arg-type]
    )
    borrows_from = forms.ModelChoiceField(
        queryset=GpuPool.objects.none(),
        required=False,
        empty_label=later("No: it has machines of its own"),
        label=later("Borrow machines"),
        help_text=later("Its jobs run while jobs of that pool need no machine, and are then interrupted."),
    )

    def __init__(self, data: QueryDict | None = None) -> None:
        super().__init__(data)
        self.fields["borrows_from"].queryset = list_pools().filter(borrows_from=None)  # type: ignore[attr-defined]
        memory = self.fields["memory_gib"]
        memory.required, memory.help_text = False, gettext("For each GPU. Leave empty to use all of the type's memory.")

    def clean(self) -> dict[str, object]:
        if self.cleaned_data.get("borrows_from"):
            self.cleaned_data["is_spot"] = True  # its machines are asked back
        return super().clean()

    @property
    def memory_bytes(self) -> int:
        return super().memory_bytes if self.cleaned_data["memory_gib"] else self.cleaned_data["gpu_type"].memory_bytes


class PoolEditForm(PoolForm):
    """The fields of a pool that may change."""

    is_open = forms.BooleanField(required=False, label=later("Accepts new jobs"))
    serves_whole_models = forms.BooleanField(
        required=False,
        label=later("May serve whole models"),
        help_text=later(
            "Merged and fully trained ones, each on a replica of its own. Customers are told before training."
        ),
    )

    def __init__(self, data: QueryDict | None = None, *, initial: dict[str, object] | None = None) -> None:
        super().__init__(data, initial=initial)
        del self.fields["name"], self.fields["gpu_type"]


class WorkerTokenForm(forms.Form):
    kind = forms.ChoiceField(
        choices=[(each.value, later(each.label)) for each in WorkerKind],
        label=later("Join as"),
        widget=forms.RadioSelect,
        initial=WorkerKind.TRAINER,
    )
    base_model = forms.ModelChoiceField(
        queryset=BaseModel.objects.none(),
        required=False,
        empty_label=later("Choose a base model"),
        label=later("Base model"),
        help_text=later("Served with its adapters."),
    )
    whole_model = forms.CharField(
        required=False,
        max_length=200,
        label=later("Or a customer's whole model"),
        help_text=later("The name of a merged or fully trained model, ft:…, which the replica then serves alone."),
    )

    def __init__(self, data: QueryDict | None = None, *, initial: dict[str, object] | None = None) -> None:
        super().__init__(data, initial=initial)
        self.fields["base_model"].queryset = list_base_models(only_installed=True)  # type: ignore[attr-defined]

    def clean_whole_model(self) -> AdapterVersion | None:
        name = self.cleaned_data["whole_model"].strip()
        if not name:
            return None
        found = AdapterVersion.objects.filter(model_name=name, deleted_at=None).select_related("adapter__base_model")
        if (version := found.first()) is None:
            raise forms.ValidationError(gettext("No customer has a model of this name."))
        return version
