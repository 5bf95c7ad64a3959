"""How work on files is shared: a lane for small ones, and time to read each in proportion to its size."""

import time
from collections.abc import Callable

from apps.datasets.problems import FileErrorCode, Rejected

SMALL_BYTES = 4_000_000
SMALL_SECONDS = 1.0  # in the lane of small files; what takes longer starts again in the other one
# Of processor time: twenty times what conversations take, and three times what the slowest table does (docs/datasets.md
# has the speeds), so that only what was made to be slow meets it. The longest is below the limit of a task.
_FREE_SECONDS, _SECONDS_PER_MB, _MAX_SECONDS = 5.0, 2.0, 3_000.0


def lane_of(byte_count: int) -> str:
    """Return the lane of the outbox for work on so many bytes."""
    return "data-small" if byte_count <= SMALL_BYTES else "data"


class ReadingTime:
    """The processor time that a file of so many bytes, as uploaded, may take to read.

    What it expands to does not count: a small file that holds much is as slow as it makes itself.
    """

    def __init__(self, byte_count: int, *, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._allowed = min(_FREE_SECONDS + _SECONDS_PER_MB * byte_count / 1e6, _MAX_SECONDS)
        self._end = clock() + self._allowed

    def check(self) -> None:
        """Raise Rejected when the time is over."""
        if self._clock() > self._end:
            raise Rejected(
                FileErrorCode.TOO_SLOW,
                f"The file took longer than {self._allowed:,.0f} seconds to read, which is more than its size allows.",
                "Upload it as plain JSONL, in several files if it is large.",
            )
