"""Celery tasks and outbox tasks of core."""

from celery import shared_task

from apps.core.database.clock import db_now
from apps.core.database.idempotency import prune_answers
from apps.core.messages.outbox import deliver_due, list_due_lanes, prune, wake
from apps.core.messages.topics import CONTROL
from apps.core.objects.store import store


@shared_task(name="core.deliver_outbox", ignore_result=True)
def deliver_outbox(**_: object) -> None:
    """Deliver the short effects that are due. Called by `outbox.publish` after commit and by the schedule."""
    deliver_due(lane=CONTROL)


# The task is acknowledged at once, because a dead worker's claim makes its message due again.
@shared_task(name="core.carry_out", ignore_result=True, acks_late=False, soft_time_limit=3_540, time_limit=3_600)
def carry_out(lane: str, **_: object) -> None:
    """Carry out the next message of a lane, and wake the lane again if there was one."""
    if deliver_due(lane=lane, limit=1):
        wake(lane)


@shared_task(name="core.wake_lanes", ignore_result=True)
def wake_lanes(**_: object) -> None:
    """Wake the lanes with due messages, because a wake may be lost and a failed message waits for its next attempt."""
    for lane in list_due_lanes():
        wake(lane)


@shared_task(name="core.prune_outbox", ignore_result=True)
def prune_outbox(**_: object) -> None:
    prune(now=db_now())


@shared_task(name="core.prune_answers", ignore_result=True)
def prune_idempotent_answers(**_: object) -> None:
    prune_answers(now=db_now())


def delete_objects(*, prefix: str = "", key: str = "") -> None:
    """Delete all objects under `prefix`, and the one object `key`. Safe to repeat."""
    if prefix:
        store().delete_prefix(prefix)
    if key:
        store().delete(key)
