"""Bring the nodes of an elastic pool to the number that its queue needs.

One task at a time works on a pool. It lists the engine's nodes, decides in one transaction, and then asks the engine.
The row of a node exists before the request and gives the node its name. After a crash in between, the next list finds
the node under that name, so no request is made twice. A listed node without a living row is released.
"""

import datetime
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from django.db import transaction
from django.db.models import Q

from apps.core.database.clock import db_now
from apps.core.database.transitions import advance
from apps.finetuning.conversions.demand import needs_node
from apps.finetuning.lifecycle import NODE_ENDED, NODE_TRANSITIONS, NodeStatus
from apps.finetuning.models import (
    CapacityKind,
    CapacityNode,
    PoolCapacity,
    Worker,
    WorkerToken,
)
from apps.finetuning.models.capacity import name_prefix
from apps.finetuning.pools import operations
from apps.finetuning.pools.capacity.demand import Limits, kinds_of_further_nodes, wanted_nodes
from apps.finetuning.pools.capacity.fleets import (
    WORKED,
    has_worked_steadily,
    is_at_work,
    lock_fleets,
    plan_fleets,
    refuse_waiting,
    replica_of,
    wait_for_operator,
)
from apps.finetuning.pools.capacity.needs import list_needs
from apps.finetuning.pools.capacity.port import CapacityError, ListedNode
from apps.finetuning.pools.capacity.settings import engine_of, limits_of
from apps.finetuning.pools.capacity.starts import (
    ENROL_WITHIN,
    FIRST_WAIT_SECONDS,
    SPOT_PAUSE,
    close_token,
    note_failed_start,
    note_wait_in_vain,
    seconds_alone,
    start_node,
)
from apps.finetuning.usage.occupancy import at_idle_work, has_worked, is_leased, last_work, leased_gpus
from apps.serving.models import ReplicaFleet
from apps.serving.operations import retire_replica

logger = logging.getLogger(__name__)

_TURN = datetime.timedelta(seconds=120)  # longer than a task may take
_SILENT_AT_MOST = datetime.timedelta(minutes=10)  # of a worker without a lease
_SPOT_WAITS_AT_MOST = datetime.timedelta(minutes=10)  # in the engine's queue
_STARTS_AT_ONCE = 4  # of one reconciliation: each is a call of some seconds at worst
_BY = "system"


@dataclass(frozen=True, kw_only=True)
class NodePlan:
    starts: Sequence[CapacityNode]
    releases: Sequence[str]  # ids of the engine


def list_elastic_pools() -> list[str]:
    """Return the pools to look at. After a failed start only further starts wait."""
    elastic = PoolCapacity.objects.exclude(kind=CapacityKind.STATIC)
    return list(elastic.order_by("pool_id").values_list("pool_id", flat=True))


def reconcile_pool(*, pool_id: str) -> None:
    """Start or release nodes of one pool. Safe to repeat; does nothing while another task works on the pool.

    After an engine could not list or release nodes, it does nothing for half a minute.
    """
    now = db_now()
    free = Q(busy_until=None) | Q(busy_until__lte=now)
    turn = now + _TURN
    if not PoolCapacity.objects.filter(free, pk=pool_id).update(busy_until=turn):
        return
    try:
        _reconcile(PoolCapacity.objects.select_related("pool").get(pk=pool_id))
    except CapacityError as error:
        logger.warning("capacity of %s: %s", pool_id, error)
        pause = now + datetime.timedelta(seconds=FIRST_WAIT_SECONDS)  # an engine that hangs delays the other pools
        PoolCapacity.objects.filter(pk=pool_id).update(problem=str(error)[:300], busy_until=pause)
        refuse_waiting(pool_id=pool_id)
    finally:
        PoolCapacity.objects.filter(pk=pool_id, busy_until=turn).update(busy_until=None)


def _reconcile(capacity: PoolCapacity) -> None:
    engine = engine_of(capacity)
    listed = engine.list_nodes(prefix=name_prefix(capacity.pool_id))
    plan = _decide(capacity, listed)
    if plan.releases:
        engine.release(external_ids=plan.releases)
    try:
        for node in plan.starts:
            start_node(engine, capacity, node)
    except CapacityError as error:
        note_failed_start(node, str(error))
    PoolCapacity.objects.filter(Q(retry_at=None) | Q(retry_at__lte=db_now()), pk=capacity.pk).update(problem="")


