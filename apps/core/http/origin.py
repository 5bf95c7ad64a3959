"""Origin of the current request: address and browser, for the audit log."""

import ipaddress
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from django.http import HttpRequest
from django.http.response import HttpResponseBase

USER_AGENT_LENGTH = 200
Handler = Callable[[HttpRequest], HttpResponseBase]


@dataclass(frozen=True)
class Origin:
    """The address, browser and API key of a request. `ip` is None if it is unknown, as behind a Unix socket."""

    ip: str | None = None
    user_agent: str = ""
    key_id: str = ""


_current: ContextVar[Origin | None] = ContextVar("origin", default=None)


def current() -> Origin:
    """Return the origin of the current request; an empty one outside of a request."""
    return _current.get() or Origin()


@contextmanager
def with_key(key_id: str) -> Iterator[None]:
    """Store that the request is made with an API key. Its actions in the name of the key's creator are then marked."""
    token = _current.set(replace(current(), key_id=key_id))
    try:
        yield
    finally:
        _current.reset(token)


def OriginMiddleware(get_response: Handler) -> Handler:  # noqa: N802 - as Django names middleware
    """Store the origin of each request while it is answered. The front door's address counts as the client's."""

    def answer(request: HttpRequest) -> HttpResponseBase:
        with _remembered(request):
            return get_response(request)

    return answer


@contextmanager
def _remembered(request: HttpRequest) -> Iterator[None]:
    token = _current.set(
        Origin(
            ip=_address(request.META.get("REMOTE_ADDR", "")),
            user_agent="".join(filter(str.isprintable, request.META.get("HTTP_USER_AGENT", "")))[:USER_AGENT_LENGTH],
        )
    )
    try:
        yield
    finally:
        _current.reset(token)


def network_of(host: str) -> str:
    """Return the network that limits count as one: an IPv4 address, or the /64 of one IPv6 customer.

    Raises ValueError for any other text.
    """
    address = ipaddress.ip_address(host)
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or ipaddress.ip_network((int(address), 64), strict=False).network_address
    return str(address)


def _address(text: str) -> str | None:
    """Return an IP address in PostgreSQL's form, without the zone of a link-local one; None for any other text."""
    try:
        return str(ipaddress.ip_address(text.partition("%")[0]))
    except ValueError:
        return None
