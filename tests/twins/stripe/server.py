"""The twin over real HTTP on loopback, and as a transport of the package for tests that make thousands of calls."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import stripe

from tests.twins.http_server import Answer, Request, serve_http
from tests.twins.stripe import invoices, money  # noqa: F401 - registers what the twin answers
from tests.twins.stripe.twin import Dropped, Twin

_MADE_UP = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|")


@contextmanager
def serve(twin: Twin) -> Iterator[str]:
    """Serve the twin on a free port of loopback; yields its address."""

    def answer(request: Request) -> Answer | None:
        try:
            status, headers, content = twin.handle(
                request.method, request.path, dict(request.headers), request.body.decode()
            )
        except Dropped:
            return None
        return Answer(status, content, {**headers, "Content-Type": "application/json"})

    with serve_http(answer) as url:
        yield url


class KeyMissing(Exception):
    """A POST came with a key that the package made up: repeated by a task, it would be done twice."""


class InProcess(stripe.HTTPClient):
    """Hands requests to the twin without a socket. Raises KeyMissing for a POST without a key of ours."""

    name = "twin"

    def __init__(self, twin: Twin) -> None:
        super().__init__()
        self._twin = twin

    def request(
        self, method: str, url: str, headers: Mapping[str, str] | None, post_data: Any = None, **_: Any
    ) -> tuple[bytes, int, Mapping[str, str]]:
        if method.upper() == "POST" and _MADE_UP.fullmatch((headers or {}).get("Idempotency-Key", "")):
            raise KeyMissing(url)
        try:
            status, answered, content = self._twin.handle(method.upper(), url, headers or {}, post_data or "")
        except Dropped as error:
            raise stripe.APIConnectionError("dropped", should_retry=True) from error
        return content, status, answered

    def close(self) -> None:
        pass
