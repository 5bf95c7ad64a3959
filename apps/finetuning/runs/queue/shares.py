"""Check of the shares of the queue that the trigger of runs keeps (`QueueShare`)."""

import logging

from django.db import transaction
from django.db.models import Count, Min, Q, Sum

from apps.finetuning.lifecycle import RUN_ACTIVE, RUN_HOLDING_LEASE, RunStatus
from apps.finetuning.models import QueueShare, Run

logger = logging.getLogger(__name__)
_QUEUED, _HELD = Q(status=RunStatus.QUEUED), Q(status__in=RUN_HOLDING_LEASE)
_WAITING, _SINCE = Count("pk", filter=_QUEUED), Min("created_at", filter=_QUEUED)
_GPUS = Sum("job__gpu_count", filter=_HELD, default=0)


def repair_shares() -> int:
    """Count the runs of every share again, correct wrong shares, and return how many were wrong."""
    kept = QueueShare.objects.exclude(queued=0, held_gpus=0)
    shares = set(kept.values_list("organization_id", "pool_id", "queued", "held_gpus"))
    active = Run.objects.filter(status__in=RUN_ACTIVE).order_by().values("organization_id", "pool_id")
    counted = active.annotate(waiting=_WAITING, gpus=_GPUS)
    counts = {(row["organization_id"], row["pool_id"], row["waiting"], row["gpus"]) for row in counted}
    # Runs may have changed between the two statements: the lock tells.
    differing = sorted({(organization_id, pool_id) for organization_id, pool_id, *_ in shares ^ counts})
    return sum(_repair(organization_id, pool_id) for organization_id, pool_id in differing)


@transaction.atomic
def _repair(organization_id: str, pool_id: str) -> bool:
    """Lock the share, as each change of its runs does, and count them."""
    QueueShare.objects.get_or_create(organization_id=organization_id, pool_id=pool_id)
    share = QueueShare.objects.select_for_update(no_key=True).get(organization_id=organization_id, pool_id=pool_id)
    runs = Run.objects.filter(organization_id=organization_id, pool_id=pool_id, status__in=RUN_ACTIVE)
    counted = runs.aggregate(queued=_WAITING, queued_since=_SINCE, held_gpus=_GPUS)
    if (share.queued, share.held_gpus) == (counted["queued"], counted["held_gpus"]):
        return False
    logger.error("the share of %s in %s had wrong counts: %s is right", organization_id, pool_id, counted)
    QueueShare.objects.filter(pk=share.pk).update(**counted)
    return True
