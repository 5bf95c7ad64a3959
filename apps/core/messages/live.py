"""Telling watchers that a row changed: a Redis message after commit, lost without harm because the row is the truth."""

import logging
from functools import cache, partial

import redis
from django.conf import settings
from django.db import transaction

logger = logging.getLogger(__name__)


def announce_after_commit(*, channel: str, payload: str) -> None:
    """Publish once the transaction in progress commits; watchers also look at the row from time to time."""
    transaction.on_commit(partial(_publish, channel, payload))


def _publish(channel: str, payload: str) -> None:
    try:
        _client().publish(f"anneal:live:{channel}", payload)
    except redis.RedisError as error:
        logger.warning("live update of %s not sent: %s", channel, error)


@cache
def _client() -> redis.Redis:
    return redis.Redis.from_url(settings.REDIS_URL, socket_timeout=1, socket_connect_timeout=1)
