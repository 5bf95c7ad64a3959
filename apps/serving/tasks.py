"""Celery and outbox tasks of serving."""

from celery import shared_task

from apps.adapters.models import AdapterVersion
from apps.core.database.clock import db_now
from apps.serving import keep_warm, operations, placements, reconciliation


@shared_task(name="serving.place")
def place(**_: object) -> None:
    placements.replan_all(now=db_now())


@shared_task(name="serving.charge_warm")
def charge_warm(**_: object) -> None:
    keep_warm.charge_warm(now=db_now())


@shared_task(name="serving.reconcile_metering")
def reconcile_metering(**_: object) -> None:
    reconciliation.reconcile(now=db_now())


def deploy(*, version_id: str) -> None:
    """Deploy a finished job's adapter automatically."""
    version = AdapterVersion.objects.select_related("adapter").filter(pk=version_id, deleted_at=None).first()
    if version is not None:
        operations.deploy(version=version, by="system")
