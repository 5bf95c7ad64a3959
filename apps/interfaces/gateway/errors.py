"""The gateway's errors as OpenAI error objects, with headers that tell a client whether to retry."""

import msgspec

from apps.core.errors import DomainError, Status
from apps.core.http.asgi import REQUEST_ID_HEADER, error_headers


class UnsupportedParameter(DomainError):
    """A field that would change the meaning of the request if it were silently ignored."""

    code = "unsupported_parameter"


class ContextLengthExceeded(DomainError):
    code = "context_length_exceeded"


class PriceNotSet(DomainError):
    """No operator has priced the model. It is not served for free, and waiting does not help."""

    code = "price_not_set"
    status = Status.UNAVAILABLE
    type = "server_error"


class AnswerTooLarge(DomainError):
    """The organization has no room for more of the answer. It is charged as far as it was written."""

    code = "answer_too_large"


class EngineError(DomainError):
    """The model failed in the middle of an answer. The answer is not charged."""

    code = "engine_error"
    status = Status.UNAVAILABLE
    type = "server_error"
    is_retryable = True


class RequestFailed(DomainError):
    """The engine works but fails on this request. It would fail again on every replica."""

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
    """Return the header lines."""
    named = error_headers(error) | {"content-type": "application/json", REQUEST_ID_HEADER: request_id}
    if error.status is Status.UNAUTHENTICATED:
        named["www-authenticate"] = "Bearer"
    return "".join([f"{name.lower()}: {value}\r\n" for name, value in named.items()]).encode()


def event_of(error: DomainError) -> bytes:
    """Return the server-sent event that makes an OpenAI client raise in the middle of a stream."""
    return b"data: " + body_of(error) + b"\n\n"
