"""Database access of the gateway: short calls in a few threads, never on the event loop."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from django.db import InterfaceError, InternalError, OperationalError, connection

THREADS = 4
# A restarted server leaves up to this many broken connections in the pool. Each is noticed at its next use.
_ATTEMPTS = THREADS + 1
_BROKEN_SECONDS = 1.0

# The server ends a connection whose transaction takes too long or is idle for too long with an InternalError.
DATABASE_ERRORS = (OperationalError, InterfaceError, InternalError)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Database:
    """Runs domain calls in threads. Each call must be safe to repeat: it is retried at once on a broken connection."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="database")

    async def call(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Return the result of `function`. Raises one of DATABASE_ERRORS when the database cannot be reached."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(call_again, partial(function, *args, **kwargs)))

    def close(self) -> None:
        self._threads.shutdown(wait=True)


def call_again(call: Callable[[], Result]) -> Result:
    """Return the result of `call`, which must be safe to repeat. Raises one of DATABASE_ERRORS."""
    began_at = time.monotonic()
    for _ in range(_ATTEMPTS - 1):
        try:
            return _call(call)
        except DATABASE_ERRORS:
            if time.monotonic() - began_at > _BROKEN_SECONDS:
                raise  # the database is away, so another attempt would wait as long
    return _call(call)


def _call(call: Callable[[], Result]) -> Result:
    try:
        return call()
    finally:
        connection.close()  # back to the pool
