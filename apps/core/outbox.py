"""Effects that must follow a commit: a row written with the change, delivered afterwards, at least once.

Handlers are named in settings.OUTBOX_HANDLERS (topic -> dotted path of a Celery task's function taking
`key` and `payload`), so that core knows no product. A handler must be idempotent.
"""

import datetime
import logging
from typing import Any

from django.conf import settings
from django.db import transaction
from django.utils.module_loading import import_string

from apps.core.audit import require_transaction
from apps.core.clock import db_now
from apps.core.models import OutboxMessage

logger = logging.getLogger(__name__)

# From here on an effect is shown to the operators; it is tried again every hour until somebody mends its cause.
STUCK_ATTEMPTS = 8
KEPT = datetime.timedelta(days=7)  # a message that was sent
_PRUNED_AT_ONCE = 10_000
_BACKOFF_SECONDS = 2
_BACKOFF_LIMIT_SECONDS = 3600
_BACKOFF_DOUBLINGS = 12  # then the limit is reached
_MOST_COUNTED = 30_000  # what its column holds


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
        due = OutboxMessage.objects.filter(sent_at=None, next_attempt_at__lte=now)
        message = due.select_for_update(skip_locked=True).order_by("id").first()
        if message is None:
            return False
        _attempt(message, now)
        return True


def _attempt(message: OutboxMessage, now: datetime.datetime) -> None:
    handler = import_string(settings.OUTBOX_HANDLERS[message.topic])
    message.attempts = min(message.attempts + 1, _MOST_COUNTED)
    try:
        with transaction.atomic():
            handler(key=message.key, payload=message.payload)
        message.sent_at = now
    except Exception as error:  # noqa: BLE001 - a process edge: the message stays and is tried again later
        delay = min(_BACKOFF_SECONDS ** min(message.attempts, _BACKOFF_DOUBLINGS), _BACKOFF_LIMIT_SECONDS)
        message.next_attempt_at = now + datetime.timedelta(seconds=delay)
        message.last_error = f"{type(error).__name__}: {error}"[:500]
        # The error's own words may quote an address or a link: they stay in the table, for operators.
        logger.warning(
            "outbox message %d (%s) failed %d times: %s",
            message.pk,
            message.topic,
            message.attempts,
            type(error).__name__,
        )
    message.save(update_fields=["attempts", "sent_at", "next_attempt_at", "last_error"])


def list_stuck(*, limit: int = 50) -> list[OutboxMessage]:
    """Return the messages that were tried in vain again and again, oldest first."""
    stuck = OutboxMessage.objects.filter(sent_at=None, attempts__gte=STUCK_ATTEMPTS).order_by("id")
    return list(stuck[:limit])


def prune(*, now: datetime.datetime) -> int:
    """Delete messages that were sent long ago; return how many. A key used again after that is a new effect."""
    old = OutboxMessage.objects.filter(sent_at__lt=now - KEPT).order_by("id").values("pk")[:_PRUNED_AT_ONCE]
    return OutboxMessage.objects.filter(pk__in=old).delete()[0]
