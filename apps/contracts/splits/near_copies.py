"""Detection of nearly equal rows in one pass.

MinHash by one permutation: each pair of neighbouring words is hashed into one of 16 bins, a bin keeps its smallest
value, and the share of equal bins estimates the Jaccard similarity of two texts (Li, Owen, Zhang 2012; empty bins take
their neighbour's value, Shrivastava, Li 2014). Rows that agree in one of eight pairs of bins are compared. A row takes
about 0.7 KB, and only the first rows of a file are compared with each other, so memory is bounded.
"""

import re
import zlib
from array import array
from collections.abc import Iterator
from itertools import pairwise

MAX_ROWS = 200_000
BINS = 16
ALIKE_BINS = 11  # of 16: a similarity of about 0.7
MIN_WORDS = 6
_BANDS = tuple((index, index + BINS // 2) for index in range(BINS // 2))
_WORD = re.compile(rb"[\w\x80-\xff]+")
_EMPTY = 0xFFFFFFFF


class NearCopies:
    """Accepts numbered rows in order and finds an earlier near copy of each.

    At the end it groups rows that belong together, including near copies of near copies.
    """

    def __init__(self, *, most_rows: int = MAX_ROWS) -> None:
        self._most_rows = most_rows
        self._sketches = array("I")
        self._rows = array("I")
        self._above = array("I")  # for each stored row, one that it belongs to; a root belongs to itself
        self._buckets: list[dict[int, int]] = [{} for _ in _BANDS]

    def find(self, text: str, row: int) -> int | None:
        """Add the row; return an earlier row that is nearly equal, or None."""
        if len(self._rows) >= self._most_rows:
            return None
        made = sketch(text)
        if made is None:
            return None
        keys = _keys(made)
        alike = self._all_alike(made, keys)
        index = len(self._rows)
        self._rows.append(row)
        self._sketches.extend(made)
        self._above.append(index)
        for candidate in alike:
            first, last = sorted((self._root(candidate), self._root(index)))
            self._above[last] = first
        for key, bucket in zip(keys, self._buckets, strict=True):
            bucket.setdefault(key, index)
        return self._rows[alike[0]] if alike else None

    def knows(self, text: str) -> bool:
        """Return whether an added row is nearly equal to this text, which is not added."""
        made = sketch(text)
        return made is not None and bool(self._all_alike(made, _keys(made)))

    def roots(self) -> Iterator[tuple[int, int]]:
        """Yield (row, first row of its group) for every row that belongs to an earlier one."""
        for index, row in enumerate(self._rows):
            root = self._root(index)
            if root != index:
                yield row, self._rows[root]

    def _root(self, index: int) -> int:
        while (above := self._above[index]) != index:
            self._above[index] = self._above[above]
            index = above
        return index

    def _all_alike(self, made: list[int], keys: list[int]) -> list[int]:
        candidates = {
            found for key, bucket in zip(keys, self._buckets, strict=True) if (found := bucket.get(key)) is not None
        }
        alike = []
        for candidate in sorted(candidates):
            kept = self._sketches[candidate * BINS : (candidate + 1) * BINS]
            if sum(map(int.__eq__, kept, made)) >= ALIKE_BINS:
                alike.append(candidate)
        return alike


def _keys(made: list[int]) -> list[int]:
    return [made[a] << 32 | made[b] for a, b in _BANDS]


def sketch(text: str) -> list[int] | None:
    """Return the bins of a text, None if it has too few words for a comparison."""
    words = _WORD.findall(text.casefold().encode("utf-8", "replace"))
    if len(words) < MIN_WORDS:
        return None
    hashes = list(map(zlib.crc32, words))
    bins = [_EMPTY] * BINS
    for value in {(one * 0x9E3779B1 + other * 0x85EBCA77 >> 7) & 0xFFFFFFFF for one, other in pairwise(hashes)}:
        at = value & 15
        if value < bins[at]:
            bins[at] = value
    return _filled(bins)


def _filled(bins: list[int]) -> list[int]:
    """Return the bins with each empty one set to the value of the next non-empty bin, offset by the distance."""
    filled = list(bins)
    for at in range(BINS):
        distance = 0
        while bins[(at + distance) % BINS] == _EMPTY:
            distance += 1
        filled[at] = (bins[(at + distance) % BINS] + distance * 0x10000001) & 0xFFFFFFFF
    return filled
