"""Isolation of faulty replicas: they get no requests and their reports are ignored until an operator clears them."""

import logging

from django.db import transaction
from django.db.models import F
from django.db.models.functions import Now

from apps.core import audit
from apps.serving.models import Replica
from apps.serving.placements import lock_around, replan_around

logger = logging.getLogger(__name__)


@transaction.atomic
def isolate_replica(*, replica_id: str, reason: str) -> None:
    """Stop routing requests to the replica and move its adapters to others.

    If the replica is already isolated, this only counts the fault.
    """
    lock_around(replica_id=replica_id)
    found = Replica.objects.filter(pk=replica_id)
    first = found.filter(isolated_at=None).update(
        isolated_at=Now(), isolated_because=reason[:300], generation=F("generation") + 1
    )
    found.update(fault_count=F("fault_count") + 1)
    if first:
        logger.critical("replica %s was isolated: %s", replica_id, reason)
        replan_around(replica_id=replica_id)


@transaction.atomic
def clear_replica(*, replica: Replica, by: str) -> None:
    """Trust the replica again. Its fault count stays."""
    lock_around(replica_id=replica.pk)
    isolated = Replica.objects.filter(pk=replica.pk, isolated_at__isnull=False)
    if isolated.update(isolated_at=None, isolated_because="", generation=F("generation") + 1):
        audit.record(
            organization=None, by=by, action="replica.cleared", target=replica.pk, fault=replica.isolated_because
        )
        replan_around(replica_id=replica.pk)
