"""Which rows of a training file repeat a row of the validation file given with it: the same answer on the pages that
count them, in the quote that leaves them out and in the run that does not train them.

Every row is asked about, however many there are: equal ones are found among all rows of the validation file, near ones
among its first `near_copies.MAX_ROWS`, so that memory has a bound and time grows with the rows alone. A row that only
resembles one left out stays. The automatic split keeps such chains together because it chooses a side for each row of
them; here the sides are given, and what resembles no validated row gives no validated row away.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from enum import IntEnum

from apps.contracts.chat.rows import Row
from apps.contracts.near_copies import NearCopies
from apps.contracts.split import own_words, row_identity


class Repeats(IntEnum):
    """What of the validation file a row repeats; one byte of what `repeats_of` returns."""

    NOTHING = 0
    A_ROW = 1  # the same but for case and spacing
    NEARLY_A_ROW = 2


class ValidationIndex:
    """The rows of a validation file, to be asked about others. Eight bytes a row (forty while it is made) and 0.7 KB
    of each of the first."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._near = NearCopies()
        self._identities = array("Q", sorted(self._take(rows)))

    def repeated_by(self, row: Row) -> Repeats:
        """Return what the row repeats."""
        identity = row_identity(row)
        at = bisect_left(self._identities, identity)
        if at < len(self._identities) and self._identities[at] == identity:
            return Repeats.A_ROW
        return Repeats.NEARLY_A_ROW if self._near.knows(own_words(row)) else Repeats.NOTHING

    def _take(self, rows: Iterable[Row]) -> "array[int]":
        identities = array("Q")
        for place, row in enumerate(rows):
            identities.append(row_identity(row))
            self._near.find(own_words(row), place)
        return identities


def repeats_of(rows: Iterable[Row], held: ValidationIndex) -> Iterator[Repeats]:
    """Yield for each row what of the validation file it repeats."""
    return map(held.repeated_by, rows)
