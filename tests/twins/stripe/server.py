"""The twin over real HTTP on loopback, and as a transport of the package for tests that make thousands of calls."""

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import stripe

from tests.twins.stripe import invoices, money  # noqa: F401 - registers what the twin answers
from tests.twins.stripe.twin import Dropped, Twin

_MADE_UP = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|")


@contextmanager
def serve(twin: Twin) -> Iterator[str]:
    """Serve the twin on a free port of loopback; yields its address."""

    class Door(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            try:
                status, headers, content = twin.handle(self.command, self.path, dict(self.headers), body)
            except Dropped:
                self.close_connection = True
                return
            self.send_response(status)
            for name, value in {**headers, "Content-Type": "application/json"}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = _answer  # noqa: N815 - names of the base class

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Door)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


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
