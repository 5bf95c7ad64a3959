"""Spans by the SDK of OpenTelemetry. Only processes that send traces import this module (tracing.py)."""

import datetime
import threading

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from apps.core.messages.tracing import Attributes

_SEND_MS = 1_000  # the longest time that a span waits to be sent
_CLOSE_SECONDS = 2.0


class Span:
    """A piece of traced work that has begun. `traceparent` is its context, for the work that it causes elsewhere."""

    __slots__ = ("_span", "_tracer", "traceparent")

    def __init__(self, span: trace.Span, tracer: trace.Tracer) -> None:
        self._span, self._tracer = span, tracer
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-01"

    def child(self, name: str, *, is_call: bool = False, attributes: Attributes | None = None) -> "Span":
        """Begin a part of this work. `is_call`: another service does it."""
        kind = trace.SpanKind.CLIENT if is_call else trace.SpanKind.INTERNAL
        inside = trace.set_span_in_context(self._span, Context())
        return Span(self._tracer.start_span(name, inside, kind, _known(attributes)), self._tracer)

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def annotate(self, attributes: Attributes) -> None:
        self._span.set_attributes(_known(attributes))

    def add_event(
        self, name: str, attributes: Attributes | None = None, *, at: datetime.datetime | None = None
    ) -> None:
        self._span.add_event(name, _known(attributes), _nanoseconds(at))

    def fail(self, error_type: str) -> None:
        """Mark the work as failed.

        The span has only the error's type, because a message or a stack may quote secrets.
        """
        self._span.set_attribute("error.type", error_type)
        self._span.set_status(trace.StatusCode.ERROR)

    def end(self, *, at: datetime.datetime | None = None) -> None:
        self._span.end(_nanoseconds(at))


class Spans:
    """Makes the spans of this process and sends them from a separate thread.

    The SDK reads the standard variables: endpoint, headers and sampler. Its queue is bounded, and drops spans that the
    collector does not take in time.
    """

    def __init__(self, process: str) -> None:
        named = Resource({"service.name": f"anneal-{process}", "service.namespace": "anneal"})
        resource = Resource.create().merge(named).merge(OTELResourceDetector().detect())
        # Not at exit: a collector that is away would delay the end by half a minute.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(), schedule_delay_millis=_SEND_MS))
        self._tracer = self._provider.get_tracer("anneal")

    def close(self) -> None:
        """Send the spans that wait, if the collector takes them within two seconds."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)

    def root(self, name: str, *, sent: str, attributes: Attributes) -> Span | None:
        """Return the span of a request, with a link to the context that its client sent; None if not sampled."""
        links = [trace.Link(_context_of(sent))] if sent else []
        span = self._tracer.start_span(name, Context(), trace.SpanKind.SERVER, _known(attributes), links)
        return Span(span, self._tracer) if span.is_recording() else None

    def child(
        self, name: str, *, parent: str, attributes: Attributes, at: datetime.datetime | None, takes_message: bool
    ) -> Span | None:
        """Return a child of a span from another process or an earlier time; None if the sampler refuses it."""
        kind = trace.SpanKind.CONSUMER if takes_message else trace.SpanKind.INTERNAL
        inside = trace.set_span_in_context(trace.NonRecordingSpan(_context_of(parent)), Context())
        span = self._tracer.start_span(name, inside, kind, _known(attributes), start_time=_nanoseconds(at))
        return Span(span, self._tracer) if span.is_recording() else None


def _context_of(traceparent: str) -> trace.SpanContext:
    _, trace_id, span_id, flags = traceparent.split("-")
    return trace.SpanContext(int(trace_id, 16), int(span_id, 16), True, trace.TraceFlags(int(flags, 16)))


def _known(attributes: Attributes | None) -> dict[str, str | int | float | bool]:
    return {name: value for name, value in (attributes or {}).items() if value is not None and value != ""}


def _nanoseconds(at: datetime.datetime | None) -> int | None:
    return None if at is None else round(at.timestamp() * 1_000_000) * 1_000
