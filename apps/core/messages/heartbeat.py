"""Periodic calls beside long work, such as renewing its claim."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from django.db import Error, connection

logger = logging.getLogger(__name__)


@contextmanager
def beating(beat: Callable[[], object], *, every_seconds: float) -> Iterator[None]:
    """Call `beat` in a thread with its own database connection until the block ends.

    A beat that fails with a database error is repeated at the next interval.
    """
    is_done = threading.Event()

    def run() -> None:
        while not is_done.wait(every_seconds):
            try:
                beat()
            except Error as error:
                logger.warning("a heartbeat failed: %s", type(error).__name__)
            finally:
                connection.close()

    thread = threading.Thread(target=run, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()
