"""What the queued runs of a pool need of its machines now."""

import datetime
from collections import Counter, defaultdict
from collections.abc import Sequence

from apps.accounts.shares import list_sharing
from apps.finetuning.models import FineTuningJob, GpuPool, Run
from apps.finetuning.pools.capacity.demand import Limits, Need, free_gpus, take
from apps.finetuning.runs.queue.queue_order import queue_order
from apps.finetuning.usage.quotas import reason_to_wait

_LOOKED_AT = (50, 200, 800)  # queued runs: the next number if none of the first ones may start
_ALIKE = 5  # of the further ones, runs of one member and size that may not start


def list_needs(*, pool: GpuPool, busy: Sequence[int], limits: Limits, now: datetime.datetime) -> list[Need]:
    """Return the needs of the queued runs that may start together now, as far as the limits could serve them.

    `busy` are the GPUs in use on each node with leases. A run that a machine joined by hand could take counts as well:
    the node ends again when it stays idle. Runs that limits hold back may be first in the order for weeks, so they must
    not hide the others.
    """
    needs: list[Need] = []
    for looked_at in _LOOKED_AT:
        runs = queue_order(pool=pool, now=now, limit=looked_at, depth=looked_at)
        most_refused = _ALIKE if looked_at > _LOOKED_AT[0] else len(runs)
        needs = _needs_of(runs, free_gpus(busy, limits), limits, now, most_refused)
        if needs or len(runs) < looked_at:
            break
    return needs


def _needs_of(
    runs: Sequence[Run], left: list[int], limits: Limits, now: datetime.datetime, most_refused: int
) -> list[Need]:
    """Return the needs of the runs that may start. Of runs that are alike, `most_refused` that may not are tried.

    `left` are the free GPUs of each node with leases.
    """
    needs: list[Need] = []
    refused: Counter[tuple[object, ...]] = Counter()
    holders = list_sharing(organizations={run.organization_id for run in runs})
    planned: dict[str, list[FineTuningJob]] = defaultdict(list)
    for run in runs:
        if len(left) >= limits.most and not any(left):
            break
        holder, job = holders[run.organization_id], run.job
        need = (job.gpus_per_node, job.node_count)
        alike = (job.organization_id, job.project_id, job.created_by, *need)
        if refused[alike] >= most_refused:
            continue
        before = planned[holder]
        rest = take(need, left, limits)
        if rest is not None and not reason_to_wait(job=job, holder=holder, now=now, planned=before):
            before.append(job)
            needs.append(need)
            left = rest
        else:
            refused[alike] += 1
    return needs
