"""Tokens of a version under one base model, counted in one pass with bounded memory."""

import math
from collections import Counter
from collections.abc import Iterable

import msgspec

from apps.contracts.chat import RenderedRow

HISTOGRAM_BARS = 24
_TAIL_SHARE = 0.995  # the bars spread over the rows below this quantile; one last bar holds the tail


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """What a pass counted."""

    rows: int
    tokens: int
    trained_tokens: int
    longest_row_tokens: int
    histogram: tuple[tuple[int, int], ...]  # ascending (upper bound in tokens, rows)


def count_rows(rows: Iterable[RenderedRow]) -> Lengths:
    """Add up the rows' tokens. Memory is one entry per distinct length."""
    lengths: Counter[int] = Counter()
    trained = 0
    for row in rows:
        lengths[row.n_tokens] += 1
        trained += row.n_trained
    return Lengths(
        rows=lengths.total(),
        tokens=sum(length * count for length, count in lengths.items()),
        trained_tokens=trained,
        longest_row_tokens=max(lengths, default=0),
        histogram=histogram_of(lengths),
    )


def histogram_of(lengths: Counter[int]) -> tuple[tuple[int, int], ...]:
    """Return ascending (upper bound, rows) pairs: even bars up to the long tail, which is the last bar."""
    if not lengths:
        return ()
    longest = max(lengths)
    width = _round_width(_quantile(lengths, _TAIL_SHARE) / (HISTOGRAM_BARS - 1))
    bars = Counter[int]()
    for length, count in lengths.items():
        bars[min(math.ceil(max(length, 1) / width), HISTOGRAM_BARS) * width] += count
    last = max(bars)
    bounds = range(width, last + 1, width)
    pairs = [(bound, bars[bound]) for bound in bounds]
    if pairs[-1][0] < longest:
        pairs[-1] = (longest, pairs[-1][1])
    return tuple(pairs)


def _quantile(lengths: Counter[int], share: float) -> int:
    wanted, seen = share * lengths.total(), 0
    for length in sorted(lengths):
        seen += lengths[length]
        if seen >= wanted:
            return length
    return max(lengths)


def _round_width(width: float) -> int:
    """Return the next 1, 2, 4, 5 or 8 times a power of ten: bounds people can read."""
    power = 10 ** max(0, math.floor(math.log10(max(width, 1))))
    return next(factor * power for factor in (1, 2, 4, 5, 8, 10) if factor * power >= width)
