"""Sharing of file work: lanes for small and middle files, and a reading time in proportion to a file's size."""

import time
from collections.abc import Callable

from apps.datasets.problems import FileErrorCode, Rejected

SMALL_BYTES, MIDDLE_BYTES = 4_000_000, 100_000_000
SMALL_SECONDS = 1.0  # in the lane of small files; longer work starts again in the next lane
_SLOWER = 4  # work on rows takes up to a second for a megabyte, four times as long as reading them
# Processor time: twenty times what conversations need and three times what the slowest table needs (speeds are in
# docs/datasets.md), so only files made to be slow exceed it. The maximum is below the time limit of a task.
_FREE_SECONDS, _SECONDS_PER_MB, _MAX_SECONDS = 5.0, 2.0, 3_000.0


class TakesLong(Exception):
    """Work took longer than others in the lane of small files should wait."""


def lane_of(byte_count: int) -> str:
    """Return the outbox lane for reading a file of this many bytes."""
    if byte_count <= SMALL_BYTES:
        return "data-small"
    return "data-middle" if byte_count <= MIDDLE_BYTES else "data"


def lane_of_rows(byte_count: int) -> str:
    """Return the outbox lane for counting, inspecting or comparing rows of this many bytes."""
    return lane_of(_SLOWER * byte_count)


class ReadingTime:
    """The processor time allowed for reading a file, by its size as uploaded.

    The expanded size does not count: it would let a small file with much content take longer.
    """

    def __init__(self, byte_count: int, *, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._allowed = min(_FREE_SECONDS + _SECONDS_PER_MB * byte_count / 1e6, _MAX_SECONDS)
        self._end = clock() + self._allowed

    def check(self) -> None:
        """Raise Rejected when the time is used up."""
        if self._clock() > self._end:
            raise Rejected(
                FileErrorCode.TOO_SLOW,
                f"The file took longer than {self._allowed:,.0f} seconds to read, which is more than its size allows.",
                "Upload it as plain JSONL, in several files if it is large.",
            )
