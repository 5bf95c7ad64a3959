"""Rate limit of worker calls. Each call is a transaction that others wait for."""

import hashlib
import threading
import time
from collections.abc import Callable

from apps.core.errors import RateLimited

CALLS_A_SECOND, CALLS_AT_ONCE = 50.0, 500.0
_MAX_KNOWN = 10_000  # credentials; one with a full bucket can be forgotten


class Pace:
    """A token bucket of calls for each credential, in this process. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left: dict[bytes, tuple[float, float]] = {}  # by digest: calls left, and the time of that count
        self._lock = threading.Lock()

    def take(self, credential: str) -> None:
        """Count one call. Raises RateLimited."""
        who, now = hashlib.sha256(credential.encode(errors="replace")).digest(), self._clock()
        with self._lock:
            left, since = self._left.get(who, (CALLS_AT_ONCE, now))
            left = min(CALLS_AT_ONCE, left + (now - since) * CALLS_A_SECOND)
            if left < 1:
                raise RateLimited("This machine calls too often. Wait a second.", retry_after_seconds=1)
            if len(self._left) >= _MAX_KNOWN:
                self._left = {
                    one: seen for one, seen in self._left.items() if now - seen[1] < CALLS_AT_ONCE / CALLS_A_SECOND
                }
            self._left[who] = (left - 1, now)
