"""Bring the nodes of an elastic pool to the number that its queue needs.

One task at a time works on a pool. It lists the engine's nodes, decides in one transaction, and then asks the engine.
The row of a node exists before the request and names it. After a crash in between, the next list finds the node under
that name, so no request is made twice. What the engine lists without a living row is released.
"""

import datetime
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import F, Q
from django.db.models.functions import Least

from apps.accounts.shares import list_sharing
from apps.core.database.clock import db_now
from apps.core.database.transitions import advance, try_advance
from apps.finetuning.lifecycle import NODE_ENDED, NODE_TRANSITIONS, NodeStatus
from apps.finetuning.models import (
    CapacityKind,
    CapacityNode,
    FineTuningJob,
    PoolCapacity,
    Worker,
    WorkerKind,
    WorkerToken,
)
from apps.finetuning.models.capacity import name_prefix
from apps.finetuning.pools import operations
from apps.finetuning.pools.capacity.demand import Limits, kinds_of_further_nodes, wanted_nodes
from apps.finetuning.pools.capacity.port import Capacity, CapacityError, ListedNode, NodeRequest
from apps.finetuning.pools.capacity.settings import engine_of
from apps.finetuning.runs.leases import sha256_hex
from apps.finetuning.runs.queue.queue_order import queue_order
from apps.finetuning.usage.occupancy import has_worked, is_leased, last_work, leased_gpus
from apps.finetuning.usage.quotas import reason_to_wait

logger = logging.getLogger(__name__)

_TURN = datetime.timedelta(seconds=120)  # longer than a task may take
_ENROL_WITHIN = datetime.timedelta(hours=1)  # after the engine's own queue
_SILENT_AT_MOST = datetime.timedelta(minutes=10)  # of a worker without a lease
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 30, 1800
_SPOT_WAITS_AT_MOST = datetime.timedelta(minutes=10)  # in the engine's queue
_SPOT_PAUSE = datetime.timedelta(minutes=30)  # after a spot node did not start
_STARTS_AT_ONCE = 4  # of one reconciliation: each is a call of some seconds at worst
_LOOKED_AT = 50  # queued runs
_LOOKS_AFTER_ALL = 3600  # a node of a minimum renews itself when it was idle for so long
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
        pause = now + datetime.timedelta(seconds=_FIRST_WAIT_SECONDS)  # an engine that hangs delays the other pools
        PoolCapacity.objects.filter(pk=pool_id).update(problem=str(error)[:300], busy_until=pause)
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
            _start(engine, capacity, node)
    except CapacityError as error:
        _note_failed_start(node, str(error))
    PoolCapacity.objects.filter(Q(retry_at=None) | Q(retry_at__lte=db_now()), pk=capacity.pk).update(problem="")


@transaction.atomic
def _decide(capacity: PoolCapacity, listed: Mapping[str, ListedNode]) -> NodePlan:
    """Record what became of the nodes, and choose which to start and to release."""
    now, asked = db_now(), (capacity.kind, capacity.settings)
    capacity = PoolCapacity.objects.select_for_update(of=("self",)).select_related("pool").get(pk=capacity.pk)
    if (capacity.kind, capacity.settings) != asked:
        return NodePlan(starts=(), releases=())  # the list may be of another engine
    _keep_waiting_tokens(capacity.pool_id, listed, now)
    unfinished = CapacityNode.objects.filter(pool=capacity.pool_id).exclude(status__in=NODE_ENDED)
    unfinished = unfinished.select_for_update(of=("self",)).select_related("worker", "token")
    nodes = list(unfinished.order_by("requested_at", "pk"))
    for node in nodes:
        _observe(node, listed.get(node.name), capacity, now)
    nodes = [node for node in nodes if node.status not in NODE_ENDED]
    leased = leased_gpus(workers=[node.worker_id for node in nodes if node.worker_id])
    for node in nodes:
        worker = node.worker
        if worker is None or node.status != NodeStatus.RUNNING or worker.pk in leased:
            continue
        if not worker.takes_work:
            _drain(node, "An operator cordoned it.", now)
        elif now - (worker.last_seen_at or worker.created_at) > _SILENT_AT_MOST and _hold_idle(worker):
            _drain(node, "Its worker was silent for ten minutes.", now)
    limits = _limits(capacity)
    has_spot = _has_spot(capacity, nodes, listed, limits, now)
    nodes = [node for node in nodes if node.status not in NODE_ENDED]
    alive = [node for node in nodes if node.status != NodeStatus.DRAINING]
    waiting = _waiting(capacity, limits, now)
    lent = leased_gpus(workers=leased, lent_by=capacity.pool_id)  # it comes back, so it is free for what waits
    busy = [gpus - lent.get(worker_id, 0) for worker_id, gpus in leased.items()]
    wanted = wanted_nodes(waiting=waiting, busy=busy, limits=limits)
    PoolCapacity.objects.filter(pk=capacity.pk).update(wanted=wanted)
    for node in _surplus(alive, len(alive) - wanted, leased, capacity, now):
        _drain(node, "It was not needed any more.", now)
    requested = [node for node in alive if node.status == NodeStatus.REQUESTED]
    kinds = kinds_of_further_nodes(
        min(wanted - len(alive), limits.most - len(nodes), _STARTS_AT_ONCE - len(requested)),
        alive=[node.is_spot for node in alive],
        unfinished=[node.is_spot for node in nodes],
        limits=limits,
        has_spot=has_spot,
    )
    requested += [CapacityNode.objects.create(pool=capacity.pool, is_spot=is_spot) for is_spot in kinds]
    may_start = PoolCapacity.objects.filter(Q(retry_at=None) | Q(retry_at__lte=now), pk=capacity.pk).exists()
    kept = {node.name for node in nodes if node.status in (NodeStatus.STARTING, NodeStatus.RUNNING)}
    return NodePlan(
        starts=requested if may_start else (),
        releases=[machine.external_id for name, machine in listed.items() if name not in kept],
    )


