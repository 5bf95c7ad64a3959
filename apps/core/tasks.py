"""Celery tasks and outbox handlers of the foundation."""

from typing import Any

from celery import shared_task

from apps.core.database.clock import db_now
from apps.core.messages.outbox import CONTROL, deliver_due, prune
from apps.core.objects.store import store


@shared_task(name="core.deliver_outbox", ignore_result=True)
def deliver_outbox(**_: Any) -> None:
    """Deliver the short effects that are due; `outbox.publish` rings it after commit, and so does the schedule."""
    deliver_due(lane=CONTROL)


# Its message is acknowledged at once: what a worker that dies had claimed is due again by itself.
@shared_task(name="core.carry_out", ignore_result=True, acks_late=False, soft_time_limit=3_540, time_limit=3_600)
def carry_out(lane: str, **_: Any) -> None:
    """Carry out one message of a lane, the next in turn; ring again as long as there is one."""
    if deliver_due(lane=lane, limit=1):
        carry_out.apply_async(kwargs={"lane": lane}, queue=lane)


@shared_task(name="core.prune_outbox", ignore_result=True)
def prune_outbox(**_: Any) -> None:
    """Delete what was sent long ago."""
    prune(now=db_now())


def delete_objects(*, key: str, payload: dict[str, Any]) -> None:
    """Delete what lies under `prefix`, or the one object `key`; outbox handler, harmless when repeated."""
    if prefix := payload.get("prefix"):
        store().delete_prefix(prefix)
    if object_key := payload.get("key"):
        store().delete(object_key)
