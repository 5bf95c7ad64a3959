"""A stand-in of another service over real HTTP: one function that answers, on a free port of loopback."""

import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class Request(NamedTuple):
    method: str
    path: str  # with its query
    headers: Message
    body: bytes

    @property
    def bearer(self) -> str:
        return str(self.headers.get("Authorization", "")).removeprefix("Bearer ")


class Answer(NamedTuple):
    status: int = 200
    content: bytes = b""
    headers: Mapping[str, str] = {}
    seconds_a_byte: float = 0.0
    cut_after: int | None = None  # bytes of the content after which the connection breaks


@contextmanager
def serve_http(answer: Callable[[Request], Answer | None], *, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serve in a thread for each connection; yield the address. For None the connection breaks without an answer."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            found = answer(Request(self.command, self.path, self.headers, body))
            if found is None:
                self.close_connection = True
                return
            self.send_response(found.status)
            for name, value in {**found.headers, "Content-Length": str(len(found.content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            with suppress(BrokenPipeError, ConnectionResetError, ssl.SSLEOFError):
                if not found.seconds_a_byte:
                    self.wfile.write(found.content[: found.cut_after])
                    self.close_connection = found.cut_after is not None
                    return
                for byte in found.content:
                    self.wfile.write(bytes([byte]))
                    time.sleep(found.seconds_a_byte)

        do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _handle  # noqa: N815 - names of the base class

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
