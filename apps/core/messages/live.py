"""Live updates: a Redis message after each commit that changes a row. Losing one is harmless: the row is the truth."""

import logging
from functools import cache, partial

import redis
from django.conf import settings
from django.db import transaction

logger = logging.getLogger(__name__)


def announce_after_commit(*, channel: str, payload: str) -> None:
    """Publish once the current transaction commits. Watchers also read the row periodically."""
    transaction.on_commit(partial(_publish, channel, payload))


def _publish(channel: str, payload: str) -> None:
    try:
        _client().publish(f"anneal:live:{channel}", payload)
    except redis.RedisError as error:
        logger.warning("live update of %s not sent: %s", channel, error)


@cache
def _client() -> redis.Redis:
    return redis.Redis.from_url(settings.REDIS_URL, socket_timeout=1, socket_connect_timeout=1)
