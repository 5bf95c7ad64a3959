"""Fleets: the replicas of a base model that an elastic pool starts and releases by the requests for it."""

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from django.db import transaction
from django.db.models import Count, Q, QuerySet
from django.utils.translation import gettext

from apps.accounts.models import is_allowed
from apps.catalog.models import BaseModel
from apps.core import audit
from apps.core.errors import InvalidState, InvalidValue
from apps.finetuning.lifecycle import NodeStatus
from apps.finetuning.models import CapacityKind, CapacityNode, GpuPool, PoolCapacity
from apps.finetuning.pools.capacity.demand import wanted_replicas
from apps.finetuning.pools.capacity.settings import (
    MAX_IDLE_SECONDS,
    MAX_NODES,
    MIN_IDLE_SECONDS,
    require_only_fleet,
)
from apps.serving.keep_warm import paying_deployments
from apps.serving.models import Replica, ReplicaFleet
from apps.serving.operations import drain_replica
from apps.serving.placements import lock_placements
from apps.serving.ready_replicas import ready_replicas

MAX_REQUESTS_PER_REPLICA = 1024
_ASKED_WITHIN = datetime.timedelta(seconds=90)  # longer than a pool is left alone after a fault of its engine
_DRAINS_AT_LEAST = datetime.timedelta(seconds=15)  # gateways read routes every second, agents report every five
_DRAINS_AT_MOST = datetime.timedelta(minutes=10)
_SILENT_AT_MOST = datetime.timedelta(minutes=10)
_READY_WITHIN = datetime.timedelta(hours=1)  # a large model may be downloaded first
_MOST_GROWTH = 4  # times as many replicas at a time: one that reports too much does not start them all
_SURPLUS, _DRAINED = WORKED = "It was not needed any more.", "It was drained."
_STEADY = datetime.timedelta(minutes=10)
_BY = "system"


@transaction.atomic
def set_fleet(
    *,
    pool: GpuPool,
    base_model: BaseModel,
    minimum: int,
    maximum: int,
    requests_per_replica: int,
    idle_seconds: int,
    by: str,
) -> ReplicaFleet:
    """Store how many replicas of the base model the pool may start; a maximum of 0 ends the fleet.

    A base model has one fleet in a region, so that a request starts one replica. Raises InvalidValue, and InvalidState
    for a pool whose machines join by hand.
    """
    capacity = PoolCapacity.objects.select_for_update().filter(pool=pool).first()
    if maximum and (capacity is None or capacity.kind == CapacityKind.STATIC):
        raise InvalidState(gettext("Choose what starts the machines of this pool first."), param="base_model")
    for name, value, least, most in (
        ("maximum", maximum, 0, MAX_NODES),
        ("minimum", minimum, 0, maximum),
        ("requests_per_replica", requests_per_replica, 1, MAX_REQUESTS_PER_REPLICA),
        ("idle_seconds", idle_seconds, MIN_IDLE_SECONDS, MAX_IDLE_SECONDS),
    ):
        if not least <= value <= most:
            raise InvalidValue(
                gettext("Set a number from %(least)s to %(most)s.") % {"least": least, "most": f"{most:,}"}, param=name
            )
    if maximum:
        require_only_fleet(pool=pool, base_model=base_model, region=pool.region_id, param="base_model")
    limits = {
        "minimum": minimum, "maximum": maximum, "requests_per_replica": requests_per_replica,
        "idle_seconds": idle_seconds,
    }  # fmt: skip
    fleet, _ = ReplicaFleet.objects.update_or_create(
        pool=pool, base_model=base_model, defaults=limits | {"region_id": pool.region_id}
    )
    audit.record(
        organization=None, by=by, action="pool.fleet_set", target=pool.pk, base_model=base_model.name, **limits
    )
    return fleet


def list_fleets(*, pool: GpuPool) -> QuerySet[ReplicaFleet]:
    """Return the pool's fleets by the names of their base models, each with its `running` nodes."""
    running = Count("nodes", filter=Q(nodes__status=NodeStatus.RUNNING))
    return pool.fleets.select_related("base_model").annotate(running=running).order_by("base_model__name")


@dataclass(frozen=True, kw_only=True)
class FleetPlan:
    """New rows to request, and nodes to release with the reason; `failed` did not work. The rest stays."""

    new: Sequence[CapacityNode]
    leaving: Sequence[tuple[CapacityNode, str]]
    failed: Sequence[tuple[CapacityNode, str]]


