"""Celery tasks and outbox handlers of the foundation."""

from typing import Any

from celery import shared_task

from apps.core.clock import db_now
from apps.core.object_store import store
from apps.core.outbox import deliver_due, prune


@shared_task(name="core.deliver_outbox", ignore_result=True)
def deliver_outbox(**_: Any) -> None:
    """Deliver what is due; `outbox.publish` rings it after commit and the schedule rings it every few seconds."""
    deliver_due()


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
