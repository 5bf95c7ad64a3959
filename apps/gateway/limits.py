"""What an organization, and each of its keys, may ask for: requests and tokens a minute, requests at once.

Kept in this process: with several gateways a limit holds for each of them.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from apps.core.errors import RateLimited

MOST_OPEN = 512
# The engine compiles grammars in a pool all tenants share; a slow one holds a place for tens of seconds.
MOST_OPEN_STRUCTURED = 2
_FORGET_SECONDS = 120.0

_HEADERS = (("limit", "d"), ("remaining", "d"), ("reset", "b"))


@dataclass(frozen=True, slots=True)
class Limits:
    """Of an organization or of one key; None: no limit of its own."""

    owner_id: str
    owner: str  # as a sentence begins: "Your organization"
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None


@dataclass(slots=True)
class _Bucket:
    left: float
    since: float  # time.monotonic()


class _Buckets:
    """A token bucket for each owner: full it holds a minute's worth."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._buckets: dict[str, _Bucket] = {}
        self._swept_at = time.monotonic()
        lines = [f"x-ratelimit-{word}-{what}: %{form}\r\n" for word, form in _HEADERS]
        self._lines = "".join(lines).encode()

    def _at(self, owner_id: str, per_minute: int, now: float) -> _Bucket:
        """Return the owner's bucket, filled up to now."""
        bucket = self._buckets.get(owner_id)
        if bucket is None:
            self._sweep(now)
            bucket = self._buckets[owner_id] = _Bucket(per_minute, now)
        left = bucket.left + (now - bucket.since) * per_minute / 60
        bucket.left = left if left < per_minute else per_minute
        bucket.since = now
        return bucket

    def _sweep(self, now: float) -> None:
        if now - self._swept_at > _FORGET_SECONDS:
            self._swept_at = now
            self._buckets = {k: v for k, v in self._buckets.items() if now - v.since < _FORGET_SECONDS}

    def require(self, one: Limits, per_minute: int, amount: int, now: float) -> _Bucket:
        """Return the bucket, in which there is the amount. Raises RateLimited."""
        bucket = self._at(one.owner_id, per_minute, now)
        # More than a minute's worth is let through when the bucket is full: it could never go otherwise.
        missing = (amount if amount < per_minute else per_minute) - bucket.left
        if missing > 0 or not per_minute:
            wait = max(1, math.ceil(missing * 60 / per_minute)) if per_minute else 60
            raise RateLimited(
                f"{one.owner}'s limit is {per_minute} {self.what} per minute. Try again in {wait} s.",
                retry_after_seconds=wait,
                limit=f"{per_minute} {self.what} per minute",
            )
        return bucket

    def correct(self, owner_id: str, per_minute: int, amount: int, now: float) -> None:
        """Take the amount more, or give it back where it is negative. What was used unforeseen leaves a debt."""
        bucket = self._at(owner_id, per_minute, now)
        left = bucket.left - amount
        bucket.left = left if left < per_minute else per_minute

    def headers(self, limits: Sequence[tuple[Limits, int]], now: float) -> bytes:
        left, per_minute = math.inf, 0
        for one, limit in limits:
            its_left = self._at(one.owner_id, limit, now).left
            if its_left < left:
                left, per_minute = its_left, limit
        reset = (per_minute - left) * 60 / per_minute if per_minute else 60.0
        return self._lines % (per_minute, left if left > 0 else 0, duration(reset).encode())


