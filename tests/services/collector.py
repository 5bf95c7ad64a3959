"""A collector of traces on the loopback interface: OTLP by HTTP, as protobuf."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.waiting import wait_until

if "opentelemetry" in sys.modules and sys.modules["opentelemetry"] is None:
    del sys.modules["opentelemetry"]  # the settings of a process without traces hide it

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status


@dataclass(frozen=True)
class ReceivedSpan:
    """One span. Ids are in hexadecimal, times in nanoseconds since 1970."""

    service: str
    name: str
    kind: str
    trace_id: str
    id: str
    parent_id: str
    started_ns: int
    ended_ns: int
    is_failed: bool
    attributes: dict[str, Any]
    events: list[tuple[str, int, dict[str, Any]]]
    links: list[tuple[str, str]]

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.id}-01"


@dataclass
class Collector:
    """What arrived at `url`."""

    url: str
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    @property
    def spans(self) -> list[ReceivedSpan]:
        return [span for body in list(self.bodies) for span in _read(body)]

    def wait_for(self, is_wanted: Callable[[ReceivedSpan], bool]) -> ReceivedSpan:
        """Return the first such span once it has arrived."""
        return wait_until(
            lambda: next(filter(is_wanted, self.spans), None),
            lambda: f"only these spans came: {[span.name for span in self.spans]}",
            seconds=20,
        )

    def wait_for_request(self, request_id: str) -> ReceivedSpan:
        """Return the span of the request with this id; those below it have arrived before."""
        return self.wait_for(lambda span: span.attributes.get("anneal.request.id") == request_id)

    def of_trace(self, trace_id: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.trace_id == trace_id]


@contextmanager
def running_collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            is_known = self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf"
            if is_known:
                collector.headers.append(dict(self.headers))
                collector.bodies.append(body)
            self.send_response(200 if is_known else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _read(body: bytes) -> Iterator[ReceivedSpan]:
    for group in ExportTraceServiceRequest.FromString(body).resource_spans:
        service = _plain(group.resource.attributes)["service.name"]
        for span in (span for scope in group.scope_spans for span in scope.spans):
            yield ReceivedSpan(
                service=service,
                name=span.name,
                kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
                trace_id=span.trace_id.hex(),
                id=span.span_id.hex(),
                parent_id=span.parent_span_id.hex(),
                started_ns=span.start_time_unix_nano,
                ended_ns=span.end_time_unix_nano,
                is_failed=span.status.code == Status.STATUS_CODE_ERROR,
                attributes=_plain(span.attributes),
                events=[(event.name, event.time_unix_nano, _plain(event.attributes)) for event in span.events],
                links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
            )


def _plain(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
