"""The header If-Match of a change: the ETag of the object that the client has read.

Changes take no other condition: answers have no Last-Modified, so RFC 9110 has If-Unmodified-Since ignored.
"""

from collections.abc import Collection
from typing import Any

from django.http import HttpResponse
from django.utils.cache import set_response_etag
from django.utils.http import parse_etags
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response

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


def set_etag(response: Response, *, moving: Collection[str]) -> None:
    """Set the ETag of a rendered answer. If the answer has `moving` fields, the ETag begins with that of its state."""
    set_response_etag(response)
    if moving:
        whole = response.headers["ETag"].strip('"')
        response.headers["ETag"] = f'"{_state_of(response.data, moving)}.{whole}"'


def require_match(asked: str, current: object, *, moving: Collection[str]) -> None:
    """Raise PreconditionFailed unless If-Match names the state of the `current` answer to GET, or any."""
    etags = parse_etags(asked)
    if not etags:
        raise InvalidValue(f"{HEADER} is an ETag in quotes, as GET answers it.", param=HEADER)
    states = {etag.strip('"').partition(".")[0] for etag in etags}
    if etags != ["*"] and _state_of(current, moving) not in states:
        text = "This was changed since you read it. Read it again, and send the change with its new ETag."
        raise PreconditionFailed(text, param=HEADER)


def _state_of(answer: Any, moving: Collection[str]) -> str:
    """Return the ETag, without quotes, of an answer to GET without its `moving` fields."""
    state = {field: value for field, value in answer.items() if field not in moving} if moving else answer
    response = HttpResponse(JSONRenderer().render(state))
    set_response_etag(response)
    return response.headers["ETag"].strip('"')


def refuse_if_match() -> InvalidValue:
    text = f"This call takes no {HEADER}, because GET does not answer at its address. Send it without one."
    return InvalidValue(text, param=HEADER)
