"""What Django as an ASGI application costs a request: visits to its thread, and the file of its body."""

import asyncio
import tempfile
from typing import Any

import pytest
from asgiref.sync import SyncToAsync

from apps.core.http.asgi import PROCESSOR_SECONDS, DjangoApplication


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


def test_all_middleware_and_the_view_take_one_visit(visits: list[Any]) -> None:
    async def scenario() -> tuple[Any, float]:
        coming = iter([{"type": "http.request", "body": b"", "more_body": False}])
        sent: list[Any] = []

        async def receive() -> Any:
            for message in coming:
                return message
            return await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        scope: dict[str, Any] = {
            "type": "http", "method": "GET", "path": "/v1/nothing", "query_string": b"", "scheme": "http",
            "headers": [(b"host", b"localhost")], "client": ("10.0.0.1", 1), "server": ("localhost", 80),
        }  # fmt: skip
        await DjangoApplication()(scope, receive, send)
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
        coming = iter([{"type": "http.request", "body": b"{}", "more_body": False}])

        async def receive() -> Any:
            for message in coming:
                return message
            return await asyncio.Event().wait()

        async def send(message: Any) -> None:
            raise OSError("The connection is gone.")

        scope: dict[str, Any] = {
            "type": "http", "method": "POST", "path": "/v1/nothing", "query_string": b"", "scheme": "http",
            "headers": [(b"host", b"localhost")], "client": ("10.0.0.1", 1), "server": ("localhost", 80),
        }  # fmt: skip
        await DjangoApplication()(scope, receive, send)

    with pytest.raises(OSError, match="gone"):
        asyncio.run(scenario())

    assert [body.closed for body in bodies] == [True]
