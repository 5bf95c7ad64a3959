"""Waiting for what another thread or process does, such as a server that gives its database connection back."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
SECONDS = 20.0


def wait_until(
    find: Callable[[], T], complaint: str | Callable[[], object] = "it never came to be", *, seconds: float = 60
) -> T:
    """Return the first true value of `find()`; look ever less often, as each look may cost a query or a request.

    Fails after `seconds` with the complaint, or with what the complaint returns.
    """
    deadline, pause = time.monotonic() + seconds, 0.01
    while not (found := find()):
        assert time.monotonic() < deadline, complaint if isinstance(complaint, str) else complaint()
        time.sleep(pause)
        pause = min(1.5 * pause, 0.25)
    return found


def join_readings() -> None:
    """Wait for the threads in which the control plane reads delivered files."""
    for thread in threading.enumerate():
        if thread.name == "reading":
            thread.join(SECONDS)
            assert not thread.is_alive(), "a file is still being read"


async def settle() -> None:
    """Let every task run until it waits. Steps of the loop are counted: on a busy machine, time passes without any."""
    for _ in range(100):
        await asyncio.sleep(0)


class SkippingLoop(asyncio.SelectorEventLoop):
    """A loop whose clock a test may put forward, to reach a time limit without waiting for it."""

    skipped = 0.0

    def time(self) -> float:
        return super().time() + self.skipped
