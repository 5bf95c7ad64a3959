"""Setting a pool's capacity: the limits, and the engine with its own settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from django.db import transaction
from django.utils.translation import gettext

from apps.catalog.models import BaseModel
from apps.core import audit
from apps.core.database.locks import lock
from apps.core.errors import InvalidState, InvalidValue
from apps.core.messages.translation import later
from apps.core.secrets.sealing import SealBroken, place_of, seal, unseal
from apps.finetuning.lifecycle import NODE_ENDED
from apps.finetuning.models import CapacityKind, CapacityNode, CapacityToken, GpuPool, PoolCapacity
from apps.finetuning.pools.capacity.demand import Limits
from apps.finetuning.pools.capacity.dstack import Dstack, DstackSettings
from apps.finetuning.pools.capacity.kubernetes import Kubernetes
from apps.finetuning.pools.capacity.manifests import ApiToken, KubernetesSettings, wrong_setting
from apps.finetuning.pools.capacity.port import Capacity, CapacityError
from apps.finetuning.pools.capacity.slurm import Slurm, SlurmSettings
from apps.serving.models import ReplicaFleet

MAX_NODES = 200
MAX_GPUS_PER_NODE = 64
_SHOWN_NODES = 20
MIN_IDLE_SECONDS, MAX_IDLE_SECONDS = 30, 86_400
_Settings = SlurmSettings | KubernetesSettings | DstackSettings


@dataclass(frozen=True, kw_only=True)
class _Engine:
    """`example` has a valid value for each setting that must not be empty; `kept` do not change while nodes run."""

    settings: type[SlurmSettings] | type[KubernetesSettings] | type[DstackSettings]
    example: Mapping[str, str]
    kept: tuple[str, ...]
    missing: str
    spot: tuple[str, ...] = ()  # a pool of both kinds needs at least one of them


_ENGINES: dict[str, _Engine] = {
    CapacityKind.SLURM: _Engine(
        settings=SlurmSettings,
        example={"partition": "gpu", "install_dir": "/opt/anneal", "work_dir": "/tmp/anneal"},  # noqa: S108
        kept=("slurm_conf",),
        missing=later("Slurm needs this setting."),
        spot=("spot_partition", "spot_qos"),
    ),
    CapacityKind.KUBERNETES: _Engine(
        settings=KubernetesSettings,
        example={"api_url": "https://10.0.0.1:6443", "namespace": "anneal", "image": "anneal-gpu", "ca": "PEM"},
        kept=("api_url", "namespace"),
        missing=later("Kubernetes needs this setting."),
        spot=("spot_node_selector",),
    ),
    CapacityKind.DSTACK: _Engine(
        settings=DstackSettings,
        example={"api_url": "https://10.0.0.1", "project": "anneal", "image": "anneal-gpu"},
        kept=("api_url", "project"),
        missing=later("dstack needs this setting."),
    ),
}
_PATH = later("Enter an absolute path of letters, digits and ._-/.")
_LABEL = later("Enter a name of small letters, digits and hyphens, with at most 63 characters.")
_AMOUNT = later("Enter an amount as Kubernetes writes it, such as 8 or 64Gi.")
_FIXES = {
    **dict.fromkeys(("install_dir", "work_dir", "model_root", "slurm_conf"), _PATH),
    **dict.fromkeys(("namespace", "queue", "service_account"), _LABEL),
    **dict.fromkeys(("cpu", "memory"), _AMOUNT),
    "minutes": later("Enter a number from 5 to 43,200."),
    "user_id": later("Enter a number from 1 to 2,000,000,000."),
    "api_url": later("Enter https://, a host and perhaps a port, such as https://10.0.0.1:6443."),
    "image": later("Enter an image, such as registry.example.com/anneal-gpu:1.0."),
    "ca": later("Paste the certificate of the API server's authority in PEM, without a private key."),
    "gpu_resource": later("Enter a resource of the cluster, such as nvidia.com/gpu."),
    "gpu": later("Enter a GPU as dstack names it, such as H100 or H100:80GB."),
    **dict.fromkeys(
        ("node_selector", "spot_node_selector"), later("Enter label=value, with commas between up to ten labels.")
    ),
}


@transaction.atomic
def set_capacity(
    *,
    pool: GpuPool,
    kind: str,
    minimum: int,
    maximum: int,
    gpus_per_node: int,
    idle_seconds: int,
    node_nano_per_hour: int,
    budget_nano_per_hour: int | None,
    settings: dict[str, Any],
    by: str,
    on_demand_nodes: int | None = None,
    spot_node_nano_per_hour: int = 0,
    replaces_spot: bool = True,
    token: str = "",
) -> PoolCapacity:
    """Store how many nodes the pool may have and what starts them. Takes effect within seconds.

    With `on_demand_nodes`, further nodes are spot, and `replaces_spot` lets on-demand nodes start where no spot node
    does. `token` opens the API server of Kubernetes or dstack; "" keeps the present one. Raises InvalidValue, and
    InvalidState if the engine or its cluster would change while it has nodes of this pool.
    """
    _require_machines(pool, kind)
    for name, value, least, most in (
        ("maximum", maximum, 0, MAX_NODES),
        ("minimum", minimum, 0, maximum),
        ("gpus_per_node", gpus_per_node, 1, MAX_GPUS_PER_NODE),
        ("idle_seconds", idle_seconds, MIN_IDLE_SECONDS, MAX_IDLE_SECONDS),
        ("on_demand_nodes", on_demand_nodes or 0, 0, maximum),
    ):
        if not least <= value <= most:
            raise InvalidValue(
                gettext("Set a number from %(least)s to %(most)s.") % {"least": least, "most": f"{most:,}"}, param=name
            )
    if budget_nano_per_hour is not None:
        _require_budget(budget_nano_per_hour, node_nano=node_nano_per_hour)
    kept = {} if kind == CapacityKind.STATIC else msgspec.to_builtins(read_settings(kind, settings))
    if on_demand_nodes is not None and kind != CapacityKind.STATIC:
        _require_spot(pool, kind, kept, spot_nano=spot_node_nano_per_hour, budget_nano=budget_nano_per_hour)
    capacity, _ = PoolCapacity.objects.select_for_update().get_or_create(pool=pool)
    _require_same_engine(capacity, kind, kept)
    if kind != CapacityKind.STATIC:
        require_only_fleets(pool=pool, region=pool.region_id, param="kind")
    _keep_token(capacity, kind, kept, token)
    values = {
        "kind": kind, "minimum": minimum, "maximum": maximum, "gpus_per_node": gpus_per_node,
        "idle_seconds": idle_seconds, "node_nano_per_hour": node_nano_per_hour,
        "budget_nano_per_hour": budget_nano_per_hour, "on_demand_nodes": on_demand_nodes,
        "spot_node_nano_per_hour": spot_node_nano_per_hour, "replaces_spot": replaces_spot, "settings": kept,
    }  # fmt: skip
    # What failed before may work with the new settings.
    cleared: dict[str, Any] = {"failures": 0, "retry_at": None, "spot_retry_at": None, "problem": ""}
    PoolCapacity.objects.filter(pk=capacity.pk).update(**values, **cleared)
    audit.record(
        organization=None, by=by, action="pool.capacity_set", target=pool.pk, has_new_token=bool(token), **values
    )
    capacity.refresh_from_db()
    return capacity


def _require_machines(pool: GpuPool, kind: str) -> None:
    """Raise InvalidValue if machines would be started for a pool that borrows them."""
    if pool.borrows_from_id and kind != CapacityKind.STATIC:
        text = gettext("This pool has no machines of its own. Change the capacity of %(pool)s.")
        raise InvalidValue(text % {"pool": pool.machines.name}, param="kind")


def _require_budget(budget_nano: int, *, node_nano: int) -> None:
    """Raise InvalidValue unless the budget pays for a node."""
    if not node_nano:
        raise InvalidValue(gettext("Set the cost of a node: the budget is divided by it."), param="node_usd")
    if budget_nano < node_nano:
        raise InvalidValue(gettext("Set at least the cost of one node, or leave the budget empty."), param="budget_usd")


def _require_spot(
    pool: GpuPool, kind: str, settings: Mapping[str, object], *, spot_nano: int, budget_nano: int | None
) -> None:
    """Raise InvalidValue unless the engine can tell spot nodes from others, and quotes count their interruptions."""
    if not pool.is_spot:
        text = gettext("Mark the pool as spot first, so that its quotes count interruptions.")
        raise InvalidValue(text, param="on_demand_nodes")
    names = _ENGINES[kind].spot
    if names and not any(settings.get(name) for name in names):
        raise InvalidValue(gettext("Say where spot nodes start."), param=names[0])
    if budget_nano is not None and not spot_nano:
        raise InvalidValue(gettext("Set the cost of a spot node: the budget also pays for it."), param="spot_node_usd")


def _require_same_engine(capacity: PoolCapacity, kind: str, settings: Mapping[str, object]) -> None:
    """Raise InvalidState if nodes of the pool run in another engine or cluster than the new settings name."""
    changed = "" if kind == capacity.kind else "kind"
    if not changed and kind in _ENGINES:
        names = _ENGINES[kind].kept
        changed = next((name for name in names if settings.get(name) != capacity.settings.get(name)), "")
    if changed and capacity.pool.nodes.exclude(status__in=NODE_ENDED).exists():
        raise InvalidState(
            gettext("Nodes of this pool still run: set both maximums, also of its replicas, to 0 and wait."),
            param=changed,
        )


def _keep_token(capacity: PoolCapacity, kind: str, settings: Mapping[str, object], token: str) -> None:
    """Seal a new token. The present one stays for its own API server and authority, so that no other gets it."""
    stored = CapacityToken.objects.filter(capacity=capacity)
    if "api_url" not in setting_names(kind):
        stored.delete()
        return
    if not token:
        is_same = all(settings.get(name) == capacity.settings.get(name) for name in ("api_url", "ca"))
        if not is_same or not stored.exists():
            raise InvalidValue(gettext("Enter the token of this API server."), param="token")
        return
    try:
        msgspec.convert(token, ApiToken)
    except msgspec.ValidationError as error:
        raise InvalidValue(gettext("Enter the token as one line without spaces."), param="token") from error
    stored.delete()
    CapacityToken.objects.create(capacity=capacity, token_sealed=seal(token, place=_token_place(capacity)))


def _token_place(capacity: PoolCapacity) -> bytes:
    return place_of(table=CapacityToken._meta.db_table, column="token_sealed", row_id=capacity.pk)


def setting_names(kind: str) -> tuple[str, ...]:
    """Return the names of the engine's settings; a static pool has none."""
    return _ENGINES[kind].settings.__struct_fields__ if kind in _ENGINES else ()