@transaction.atomic
def _decide(capacity: PoolCapacity, listed: Mapping[str, ListedNode]) -> NodePlan:
    """Record what became of the nodes, and choose which to start and to release."""
    now, asked = db_now(), (capacity.kind, capacity.settings)
    capacity = PoolCapacity.objects.select_for_update(of=("self",)).select_related("pool").get(pk=capacity.pk)
    if (capacity.kind, capacity.settings) != asked:
        return NodePlan(starts=(), releases=())  # the list may be of another engine
    # The hour to enrol begins when a node leaves the queue. Tokens are locked before nodes, as in an enrolment.
    in_queue = [machine.external_id for machine in listed.values() if machine.is_waiting]
    starting = CapacityNode.objects.filter(pool=capacity.pool_id, status=NodeStatus.STARTING, external_id__in=in_queue)
    tokens = WorkerToken.objects.filter(pk__in=starting.values("token"), used_at=None)
    tokens.update(expires_at=now + ENROL_WITHIN)
    fleets = lock_fleets(pool_id=capacity.pool_id)
    unfinished = CapacityNode.objects.filter(pool=capacity.pool_id).exclude(status__in=NODE_ENDED)
    unfinished = unfinished.select_for_update(of=("self",)).select_related("worker__replica", "token")
    every = list(unfinished.order_by("requested_at", "pk"))
    for node in every:
        _observe(node, listed.get(node.name), capacity, now)
    may_start = PoolCapacity.objects.filter(Q(retry_at=None) | Q(retry_at__lte=now), pk=capacity.pk).exists()
    every = [node for node in every if node.status not in NODE_ENDED]
    serving = _plan_replicas(fleets, capacity, every, may_start, now)
    nodes = [node for node in every if node.fleet_id is None]
    workers = [node.worker_id for node in nodes if node.worker_id]
    lent = leased_gpus(workers=workers, lent_by=capacity.pool_id)  # it comes back, so it is free for what waits
    leased = dict.fromkeys(at_idle_work(workers=workers, now=now), 0) | leased_gpus(workers=workers)
    for node in nodes:
        worker = node.worker
        if worker is None or node.status != NodeStatus.RUNNING or worker.pk in leased:
            continue
        if not worker.takes_work:
            _drain(node, "An operator cordoned it.", now)
        elif now - (worker.last_seen_at or worker.created_at) > _SILENT_AT_MOST and _hold_idle(worker, now):
            _drain(node, "Its worker was silent for ten minutes.", now)
    limits = limits_of(capacity, replicas=len(serving))
    has_spot = _has_spot(capacity, nodes, listed, limits, now)
    nodes = [node for node in nodes if node.status not in NODE_ENDED]
    alive = [node for node in nodes if node.status != NodeStatus.DRAINING]
    busy = [gpus - lent.get(worker_id, 0) for worker_id, gpus in leased.items()]
    waiting = list_needs(pool=capacity.pool, busy=busy, limits=limits, now=now)
    if not waiting and needs_node(capacity=capacity, now=now):
        waiting = [(limits.gpus_per_node, 1)]
    wanted = wanted_nodes(waiting=waiting, busy=busy, limits=limits)
    PoolCapacity.objects.filter(pk=capacity.pk).update(wanted=wanted)
    for node in _surplus(alive, len(alive) - wanted, leased, capacity, now):
        _drain(node, "It was not needed any more.", now)
    requested = [node for node in (*serving, *alive) if node.status == NodeStatus.REQUESTED]
    kinds = kinds_of_further_nodes(
        min(wanted - len(alive), limits.most - len(nodes), _STARTS_AT_ONCE - len(requested)),
        alive=[node.is_spot for node in alive],
        unfinished=[node.is_spot for node in nodes],
        limits=limits,
        has_spot=has_spot,
    )
    requested += [CapacityNode.objects.create(pool=capacity.pool, is_spot=is_spot) for is_spot in kinds]
    kept = {node.name for node in (*serving, *nodes) if node.status in (NodeStatus.STARTING, NodeStatus.RUNNING)}
    return NodePlan(
        starts=requested if may_start else (),
        releases=[machine.external_id for name, machine in listed.items() if name not in kept],
    )


