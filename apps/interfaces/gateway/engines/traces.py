"""The trace of an inference request: one span for the whole, and one for each phase.

The span of the engine has the attributes of OpenTelemetry's conventions for generative AI. No span has a prompt, an
answer or a key.
"""

from enum import StrEnum
from typing import TYPE_CHECKING

from apps.core.messages import tracing
from apps.core.messages.tracing import Attributes
from apps.interfaces.gateway.engines.meter import Meter

if TYPE_CHECKING:
    from apps.core.messages.spans import Span

_OPERATIONS = {"/v1/completions": "text_completion"}


class RequestPhase(StrEnum):
    """The phases of a request before an engine works on it."""

    ADMISSION = "admission"  # key, limits, body, room and money
    REPLICA = "wait for replica"  # that starts, or loads the adapter
    PLACE = "wait for place"  # on a replica, while tenants take turns


class RequestTrace:
    """The trace of a request that was not sampled: every method does nothing."""

    __slots__ = ()

    def annotate(self, attributes: Attributes) -> None:
        """Add attributes to the span of the request."""

    def enter(self, phase: RequestPhase) -> None:
        """End the present phase and begin the next."""

    def ask_engine(self, model_name: str, replica_id: str, *, output_tokens: int | None) -> str:
        """Begin the phase of an engine.

        Return the trace context for the engine to continue; "" if the request is not traced.
        """
        return ""

    def fail_phase(self, error_type: str) -> None: ...

    def record_first_token(self) -> None: ...

    def record_usage(self, meter: Meter) -> None:
        """Add the tokens that the customer pays for to the span of the engine."""

    def refuse(self, code: str, status: int) -> None:
        """Record how the request was refused. By convention, only a server error counts as a failure."""

    def end(self) -> None: ...


class SampledTrace(RequestTrace):
    """The trace of a request that the operator's sampler chose."""

    __slots__ = ("_path", "_phase", "_request")

    def __init__(self, request: "Span", path: str) -> None:
        self._request, self._path = request, path
        self._phase = request.child(RequestPhase.ADMISSION)

    def annotate(self, attributes: Attributes) -> None:
        self._request.annotate(attributes)

    def enter(self, phase: RequestPhase) -> None:
        self._phase.end()
        self._phase = self._request.child(phase)

    def ask_engine(self, model_name: str, replica_id: str, *, output_tokens: int | None) -> str:
        operation = _OPERATIONS.get(self._path, "chat")
        attributes: Attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "vllm",
            "gen_ai.request.model": model_name,
            "gen_ai.request.max_tokens": output_tokens,
            "anneal.replica.id": replica_id,
        }
        self._phase.end()
        self._phase = self._request.child(f"{operation} {model_name}", is_call=True, attributes=attributes)
        return self._phase.traceparent

    def fail_phase(self, error_type: str) -> None:
        self._phase.fail(error_type)

    def record_first_token(self) -> None:
        self._phase.add_event("gen_ai.first_token")

    def record_usage(self, meter: Meter) -> None:
        self._phase.annotate(
            {
                "gen_ai.usage.input_tokens": meter.input_tokens,
                "gen_ai.usage.cache_read.input_tokens": meter.cached_input_tokens,
                "gen_ai.usage.output_tokens": meter.output_tokens,
            }
        )

    def refuse(self, code: str, status: int) -> None:
        self._request.annotate({"error.type": code, "http.response.status_code": status})
        if status >= 500:
            self._phase.fail(code)
            self._request.fail(code)

    def end(self) -> None:
        self._phase.end()
        self._request.end()


UNTRACED = RequestTrace()


def begin_trace(path: str, *, request_id: str, sent: str) -> RequestTrace:
    """Return the trace of a request to a route, with a link to the context that the client sent, if any."""
    attributes: Attributes = {"http.request.method": "POST", "http.route": path, "anneal.request.id": request_id}
    span = tracing.begin_request(f"POST {path}", sent=sent, attributes=attributes)
    return SampledTrace(span, path) if span else UNTRACED
