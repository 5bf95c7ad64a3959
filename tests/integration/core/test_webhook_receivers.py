"""Receivers of webhooks that do what they should not: the delivery fails as any other, and costs little."""

import socket
import ssl
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from apps.accounts.models import WebhookDelivery
from apps.accounts.notices import endpoints, outgoing
from apps.core.messages.outbox import deliver_due
from tests.twins.http_server import Answer, Request, serve_http
from tests.twins.kubernetes import make_certificate

pytestmark = pytest.mark.django_db
MIB = 2**20


@pytest.fixture
def deliver(organization, alice, settings) -> Callable[[str], WebhookDelivery]:
    """Return a function that sends an event to an address, and returns the delivery after the first attempt."""
    settings.PRIVATE_WEBHOOKS = True

    def send(url: str) -> WebhookDelivery:
        endpoint, _ = endpoints.create_endpoint(
            organization=organization, url=url, event_types=["batch.completed"], format="standard", by=alice.pk
        )
        delivery = endpoints.send_test(endpoint=endpoint, by=alice.pk)
        deliver_due(lane="webhooks")
        delivery.refresh_from_db()
        return delivery

    return send


def test_one_that_takes_the_connection_and_says_nothing_is_left_after_the_limit(deliver, monkeypatch) -> None:
    monkeypatch.setattr(outgoing, "_TIMEOUT", aiohttp.ClientTimeout(total=0.3))
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel takes the connection
        delivery = deliver(f"http://127.0.0.1:{silent.getsockname()[1]}/")

        connection, _ = silent.accept()
        with connection:
            assert connection.recv(100).startswith(b"POST / ")
    assert (delivery.status, delivery.attempts, delivery.error) == ("pending", 1, "No answer in time.")
    assert 300 <= delivery.duration_ms < 3_000


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_nothing_goes_where_a_redirect_leads(deliver, status: int) -> None:
    asked: list[Request] = []
    with (
        serve_http(lambda request: asked.append(request) or Answer()) as elsewhere,
        serve_http(lambda request: Answer(status, headers={"Location": f"{elsewhere}/hook"})) as url,
    ):
        delivery = deliver(url)

    assert asked == []
    assert (delivery.status, delivery.attempts, delivery.response_code) == ("pending", 1, status)


def test_of_a_huge_answer_only_the_beginning_is_read_and_kept(
    deliver, record_property: Callable[[str, object], None]
) -> None:
    huge = b"x" * (20 * MIB)
    with serve_http(lambda request: Answer(200, huge)) as url:
        tracemalloc.start()
        try:
            delivery = deliver(url)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

    record_property("peak_bytes", peak_bytes)
    assert (delivery.status, delivery.response_code, delivery.response_text) == ("delivered", 200, "x" * 500)
    assert peak_bytes < 2 * MIB


def test_one_whose_certificate_no_known_authority_signed_gets_nothing(deliver, tmp_path: Path) -> None:
    make_certificate(tmp_path / "foreign.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "foreign.pem")
    asked: list[Request] = []
    with serve_http(lambda request: asked.append(request) or Answer(), tls=context) as url:
        delivery = deliver(url)

    assert asked == []
    assert (delivery.status, delivery.attempts, delivery.response_code) == ("pending", 1, None)
    assert "certificate verify failed" in delivery.error.lower()
