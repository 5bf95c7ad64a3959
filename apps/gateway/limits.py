"""How many requests an organization may send per minute, and how many of which kind it may have open."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from apps.core.errors import RateLimited

MOST_OPEN = 512
# The engine compiles grammars in a pool all tenants share; a slow one holds a place for tens of seconds.
MOST_OPEN_STRUCTURED = 2
_FORGET_SECONDS = 120.0


class RequestRate:
    """A token bucket for each organization: full it holds a minute's requests.

    Kept in this process: with several gateways a limit holds for each of them.
    """

    def __init__(self) -> None:
        self._buckets: dict[str, tuple[float, float]] = {}
        self._swept_at = time.monotonic()

    def take(self, organization_id: str, *, per_minute: int | None) -> None:
        """Count one request. Raises RateLimited with the seconds until the next may come."""
        if per_minute is None:
            return
        now = time.monotonic()
        left, since = self._buckets.get(organization_id, (float(per_minute), now))
        left = min(left + (now - since) * per_minute / 60, float(per_minute))
        if left < 1:
            self._buckets[organization_id] = (left, now)
            wait = max(1, round((1 - left) * 60 / per_minute)) if per_minute else 60
            raise RateLimited(
                f"Your organization's limit is {per_minute} requests per minute. Try again in {wait} s.",
                retry_after_seconds=wait,
                limit_requests_per_minute=per_minute,
            )
        self._buckets[organization_id] = (left - 1, now)
        self._sweep(now)

    def _sweep(self, now: float) -> None:
        if now - self._swept_at > _FORGET_SECONDS:
            self._swept_at = now
            self._buckets = {k: v for k, v in self._buckets.items() if now - v[1] < _FORGET_SECONDS}


class OpenRequests:
    """Counts what each organization has in progress."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()
        self._structured: Counter[str] = Counter()

    @contextmanager
    def one_more(self, organization_id: str, *, is_structured: bool) -> Iterator[None]:
        """Hold a place while the block runs. Raises RateLimited."""
        counters = [(self._open, MOST_OPEN, "requests")]
        if is_structured:
            counters.append((self._structured, MOST_OPEN_STRUCTURED, "requests with a response_format"))
        for counter, most, what in counters:
            if counter[organization_id] >= most:
                raise RateLimited(f"Your organization has {most} {what} in progress, the most allowed at once.")
        for counter, _, _ in counters:
            counter[organization_id] += 1
        try:
            yield
        finally:
            for counter, _, _ in counters:
                _decrease(counter, organization_id)


def _decrease(counter: Counter[str], organization_id: str) -> None:
    counter[organization_id] -= 1
    if not counter[organization_id]:
        del counter[organization_id]
