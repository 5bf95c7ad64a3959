"""A broker that is away costs a request nothing but a moment."""

import socket
import time
from typing import Any

import pytest

from apps.accounts.models import Organization, User
from apps.config import celery
from apps.config.celery import app, wake_outbox
from apps.core.models import OutboxMessage
from tests.services.ports import free_port


@pytest.fixture
def silent_port() -> Any:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.slow
def test_a_committed_request_succeeds_without_the_broker(
    monkeypatch: Any,
    client_for: Any,
    alice: User,
    organization: Organization,
    django_capture_on_commit_callbacks: Any,
) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", f"redis://127.0.0.1:{free_port()}/0")

    with django_capture_on_commit_callbacks() as after_commit:
        response = client_for(alice).post("/members/invite", {"email": "new@example.com", "role": "member"})
    started_at = time.monotonic()
    for effect in after_commit:
        effect()

    assert time.monotonic() - started_at < 10
    assert response.status_code < 400
    assert OutboxMessage.objects.get().sent_at is None


def test_a_broker_that_does_not_answer_is_given_up_on(monkeypatch: Any, silent_port: int) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", f"redis://127.0.0.1:{silent_port}/0")
    started_at = time.monotonic()

    wake_outbox("control")

    assert time.monotonic() - started_at < 10


@pytest.mark.parametrize(
    ("lane", "task", "arguments"),
    [("control", "core.deliver_outbox", {}), ("mail", "core.carry_out", {"lane": "mail"})],
)
def test_the_wake_reaches_the_queue_of_the_lane(
    monkeypatch: Any, settings: Any, lane: str, task: str, arguments: dict[str, str]
) -> None:
    monkeypatch.setenv(
        "CELERY_BROKER_URL", settings.BROKER_URL.replace("virtual_host=0", "virtual_host=1")
    )  # ours alone
    monkeypatch.setattr(celery, "_WAKE_OPTIONS", {"max_retries": 0})  # a busy machine's queue may take its time
    monkeypatch.setattr(celery, "_WAKE_SECONDS", 60)

    wake_outbox(lane)

    with app.connection_for_read() as connection:
        message = connection.SimpleQueue(lane).get(timeout=10)
        assert (message.headers["task"], message.payload[1]) == (task, arguments)
        message.ack()
