"""Periodic tasks of batches."""

from celery import shared_task

from apps.batches import files, worker
from apps.core.database.clock import db_now


# Acknowledged at once: requests without an answer stay pending, and the schedule brings the next task.
@shared_task(name="batches.work", acks_late=False, ignore_result=True, soft_time_limit=2_400, time_limit=2_460)
def work() -> None:
    worker.work()


@shared_task(name="batches.delete_expired", ignore_result=True)
def delete_expired() -> None:
    files.delete_expired(now=db_now())


@shared_task(name="batches.sweep_orphans", acks_late=False, ignore_result=True, soft_time_limit=3_540, time_limit=3_600)
def sweep_orphans() -> None:
    files.sweep_orphans(now=db_now())
