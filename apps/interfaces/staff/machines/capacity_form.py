"""The form of an elastic pool."""

from decimal import Decimal
from typing import Any, NamedTuple

from django import forms
from django.db.models import Q
from django.http import QueryDict

from apps.catalog.models import BaseModel
from apps.core.messages.translation import later
from apps.core.money import nano_to_usd, usd_to_nano
from apps.finetuning.models import CapacityKind, GpuPool, PoolCapacity
from apps.finetuning.pools.capacity.fleets import MAX_REQUESTS_PER_REPLICA
from apps.finetuning.pools.capacity.manifests import MAX_CA_CHARACTERS
from apps.finetuning.pools.capacity.settings import (
    MAX_GPUS_PER_NODE,
    MAX_IDLE_SECONDS,
    MAX_NODES,
    MIN_IDLE_SECONDS,
    needed_names,
    setting_names,
)

_USD: dict[str, Any] = {"required": False, "min_value": Decimal(0), "max_value": 10_000, "decimal_places": 9}
_NAME: dict[str, Any] = {"required": False, "max_length": 100}
_PATH: dict[str, Any] = {"required": False, "max_length": 200}
LIMITS = ("minimum", "maximum", "gpus_per_node", "idle_seconds")
_SHARED = ("minutes",)  # by all engines
_OF_API_SERVERS = ("api_url", "ca", "token", "image", "user_id")  # of Kubernetes and dstack
_USUAL_RESOURCE = "nvidia.com/gpu"


class FieldGroup(NamedTuple):
    """Fields that the page shows under one heading, open if they count or have an error; `needed` are their names."""

    title: str
    is_open: bool
    fields: list[forms.BoundField]
    needed: tuple[str, ...] = ()


def _own(engine: CapacityKind) -> tuple[str, ...]:
    return tuple(name for name in setting_names(engine) if name not in (*_SHARED, *_OF_API_SERVERS))


_PARTS: tuple[tuple[str, tuple[CapacityKind, ...], tuple[str, ...]], ...] = (
    ("Slurm", (CapacityKind.SLURM,), _own(CapacityKind.SLURM)),
    (later("Kubernetes and dstack"), (CapacityKind.KUBERNETES, CapacityKind.DSTACK), _OF_API_SERVERS),
    ("Kubernetes", (CapacityKind.KUBERNETES,), _own(CapacityKind.KUBERNETES)),
    ("dstack", (CapacityKind.DSTACK,), _own(CapacityKind.DSTACK)),
)


