"""The layer around a server of pages: probes, and the figures of its requests for the monitor alone."""

import asyncio
from typing import Any

import pytest

from apps.config.monitored import Monitored
from apps.serving.metrics import metrics_token

TOKEN = [(b"authorization", f"Bearer {metrics_token()}".encode())]


async def application(scope: Any, receive: Any, send: Any) -> None:
    status = int(scope["path"].removeprefix("/")) if scope["path"][1:].isdigit() else 404
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b"of the application"})


def ask(monitored: Monitored, path: str, headers: list[tuple[bytes, bytes]] | None = None) -> tuple[int, str]:
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    asyncio.run(monitored({"type": "http", "path": path, "headers": headers or []}, application, send))
    return messages[0]["status"], messages[1]["body"].decode()


def test_requests_are_counted_by_their_status_and_probes_are_not() -> None:
    monitored = Monitored(application, process="web")
    for path in ("/200", "/204", "/503", "/healthz"):
        ask(monitored, path)

    status, text = ask(monitored, "/metrics", TOKEN)

    assert (status, ask(monitored, "/healthz")) == (200, (200, '{"status":"ok"}'))
    lines = text.splitlines()
    assert 'anneal_http_request_seconds_count{process="web",status="2xx"} 2' in lines
    assert 'anneal_http_request_seconds_bucket{process="web",status="5xx",le="+Inf"} 1' in lines
    assert 'anneal_http_open_requests{process="web"} 0' in lines


def test_a_request_that_fails_is_no_longer_open() -> None:
    async def failing(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError

    monitored = Monitored(failing, process="web")
    with pytest.raises(RuntimeError):
        ask(monitored, "/")

    assert 'anneal_http_open_requests{process="web"} 0' in monitored.render().splitlines()


@pytest.mark.parametrize("headers", [[], [(b"authorization", b"Bearer x")], [(b"authorization", b"\xff")]])
def test_a_stranger_gets_what_the_application_answers(headers: list[tuple[bytes, bytes]]) -> None:
    assert ask(Monitored(application, process="web"), "/metrics", headers) == (404, "of the application")
