"""The gateway's connections without sockets: transports that record what is sent, small applications, and a clock."""

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from unittest.mock import Mock

from uvicorn import Config
from uvicorn.server import ServerState

from apps.interfaces.gateway.http.connections import GatewayConnection


class Transport:
    """Records what happens to it."""

    def __init__(self) -> None:
        self.events: list[bytes | str] = []

    def write(self, data: bytes) -> None:
        self.events.append(data)

    def close(self) -> None:
        self.events.append("close")

    def abort(self) -> None:
        self.events.append("abort")

    def is_closing(self) -> bool:
        return "close" in self.events

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_extra_info(self, name: str, default: object = None) -> None: ...


class Socket(Transport):
    """A transport of which a test sees what was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.is_reading = True

    @property
    def sent(self) -> bytes:
        return b"".join(event for event in self.events if isinstance(event, bytes))

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True


async def answer(scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


async def echo(scope, receive, send) -> None:
    """Answer with the path and the body."""
    body, message = b"", {"more_body": True}
    while message.get("more_body"):
        message = await receive()
        body += message.get("body", b"")
    content = scope["path"].encode() + b"=" + body
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(content))]})
    await send({"type": "http.response.body", "body": content})


@asynccontextmanager
async def connected(application, **options):
    """Give a connection and its socket; what the application still does at the end of the block is waited for."""
    config = Config(application, lifespan="off", log_config=None, **options)
    socket, state = Socket(), ServerState()
    connection = GatewayConnection(config, state, {}, asyncio.get_running_loop())
    connection.connection_made(socket)
    yield connection, socket
    connection.connection_lost(None)
    await asyncio.gather(*state.tasks)


async def answered(connection: GatewayConnection) -> None:
    """Wait until the first request is answered, and no longer: what is sent with it is not sent yet."""
    while connection.server_state.total_requests == 0:
        await asyncio.sleep(0)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def post(path: bytes, body: bytes, *lines: bytes) -> bytes:
    head = b"\r\n".join([b"POST %b HTTP/1.1" % path, b"Host: x", b"Content-Length: %d" % len(body), *lines])
    return head + b"\r\n\r\n" + body


class Clock:
    """A loop whose time passes as a test says."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.create_task, self.create_future, self.call_soon = loop.create_task, loop.create_future, loop.call_soon
        self.now = 0.0
        self._due: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: Callable[[], None]) -> Mock:
        self._due.append((self.now + seconds, call))
        return Mock()

    def pass_to(self, moment: float) -> None:
        while self._due and min(self._due)[0] <= moment:
            self.now, call = self._due.pop(self._due.index(min(self._due)))
            call()
        self.now = moment
