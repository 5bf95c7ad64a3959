"""Celery tasks and outbox handlers of core."""

from typing import Any

from celery import shared_task

from apps.core.database.clock import db_now
from apps.core.messages.outbox import CONTROL, deliver_due, prune
from apps.core.objects.store import store


@shared_task(name="core.deliver_outbox", ignore_result=True)
def deliver_outbox(**_: Any) -> None:
    """Deliver the short effects that are due. Called by `outbox.publish` after commit and by the schedule."""
    deliver_due(lane=CONTROL)


# The task is acknowledged at once, because a dead worker's claim makes its message due again.
@shared_task(name="core.carry_out", ignore_result=True, acks_late=False, soft_time_limit=3_540, time_limit=3_600)
def carry_out(lane: str, **_: Any) -> None:
    """Carry out the next message of a lane, and queue this task again if there was one."""
    if deliver_due(lane=lane, limit=1):
        carry_out.apply_async(kwargs={"lane": lane}, queue=lane)


@shared_task(name="core.prune_outbox", ignore_result=True)
def prune_outbox(**_: Any) -> None:
    prune(now=db_now())


def delete_objects(*, key: str, payload: dict[str, Any]) -> None:
    """Delete all objects under `prefix`, or the one object `key`. An outbox handler; safe to repeat."""
    if prefix := payload.get("prefix"):
        store().delete_prefix(prefix)
    if object_key := payload.get("key"):
        store().delete(object_key)
