"""What the queued runs of a pool need of its machines now."""

import datetime
from collections import defaultdict
from collections.abc import Sequence

from apps.accounts.shares import list_sharing
from apps.finetuning.models import FineTuningJob, GpuPool, Run
from apps.finetuning.pools.capacity.demand import Limits, Need, free_gpus, take
from apps.finetuning.runs.queue.queue_order import queue_order
from apps.finetuning.usage.quotas import Room

_LOOKED_AT = (50, 200, 800)  # queued runs: the next number if none of the first ones may start


def list_needs(*, pool: GpuPool, busy: Sequence[int], limits: Limits, now: datetime.datetime) -> list[Need]:
    """Return the needs of the queued runs that may start together now, as far as the limits could serve them.

    `busy` are the GPUs in use on each node with leases. A run that a machine joined by hand could take counts as well:
    the node ends again when it stays idle. Runs that limits hold back may be first in the order for weeks, so they must
    not hide the others.
    """
    needs: list[Need] = []
    for looked_at in _LOOKED_AT:
        runs = queue_order(pool=pool, now=now, limit=looked_at, depth=looked_at)
        needs = needs_of(runs, busy=busy, limits=limits, now=now)
        if needs or len(runs) < looked_at:
            break
    return needs


def needs_of(runs: Sequence[Run], *, busy: Sequence[int], limits: Limits, now: datetime.datetime) -> list[Need]:
    """Return the needs of those of the runs that may start together, as `list_needs` does."""
    needs: list[Need] = []
    left = free_gpus(busy, limits)
    holders = list_sharing(organizations={run.organization_id for run in runs})
    jobs: dict[str, list[FineTuningJob]] = defaultdict(list)
    for run in runs:
        jobs[holders[run.organization_id]].append(run.job)
    rooms: dict[str, Room] = {}
    for run in runs:
        if len(left) >= limits.most and not any(left):
            break
        holder, need = holders[run.organization_id], (run.job.gpus_per_node, run.job.node_count)
        rest = take(need, left, limits)
        if rest is None:
            continue
        if holder not in rooms:
            rooms[holder] = Room(holder=holder, jobs=jobs[holder], now=now)
        if rooms[holder].take(run.job):
            needs.append(need)
            left = rest
    return needs