def _plan_replicas(
    fleets: Sequence[ReplicaFleet],
    capacity: PoolCapacity,
    unfinished: Sequence[CapacityNode],
    may_start: bool,
    now: datetime.datetime,
) -> list[CapacityNode]:
    """Release and create nodes of the pool's fleets; return those that have not ended. They are never spot."""
    nodes = [node for node in unfinished if node.fleet_id is not None]
    most_new = _STARTS_AT_ONCE - sum(node.status == NodeStatus.REQUESTED for node in unfinished) if may_start else 0
    if capacity.budget_nano_per_hour is not None and capacity.node_nano_per_hour:
        spot_nodes = sum(node.is_spot for node in unfinished)
        spent = spot_nodes * capacity.spot_node_nano_per_hour
        spent += (len(unfinished) - spot_nodes) * capacity.node_nano_per_hour
        most_new = min(most_new, max(capacity.budget_nano_per_hour - spent, 0) // capacity.node_nano_per_hour)
    plan = plan_fleets(fleets, capacity=capacity, nodes=nodes, may_start=may_start, most_new=most_new, now=now)
    for node, reason in (*plan.leaving, *plan.failed):
        _drain(node, reason, now)
    for node, reason in plan.failed:
        note_failed_start(node, f"{node.name}: {reason}")
    return [*(node for node in nodes if node.status not in NODE_ENDED), *plan.new]


def _observe(node: CapacityNode, machine: ListedNode | None, capacity: PoolCapacity, now: datetime.datetime) -> None:
    """Move the row to where the machine is."""
    if node.status == NodeStatus.REQUESTED and machine is not None:
        advance(node, to=NodeStatus.STARTING, transitions=NODE_TRANSITIONS, external_id=machine.external_id)
    if node.status == NodeStatus.STARTING and node.worker is not None and (node.fleet_id is None or is_at_work(node)):
        advance(node, to=NodeStatus.RUNNING, transitions=NODE_TRANSITIONS, reason="")
        if node.fleet_id is None:  # a replica that becomes ready may still end at its first request
            PoolCapacity.objects.filter(pk=node.pool_id).update(failures=0, retry_at=None, problem="")
    if node.status == NodeStatus.REQUESTED:
        return
    if machine is None:
        _end(node, capacity, now)
    elif node.status == NodeStatus.STARTING and node.worker is None and not _may_enrol(node, now):
        _drain(node, "It did not enrol within an hour.", now)
        note_failed_start(node, f"{node.name} did not enrol within an hour.")
    elif node.status == NodeStatus.STARTING and node.reason != (reason := machine.reason or wait_for_operator(node)):
        CapacityNode.objects.filter(pk=node.pk).update(reason=reason)


def _may_enrol(node: CapacityNode, now: datetime.datetime) -> bool:
    return node.token is not None and node.token.expires_at > now


def _end(node: CapacityNode, capacity: PoolCapacity, now: datetime.datetime) -> None:
    """Record that the engine has the node no more, and refuse its credential from now on."""
    to, reason = NodeStatus.RELEASED, node.reason or "It was idle and ended."
    if node.status == NodeStatus.STARTING:
        ended = "ended before it enrolled" if node.worker is None else "ended before its replica was ready"
        to, reason = NodeStatus.LOST, f"It {ended}."
        note_failed_start(node, f"{node.name} {ended}: look at the engine's log of it.")
    elif node.worker is not None and is_leased(worker=node.worker):
        to, reason = NodeStatus.LOST, "It was taken away while a run worked on it."
    elif node.status == NodeStatus.RUNNING and node.fleet_id is not None:
        to, reason = NodeStatus.LOST, "Its replica ended by itself."
        if not has_worked_steadily(node, now):
            note_failed_start(node, f"{node.name} ended by itself: look at the engine's log of it.")
    elif node.status == NodeStatus.RUNNING and _has_crashed(node.worker, capacity, now):
        to, reason = NodeStatus.LOST, "It ended before it worked."
        note_failed_start(node, f"{node.name} ended before it worked: look at the engine's log of it.")
    elif node.status == NodeStatus.RUNNING and _has_waited_in_vain(node.worker, capacity, now):
        note_wait_in_vain(node)
    advance(node, to=to, transitions=NODE_TRANSITIONS, ended_at=now, reason=reason)
    if reason in WORKED:
        PoolCapacity.objects.filter(pk=node.pool_id).update(failures=0)
    close_token(node, now)
    if node.worker is not None and node.worker.revoked_at is None:
        operations.revoke(worker=node.worker, by=_BY)
    if (replica := replica_of(node)) is not None:
        retire_replica(replica=replica)


def _drain(node: CapacityNode, reason: str, now: datetime.datetime) -> None:
    """Give the node no new work and no late enrolment. The engine stops it after this transaction."""
    if node.status == NodeStatus.REQUESTED:  # the engine has not listed it
        advance(node, to=NodeStatus.RELEASED, transitions=NODE_TRANSITIONS, ended_at=now, reason=reason)
    else:
        advance(node, to=NodeStatus.DRAINING, transitions=NODE_TRANSITIONS, reason=reason)
    close_token(node, now)
    if node.worker is not None:
        operations.cordon(worker=node.worker, by=_BY)


def _has_crashed(worker: Worker | None, capacity: PoolCapacity, now: datetime.datetime) -> bool:
    """Return whether a worker that ended by itself had no run, and too little time to end because it was idle."""
    if worker is None or (now - worker.created_at).total_seconds() >= seconds_alone(capacity):
        return False
    return not has_worked(worker=worker)


def _has_waited_in_vain(worker: Worker | None, capacity: PoolCapacity, now: datetime.datetime) -> bool:
    """Return whether a worker ended by itself because it never had work, although the pool wanted its node."""
    if worker is None or capacity.minimum or not capacity.wanted:
        return False
    return (now - worker.created_at).total_seconds() >= seconds_alone(capacity) and not has_worked(worker=worker)


def _surplus(
    alive: Sequence[CapacityNode],
    count: int,
    leased: Mapping[str, int],
    capacity: PoolCapacity,
    now: datetime.datetime,
) -> list[CapacityNode]:
    """Return at most `count` nodes that have had no work for the idle time, in the order of `_by_use`."""
    idle: list[CapacityNode] = []
    for node in _by_use(alive, capacity.on_demand_nodes or 0):
        if len(idle) >= count:
            break
        if node.worker is None:
            since = node.requested_at
        elif node.worker_id in leased or not _hold_idle(node.worker, now):
            continue
        else:
            since = last_work(worker=node.worker)
        if (now - since).total_seconds() >= capacity.idle_seconds:
            idle.append(node)
    return idle


def _by_use(alive: Sequence[CapacityNode], on_demand: int) -> list[CapacityNode]:
    """Return on-demand nodes above this number, then spot nodes, then the others, the newest of each first."""
    newest = sorted(alive, key=lambda each: each.requested_at, reverse=True)
    kept = [node for node in newest if not node.is_spot]
    extra = max(len(kept) - on_demand, 0)
    return [*kept[:extra], *(node for node in newest if node.is_spot), *kept[extra:]]


def _has_spot(
    capacity: PoolCapacity,
    nodes: Sequence[CapacityNode],
    listed: Mapping[str, ListedNode],
    limits: Limits,
    now: datetime.datetime,
) -> bool:
    """Return whether spot nodes can be had; give up those that did not start, so that on-demand nodes replace them.

    They are not given up while the budget does not pay for a replacement.
    """
    waiting = [node for node in nodes if node.is_spot and _has_no_machine(node, listed.get(node.name))]
    kept = [node.is_spot for node in nodes if node not in waiting]
    if not capacity.replaces_spot or not kinds_of_further_nodes(
        1, alive=kept, unfinished=kept, limits=limits, has_spot=False
    ):
        return True
    late = [node for node in waiting if node.external_id and now - node.requested_at > _SPOT_WAITS_AT_MOST]
    if late:
        PoolCapacity.objects.filter(pk=capacity.pk).update(spot_retry_at=now + SPOT_PAUSE)
    paused = PoolCapacity.objects.filter(pk=capacity.pk, spot_retry_at__gt=now).exists()
    if paused:
        late += [node for node in waiting if node.status == NodeStatus.REQUESTED]
    for node in late:
        _drain(node, "No spot machine was free.", now)
    return not paused


def _has_no_machine(node: CapacityNode, machine: ListedNode | None) -> bool:
    """Return whether the node was not requested yet, or is in the engine's queue."""
    is_queued = node.status == NodeStatus.STARTING and machine is not None and machine.is_waiting
    return is_queued or node.status == NodeStatus.REQUESTED


def _hold_idle(worker: Worker, now: datetime.datetime) -> bool:
    """Lock the worker's row, as a claim does, and return whether it has no work; it gets no run before the end."""
    Worker.objects.select_for_update().get(pk=worker.pk)
    return not is_leased(worker=worker) and not at_idle_work(workers=[worker.pk], now=now)
