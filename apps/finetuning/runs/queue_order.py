"""Order of a pool's queued runs: the share holder with the least use for its weight comes first.

A share holder is an organization, or the founder of several that never paid (apps/accounts/shares.py).
"""

import datetime
from collections import defaultdict
from collections.abc import Mapping, Sequence

from django.db.models import Max, Sum, Window
from django.db.models.functions import RowNumber

from apps.accounts.models import Organization
from apps.accounts.shares import list_sharing
from apps.billing.queries import stopped_organizations
from apps.core.database.tenancy import system
from apps.finetuning.lifecycle import RUN_HOLDING_LEASE, RunStatus
from apps.finetuning.models import GpuPool, Quota, Run
from apps.finetuning.usage.occupancy import held_gpu_seconds

_RECENT = datetime.timedelta(hours=1)
# Only the oldest runs of each holder count, so that many runs of one holder cannot hide another's first run.
_CANDIDATES = 20
_HOLDER = Organization.share_holder_by("organization__")


def queue_order(*, pool: GpuPool, now: datetime.datetime) -> list[Run]:
    """Return the pool's queued runs in the order they should start.

    A holder's share is the GPUs it holds plus the GPU-hours it used in the last hour, divided by its weight. Each hour
    of waiting unserved counts as one GPU less, so that a holder with a large share is not delayed forever. Runs of a
    suspended organization wait until it has paid, or an operator has reinstated it.
    """
    oldest_first = Window(RowNumber(), partition_by=_HOLDER, order_by=("created_at", "id"))
    queued = Run.objects.filter(pool=pool, status=RunStatus.QUEUED, organization__suspended_at=None)
    queued = queued.exclude(organization_id__in=stopped_organizations())
    queued = queued.annotate(turn=oldest_first)
    runs = list(queued.filter(turn__lte=_CANDIDATES))
    turns = {run.pk: run.turn for run in runs}
    sharing = list_sharing(organizations={run.organization_id for run in runs})
    unserved = _hours_unserved(runs, sharing, now)
    shares = _shares(sharing, now)

    def rank(run: Run) -> tuple[float, datetime.datetime, str]:
        holder = sharing[run.organization_id]
        return shares[holder] + turns[run.pk] - unserved[holder], run.created_at, run.pk

    return sorted(runs, key=rank)


def queue_position(*, run: Run, now: datetime.datetime) -> int | None:
    """Return 1 for the run that starts next; None if it is not queued or too many of its holder's runs precede it.

    Other tenants' runs are counted but never shown.
    """
    with system():
        order = [queued.pk for queued in queue_order(pool=run.pool, now=now)]
    return order.index(run.pk) + 1 if run.pk in order else None


def _shares(sharing: Mapping[str, str], now: datetime.datetime) -> dict[str, float]:
    """Return for each holder the GPUs held now plus the GPU-hours of the last hour, per unit of weight.

    The hours are the time ended attempts held machines, not the billed time: a cheap job takes its turn as well.
    `sharing` maps organizations to their holders.
    """
    held = Run.objects.filter(organization_id__in=sharing, status__in=RUN_HOLDING_LEASE)
    ended = Run.objects.filter(organization_id__in=sharing, finished_at__isnull=False)
    used = held_gpu_seconds(ended, by="organization_id", begin=now - _RECENT, end=now)
    quotas = Quota.objects.filter(organization_id__in=sharing)
    weights = {sharing[pk]: weight for pk, weight in quotas.values_list("organization_id", "weight")}
    loads: dict[str, float] = defaultdict(float)
    for organization, count in held.values_list("organization_id").annotate(Sum("job__gpu_count")).order_by():
        loads[sharing[organization]] += count
    for organization, seconds in used.items():
        loads[sharing[organization]] += seconds / 3600
    return {holder: loads[holder] / max(weights.get(holder, 1), 1) for holder in sharing.values()}


def _hours_unserved(runs: Sequence[Run], sharing: Mapping[str, str], now: datetime.datetime) -> dict[str, float]:
    """Return each holder's hours since its oldest run was queued or a worker last took one, whichever is later."""
    since: dict[str, datetime.datetime] = {}
    for run in runs:
        holder = sharing[run.organization_id]
        since[holder] = min(since.get(holder, run.created_at), run.created_at)
    served = Run.objects.filter(organization_id__in=sharing, leased_at__isnull=False).values_list("organization_id")
    for organization, leased_at in served.annotate(Max("leased_at")).order_by():
        holder = sharing[organization]
        since[holder] = max(since[holder], leased_at)
    return {holder: max((now - moment).total_seconds(), 0.0) / 3600 for holder, moment in since.items()}