def lock_fleets(*, pool_id: str) -> list[ReplicaFleet]:
    """Lock the pool's fleets and the placements of their models, in the order in which gateways lock them."""
    fleets = ReplicaFleet.objects.select_related("base_model").filter(pool=pool_id).order_by("pk")
    found = list(fleets.select_for_update(of=("self",)))
    for base_model_id in sorted({fleet.base_model_id for fleet in found}):
        lock_placements(base_model_id=base_model_id)
    return found


def plan_fleets(
    fleets: Iterable[ReplicaFleet],
    *,
    capacity: PoolCapacity,
    nodes: Sequence[CapacityNode],
    may_start: bool,
    most_new: int,
    now: datetime.datetime,
) -> FleetPlan:
    """Decide about the unfinished nodes of a pool's fleets, and record whether requests may wait for a replica.

    Without `may_start`, the engine failed lately and is asked for no node now.
    Replicas that are not needed drain first. They still answer what no other replica can, and end once no request is
    running.
    """
    failed = [(node, reason) for node in nodes if (reason := _fault(node, now))]
    gone = {node.pk for node, _ in failed}
    leaving, new = list[tuple[CapacityNode, str]](), list[CapacityNode]()
    for fleet in fleets:
        # A base model that customers cannot use gets no replica.
        base_model = fleet.base_model
        maximum = fleet.maximum if base_model.is_installed and base_model.retired_at is None else 0
        present = [node for node in nodes if node.fleet_id == fleet.pk and node.pk not in gone]
        own = [node for node in present if not _is_draining(node)]
        wanted = _note_wanted(fleet, maximum, now)
        CapacityNode.objects.filter(pk__in=[node.pk for node in own if node.reason == _SURPLUS]).update(reason="")
        own += _take_back(present, wanted - len(own))
        leaving += [(node, node.reason or _DRAINED) for node in present if node not in own and _has_drained(node, now)]
        own.sort(key=lambda node: (not is_at_work(node), node.requested_at))
        for node in own[wanted:]:
            if (replica := replica_of(node)) is None and (node.status == NodeStatus.REQUESTED or len(own) > maximum):
                leaving.append((node, _SURPLUS))
            elif replica is not None and (len(own) > maximum or _was_ready_for(replica, fleet.idle_seconds, now)):
                drain_replica(replica=replica, is_draining=True, by=_BY)
                CapacityNode.objects.filter(pk=node.pk).update(reason=_SURPLUS)
        count = max(min(wanted - len(own), most_new - len(new)), 0)
        new += [CapacityNode.objects.create(pool=capacity.pool, fleet=fleet) for _ in range(count)]
        working = [node for node in own if not wait_for_operator(node)]
        has_started = any(node.status != NodeStatus.REQUESTED for node in working)
        is_able = has_started or (may_start and bool(working or count or (not own and most_new > len(new))))
        ReplicaFleet.objects.filter(pk=fleet.pk).update(able_at=now if maximum and is_able else None)
    return FleetPlan(new=new, leaving=leaving, failed=failed)


def refuse_waiting(*, pool_id: str) -> None:
    """Have requests refused at once, after a fault of the pool's engine, where no replica runs or starts."""
    begun = (NodeStatus.STARTING, NodeStatus.RUNNING)
    ReplicaFleet.objects.filter(pool=pool_id).exclude(nodes__status__in=begun).update(able_at=None)


def _was_ready_for(replica: Replica, seconds: int, now: datetime.datetime) -> bool:
    return replica.is_ready and (now - replica.readiness_changed_at).total_seconds() >= seconds


def replica_of(node: CapacityNode) -> Replica | None:
    """Return the replica that runs on the node, once it has enrolled."""
    return getattr(node.worker, "replica", None)


def is_at_work(node: CapacityNode) -> bool:
    """Return whether the node's replica has loaded its model and may get requests."""
    replica = replica_of(node)
    return replica is not None and replica.is_ready and replica.is_trusted


def has_worked_steadily(node: CapacityNode, now: datetime.datetime) -> bool:
    """Return whether the node's replica was ready for so long that its end is no failed start."""
    replica = replica_of(node)
    return is_at_work(node) and replica is not None and now - replica.readiness_changed_at >= _STEADY


def wait_for_operator(node: CapacityNode) -> str:
    """Return what an operator must do before the node's replica may get requests, or ""."""
    replica = replica_of(node)
    is_accepted = replica is None or replica.is_address_accepted
    return "" if is_accepted else "Accept the address of its replica."


