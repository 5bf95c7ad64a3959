"""Fair use of the web process: no key, person, organization or address can starve the others.

Each of them has a limit of requests and one of processor time per minute. The time of each request is measured, so no
list of costly routes is needed. Concurrency is limited too: few views run at once, because they share one interpreter;
more bodies, downloads and live streams may be open. The bodies of one organization are read at a limited rate. Waiting
views take turns, organization by organization. Views of heavy users run in a separate process, so that they delay only
each other. A refusal costs processor time too, so an address that is refused often gets its refusals after a delay.

The counts are kept in this process: with several web processes, a limit holds for each of them (docs/limits.md).
"""

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from django.conf import settings
from django.http import HttpRequest
from django.utils.translation import get_language_from_request, gettext, gettext_noop, override

from apps.core.errors import DomainError, RateLimited, Status, Unavailable
from apps.core.http.asgi import (
    DEFAULT_BODY_BYTES,
    MIB,
    PROCESSOR_SECONDS,
    Application,
    Message,
    Receive,
    Scope,
    Send,
    UnknownUrl,
    declared_length,
    is_machine_path,
    plain_page,
    send_error,
    send_page,
)
from apps.core.http.body_limits import LimitBodies
from apps.core.http.fair_shares import Buckets, LateRefusals, OpenCounts, Pace, Places, TooManyWaiting
from apps.core.http.turns import PlacedRequest
from apps.core.messages.translation import later, translated
from apps.core.objects.views import OBJECT_LIMIT
from apps.interfaces.web.edge import callers
from apps.interfaces.web.edge.busy_process import BusyProcess
from apps.interfaces.web.edge.dashboard_files import has_file
from apps.interfaces.web.edge.upload_limits import UPLOAD_LIMITS

BODY_LIMITS = (*UPLOAD_LIMITS, OBJECT_LIMIT)
_UPLOAD_PREFIXES = ("/v1/files", "/v1/uploads", "/datasets", "/adapters/upload", "/api/v1/adapters")
_WAIT_SECONDS, _MAX_WAITING = 10.0, 32
# Of the bodies of one owner: to read a mebibyte, and to pass it on, takes up to 8 ms of this process.
_PROMPT_BODY_BYTES, _BODY_BYTES_PER_SECOND = 16 * MIB, 24 * MIB
# A caller is quiet if it runs no other view and none of its owners has used more of its processor time than this.
_QUIET_PART = 1 / 100
# Views share one interpreter: each further view of one organization slows down the others. An owner takes at most
# a quarter of the places, and only one place after using more than this part of its processor time.
_PART_OF_ONE, _MODEST_PART = 4, 1 / 10


class Share(NamedTuple):
    """The limits of one owner, as multiples of those of a key or session."""

    requests: float
    seconds: float
    open: int
    uploads: int


# An organization uses more than one key, and an address may serve several organizations: an office, a university.
_SHARES = {
    "key": Share(1, 1, 24, 4),
    "session": Share(1, 1, 24, 4),
    "person": Share(2, 1.5, 36, 6),
    "organization": Share(2, 1.5, 48, 8),
    "address": Share(4, 3, 96, 16),
    "anonymous": Share(1, 0.5, 24, 4),  # an address, for callers who are not signed in
    "static": Share(5, 0.5, 96, 16),  # an address, for files of the dashboard: a page has several, which browsers keep
}
_NAMES = {
    "key": "This API key",
    "session": gettext_noop("Your browser"),
    "person": gettext_noop("Your account"),
    "organization": gettext_noop("Your organization"),
    "address": gettext_noop("Your network"),
    "anonymous": "Your network",
    "static": "Your network",
}
# The sentences below, as pages translate them.
_SENTENCES = (
    gettext_noop("%(who)s may use %(limit)s."),
    gettext_noop("%(who)s has too many requests waiting at once."),
    gettext_noop("Try again in %(seconds)s s."),
    gettext_noop("%(number)s requests per minute"),
    gettext_noop("%(number)s seconds of processor time per minute"),
    gettext_noop("%(number)s open requests at once"),
    gettext_noop("%(number)s large uploads at once"),
    gettext_noop("The request body is larger than %(size)s MiB."),
    gettext_noop("The request body did not arrive in time. Send it again."),
)
_HEADINGS = {
    Status.TOO_MANY: later("Too many requests"),
    Status.TOO_LARGE: later("That is too large"),
    Status.TIMED_OUT: later("That took too long"),
}
_OTHER_HEADING = later("This did not work")
_JSON = b"application/json"  # what the upload script reads


