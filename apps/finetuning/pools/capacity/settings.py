"""Setting a pool's capacity: the limits, and the engine with its own settings."""

from typing import Any

import msgspec
from django.db import transaction
from django.utils.translation import gettext

from apps.core import audit
from apps.core.errors import InvalidState, InvalidValue
from apps.finetuning.lifecycle import NODE_ENDED
from apps.finetuning.models import CapacityKind, CapacityNode, GpuPool, PoolCapacity
from apps.finetuning.pools.capacity.port import Capacity
from apps.finetuning.pools.capacity.slurm import Slurm, SlurmSettings

MAX_NODES = 200
MAX_GPUS_PER_NODE = 64
_SHOWN_NODES = 20
MIN_IDLE_SECONDS, MAX_IDLE_SECONDS = 30, 86_400


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
) -> PoolCapacity:
    """Store how many nodes the pool may have and what starts them. Takes effect within seconds.

    Raises InvalidValue, and InvalidState if the engine or its cluster would change while it has nodes of this pool.
    """
    for name, value, least, most in (
        ("maximum", maximum, 0, MAX_NODES),
        ("minimum", minimum, 0, maximum),
        ("gpus_per_node", gpus_per_node, 1, MAX_GPUS_PER_NODE),
        ("idle_seconds", idle_seconds, MIN_IDLE_SECONDS, MAX_IDLE_SECONDS),
    ):
        if not least <= value <= most:
            raise InvalidValue(
                gettext("Set a number from %(least)s to %(most)s.") % {"least": least, "most": f"{most:,}"}, param=name
            )
    if budget_nano_per_hour is not None and not node_nano_per_hour:
        raise InvalidValue(gettext("Set the cost of a node: the budget is divided by it."), param="node_usd")
    if budget_nano_per_hour is not None and budget_nano_per_hour < node_nano_per_hour:
        raise InvalidValue(gettext("Set at least the cost of one node, or leave the budget empty."), param="budget_usd")
    kept = {} if kind == CapacityKind.STATIC else msgspec.to_builtins(read_settings(kind, settings))
    capacity, _ = PoolCapacity.objects.select_for_update().get_or_create(pool=pool)
    is_other_cluster = kept.get("slurm_conf") != capacity.settings.get("slurm_conf")
    if (kind != capacity.kind or is_other_cluster) and pool.nodes.exclude(status__in=NODE_ENDED).exists():
        raise InvalidState(
            gettext("Nodes of this pool still run: set the maximum to 0 and wait until they are gone."),
            param="kind" if kind != capacity.kind else "slurm_conf",
        )
    values = {
        "kind": kind, "minimum": minimum, "maximum": maximum, "gpus_per_node": gpus_per_node,
        "idle_seconds": idle_seconds, "node_nano_per_hour": node_nano_per_hour,
        "budget_nano_per_hour": budget_nano_per_hour, "settings": kept,
    }  # fmt: skip
    # What failed before may work with the new settings.
    PoolCapacity.objects.filter(pk=capacity.pk).update(**values, failures=0, retry_at=None, problem="")
    audit.record(organization=None, by=by, action="pool.capacity_set", target=pool.pk, **values)
    capacity.refresh_from_db()
    return capacity


def read_settings(kind: str, settings: dict[str, Any]) -> SlurmSettings:
    """Return the engine's settings. Raises InvalidValue that names the setting."""
    if kind != CapacityKind.SLURM:
        raise InvalidValue(gettext("Choose static or slurm."), param="kind")
    for name in ("partition", "install_dir", "work_dir"):
        if not settings.get(name):
            raise InvalidValue(gettext("Slurm needs this setting."), param=name)
    for name, value in settings.items():
        try:
            msgspec.convert(_EXAMPLE | {name: value}, SlurmSettings)
        except msgspec.ValidationError as error:
            text = gettext("Enter a plain name of letters, digits and .,:_-.")
            if name in ("install_dir", "work_dir", "model_root", "slurm_conf"):
                text = gettext("Enter an absolute path of letters, digits and ._-/.")
            elif name == "minutes":
                text = gettext("Enter a number from 5 to 43,200.")
            raise InvalidValue(text, param=name) from error
    return msgspec.convert(settings, SlurmSettings)


_EXAMPLE = {"partition": "gpu", "install_dir": "/opt/anneal", "work_dir": "/tmp/anneal"}  # noqa: S108


def list_recent_nodes(*, pool: GpuPool) -> list[CapacityNode]:
    """Return the pool's newest nodes, ended ones included."""
    return list(pool.nodes.select_related("worker").order_by("-requested_at", "-pk")[:_SHOWN_NODES])


def engine_of(capacity: PoolCapacity) -> Capacity:
    """Return the adapter of an elastic pool."""
    return Slurm(read_settings(capacity.kind, capacity.settings))
