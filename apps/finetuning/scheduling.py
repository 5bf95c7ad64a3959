"""Whose run starts next: among the queued runs of a pool, the organization that has had least for its weight."""

import datetime
from collections import defaultdict
from collections.abc import Sequence

from django.db.models import F, Max, Sum, Window
from django.db.models.functions import RowNumber

from apps.billing.queries import stopped_organizations
from apps.core.tenancy import system
from apps.finetuning.lifecycle import RUN_HOLDING_LEASE
from apps.finetuning.models import GpuPool, Quota, Run
from apps.finetuning.occupancy import held_gpu_seconds

_RECENT = datetime.timedelta(hours=1)
# Of each organization only its oldest runs are looked at, so that nobody's many hide another's first.
_CANDIDATES = 20


def queue_order(*, pool: GpuPool, now: datetime.datetime) -> list[Run]:
    """Return the pool's queued runs in the order they should start.

    An organization's share is the GPUs it holds plus the GPU-hours it used in the last hour, by its weight. Each hour
    that it was not served while it waited counts as one GPU less, so that a small share is no precondition for ever.
    What a suspended organization queued before waits until it has paid, or an operator has reinstated it.
    """
    oldest_first = Window(RowNumber(), partition_by=F("organization_id"), order_by=("created_at", "id"))
    queued = Run.objects.filter(pool=pool, status="queued", organization__suspended_at=None)
    queued = queued.exclude(organization_id__in=stopped_organizations())
    queued = queued.annotate(turn=oldest_first)
    runs = list(queued.filter(turn__lte=_CANDIDATES))
    turns = {run.pk: run.turn for run in runs}
    unserved = _hours_unserved(runs, now)
    shares = _shares({run.organization_id for run in runs}, now)

    def rank(run: Run) -> tuple[float, datetime.datetime, str]:
        organization = run.organization_id
        return shares[organization] + turns[run.pk] - unserved[organization], run.created_at, run.pk

    return sorted(runs, key=rank)


def queue_position(*, run: Run, now: datetime.datetime) -> int | None:
    """Return 1 for the run that starts next, None for one that is not queued or has too many of its owner's before it.

    Other tenants' runs are counted and never shown.
    """
    with system():
        order = [queued.pk for queued in queue_order(pool=run.pool, now=now)]
    return order.index(run.pk) + 1 if run.pk in order else None


def _shares(organizations: set[str], now: datetime.datetime) -> dict[str, float]:
    """GPUs held now plus GPU-hours that ended attempts held in the last hour, for each unit of weight.

    The hours are those of the machines, not of the bill: a job that costs little takes its turn all the same.
    """
    held = Run.objects.filter(organization_id__in=organizations, status__in=RUN_HOLDING_LEASE)
    ended = Run.objects.filter(organization_id__in=organizations, finished_at__isnull=False)
    used = held_gpu_seconds(ended, by="organization_id", begin=now - _RECENT, end=now)
    weights = dict(Quota.objects.filter(organization_id__in=organizations).values_list("organization_id", "weight"))
    loads: dict[str, float] = defaultdict(float)
    for organization, count in held.values_list("organization_id").annotate(Sum("job__gpu_count")).order_by():
        loads[organization] += count
    for organization, seconds in used.items():
        loads[organization] += seconds / 3600
    return {pk: loads[pk] / max(weights.get(pk, 1), 1) for pk in organizations}


def _hours_unserved(runs: Sequence[Run], now: datetime.datetime) -> dict[str, float]:
    """Since the oldest run was queued, or since a worker last took one, whichever is later."""
    since: dict[str, datetime.datetime] = {}
    for run in runs:
        since[run.organization_id] = min(since.get(run.organization_id, run.created_at), run.created_at)
    served = Run.objects.filter(organization_id__in=since, leased_at__isnull=False).values_list("organization_id")
    for organization, leased_at in served.annotate(Max("leased_at")).order_by():
        since[organization] = max(since[organization], leased_at)
    return {pk: max((now - moment).total_seconds(), 0.0) / 3600 for pk, moment in since.items()}