def _is_draining(node: CapacityNode) -> bool:
    replica = replica_of(node)
    return node.status == NodeStatus.DRAINING or (replica is not None and replica.draining_at is not None)


def _take_back(nodes: Sequence[CapacityNode], count: int) -> list[CapacityNode]:
    """Stop the draining of at most `count` nodes that were not needed; one that an operator drains goes on."""
    found = [node for node in nodes if node.status == NodeStatus.RUNNING and _is_draining(node)]
    taken = [node for node in found if node.reason == _SURPLUS][: max(count, 0)]
    for node in taken:
        if (replica := replica_of(node)) is not None:
            drain_replica(replica=replica, is_draining=False, by=_BY)
        CapacityNode.objects.filter(pk=node.pk).update(reason="")
    return taken


def _fault(node: CapacityNode, now: datetime.datetime) -> str:
    """Return why a node with a replica does not work, or ""."""
    replica = replica_of(node)
    if replica is None or node.status == NodeStatus.DRAINING:
        return ""
    if replica.isolated_at is not None:
        return "Its replica was found faulty."
    if now - _seen_at(replica) > _SILENT_AT_MOST:
        return "Its replica was silent for ten minutes."
    if not is_at_work(node) and now - replica.readiness_changed_at > _READY_WITHIN:
        return "Its replica got no requests for an hour: it was not ready, or its address was not accepted."
    return ""


def _has_drained(node: CapacityNode, now: datetime.datetime) -> bool:
    """Return whether a draining replica has answered everything, or had its time for that."""
    replica = replica_of(node)
    if replica is None or replica.draining_at is None or node.status == NodeStatus.DRAINING:
        return False
    is_empty = min(_seen_at(replica), now) - replica.draining_at > _DRAINS_AT_LEAST and not _in_progress([replica])
    return is_empty or now - replica.draining_at > _DRAINS_AT_MOST


def _seen_at(replica: Replica) -> datetime.datetime:
    return replica.observed_at or replica.created_at


def _note_wanted(fleet: ReplicaFleet, maximum: int, now: datetime.datetime) -> int:
    """Return how many replicas the fleet should have: the most that were needed within its idle time."""
    ready = ready_replicas().filter(base_model=fleet.base_model_id, region=fleet.region_id, whole_model=None)
    found = list(ready.select_related("worker__node"))
    needed = wanted_replicas(
        in_progress=sum(min(_in_progress([replica]), _MOST_GROWTH * fleet.requests_per_replica) for replica in found),
        per_replica=fleet.requests_per_replica,
        is_needed=_was_asked(fleet, now) or _is_kept_warm(fleet),
        others=sum(replica.draining_at is None and _fleet_of(replica) != fleet.pk for replica in found),
    )
    needed = min(max(needed, fleet.minimum), maximum)
    is_over = fleet.wanted_at is None or (now - fleet.wanted_at).total_seconds() >= fleet.idle_seconds
    if needed >= fleet.wanted or is_over:
        ReplicaFleet.objects.filter(pk=fleet.pk).update(wanted=needed, wanted_at=now)
        return needed
    return min(fleet.wanted, maximum)


def _in_progress(replicas: Iterable[Replica]) -> int:
    return sum(replica.load.get("running", 0) + replica.load.get("waiting", 0) for replica in replicas)


def _fleet_of(replica: Replica) -> str | None:
    node = getattr(replica.worker, "node", None)
    return node.fleet_id if node is not None else None


def _was_asked(fleet: ReplicaFleet, now: datetime.datetime) -> bool:
    return fleet.last_requested_at is not None and now - fleet.last_requested_at < _ASKED_WITHIN


def _is_kept_warm(fleet: ReplicaFleet) -> bool:
    """Return whether a customer pays for an adapter that is always loaded, and this fleet is the first that may."""
    kept = paying_deployments(base_model=fleet.base_model).filter(adapter_version__rank__lte=Replica().max_rank)
    limits = list(kept.values_list("organization__regions", flat=True).distinct())
    if not limits:
        return False
    others = ReplicaFleet.objects.filter(base_model=fleet.base_model_id, maximum__gt=0, pk__lt=fleet.pk)
    others = others.exclude(pool__capacity__kind=CapacityKind.STATIC)
    before = set(others.values_list("region", flat=True))
    return any(
        is_allowed(regions, fleet.region_id) and not any(is_allowed(regions, region) for region in before)
        for regions in limits
    )
