"""Limits of organizations, their allowances and their keys: requests and tokens per minute, and concurrent requests.

Counts are kept in this process, so each gateway applies the limits separately.
"""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from apps.core.errors import RateLimited

MAX_OPEN = 512
# The engine compiles grammars in a pool that all tenants share; a slow one holds a place for tens of seconds.
MAX_OPEN_STRUCTURED = 2
MAX_ENGINE_FAILURES = 30  # per minute, of one organization
# Prompt tokens per minute of an organization's requests that it gave up before their first token. An engine reads such
# prompts for free, because it counted no tokens. A debt lasts five minutes at most.
MAX_ABANDONED_TOKENS, _MAX_ABANDONED_DEBT = 100_000, 5 * 100_000
# An organization does not use a minute's worth at once. It begins a second's worth, at least this many requests, and
# then as many a second as its limit allows.
_PROMPT_REQUESTS = 16
_FORGET_SECONDS = 120.0

_HEADERS = (("limit", "d"), ("remaining", "d"), ("reset", "b"))


@dataclass(frozen=True, slots=True)
class OwnerLimits:
    """Limits of an organization, an allowance or a key. None means that no such limit is set."""

    owner_id: str
    owner: str  # starts a sentence: "Your organization"
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None


@dataclass(slots=True)
class _TokenBucket:
    left: float
    since: float  # time.monotonic()
    next_at: float = 0.0  # when the next request of a paced owner would begin, on the same clock


class _Buckets:
    """A token bucket for each owner. A full bucket holds one minute's worth."""

    def __init__(self, what: str, rate_of: Callable[[OwnerLimits], int | None]) -> None:
        self._what, self._rate_of = what, rate_of
        self._buckets: dict[str, _TokenBucket] = {}
        self._swept_at = time.monotonic()
        lines = [f"x-ratelimit-{word}-{what}: %{form}\r\n" for word, form in _HEADERS]
        self._lines = "".join(lines).encode()

    def _at(self, owner_id: str, per_minute: int, now: float) -> _TokenBucket:
        """Return the owner's bucket, refilled up to now."""
        bucket = self._buckets.get(owner_id)
        if bucket is None:
            if now - self._swept_at > _FORGET_SECONDS:
                self._swept_at = now
                self._buckets = {k: v for k, v in self._buckets.items() if now - v.since < _FORGET_SECONDS}
            bucket = self._buckets[owner_id] = _TokenBucket(per_minute, now)
        left = bucket.left + (now - bucket.since) * per_minute / 60
        bucket.left = left if left < per_minute else per_minute
        bucket.since = now
        return bucket

    def take(self, limits: Sequence[OwnerLimits], amount: int = 1) -> None:
        """Take the amount from every bucket, or from none if one has too little.

        Raises RateLimited with the seconds until the amount is available.
        """
        now, found = time.monotonic(), []
        for one in limits:
            per_minute = self._rate_of(one)
            if per_minute is None:
                continue
            bucket = self._at(one.owner_id, per_minute, now)
            # A request for more than a minute's worth passes when the bucket is full; otherwise it could never pass.
            wanted = amount if amount < per_minute else per_minute
            if wanted > bucket.left or not per_minute:
                wait = max(1, math.ceil((wanted - bucket.left) * 60 / per_minute)) if per_minute else 60
                raise RateLimited(
                    f"{one.owner}'s limit is {per_minute} {self._what} per minute. Try again in {wait} s.",
                    retry_after_seconds=wait,
                    limit=f"{per_minute} {self._what} per minute",
                )
            found.append((bucket, wanted))
        for bucket, wanted in found:
            bucket.left -= wanted

    def turn_seconds(self, one: OwnerLimits) -> float:
        """Take the owner's next turn; return how long to wait for it."""
        per_minute = self._rate_of(one)
        if not per_minute:
            return 0.0
        now, interval = time.monotonic(), 60 / per_minute
        bucket = self._at(one.owner_id, per_minute, now)
        prompt = max(_PROMPT_REQUESTS, per_minute / 60)
        bucket.next_at = max(bucket.next_at, now - prompt * interval) + interval
        return max(0.0, bucket.next_at - now)

    def correct(self, limits: Sequence[OwnerLimits], *, taken: int, used: int, most_debt: float = math.inf) -> None:
        """Charge or return the difference between `used` and `taken`.

        If more was used than the bucket has, it goes below zero.
        """
        now = time.monotonic()
        for one in limits:
            per_minute = self._rate_of(one)
            if per_minute is not None:
                bucket = self._at(one.owner_id, per_minute, now)
                left = max(bucket.left - used + (taken if taken < per_minute else per_minute), -most_debt)
                bucket.left = left if left < per_minute else per_minute

    def headers(self, limits: Sequence[OwnerLimits], now: float) -> bytes:
        """Return the header lines of the owner with the smallest remainder; empty if no limit is set."""
        left, tightest = math.inf, None
        for one in limits:
            per_minute = self._rate_of(one)
            if per_minute is not None:
                its_left = self._at(one.owner_id, per_minute, now).left
                if its_left < left:
                    left, tightest = its_left, per_minute
        if tightest is None:
            return b""
        reset = (tightest - left) * 60 / tightest if tightest else 60.0
        return self._lines % (tightest, left if left > 0 else 0, duration(reset).encode())


