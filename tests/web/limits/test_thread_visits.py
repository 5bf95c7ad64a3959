"""What Django as an ASGI application costs a request: visits to its thread, and the file of its body."""

import asyncio
import tempfile
from typing import Any

import pytest
from asgiref.sync import SyncToAsync

from apps.core.http.asgi import PROCESSOR_SECONDS, DjangoApplication, Send


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Give the functions that were called in a thread."""
    called: list[Any] = []
    call = SyncToAsync.__call__

    async def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(self.func)
        return await call(self, *args, **kwargs)

    monkeypatch.setattr(SyncToAsync, "__call__", counted)
    return called


async def call(method: str, body: bytes, send: Send) -> dict[str, Any]:
    """Let Django answer a request; return its scope."""
    coming = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        return next(coming, None) or await asyncio.Event().wait()

    scope: dict[str, Any] = {
        "type": "http", "method": method, "path": "/v1/nothing", "query_string": b"", "scheme": "http",
        "headers": [(b"host", b"localhost")], "client": ("10.0.0.1", 1), "server": ("localhost", 80),
    }  # fmt: skip
    await DjangoApplication()(scope, receive, send)
    return scope


def test_all_middleware_and_the_view_take_one_visit(visits: list[Any]) -> None:
    async def scenario() -> tuple[Any, float]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = await call("GET", b"", send)
        return sent[0], scope[PROCESSOR_SECONDS]

    start, seconds = asyncio.run(scenario())

    assert start["status"] == 404
    assert dict(start["headers"])[b"x-request-id"].startswith(b"req_")
    assert seconds > 0
    assert len(visits) <= 4, visits  # begin, answer, close, end


def test_a_body_is_closed_when_its_answer_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[Any] = []

    class Body(tempfile.SpooledTemporaryFile[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            bodies.append(self)

    monkeypatch.setattr(tempfile, "SpooledTemporaryFile", Body)

    async def scenario() -> None:
        async def send(message: Any) -> None:
            raise OSError("The connection is gone.")

        await call("POST", b"{}", send)

    with pytest.raises(OSError, match="gone"):
        asyncio.run(scenario())

    assert [body.closed for body in bodies] == [True]
