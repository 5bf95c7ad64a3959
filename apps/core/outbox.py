"""Effects that must follow a commit: a row written with the change, delivered afterwards, at least once.

Handlers are named in settings.OUTBOX_HANDLERS (topic -> dotted path of a Celery task's function taking
`key` and `payload`), so that core knows no product. A handler must be idempotent.
"""

import datetime
from typing import Any

from django.conf import settings
from django.db import transaction
from django.utils.module_loading import import_string

from apps.core.audit import require_transaction
from apps.core.clock import db_now
from apps.core.models import OutboxMessage

MAX_ATTEMPTS = 20
_BACKOFF_SECONDS = 2
_BACKOFF_LIMIT_SECONDS = 3600


def publish(*, topic: str, key: str, payload: dict[str, Any]) -> None:
    """Queue one effect with the change in progress; the same key again is the same effect."""
    require_transaction()
    if topic not in settings.OUTBOX_HANDLERS:
        raise ValueError(f"no handler for outbox topic {topic!r}")
    OutboxMessage.objects.bulk_create([OutboxMessage(topic=topic, key=key, payload=payload)], ignore_conflicts=True)
    transaction.on_commit(import_string(settings.OUTBOX_WAKE))


def deliver_due(*, limit: int = 100) -> int:
    """Deliver messages that are due, oldest first, each in a transaction of its own; return how many were sent."""
    sent = 0
    while sent < limit and _deliver_one():
        sent += 1
    return sent


def _deliver_one() -> bool:
    with transaction.atomic():
        now = db_now()
        due = OutboxMessage.objects.filter(sent_at=None, attempts__lt=MAX_ATTEMPTS, next_attempt_at__lte=now)
        message = due.select_for_update(skip_locked=True).order_by("id").first()
        if message is None:
            return False
        _attempt(message, now)
        return True


def _attempt(message: OutboxMessage, now: datetime.datetime) -> None:
    handler = import_string(settings.OUTBOX_HANDLERS[message.topic])
    message.attempts += 1
    try:
        with transaction.atomic():
            handler(key=message.key, payload=message.payload)
        message.sent_at = now
    except Exception as error:  # noqa: BLE001 - a process edge: the message stays and is tried again later
        delay = min(_BACKOFF_SECONDS**message.attempts, _BACKOFF_LIMIT_SECONDS)
        message.next_attempt_at = now + datetime.timedelta(seconds=delay)
        message.last_error = f"{type(error).__name__}: {error}"[:500]
    message.save(update_fields=["attempts", "sent_at", "next_attempt_at", "last_error"])
