"""The time that the database takes to read a list.

It grows with an organization's rows and counts against the organization. A filter or a search without an index reads
every row. The request's thread only waits meanwhile, so its processor time does not include this work.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class _Reads(threading.local):
    seconds = 0.0


_reads = _Reads()


@contextmanager
def counted_read() -> Iterator[None]:
    """Count the time of the block, in which the database reads, as processor time of the request's thread."""
    began, used = time.perf_counter(), time.thread_time()
    try:
        yield
    finally:
        _reads.seconds += time.perf_counter() - began - (time.thread_time() - used)


def read_seconds() -> float:
    """Return the counted time of this thread, without its own processor time. A thread serves one request."""
    return _reads.seconds