class WebLimits(NamedTuple):
    """The limits of one key or session per minute (seconds are processor time), and how many views run at once."""

    requests_per_minute: int
    seconds_per_minute: int
    places: int


class _Lane(NamedTuple):
    """A process that runs views, and its places."""

    application: Application
    places: Places


class LimitRequests:
    """ASGI layer that applies the limits before any costly work.

    Views of heavy users run in `busy` while it is ready, and otherwise in this process.
    """

    def __init__(self, application: Application, limits: WebLimits, *, busy: BusyProcess | None = None) -> None:
        self._own = _Lane(LimitBodies(application, BODY_LIMITS, refuse=send_refusal), _places(limits))
        self._busy = _Lane(LimitBodies(busy or application, BODY_LIMITS, refuse=send_refusal), _places(limits))
        self._busy_process = busy
        self._limits = limits
        self._requests, self._seconds = Buckets(), Buckets()
        self._open, self._uploads = OpenCounts(), OpenCounts()
        self._bodies = Pace(prompt=_PROMPT_BODY_BYTES, per_second=_BODY_BYTES_PER_SECOND, wait_seconds=math.inf)
        self._refusals = LateRefusals()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._own.application(scope, receive, send)
            return
        try:
            owners = await self._owners(scope)
            self._take_request(owners)
            if _is_static(scope) and not has_file(scope["path"]):
                raise UnknownUrl("There is no such file.")
            opened = self._open_for(owners, is_upload=_is_upload(scope))
        except (RateLimited, UnknownUrl, Unavailable) as refusal:
            await self._refuse(scope, send, refusal)
            return
        lane, owner = self._lane_of(owners), owners[-1]
        begin, end = partial(self._begin, lane, owners), partial(lane.places.give_back, owner)
        run = PlacedRequest(begin, end, partial(self._receive, owner, receive), send)
        try:
            await lane.application(scope, run.receive, run.send)
        finally:
            run.end()
            self._take_seconds(owners, scope.get(PROCESSOR_SECONDS, 0.0))
            for counts, owner in opened:
                counts.remove(owner)
        if run.refusal and not run.has_answered:
            await self._refuse(scope, send, run.refusal)

    async def _receive(self, owner: str, receive: Receive) -> Message:
        """Return the next part of a body when the owner's rate allows it. Until then the client cannot send more."""
        message = await receive()
        if body := message.get("body"):
            await self._bodies.wait_turn(owner, len(body))
        return message

    async def _refuse(self, scope: Scope, send: Send, refusal: DomainError) -> None:
        await self._refusals.wait(callers.address_of(scope))
        await send_refusal(scope, send, refusal)

    async def _owners(self, scope: Scope) -> Sequence[str]:
        """Return all owners whose limits apply to a request. The request takes turns for the last one."""
        address = callers.address_of(scope)
        if _is_static(scope):
            return [f"static {address}"]
        credential = callers.credential_of(scope)
        anonymous = f"anonymous {address}"
        caller = callers.recall(credential)
        if caller is None and any(credential):
            self._take_request([anonymous])  # before asking the database
            caller = await callers.find(credential)
        if caller is None:
            return [address, anonymous]
        return [address, *(owner for owner in (caller.credential, caller.person, caller.organization) if owner)]

    def _take_request(self, owners: Sequence[str]) -> None:
        """Take one request from each owner's limit. If a limit is used up, take none and raise RateLimited."""
        for owner in owners:
            requests, seconds = self._rates(owner)
            wait = self._requests.wait_seconds(owner, requests)
            if wait:
                raise _refusal(owner, f"{requests:.0f} requests per minute", wait)
            wait = self._seconds.wait_seconds(owner, seconds, 0)
            if wait:
                raise _refusal(owner, f"{seconds:.0f} seconds of processor time per minute", wait)
        for owner in owners:
            self._requests.take(owner, self._rates(owner)[0])

    def _open_for(self, owners: Sequence[str], *, is_upload: bool) -> list[tuple[OpenCounts, str]]:
        """Count one more open request, and one more upload if it is an upload. Raises RateLimited."""
        for owner in owners:
            share = _share(owner)
            if self._open[owner] >= share.open:
                raise _refusal(owner, f"{share.open} open requests at once", 1)
            if is_upload and self._uploads[owner] >= share.uploads:
                raise _refusal(owner, f"{share.uploads} large uploads at once", 5)
        counted = [self._open, self._uploads] if is_upload else [self._open]
        opened = [(counts, owner) for counts in counted for owner in owners]
        for counts, owner in opened:
            counts.add(owner)
        return opened

    def _lane_of(self, owners: Sequence[str]) -> _Lane:
        """Return the process for a request of these owners: this one, unless they are heavy users."""
        if self._busy_process is None or not self._busy_process.is_ready:
            return self._own
        is_quiet = self._used_part(owners) < _QUIET_PART and not self._own.places.is_taken_by(owners[-1])
        return self._own if is_quiet else self._busy

    async def _begin(self, lane: _Lane, owners: Sequence[str]) -> None:
        """Wait for a place to run in. Raises RateLimited."""
        is_modest = self._used_part(owners) < _MODEST_PART
        most = max(1, self._limits.places // _PART_OF_ONE) if is_modest else 1
        try:
            await lane.places.take(owners[-1], most=most)
        except TooManyWaiting:
            text = f"{_name(owners[-1])} has too many requests waiting at once. Try again in 2 s."
            raise RateLimited(text, retry_after_seconds=2) from None

    def _used_part(self, owners: Sequence[str]) -> float:
        """Return the largest share of processor time that one of the owners has used."""
        return 1 - min(self._seconds.share_left(owner, self._rates(owner)[1]) for owner in owners)

    def _take_seconds(self, owners: Sequence[str], seconds: float) -> None:
        for owner in owners:
            self._seconds.take(owner, self._rates(owner)[1], seconds)

    def _rates(self, owner: str) -> tuple[float, float]:
        share = _share(owner)
        return (
            self._limits.requests_per_minute * share.requests,
            self._limits.seconds_per_minute * share.seconds,
        )


def _places(limits: WebLimits) -> Places:
    return Places(limits.places, most_waiting=_MAX_WAITING, wait_seconds=_WAIT_SECONDS)


async def send_refusal(scope: Scope, send: Send, refusal: DomainError) -> None:
    """Answer a program with an error object, htmx with a notice that keeps the page, and a person with a page."""
    headers = dict(scope["headers"])
    language = _language(headers.get(b"accept-language", b"").decode("latin-1"))
    if is_machine_path(scope["path"]) or _is_static(scope) or headers.get(b"accept", b"").startswith(_JSON):
        await send_error(send, refusal)
    elif headers.get(b"hx-request") == b"true":
        with override(language):
            notice = translated(refusal.message)
        await send_page(send, refusal, "", notice=notice)
    else:
        is_signed_in = bool(callers.credential_of(scope)[1])
        page = _page(int(refusal.status), refusal.message, language, is_signed_in, scope["method"] == "GET")
        await send_page(send, refusal, page)


@lru_cache(maxsize=256)
def _page(status: int, message: str, language: str, is_signed_in: bool, can_repeat: bool) -> str:
    """Render the page. It is cached, because every request of a flood gets the same page."""
    with override(language):
        text = translated(message)
        if status == Status.TOO_MANY:
            text = f"{text} {gettext('Your earlier work is saved.')}"
        heading = _HEADINGS.get(Status(status), _OTHER_HEADING)
        return plain_page(status, str(heading), text, is_signed_in=is_signed_in, can_repeat=can_repeat)


def _language(accepted: str) -> str:
    """Return the language that a browser asks for. The person's own choice would need the database."""
    request = HttpRequest()
    request.META["HTTP_ACCEPT_LANGUAGE"] = accepted
    return get_language_from_request(request)


def _is_static(scope: Scope) -> bool:
    return scope["path"].startswith(settings.STATIC_URL)


def _is_upload(scope: Scope) -> bool:
    """Return whether the body is or may be large. A body of undeclared length may be."""
    if scope["method"] not in ("POST", "PUT") or not scope["path"].startswith(_UPLOAD_PREFIXES):
        return False
    is_chunked = any(name == b"transfer-encoding" for name, _ in scope["headers"])
    return is_chunked or declared_length(scope) > DEFAULT_BODY_BYTES


def _share(owner: str) -> Share:
    return _SHARES[owner.partition(" ")[0]]


def _name(owner: str) -> str:
    return _NAMES[owner.partition(" ")[0]]


def _refusal(owner: str, limit: str, wait_seconds: float) -> RateLimited:
    wait = math.ceil(wait_seconds)
    text = f"{_name(owner)} may use {limit}. Try again in {wait} s."
    return RateLimited(text, retry_after_seconds=wait, limit=limit)