def needed_names(kind: str) -> tuple[str, ...]:
    """Return the names of the settings that must not be empty."""
    return tuple(_ENGINES[kind].example) if kind in _ENGINES else ()


def read_settings(kind: str, settings: Mapping[str, Any]) -> _Settings:
    """Return the engine's settings. Raises InvalidValue that names the setting."""
    engine = _ENGINES.get(kind)
    if engine is None:
        raise InvalidValue(gettext("Choose static, slurm, kubernetes or dstack."), param="kind")
    for name in needed_names(kind):
        if not settings.get(name):
            raise InvalidValue(str(engine.missing), param=name)
    for name, value in settings.items():
        try:
            msgspec.convert({**engine.example, name: value}, engine.settings)
        except msgspec.ValidationError as error:
            raise InvalidValue(_fix_of(name), param=name) from error
    read = msgspec.convert(dict(settings), engine.settings)
    if isinstance(read, SlurmSettings):
        return read
    if wrong := wrong_setting(api_url=read.api_url, ca=read.ca):
        raise InvalidValue(_fix_of(wrong), param=wrong)
    return read


def _fix_of(name: str) -> str:
    return str(_FIXES.get(name, "")) or gettext("Enter a plain name of letters, digits and .,:_-.")


def list_recent_nodes(*, pool: GpuPool) -> list[CapacityNode]:
    """Return the pool's newest nodes, ended ones included."""
    return list(
        pool.nodes.select_related("worker", "fleet__base_model").order_by("-requested_at", "-pk")[:_SHOWN_NODES]
    )


