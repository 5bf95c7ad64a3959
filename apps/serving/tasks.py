"""Celery tasks of serving."""

from celery import shared_task

from apps.core.database.clock import db_now
from apps.serving import keep_warm, placements, reconciliation


@shared_task(name="serving.place")
def place(**_: object) -> None:
    placements.replan_all(now=db_now())


@shared_task(name="serving.charge_warm")
def charge_warm(**_: object) -> None:
    keep_warm.charge_warm(now=db_now())


@shared_task(name="serving.reconcile_metering")
def reconcile_metering(**_: object) -> None:
    reconciliation.reconcile(now=db_now())
