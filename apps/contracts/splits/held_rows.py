"""Rows of a training file that repeat a row of its validation file.

Pages that count them, the quote that excludes them and the run that skips them use the same result.

Every row is checked: for equal rows against the whole validation file, for near copies against its first
`near_copies.MAX_ROWS`. So memory is bounded and time grows only with the rows. A row that merely resembles an excluded
row stays. The automatic split keeps such chains together because it chooses each row's side; here the sides are given,
and a row that resembles no validation row reveals none.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from enum import IntEnum

from apps.contracts.chat.rows import Row
from apps.contracts.splits.near_copies import NearCopies
from apps.contracts.splits.split import own_words, row_identity


class Repeats(IntEnum):
    """How a row repeats the validation file; one byte of the result of `repeats_of`."""

    NOTHING = 0
    A_ROW = 1  # equal except for case and spacing
    NEARLY_A_ROW = 2


class ValidationIndex:
    """The rows of a validation file, indexed for comparison.

    Memory is 8 bytes a row (40 while it is built), and 0.7 KB for each of the first ones.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self._near = NearCopies()
        identities = array("Q")
        for place, row in enumerate(rows):
            identities.append(row_identity(row))
            self._near.find(own_words(row), place)
        self._identities = array("Q", sorted(identities))

    def repeated_by(self, row: Row) -> Repeats:
        """Return how the row repeats the validation file."""
        identity = row_identity(row)
        at = bisect_left(self._identities, identity)
        if at < len(self._identities) and self._identities[at] == identity:
            return Repeats.A_ROW
        return Repeats.NEARLY_A_ROW if self._near.knows(own_words(row)) else Repeats.NOTHING


def repeats_of(rows: Iterable[Row], held: ValidationIndex) -> Iterator[Repeats]:
    """Yield for each row how it repeats the validation file."""
    return map(held.repeated_by, rows)
