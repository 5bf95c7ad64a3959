"""A pool's queue holds one doorbell at most, whether or not anybody answers it."""

import uuid

import pytest

from apps.config.celery import app
from apps.finetuning import tasks


@pytest.fixture
def pool() -> str:
    return f"pool-{uuid.uuid4().hex[:8]}"


def waiting(pool: str) -> int:
    with app.connection_for_read() as connection:
        return connection.default_channel.queue_declare(f"train.{pool}").message_count


def test_a_pool_without_a_worker_piles_up_nothing(pool: str) -> None:
    for _ in range(5):
        tasks.ring_doorbell(pool=pool)

    assert waiting(pool) == 1


def test_a_doorbell_that_was_answered_is_rung_again(pool: str) -> None:
    tasks.ring_doorbell(pool=pool)
    with app.connection_for_read() as connection:
        message = connection.SimpleQueue(f"train.{pool}").get(timeout=5)
        message.ack()
    assert (message.headers["task"], message.payload[1]) == ("train.wake", {"pool": pool})
    assert message.headers["expires"] is None

    tasks.ring_doorbell(pool=pool)

    assert waiting(pool) == 1