class CapacityForm(forms.Form):
    """Limits of the pool, and the settings of the engines, which a static pool does not need."""

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
    on_demand_nodes = forms.IntegerField(
        required=False,
        min_value=0,
        max_value=MAX_NODES,
        label=later("On-demand nodes"),
        help_text=later("Nodes above this number are spot. Empty: all nodes are of one kind."),
    )
    spot_node_usd = forms.DecimalField(**_USD, label=later("Cost per spot node-hour, USD"))
    replaces_spot = forms.BooleanField(
        required=False,
        label=later("Replace spot nodes"),
        help_text=later("If no spot node starts within ten minutes, on-demand nodes replace it for half an hour."),
    )
    minutes = forms.IntegerField(
        required=False, min_value=5, max_value=43_200, label=later("Time limit of a job, minutes")
    )
    partition = forms.CharField(**_NAME, label=later("Slurm partition"))
    account = forms.CharField(**_NAME, label=later("Slurm account"))
    qos = forms.CharField(**_NAME, label=later("Slurm QOS"))
    spot_partition = forms.CharField(
        **_NAME, label=later("Slurm partition of spot nodes"), help_text=later("Empty: the same as for other nodes.")
    )
    spot_qos = forms.CharField(
        **_NAME, label=later("Slurm QOS of spot nodes"), help_text=later("Empty: the same as for other nodes.")
    )
    gres = forms.CharField(
        **_NAME, label=later("GPUs per Slurm job"), help_text=later("As in sbatch --gres: gpu:h100:2.")
    )
    install_dir = forms.CharField(**_PATH, label=later("Folder of Anneal on the nodes"))
    work_dir = forms.CharField(
        **_PATH, label=later("Work folder on the nodes"), help_text=later("Each node makes its own folder in it.")
    )
    model_root = forms.CharField(**_PATH, label=later("Folder of base models on the nodes"))
    slurm_conf = forms.CharField(
        **_PATH, label=later("slurm.conf"), help_text=later("Where Celery runs. Empty: Slurm's usual one.")
    )
    api_url = forms.CharField(
        **_PATH, label=later("Address of the API server"), help_text=later("Such as https://10.0.0.1:6443.")
    )
    ca = forms.CharField(
        required=False,
        max_length=MAX_CA_CHARACTERS,
        label=later("Certificate of its authority"),
        widget=forms.Textarea(attrs={"rows": 4}),
        help_text=later("In PEM; Kubernetes needs it. The API server must show a certificate of this authority."),
    )
    token = forms.CharField(
        required=False,
        max_length=8192,
        label=later("Token of the API server"),
        widget=forms.PasswordInput(attrs={"autocomplete": "off"}),
        help_text=later("Encrypted, and never shown again. Empty: the present one stays."),
    )
    namespace = forms.CharField(**_NAME, label=later("Namespace"))
    image = forms.CharField(required=False, max_length=255, label=later("Image of the nodes"))
    gpu_resource = forms.CharField(
        **_PATH, label=later("GPU resource"), help_text=later("As many as GPUs per node. Empty: nodes without a GPU.")
    )
    cpu = forms.CharField(**_NAME, label=later("CPUs of a node"), help_text=later("Empty: 4."))
    memory = forms.CharField(**_NAME, label=later("Memory of a node"), help_text=later("Empty: 16Gi."))
    node_selector = forms.CharField(
        required=False, max_length=1000, label=later("Node selector"), help_text=later("label=value,label=value")
    )
    spot_node_selector = forms.CharField(
        required=False,
        max_length=1000,
        label=later("Node selector of spot nodes"),
        help_text=later("Their pods also tolerate taints with these keys and values."),
    )
    queue = forms.CharField(
        **_NAME, label=later("Kueue queue"), help_text=later("A LocalQueue. Empty: Jobs start without Kueue.")
    )
    service_account = forms.CharField(
        **_NAME,
        label=later("Service account of the nodes"),
        help_text=later("The image is pulled with its secrets. Nodes never get its token."),
    )
    user_id = forms.IntegerField(
        required=False,
        min_value=1,
        max_value=2_000_000_000,
        label=later("User ID in the image"),
        help_text=later("Empty: 10001."),
    )

    project = forms.CharField(**_NAME, label=later("dstack project"))
    gpu = forms.CharField(
        **_NAME, label=later("GPU"), help_text=later("Such as H100 or H100:80GB. Empty: nodes without a GPU.")
    )
    fleet = forms.CharField(**_NAME, label=later("dstack fleet"), help_text=later("Empty: any fleet of the project."))
    spot_policy = forms.ChoiceField(
        required=False,
        choices=[
            ("on-demand", later("On demand")),
            ("spot", later("Spot")),
            ("auto", later("What is cheaper at the time")),
        ],
        label=later("Kind of machine"),
        help_text=later("If all nodes are of one kind."),
    )

    def __init__(self, data: QueryDict | None = None, *, initial: dict[str, object] | None = None) -> None:
        super().__init__(data, initial=initial, auto_id="capacity_%s")  # the page has other forms with such names

    def clean_ca(self) -> str:
        """Return the certificate with the line ends that it had before a browser sent it."""
        return str(self.cleaned_data["ca"]).replace("\r\n", "\n")

    @property
    def groups(self) -> list[FieldGroup]:
        """Return the fields that a static pool does not need."""
        kind, apart = self["kind"].value(), {name for _, _, names in _PARTS for name in names}
        limits = [name for name in self.fields if name != "kind" and name not in apart]
        is_elastic = bool(self.errors) or kind != CapacityKind.STATIC
        groups = [FieldGroup(later("Nodes that Anneal starts"), is_elastic, [self[name] for name in limits])]
        for title, engines, names in _PARTS:
            fields = [self[name] for name in self.fields if name in names]
            is_open = kind in engines or any(field.errors for field in fields)
            needed = [name for name in names if all(name in needed_names(engine) for engine in engines)]
            groups.append(FieldGroup(title, is_open, fields, tuple(needed)))
        return groups

    def values(self) -> dict[str, Any]:
        """Return the arguments of `set_capacity`; an empty limit has its usual value."""
        data = self.cleaned_data
        settings = {name: data[name] for name in setting_names(data["kind"]) if data[name] not in ("", None)}
        return {
            "kind": data["kind"],
            **{name: _usual(name) if data[name] is None else data[name] for name in LIMITS},
            "node_nano_per_hour": usd_to_nano(data["node_usd"] or Decimal(0)),
            "budget_nano_per_hour": None if data["budget_usd"] is None else usd_to_nano(data["budget_usd"]),
            "on_demand_nodes": data["on_demand_nodes"],
            "spot_node_nano_per_hour": usd_to_nano(data["spot_node_usd"] or Decimal(0)),
            "replaces_spot": data["replaces_spot"],
            "settings": settings,
            "token": data["token"],
        }


