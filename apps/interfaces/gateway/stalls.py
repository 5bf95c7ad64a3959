"""Stalls of the event loop. During a stall, no customer of this gateway receives a byte."""

import asyncio
import logging
import time
from collections import deque

logger = logging.getLogger(__name__)

_EVERY_SECONDS = 0.05
_WINDOW_SECONDS = 60.0
LONG_SECONDS = 0.2  # longer stalls are logged


class Stalls:
    """The stalls of the last minute, and the longest since the start."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float]] = deque()  # time and length; each is shorter than those before it
        self.longest_seconds = 0.0

    async def watch(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _EVERY_SECONDS
            await asyncio.sleep(_EVERY_SECONDS)
            self.record(loop.time() - due)

    def record(self, seconds: float) -> None:
        """Record that the loop was this late."""
        if seconds > LONG_SECONDS:
            logger.warning("the event loop stood still for %.0f ms", seconds * 1000)
        self.longest_seconds = max(self.longest_seconds, seconds)
        while self._recent and self._recent[-1][1] <= seconds:
            self._recent.pop()
        self._recent.append((time.monotonic(), seconds))
        self._forget()

    def _forget(self) -> None:
        while self._recent and self._recent[0][0] < time.monotonic() - _WINDOW_SECONDS:
            self._recent.popleft()

    def longest_of_last_minute(self) -> float:
        """Return the longest stall of the last minute in seconds."""
        self._forget()
        return self._recent[0][1] if self._recent else 0.0
