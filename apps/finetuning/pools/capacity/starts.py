"""Start a node: issue its token, ask the engine, and wait longer after each failed start."""

import datetime
import logging
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import F
from django.db.models.functions import Least

from apps.core.database.clock import db_now
from apps.core.database.transitions import try_advance
from apps.finetuning.lifecycle import NODE_TRANSITIONS, NodeStatus
from apps.finetuning.models import CapacityNode, PoolCapacity, WorkerKind, WorkerToken
from apps.finetuning.pools import operations
from apps.finetuning.pools.capacity.port import Capacity, NodeRequest
from apps.finetuning.runs.leases import sha256_hex

logger = logging.getLogger(__name__)

ENROL_WITHIN = datetime.timedelta(hours=1)  # after the engine's own queue
FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 30, 1800
SPOT_PAUSE = datetime.timedelta(minutes=30)  # after a spot node did not start
# A worker ends itself only after so long: nodes that are not needed are released before. Until then it waits for the
# rest of its group, whose nodes may start later.
_ALONE_AT_MOST = 3600
_BY = "system"


def seconds_alone(capacity: PoolCapacity) -> int:
    """Return after how many seconds without work a worker of the pool ends itself."""
    return max(capacity.idle_seconds, _ALONE_AT_MOST)


def start_node(engine: Capacity, capacity: PoolCapacity, node: CapacityNode) -> None:
    """Issue a token and request the node. Raises CapacityError; the row then waits for the next try."""
    with transaction.atomic():
        close_token(node, db_now())
        base_model = node.fleet.base_model if node.fleet else None
        kind = WorkerKind.REPLICA if base_model else WorkerKind.TRAINER
        token = operations.issue_worker_token(
            pool=capacity.pool, kind=kind, base_model=base_model, life=ENROL_WITHIN, by=_BY
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
            idle_seconds=seconds_alone(capacity),
            is_replica=node.fleet is not None,
            gpus=capacity.gpus_per_node,
            is_spot=None if capacity.on_demand_nodes is None else node.is_spot,
        )
    )
    try_advance(node, to=NodeStatus.STARTING, transitions=NODE_TRANSITIONS, external_id=external_id)


def note_failed_start(node: CapacityNode, problem: str) -> None:
    """Show the problem to the operator and wait before the next start, twice as long each time.

    After a spot node that on-demand nodes may replace, the wait stays short, and further spot nodes wait longer.
    """
    logger.warning("capacity of %s: %s", node.pool_id, problem)
    now, capacity = db_now(), PoolCapacity.objects.get(pk=node.pool_id)
    changes: dict[str, Any] = {"problem": problem[:300]}
    if node.is_spot and capacity.replaces_spot:
        wait, changes["spot_retry_at"] = FIRST_WAIT_SECONDS, now + SPOT_PAUSE
    else:
        wait = min(FIRST_WAIT_SECONDS * 2 ** min(capacity.failures, 10), _LONGEST_WAIT_SECONDS)
        changes["failures"] = Least(F("failures") + 1, 1000)
    changes["retry_at"] = now + datetime.timedelta(seconds=wait)
    PoolCapacity.objects.filter(pk=node.pool_id).update(**changes)


def note_wait_in_vain(node: CapacityNode) -> None:
    """Let further starts wait for half an hour after a node that the queue needed found no work.

    The rest of its group did not start in time, or its worker cannot run what waits. The other nodes of the group end
    in the same way, so the next ones start together.
    """
    PoolCapacity.objects.filter(pk=node.pool_id).update(
        problem=f"{node.name} waited an hour for work: the other nodes of a run did not start in time.",
        retry_at=db_now() + datetime.timedelta(seconds=_LONGEST_WAIT_SECONDS),
    )


def close_token(node: CapacityNode, now: datetime.datetime) -> None:
    """Refuse an enrolment that has not happened yet."""
    WorkerToken.objects.filter(pk=node.token_id, used_at=None).update(expires_at=now)