class Rates:
    """Requests and tokens per minute of organizations, allowances and keys."""

    def __init__(self) -> None:
        self._requests = _Buckets("requests", attrgetter("requests_per_minute"))
        self._tokens = _Buckets("tokens", attrgetter("tokens_per_minute"))
        self._failures = _Buckets("requests on which an engine fails", lambda _: MAX_ENGINE_FAILURES)
        self._abandoned = _Buckets(
            "prompt tokens of requests given up before their first token", lambda _: MAX_ABANDONED_TOKENS
        )
        self.take_request = self._requests.take
        self.take_tokens = self._tokens.take  # the first estimate; `correct` it later
        self.correct = self._tokens.correct

    async def wait_turn(self, limits: Sequence[OwnerLimits]) -> None:
        """Wait until the organization may begin a request, so that its burst leaves room for others."""
        seconds = self._requests.turn_seconds(limits[0])
        if seconds:
            await asyncio.sleep(seconds)

    def take_all_tokens(self, limits: Sequence[OwnerLimits], amount: int, *, taken: int) -> None:
        """Replace the amount taken before with a new one. If this raises RateLimited, the old amount stays taken."""
        self._tokens.correct(limits, taken=taken, used=0)
        try:
            self._tokens.take(limits, amount)
        except RateLimited:
            self._tokens.correct(limits, taken=0, used=taken)
            raise

    def require_few_wasted(self, limits: Sequence[OwnerLimits]) -> None:
        """Raise RateLimited for an organization whose requests too often failed in engines or were abandoned."""
        self._failures.take(limits[:1], 0)
        self._abandoned.take(limits[:1], 0)

    def record_abandoned(self, limits: Sequence[OwnerLimits], prompt_tokens: int) -> None:
        """Count a request whose customer left after an engine saw it and before the first token."""
        self._abandoned.correct(limits[:1], taken=0, used=prompt_tokens, most_debt=_MAX_ABANDONED_DEBT)

    def record_failure(self, limits: Sequence[OwnerLimits]) -> None:
        """Count an engine failure against the organization that sent the request."""
        self._failures.correct(limits[:1], taken=0, used=1)

    def headers(self, limits: Sequence[OwnerLimits]) -> bytes:
        """Return the standard x-ratelimit-* header lines of the limit with the least left."""
        now = time.monotonic()
        return self._requests.headers(limits, now) + self._tokens.headers(limits, now)


def duration(seconds: float) -> str:
    """Return a duration as OpenAI writes it in these headers: 20ms, 1.5s, 6m0s."""
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    hundredths = round(seconds * 100)
    if hundredths < 6000:
        return f"{hundredths / 100:g}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest}s"


class OpenRequests:
    """Counts the requests in progress of each organization, allowance and key."""

    def __init__(self) -> None:
        self._open: dict[str, int] = defaultdict(int)
        self._structured: dict[str, int] = defaultdict(int)

    def one_more(self, limits: Sequence[OwnerLimits]) -> "_Place":
        """Hold a place while the block runs. The organization's limits are checked first.

        Entering raises RateLimited.
        """
        return _Place(self._take, self._give_back, limits)

    def one_more_structured(self, limits: Sequence[OwnerLimits]) -> "_Place":
        """Hold a place for a request with a grammar while the block runs. Entering raises RateLimited."""
        return _Place(self._take_structured, self._give_back_structured, limits)

    def _take(self, limits: Sequence[OwnerLimits]) -> None:
        for one in limits:
            most = one.concurrent_requests
            if one is limits[0]:
                most = MAX_OPEN if most is None else min(most, MAX_OPEN)
            if most is not None and self._open.get(one.owner_id, 0) >= most:
                raise _too_many(one, most, "requests")
        for one in limits:
            self._open[one.owner_id] += 1

    def _give_back(self, limits: Sequence[OwnerLimits]) -> None:
        for one in limits:
            _decrease(self._open, one.owner_id)

    def _take_structured(self, limits: Sequence[OwnerLimits]) -> None:
        organization = limits[0]
        if self._structured.get(organization.owner_id, 0) >= MAX_OPEN_STRUCTURED:
            raise _too_many(organization, MAX_OPEN_STRUCTURED, "requests with a response_format or tools")
        self._structured[organization.owner_id] += 1

    def _give_back_structured(self, limits: Sequence[OwnerLimits]) -> None:
        _decrease(self._structured, limits[0].owner_id)


class _Place:
    """A block that holds a place. Not a generator, because every request enters one."""

    __slots__ = ("_give_back", "_limits", "_take")

    def __init__(
        self,
        take: Callable[[Sequence[OwnerLimits]], None],
        give_back: Callable[[Sequence[OwnerLimits]], None],
        limits: Sequence[OwnerLimits],
    ) -> None:
        self._take, self._give_back, self._limits = take, give_back, limits

    def __enter__(self) -> None:
        self._take(self._limits)

    def __exit__(self, *failure: object) -> None:
        self._give_back(self._limits)


def _too_many(limits: OwnerLimits, most: int, what: str) -> RateLimited:
    return RateLimited(f"{limits.owner} has {most} {what} in progress, the most allowed at once.")


def _decrease(counts: dict[str, int], owner_id: str) -> None:
    left = counts[owner_id] - 1
    if left:
        counts[owner_id] = left
    else:
        del counts[owner_id]
