"""The form of an elastic pool."""

from decimal import Decimal
from typing import Any

from django import forms
from django.http import QueryDict

from apps.core.messages.translation import later
from apps.core.money import nano_to_usd, usd_to_nano
from apps.finetuning.models import CapacityKind, GpuPool, PoolCapacity
from apps.finetuning.pools.capacity.settings import MAX_GPUS_PER_NODE, MAX_IDLE_SECONDS, MAX_NODES, MIN_IDLE_SECONDS
from apps.finetuning.pools.capacity.slurm import SlurmSettings

_USD: dict[str, Any] = {"required": False, "min_value": Decimal(0), "max_value": 10_000, "decimal_places": 9}
_NAME: dict[str, Any] = {"required": False, "max_length": 100}
_PATH: dict[str, Any] = {"required": False, "max_length": 200}
LIMITS = ("minimum", "maximum", "gpus_per_node", "idle_seconds")


class CapacityForm(forms.Form):
    """Limits of the pool, and the settings of Slurm, which a static pool does not need."""

    kind = forms.ChoiceField(
        choices=[(kind.value, later(kind.label)) for kind in CapacityKind],
        label=later("Who starts machines"),
        widget=forms.RadioSelect,
        initial=CapacityKind.STATIC,
    )
    minimum = forms.IntegerField(required=False, min_value=0, max_value=MAX_NODES, label=later("Minimum nodes"))
    maximum = forms.IntegerField(required=False, min_value=0, max_value=MAX_NODES, label=later("Maximum nodes"))
    gpus_per_node = forms.IntegerField(
        required=False,
        min_value=1,
        max_value=MAX_GPUS_PER_NODE,
        label=later("GPUs per node"),
        help_text=later("For a pool of CPUs, enter 1."),
    )
    idle_seconds = forms.IntegerField(
        required=False,
        min_value=MIN_IDLE_SECONDS,
        max_value=MAX_IDLE_SECONDS,
        label=later("Release a node after idle seconds"),
    )
    node_usd = forms.DecimalField(**_USD, label=later("Cost per node-hour, USD"))
    budget_usd = forms.DecimalField(
        **_USD, label=later("Budget per hour, USD"), help_text=later("Empty: only the number of nodes is limited.")
    )
    partition = forms.CharField(**_NAME, label=later("Slurm partition"))
    account = forms.CharField(**_NAME, label=later("Slurm account"))
    qos = forms.CharField(**_NAME, label=later("Slurm QOS"))
    gres = forms.CharField(
        **_NAME, label=later("GPUs per Slurm job"), help_text=later("As in sbatch --gres: gpu:h100:2.")
    )
    minutes = forms.IntegerField(
        required=False, min_value=5, max_value=43_200, label=later("Time limit of a job, minutes")
    )
    install_dir = forms.CharField(**_PATH, label=later("Folder of Anneal on the nodes"))
    work_dir = forms.CharField(
        **_PATH, label=later("Work folder on the nodes"), help_text=later("Each node makes its own folder in it.")
    )
    model_root = forms.CharField(**_PATH, label=later("Folder of base models on the nodes"))
    slurm_conf = forms.CharField(
        **_PATH, label=later("slurm.conf"), help_text=later("Where Celery runs. Empty: Slurm's usual one.")
    )

    def __init__(self, data: QueryDict | None = None, *, initial: dict[str, object] | None = None) -> None:
        super().__init__(data, initial=initial, auto_id="capacity_%s")  # the page has other forms with such names

    @property
    def node_fields(self) -> list[forms.BoundField]:
        """Return the fields that a static pool does not need."""
        return [self[name] for name in self.fields if name != "kind"]

    @property
    def is_elastic(self) -> bool:
        """Return whether to show these fields: nodes are chosen, or a value has an error."""
        return bool(self.errors) or self["kind"].value() != CapacityKind.STATIC

    def values(self) -> dict[str, Any]:
        """Return the arguments of `set_capacity`; an empty limit has its usual value."""
        data = self.cleaned_data
        settings = {name: data[name] for name in SlurmSettings.__struct_fields__ if data[name] not in ("", None)}
        return {
            "kind": data["kind"],
            **{name: _usual(name) if data[name] is None else data[name] for name in LIMITS},
            "node_nano_per_hour": usd_to_nano(data["node_usd"] or Decimal(0)),
            "budget_nano_per_hour": None if data["budget_usd"] is None else usd_to_nano(data["budget_usd"]),
            "settings": settings,
        }


def capacity_form_of(pool: GpuPool) -> CapacityForm:
    """Return the form with the pool's settings."""
    usual: dict[str, object] = {name: _usual(name) for name in LIMITS}
    capacity = getattr(pool, "capacity", None)
    if capacity is None:
        return CapacityForm(initial=usual)
    budget_nano = capacity.budget_nano_per_hour
    return CapacityForm(
        initial={
            "kind": capacity.kind,
            **{name: getattr(capacity, name) for name in LIMITS},
            "node_usd": nano_to_usd(capacity.node_nano_per_hour),
            "budget_usd": None if budget_nano is None else nano_to_usd(budget_nano),
            **capacity.settings,
        }
    )


def _usual(name: str) -> int:

    usual: int = getattr(PoolCapacity(), name)
    return usual
