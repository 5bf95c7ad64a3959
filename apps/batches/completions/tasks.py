"""Periodic tasks of stored completions."""

from celery import shared_task

from apps.batches.completions import operations
from apps.core.database.clock import db_now


@shared_task(name="completions.delete_expired", ignore_result=True)
def delete_expired(**_: object) -> None:
    operations.delete_expired(now=db_now())
