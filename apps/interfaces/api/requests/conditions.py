"""The header If-Match of a change: the ETag of the object that the client has read.

Changes take no other condition: answers have no Last-Modified, so RFC 9110 has If-Unmodified-Since ignored.
"""

from django.http import HttpResponse
from django.utils.cache import set_response_etag
from django.utils.http import parse_etags
from rest_framework.request import Request

from apps.core.errors import DomainError, InvalidValue, Status

HEADER = "If-Match"
HEADERS = {
    HEADER: (
        "The ETag of what GET answers at this address. If it has changed since, the status is 412 "
        "(`precondition_failed`), and nothing is changed."
    )
}


class PreconditionFailed(DomainError):
    """The object is no longer the one that If-Match names."""

    code = "precondition_failed"
    status = Status.PRECONDITION_FAILED


def read_if_match(request: Request) -> str | None:
    """Return the header of a change; None without one, and for reads, which it does not concern."""
    return None if request.method in ("GET", "HEAD") else request.headers.get(HEADER)


def require_match(asked: str, current: bytes) -> None:
    """Raise PreconditionFailed unless If-Match names the ETag of the `current` answer to GET, or any."""
    etags = parse_etags(asked)
    if not etags:
        raise InvalidValue(f"{HEADER} is an ETag in quotes, as GET answers it.", param=HEADER)
    response = HttpResponse(current)
    set_response_etag(response)
    if etags != ["*"] and response.headers["ETag"] not in etags:
        text = "This was changed since you read it. Read it again, and send the change with its new ETag."
        raise PreconditionFailed(text, param=HEADER)


def refuse_if_match() -> InvalidValue:
    text = f"This call takes no {HEADER}, because GET does not answer at its address. Send it without one."
    return InvalidValue(text, param=HEADER)