def require_only_fleets(*, pool: GpuPool, region: str, param: str) -> None:
    """Raise InvalidValue if another pool in the region already starts replicas of a base model of this pool."""
    for fleet in pool.fleets.filter(maximum__gt=0).select_related("base_model").order_by("base_model"):
        require_only_fleet(pool=pool, base_model=fleet.base_model, region=region, param=param)


def require_only_fleet(*, pool: GpuPool, base_model: BaseModel, region: str, param: str) -> None:
    """Raise InvalidValue if another pool starts replicas of the base model in the region."""
    lock(f"fleets:{base_model.pk}")
    beside = ReplicaFleet.objects.filter(base_model=base_model, region=region, maximum__gt=0).exclude(pool=pool)
    other = beside.exclude(pool__capacity__kind=CapacityKind.STATIC).select_related("pool").first()
    if other is not None:
        text = gettext("%(pool)s starts replicas of %(model)s in this region already.")
        raise InvalidValue(text % {"pool": other.pool.name, "model": base_model.display_name}, param=param)


def limits_of(capacity: PoolCapacity, *, replicas: int) -> Limits:
    """Return the limits of the pool's nodes that train. The budget also pays for those that serve."""
    budget_nano = capacity.budget_nano_per_hour
    if budget_nano is not None:
        budget_nano = max(budget_nano - replicas * capacity.node_nano_per_hour, 0)
    return Limits(
        minimum=capacity.minimum,
        maximum=capacity.maximum,
        gpus_per_node=capacity.gpus_per_node,
        node_nano=capacity.node_nano_per_hour,
        budget_nano=budget_nano,
        on_demand=capacity.on_demand_nodes,
        spot_nano=capacity.spot_node_nano_per_hour,
    )


def engine_of(capacity: PoolCapacity) -> Capacity:
    """Return the adapter of an elastic pool. Raises CapacityError if its token cannot be read."""
    settings = read_settings(capacity.kind, capacity.settings)
    if isinstance(settings, SlurmSettings):
        return Slurm(settings)
    stored = CapacityToken.objects.filter(capacity=capacity).first()
    try:
        token = unseal(bytes(stored.token_sealed), place=_token_place(capacity)) if stored else ""
    except SealBroken as error:
        raise CapacityError("The token of the API server cannot be opened: enter it again.") from error
    if not token:
        raise CapacityError("The token of the API server is missing: enter it.")
    return Dstack(settings, token=token) if isinstance(settings, DstackSettings) else Kubernetes(settings, token=token)
