"""What uvicorn writes together leaves the gateway together, and before the connection closes."""

import asyncio

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from apps.gateway.connections import Connection


class Transport:
    """Notes what happens to it."""

    def __init__(self) -> None:
        self.events: list[bytes | str] = []

    def write(self, data: bytes) -> None:
        self.events.append(data)

    def close(self) -> None:
        self.events.append("close")

    def is_closing(self) -> bool:
        return "close" in self.events

    def resume_reading(self) -> None: ...

    def get_extra_info(self, name: str) -> None: ...


async def answer(scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


def events_of(request: bytes) -> list[bytes | str]:
    """Return what happens to the connection of one request."""

    async def scenario() -> list[bytes | str]:
        transport, state = Transport(), ServerState()
        connection = Connection(Config(answer, lifespan="off", log_config=None), state, {}, asyncio.get_running_loop())
        connection.connection_made(transport)
        connection.data_received(request)
        await asyncio.gather(*state.tasks)
        await asyncio.sleep(0)
        connection.connection_lost(None)
        return transport.events

    return asyncio.run(scenario())


def test_the_head_and_the_body_of_an_answer_are_one_packet():
    sent, *rest = events_of(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")

    assert sent.startswith(b"HTTP/1.1 200 OK\r\n")
    assert sent.endswith(b"\r\n\r\nhello")
    assert not [event for event in rest if event != "close"]


@pytest.mark.parametrize(
    "request_bytes", [b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"nonsense\r\n\r\n"]
)
def test_an_answer_is_sent_before_its_connection_closes(request_bytes):
    first, second, *_ = events_of(request_bytes)

    assert first.startswith(b"HTTP/1.1 ")
    assert second == "close"
