"""What the gateway refuses, as OpenAI's error object with the headers that tell a client whether to try again."""

import msgspec

from apps.core.errors import DomainError, NotFound, Status
from apps.core.http.asgi import REQUEST_ID_HEADER, error_headers


class InvalidApiKey(DomainError):
    """No key, or one that is malformed, unknown, revoked or expired; the answer does not tell which."""

    code = "invalid_api_key"
    status = Status.UNAUTHENTICATED


class ModelNotFound(NotFound):
    """Unknown, or another organization's. The sentence names no model, so that the two answers are the same bytes."""

    code = "model_not_found"


class InvalidJson(DomainError):
    """The body is no JSON; the public API's other half answers with the same code."""

    code = "invalid_json"


class MissingParameter(DomainError):
    code = "missing_required_parameter"


class UnsupportedParameter(DomainError):
    """A field whose silent loss would change the meaning of the request."""

    code = "unsupported_parameter"


class UnknownParameter(DomainError):
    """A field that neither OpenAI nor we document; an engine's private field among them."""

    code = "unknown_parameter"


class ContextLengthExceeded(DomainError):
    code = "context_length_exceeded"


class PriceNotSet(DomainError):
    """An operator has not priced the model; nothing is given away silently, and waiting does not help."""

    code = "price_not_set"
    status = Status.UNAVAILABLE
    type = "server_error"


class EngineError(DomainError):
    """The model failed in the middle of an answer; nothing of it is charged."""

    code = "engine_error"
    status = Status.UNAVAILABLE
    type = "server_error"
    is_retryable = True


class RequestFailed(DomainError):
    """The engine is well and failed on this request alone; it would fail on it again, on every replica."""

    code = "request_failed"
    status = Status.UNPROCESSABLE

    def __init__(self) -> None:
        super().__init__(
            "The model's engine fails on this request and would fail on it again, so it was not repeated. Look for "
            "unusual values in the messages, tools or response_format."
        )


def body_of(error: DomainError) -> bytes:
    return msgspec.json.encode(error.as_openai(), enc_hook=str)


def headers_of(error: DomainError, request_id: str) -> bytes:
    """Return the headers as lines."""
    named = error_headers(error) | {"content-type": "application/json", REQUEST_ID_HEADER: request_id}
    if error.status is Status.UNAVAILABLE and not error.is_retryable:
        named["x-should-retry"] = "false"
    if error.status is Status.UNAUTHENTICATED:
        named["www-authenticate"] = "Bearer"
    return "".join([f"{name.lower()}: {value}\r\n" for name, value in named.items()]).encode()


def event_of(error: DomainError) -> bytes:
    """Return the server-sent event that makes an OpenAI client raise in the middle of a stream."""
    return b"data: " + body_of(error) + b"\n\n"