def _keep_waiting_tokens(pool_id: str, listed: Mapping[str, ListedNode], now: datetime.datetime) -> None:
    """Let the hour in which a node must enrol begin when it leaves the engine's queue.

    Locks tokens before nodes, as an enrolment does.
    """
    waiting = [machine.external_id for machine in listed.values() if machine.is_waiting]
    nodes = CapacityNode.objects.filter(pool=pool_id, status=NodeStatus.STARTING, external_id__in=waiting)
    tokens = WorkerToken.objects.filter(pk__in=nodes.values("token"), used_at=None)
    tokens.update(expires_at=now + _ENROL_WITHIN)


def _observe(node: CapacityNode, machine: ListedNode | None, capacity: PoolCapacity, now: datetime.datetime) -> None:
    """Move the row to where the machine is."""
    if node.status == NodeStatus.REQUESTED and machine is not None:
        advance(node, to=NodeStatus.STARTING, transitions=NODE_TRANSITIONS, external_id=machine.external_id)
    if node.status == NodeStatus.STARTING and node.worker is not None:
        advance(node, to=NodeStatus.RUNNING, transitions=NODE_TRANSITIONS, reason="")
        PoolCapacity.objects.filter(pk=node.pool_id).update(failures=0, retry_at=None, problem="")
    if node.status == NodeStatus.REQUESTED:
        return
    if machine is None:
        _end(node, capacity, now)
    elif node.status == NodeStatus.STARTING and (node.token is None or node.token.expires_at <= now):
        _drain(node, "It did not enrol within an hour.", now)
        _note_failed_start(node, f"{node.name} did not enrol within an hour.")
    elif node.status == NodeStatus.STARTING and node.reason != machine.reason:
        CapacityNode.objects.filter(pk=node.pk).update(reason=machine.reason)


def _end(node: CapacityNode, capacity: PoolCapacity, now: datetime.datetime) -> None:
    """Record that the engine has the node no more, and refuse its credential from now on."""
    to, reason = NodeStatus.RELEASED, node.reason or "It was idle and ended."
    if node.status == NodeStatus.STARTING:
        to, reason = NodeStatus.LOST, "It ended before it enrolled."
        _note_failed_start(node, f"{node.name} ended before it enrolled: look at the engine's log of it.")
    elif node.worker is not None and is_leased(worker=node.worker):
        to, reason = NodeStatus.LOST, "It was taken away while a run worked on it."
    elif node.status == NodeStatus.RUNNING and _has_crashed(node.worker, capacity, now):
        to, reason = NodeStatus.LOST, "It ended before it worked."
        _note_failed_start(node, f"{node.name} ended before it worked: look at the engine's log of it.")
    advance(node, to=to, transitions=NODE_TRANSITIONS, ended_at=now, reason=reason)
    _close_token(node, now)
    if node.worker is not None and node.worker.revoked_at is None:
        operations.revoke(worker=node.worker, by=_BY)


def _drain(node: CapacityNode, reason: str, now: datetime.datetime) -> None:
    """Give the node no new work and no late enrolment. The engine stops it after this transaction."""
    if node.status == NodeStatus.REQUESTED:  # the engine has not listed it
        advance(node, to=NodeStatus.RELEASED, transitions=NODE_TRANSITIONS, ended_at=now, reason=reason)
    else:
        advance(node, to=NodeStatus.DRAINING, transitions=NODE_TRANSITIONS, reason=reason)
    _close_token(node, now)
    if node.worker is not None:
        operations.cordon(worker=node.worker, by=_BY)


