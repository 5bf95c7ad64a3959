"""Traces of requests, of messages of the outbox and of attempts, for an operator who sets OTEL_EXPORTER_OTLP_ENDPOINT.

Without it, no module of OpenTelemetry is imported. A context is a W3C traceparent that this installation made; ""
stands for work that is not traced. The operator's sampler decides whether a trace begins. A client's own context is
only linked.
"""

import datetime
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from django.conf import settings

if TYPE_CHECKING:
    from apps.core.messages.spans import Span, Spans

HEADER = "traceparent"
Attributes = Mapping[str, str | int | float | bool | None]  # None and "" are left out
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")

_spans: "Spans | None" = None
_current: ContextVar["Span | None"] = ContextVar("span", default=None)


def start(process: str) -> None:
    """Trace this process, if the operator wants traces. Its service is `anneal-<process>`, or OTEL_SERVICE_NAME."""
    global _spans
    if settings.TRACES_ENDPOINT:
        from apps.core.messages.spans import Spans  # noqa: PLC0415 - the SDK costs memory, and time at each start

        _spans = Spans(process)


def stop() -> None:
    """Stop tracing, and send the waiting spans. This takes at most two seconds."""
    global _spans
    closing, _spans = _spans, None
    if closing is not None:
        closing.close()


def is_on() -> bool:
    return _spans is not None


def usable_traceparent(value: str) -> str:
    """Return a traceparent that was sent or stored if it is well-formed; otherwise ""."""
    return value if _TRACEPARENT.fullmatch(value) else ""


def current() -> str:
    """Return the context of the present work, to be stored with the work that continues it."""
    span = _current.get()
    return span.traceparent if span else ""


def annotate(attributes: Attributes) -> None:
    """Add attributes to the span of the present work, if there is one."""
    if span := _current.get():
        span.annotate(attributes)


def begin_request(name: str, *, sent: str, attributes: Attributes) -> "Span | None":
    """Return the first span of a trace; None if the sampler refuses it or tracing is off.

    `sent` is the client's traceparent. It becomes a link. As a parent, it would choose the id by which the sampler
    decides, and could join requests of several tenants.
    """
    if _spans is None:
        return None
    return _spans.root(name, sent=usable_traceparent(sent), attributes=attributes)


@contextmanager
def working(span: "Span | None") -> Iterator[None]:
    """Make the block the span's work: messages that it publishes continue the trace. The span ends with the block."""
    if span is None:
        yield
        return
    token = _current.set(span)
    try:
        yield
    except Exception as error:
        span.fail(type(error).__name__)
        raise
    finally:
        _current.reset(token)
        span.end()


def begin_child(
    name: str,
    *,
    parent: str,
    attributes: Attributes,
    at: datetime.datetime | None = None,
    takes_message: bool = False,
) -> "Span | None":
    """Return a child of a stored context's span; None if that one was not traced or this process does not trace."""
    if _spans is None or not usable_traceparent(parent):
        return None
    return _spans.child(name, parent=parent, attributes=attributes, at=at, takes_message=takes_message)


def record(
    name: str,
    *,
    parent: str,
    since: datetime.datetime,
    until: datetime.datetime,
    attributes: Attributes,
    events: Iterable[tuple[str, datetime.datetime, Attributes]] = (),
    error_type: str = "",
) -> str:
    """Make a span of past work, with times of the database. Return its context, or "" if it is not traced."""
    span = begin_child(name, parent=parent, attributes=attributes, at=since)
    if span is None:
        return ""
    for event, at, details in events:
        span.add_event(event, details, at=at)
    if error_type:
        span.fail(error_type)
    span.end(at=until)
    return span.traceparent