class FleetForm(forms.Form):
    """The limits of the replicas that a pool starts for one base model."""

    base_model = forms.ModelChoiceField(
        queryset=BaseModel.objects.none(), empty_label=later("Choose a base model"), label=later("Base model")
    )
    minimum = forms.IntegerField(min_value=0, max_value=MAX_NODES, initial=0, label=later("Minimum replicas"))
    maximum = forms.IntegerField(
        min_value=0,
        max_value=MAX_NODES,
        initial=1,
        label=later("Maximum replicas"),
        help_text=later("0: no replica starts any more."),
    )
    requests_per_replica = forms.IntegerField(
        min_value=1,
        max_value=MAX_REQUESTS_PER_REPLICA,
        initial=16,
        label=later("Requests for each replica"),
        help_text=later("Above this many at once, another replica starts."),
    )
    idle_seconds = forms.IntegerField(
        min_value=MIN_IDLE_SECONDS,
        max_value=MAX_IDLE_SECONDS,
        initial=600,
        label=later("Seconds before a replica stops"),
        help_text=later("After it was last needed."),
    )

    def __init__(
        self, data: QueryDict | None = None, *, pool: GpuPool, initial: dict[str, object] | None = None
    ) -> None:
        super().__init__(data, auto_id="fleet_%s", initial=initial)  # the page has other forms with such names
        # Those that the pool has, so that one that was retired can be set to 0.
        usable = Q(is_installed=True, retired_at=None) | Q(fleets__pool=pool)
        self.fields["base_model"].queryset = BaseModel.objects.filter(usable).distinct().order_by("name")  # type: ignore[attr-defined]


def capacity_form_of(pool: GpuPool) -> CapacityForm:
    """Return the form with the pool's settings."""
    usual: dict[str, object] = {name: _usual(name) for name in LIMITS}
    usual |= {"gpu_resource": _USUAL_RESOURCE, "replaces_spot": True}
    capacity = getattr(pool, "capacity", None)
    if capacity is None:
        return CapacityForm(initial=usual)
    budget_nano = capacity.budget_nano_per_hour
    return CapacityForm(
        initial={
            "gpu_resource": "" if capacity.kind == CapacityKind.KUBERNETES else _USUAL_RESOURCE,
            "kind": capacity.kind,
            **{name: getattr(capacity, name) for name in LIMITS},
            "node_usd": nano_to_usd(capacity.node_nano_per_hour),
            "budget_usd": None if budget_nano is None else nano_to_usd(budget_nano),
            "on_demand_nodes": capacity.on_demand_nodes,
            "spot_node_usd": nano_to_usd(capacity.spot_node_nano_per_hour),
            "replaces_spot": capacity.replaces_spot,
            **capacity.settings,
        }
    )


def fleet_form_of(pool: GpuPool, *, fleet_id: str) -> FleetForm:
    """Return the form with the limits of this fleet of the pool, or with the usual ones."""
    fleet = pool.fleets.filter(pk=fleet_id).first() if fleet_id else None
    names = FleetForm.declared_fields
    return FleetForm(pool=pool, initial={name: getattr(fleet, name) for name in names} if fleet else None)


def _usual(name: str) -> int:
    usual: int = getattr(PoolCapacity(), name)
    return usual