def _has_crashed(worker: Worker | None, capacity: PoolCapacity, now: datetime.datetime) -> bool:
    """Return whether a worker that ended by itself had no run, and too little time to end because it was idle."""
    if worker is None or (now - worker.created_at).total_seconds() >= capacity.idle_seconds:
        return False
    return not has_worked(worker=worker)


def _close_token(node: CapacityNode, now: datetime.datetime) -> None:
    WorkerToken.objects.filter(pk=node.token_id, used_at=None).update(expires_at=now)


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
        elif node.worker_id in leased or not _hold_idle(node.worker):
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
        PoolCapacity.objects.filter(pk=capacity.pk).update(spot_retry_at=now + _SPOT_PAUSE)
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


def _hold_idle(worker: Worker) -> bool:
    """Lock the worker's row, as a claim does, and return whether it has no lease; it gets none before the end."""
    Worker.objects.select_for_update().get(pk=worker.pk)
    return not is_leased(worker=worker)


def _waiting(capacity: PoolCapacity, limits: Limits, now: datetime.datetime) -> list[int]:
    """Return the GPUs of the queued runs that may start together now, as far as the limits could serve them.

    A run that a machine joined by hand could take counts as well: the node ends again when it stays idle.
    """
    needs: list[int] = []
    runs = queue_order(pool=capacity.pool, now=now, limit=_LOOKED_AT)
    holders = list_sharing(organizations={run.organization_id for run in runs})
    planned: dict[str, list[FineTuningJob]] = defaultdict(list)
    for run in runs:
        if sum(needs) >= limits.most * limits.gpus_per_node:
            break
        holder, job = holders[run.organization_id], run.job
        before = planned[holder]
        can_fit = job.gpus_per_node <= limits.gpus_per_node and job.node_count <= limits.most
        if can_fit and not reason_to_wait(job=job, holder=holder, now=now, planned=before):
            before.append(job)
            needs += [job.gpus_per_node] * job.node_count
    return needs


def _limits(capacity: PoolCapacity) -> Limits:
    return Limits(
        minimum=capacity.minimum,
        maximum=capacity.maximum,
        gpus_per_node=capacity.gpus_per_node,
        node_nano=capacity.node_nano_per_hour,
        budget_nano=capacity.budget_nano_per_hour,
        on_demand=capacity.on_demand_nodes,
        spot_nano=capacity.spot_node_nano_per_hour,
    )


def _start(engine: Capacity, capacity: PoolCapacity, node: CapacityNode) -> None:
    """Issue a token and request the node. Raises CapacityError; the row then waits for the next try."""
    with transaction.atomic():
        _close_token(node, db_now())
        token = operations.issue_worker_token(
            pool=capacity.pool, kind=WorkerKind.TRAINER, base_model=None, life=_ENROL_WITHIN, by=_BY
        )
        issued = WorkerToken.objects.get(token_sha256=sha256_hex(token))
        waiting = CapacityNode.objects.filter(pk=node.pk, status=NodeStatus.REQUESTED)
        waiting.update(token=issued, requested_at=db_now())
    external_id = engine.request(
        NodeRequest(
            name=node.name,
            pool=capacity.pool.name,
            token=token,
            internal_url=settings.INTERNAL_URL,
            idle_seconds=max(capacity.idle_seconds, _LOOKS_AFTER_ALL if capacity.minimum else 0),
            gpus=capacity.gpus_per_node,
            is_spot=None if capacity.on_demand_nodes is None else node.is_spot,
        )
    )
    try_advance(node, to=NodeStatus.STARTING, transitions=NODE_TRANSITIONS, external_id=external_id)


def _note_failed_start(node: CapacityNode, problem: str) -> None:
    """Show the problem to the operator and wait before the next start, twice as long each time.

    After a spot node that on-demand nodes may replace, the wait stays short, and further spot nodes wait longer.
    """
    logger.warning("capacity of %s: %s", node.pool_id, problem)
    now, capacity = db_now(), PoolCapacity.objects.get(pk=node.pool_id)
    changes: dict[str, Any] = {"problem": problem[:300]}
    if node.is_spot and capacity.replaces_spot:
        wait, changes["spot_retry_at"] = _FIRST_WAIT_SECONDS, now + _SPOT_PAUSE
    else:
        wait = min(_FIRST_WAIT_SECONDS * 2 ** min(capacity.failures, 10), _LONGEST_WAIT_SECONDS)
        changes["failures"] = Least(F("failures") + 1, 1000)
    changes["retry_at"] = now + datetime.timedelta(seconds=wait)
    PoolCapacity.objects.filter(pk=node.pool_id).update(**changes)