class Rates:
    """Requests and tokens per minute of organizations and keys."""

    def __init__(self) -> None:
        self._requests = _Buckets("requests")
        self._tokens = _Buckets("tokens")

    def take_request(self, limits: Sequence[Limits]) -> None:
        """Count one request against each. Raises RateLimited with the seconds until the next may come."""
        _take(self._requests, _of_requests(limits), 1)

    def take_tokens(self, limits: Sequence[Limits], tokens: int) -> None:
        """Count what a request may use at most; `correct` it when that is known. Raises RateLimited."""
        _take(self._tokens, _of_tokens(limits), tokens)

    def correct(self, limits: Sequence[Limits], *, taken: int, used: int) -> None:
        now = time.monotonic()
        for one, per_minute in _of_tokens(limits):
            self._tokens.correct(one.owner_id, per_minute, used - min(taken, per_minute), now)

    def headers(self, limits: Sequence[Limits]) -> bytes:
        """Return the standard x-ratelimit-* headers, as lines: of organization and key the one with less left."""
        now, found = time.monotonic(), b""
        if of_requests := _of_requests(limits):
            found = self._requests.headers(of_requests, now)
        if of_tokens := _of_tokens(limits):
            found += self._tokens.headers(of_tokens, now)
        return found


def _of_requests(limits: Sequence[Limits]) -> list[tuple[Limits, int]]:
    return [(one, one.requests_per_minute) for one in limits if one.requests_per_minute is not None]


def _of_tokens(limits: Sequence[Limits]) -> list[tuple[Limits, int]]:
    return [(one, one.tokens_per_minute) for one in limits if one.tokens_per_minute is not None]


def _take(buckets: _Buckets, limits: Sequence[tuple[Limits, int]], amount: int) -> None:
    """Take the amount of all, or of none when one of them has less."""
    now = time.monotonic()
    found = [(buckets.require(one, per_minute, amount, now), per_minute) for one, per_minute in limits]
    for bucket, per_minute in found:
        bucket.left -= amount if amount < per_minute else per_minute


def duration(seconds: float) -> str:
    """Return a time as OpenAI writes it in these headers: 20ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{minutes:.0f}m{rest:.0f}s" if minutes else f"{rest:.3g}s"


class OpenRequests:
    """Counts what each organization and each key has in progress."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        self._structured: dict[str, int] = {}

    def one_more(self, limits: Sequence[Limits], *, is_structured: bool) -> "_Place":
        """Hold a place while the block runs; the organization's limits come first. Entering raises RateLimited."""
        return _Place(self, limits, is_structured=is_structured)

    def take(self, limits: Sequence[Limits], *, is_structured: bool) -> None:
        """Raises RateLimited."""
        organization = limits[0]
        for one in limits:
            most = one.concurrent_requests
            if one is organization:
                most = MOST_OPEN if most is None else min(most, MOST_OPEN)
            if most is not None and self._open.get(one.owner_id, 0) >= most:
                raise _too_many(one, most, "requests")
        if is_structured:
            if self._structured.get(organization.owner_id, 0) >= MOST_OPEN_STRUCTURED:
                raise _too_many(organization, MOST_OPEN_STRUCTURED, "requests with a response_format or tools")
            _increase(self._structured, organization.owner_id)
        for one in limits:
            _increase(self._open, one.owner_id)

    def give_back(self, limits: Sequence[Limits], *, is_structured: bool) -> None:
        for one in limits:
            _decrease(self._open, one.owner_id)
        if is_structured:
            _decrease(self._structured, limits[0].owner_id)


class _Place:
    """A block with a place. No generator: this is entered for every request."""

    __slots__ = ("_is_structured", "_limits", "_open")

    def __init__(self, open_requests: OpenRequests, limits: Sequence[Limits], *, is_structured: bool) -> None:
        self._open, self._limits, self._is_structured = open_requests, limits, is_structured

    def __enter__(self) -> None:
        self._open.take(self._limits, is_structured=self._is_structured)

    def __exit__(self, *failure: object) -> None:
        self._open.give_back(self._limits, is_structured=self._is_structured)


def _too_many(limits: Limits, most: int, what: str) -> RateLimited:
    return RateLimited(f"{limits.owner} has {most} {what} in progress, the most allowed at once.")


def _increase(counts: dict[str, int], owner_id: str) -> None:
    counts[owner_id] = counts.get(owner_id, 0) + 1


def _decrease(counts: dict[str, int], owner_id: str) -> None:
    left = counts[owner_id] - 1
    if left:
        counts[owner_id] = left
    else:
        del counts[owner_id]
