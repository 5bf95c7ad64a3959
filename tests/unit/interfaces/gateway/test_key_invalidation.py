"""Announced changes of keys after an outage: what is cached is needed until it can be looked up again."""

import asyncio
from contextlib import suppress

import pytest

from apps.interfaces.gateway.admission.key_invalidation import keep_listening

pytestmark = pytest.mark.django_db


class Keys:
    def __init__(self) -> None:
        self.forgotten = asyncio.Event()

    def forget_all(self) -> None:
        self.forgotten.set()


class Pool:
    """Connects later than the connection that listens."""

    def __init__(self) -> None:
        self.is_asked, self.is_back = asyncio.Event(), asyncio.Event()

    async def call(self, function):
        self.is_asked.set()
        await self.is_back.wait()


async def test_keys_are_forgotten_when_they_can_be_looked_up_again_and_not_before():
    keys, pool = Keys(), Pool()
    listening = asyncio.create_task(keep_listening(keys, pool))

    await pool.is_asked.wait()
    assert not keys.forgotten.is_set()
    pool.is_back.set()
    await keys.forgotten.wait()

    listening.cancel()
    with suppress(asyncio.CancelledError):
        await listening
