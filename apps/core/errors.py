"""Anticipated failures. Each has a stable code, a sentence for the customer, the faulty field and the fix.

The public API renders one as an OpenAI-shaped error, a form as a field error, and htmx as a 422 with the form again.
"""

from enum import IntEnum
from typing import Any, ClassVar, NotRequired, TypedDict, cast


class Status(IntEnum):
    INVALID = 400
    UNAUTHENTICATED = 401
    FORBIDDEN = 403
    NOT_FOUND = 404
    METHOD_NOT_ALLOWED = 405
    TIMED_OUT = 408  # OpenAI clients retry it
    CONFLICT = 409  # OpenAI clients retry it: on the public API it is only for a request that is still in progress
    PRECONDITION_FAILED = 412
    TOO_LARGE = 413
    UNSUPPORTED_MEDIA_TYPE = 415
    UNPROCESSABLE = 422
    TOO_MANY = 429
    FAULT = 500
    UNAVAILABLE = 503


class ErrorDetails(TypedDict):
    """`param` names the faulty field, and `doc_url` the help about the code. Some errors have further members."""

    message: str
    type: str
    param: str | None
    code: str
    doc_url: NotRequired[str]


class ErrorBody(TypedDict):
    """The body of every answer that refuses a call."""

    error: ErrorDetails


class DomainError(Exception):
    """Base of every anticipated failure. Subclasses live in the module that raises them; shared ones live here.

    A failure that one place raises and no place catches is a shared class with its own `code`.
    """

    code: str = "invalid_request"
    status: ClassVar[Status] = Status.INVALID
    type: ClassVar[str] = "invalid_request_error"
    is_retryable: ClassVar[bool] = False
    help_page: ClassVar[str] = ""  # the address of the page about all codes; a server sets it when it starts

    def __init__(self, message: str, *, param: str | None = None, code: str = "", **data: Any) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.code
        self.data = data

    def as_openai(self) -> ErrorBody:
        """Return the body of OpenAI's error object, with the help's address and extra data beside its four members."""
        body = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        if self.help_page:
            body["doc_url"] = f"{self.help_page}#{self.code}"
        return {"error": cast(ErrorDetails, body | self.data)}


class InvalidApiKey(DomainError):
    """The key is missing, malformed, unknown, revoked or expired. The answer does not reveal which."""

    code = "invalid_api_key"
    status = Status.UNAUTHENTICATED


class MismatchedProject(DomainError):
    """The header OpenAI-Project names a project that is not the key's, or that does not exist."""

    code = "mismatched_project"
    status = Status.UNAUTHENTICATED


class InvalidJson(DomainError):
    """The body is not JSON, or holds a value that cannot be stored."""

    code = "invalid_json"


class MissingParameter(DomainError):
    code = "missing_required_parameter"


class MethodNotAllowed(DomainError):
    """The address exists, but not for this HTTP method."""

    code = "method_not_allowed"
    status = Status.METHOD_NOT_ALLOWED


class NotFound(DomainError):
    """The object is unknown or another tenant's. Answers never distinguish the two."""

    code = "not_found"
    status = Status.NOT_FOUND


class PermissionDenied(DomainError):
    code = "insufficient_permissions"
    status = Status.FORBIDDEN
    type = "permission_error"


class InvalidValue(DomainError):
    code = "invalid_value"


class UnknownParameter(DomainError):
    """A field that neither OpenAI nor this API documents, such as an engine's private field."""

    code = "unknown_parameter"


class InvalidState(DomainError):
    """The object is in a state that does not allow this. This is permanent, so the status is 400 and not 409."""

    code = "invalid_state"


class QuotaExceeded(DomainError):
    """A limit of the organization is reached. Waiting does not help, so clients must not retry."""

    code = "insufficient_quota"
    status = Status.TOO_MANY
    type = "insufficient_quota"


class RateLimited(DomainError):
    code = "rate_limit_exceeded"
    status = Status.TOO_MANY
    type = "rate_limit_error"
    is_retryable = True


class Unavailable(DomainError):
    code = "service_unavailable"
    status = Status.UNAVAILABLE
    type = "server_error"
    is_retryable = True
