"""Lengths of a dataset's rows, and of those that a trainer computes: with padding, and with the wait for other GPUs.

Matrix products take the time of a row's tokens, attention that of their square, and a short row waits for launches.
So the mean length alone does not give the time of rows that differ.
"""

import bisect
import itertools
import math
import operator
import random
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

_SAMPLES = 256  # rows that are dealt to micro-batches, to find what is computed together
_KINDS = 16  # of micro-batches, by their tokens


class MicroBatch(NamedTuple):
    """A kind of micro-batch that is this share of all.

    `tokens` is the mean length of its rows. `attended` is the sum of the squared lengths divided by the sum of the
    lengths: attention takes as long as with rows of this one length and as many tokens in all.
    """

    tokens: float
    attended: float
    share: float = 1.0


class RowLayout(NamedTuple):
    """Rows as a trainer computes them: the mean of all micro-batches, and their kinds."""

    tokens: float
    attended: float
    kinds: tuple[MicroBatch, ...]

    def stretched(self, factor: float) -> "RowLayout":
        """Return all rows longer by this factor."""
        kinds = tuple(MicroBatch(tokens * factor, attended * factor, share) for tokens, attended, share in self.kinds)
        return RowLayout(self.tokens * factor, self.attended * factor, kinds)

    def windowed(self, window: int, share: float) -> "RowLayout":
        """Return rows of which attention reaches `window` tokens in this share of the layers."""
        kinds = []
        for tokens, attended, number in self.kinds:
            within = 2 * window - window * window / attended if attended > window else attended
            kinds.append(MicroBatch(tokens, attended + share * (within - attended), number))
        total = sum(kind.share * kind.tokens for kind in kinds)
        attended = sum(kind.share * kind.tokens * kind.attended for kind in kinds) / total
        return RowLayout(self.tokens, attended, tuple(kinds))


def equal_rows(length: float) -> RowLayout:
    """Return rows of one length."""
    return RowLayout(length, length, (MicroBatch(length, length),))


Part = tuple[float, float, int]  # micro-batches: mean tokens of a row, mean square of them, number
Ranks = tuple[int, ...]  # the rows of one micro-batch


class RowLengths:
    """The distribution of the lengths in tokens of one dataset's rows.

    It comes from a histogram of (upper bound, rows). The rows of a bar have the lengths low + (high - low) x u^p, with
    u even from 0 to 1. All bars share the power p that gives the known mean. So rows of one length have exactly this
    length although their bar is wide, and rows of a long last bar are as long as the mean allows. Without a histogram,
    the lengths are exponential with their mean.
    """

    def __init__(
        self, histogram: Sequence[tuple[int, int]], *, mean: float, longest: float, is_lower_bound: bool
    ) -> None:
        """Take `is_lower_bound` if the mean may be more than `mean`: then it is at least that of the bars' middles."""
        bars = sorted(histogram) if any(rows for _, rows in histogram) else []
        bounds = [0.0, *(min(float(bound), longest) for bound, _ in bars)]
        self._bars, self._counts = list(itertools.pairwise(bounds)), [rows for _, rows in bars]
        self._seen = list(itertools.accumulate(self._counts))
        self._longest, total = longest, self._seen[-1] if bars else 1
        low, high = (sum(map(operator.mul, ends, self._counts)) / total for ends in (bounds[:-1], bounds[1:]))
        self._mean = min(max(mean, (low + high) / 2) if is_lower_bound else mean, longest)
        place = (self._mean - low) / (high - low) if high > low else 1.0  # of the mean row in its bar
        self._place = min(max(place, 0.01), 1.0)
        self._rows = self._parts()
        self._sampled: list[float] = []

    def unpadded(self) -> RowLayout:
        """Return micro-batches with rows of one length: single rows, or rows sorted by length."""
        return self._layout(self._rows)

    def shuffled(self, rows: int) -> RowLayout:
        """Return micro-batches of `rows` random rows, each padded to its longest."""
        return self.unpadded() if rows == 1 else self._layout([self._longest_of(rows)])

    def grouped(self, rows: int, *, pool: int) -> RowLayout:
        """Return groups of `rows` rows, each padded to its longest, cut from pools that are sorted by length.

        The longest rows of the groups are at evenly spaced quantiles, and the last one is the pool's longest.
        """
        if rows == 1:
            return self.unpadded()
        ends = [self._quantile(cut * rows / (pool + 1)) for cut in range(1, max(1, pool // rows))]
        return self._layout([*((end, end * end, 1) for end in ends), self._longest_of(pool)])

    def balanced(self, rows: int, *, micro_batches: int, gpu_count: int) -> RowLayout:
        """Return packed micro-batches of `rows` rows: of those that the GPUs compute at once, the fullest.

        `micro_batches` are those of a step. Without a histogram, all are taken to be equal.
        """
        if rows * gpu_count == 1 or not self._bars:
            return self.unpadded()
        lengths = self._sampled = self._sampled or [self._quantile((n + 0.5) / _SAMPLES) for n in range(_SAMPLES)]
        squares = [length * length for length in lengths]
        together, ranks = _balance(rows, micro_batches, gpu_count)
        fullest: list[Part] = []
        for hands in together:
            hand = max(hands, key=lambda hand: sum([lengths[rank] for rank in hand])) if gpu_count > 1 else hands[0]
            tokens, square = (sum([values[rank] for rank in hand]) / rows for values in (lengths, squares))
            fullest.append((tokens, square, 1))
        # The sampled rows differ a little from all rows.
        mean, square, _ = _mean_of(self._rows)
        more, squared = (
            known * len(ranks) / sum([values[rank] for rank in ranks])
            for known, values in ((mean, lengths), (square, squares))
        )
        return self._layout([(tokens * more, square * squared, number) for tokens, square, number in fullest])

    def _parts(self) -> list[Part]:
        """Return the rows without padding, a part for each bar."""
        mean, longest, place = self._mean, self._longest, self._place
        if not self._bars:
            cut = math.exp(-longest / mean)  # the share of rows above the longest, which are cut to it
            return [(mean, mean * max(2 * mean - 2 * longest * cut / (1 - cut), mean), 1)]
        parts = []
        for (low, high), rows in zip(self._bars, self._counts, strict=True):
            if not rows:
                continue
            width = high - low
            square = low * low + 2 * low * width * place + width * width * place / (2 - place)
            parts.append((low + width * place, square, rows))
        return parts

    def _layout(self, parts: list[Part]) -> RowLayout:
        """Return the micro-batches, in a few kinds, with rows of at least the known mean."""
        if len(parts) > 2 * _KINDS:
            size, parts = -(-len(parts) // _KINDS), sorted(parts)
            parts = [_mean_of(parts[at : at + size]) for at in range(0, len(parts), size)]
        tokens, square, total = _mean_of(parts)
        more = max(self._mean / tokens, 1.0)
        kinds = [MicroBatch(mean * more, squared / mean * more, number / total) for mean, squared, number in parts]
        return RowLayout(tokens * more, square / tokens * more, tuple(kinds))

    def _longest_of(self, rows: int) -> Part:
        """Return the expected length of the longest of `rows` random rows, and the expected square of it.

        The largest of n exponential numbers is in the mean their mean times 1 + 1/2 + ... + 1/n.
        """
        if not self._bars:
            longest = self._mean * sum(1 / n for n in range(1, rows + 1))
            spread = self._mean**2 * sum(1 / n**2 for n in range(1, rows + 1))
            return min(longest, self._longest), min(longest**2 + spread, self._longest**2), 1
        longest = square = before = 0.0
        for (_, high), seen in zip(self._bars, self._seen, strict=True):
            share = (seen / self._seen[-1]) ** rows
            longest, square = longest + high * (share - before), square + high * high * (share - before)
            before = share
        return longest, square, 1

    def _quantile(self, share: float) -> float:
        """Return the length in tokens of a row longer than this share of all."""
        if not self._bars:
            return min(self._longest, -self._mean * math.log1p(-share))
        wanted = share * self._seen[-1]
        index = bisect.bisect_left(self._seen, wanted)
        (low, high), within = self._bars[index], 1 - (self._seen[index] - wanted) / self._counts[index]
        return low + (high - low) * within ** (1 / self._place - 1)


@lru_cache(maxsize=256)
def _balance(rows: int, micro_batches: int, gpu_count: int) -> tuple[tuple[tuple[Ranks, ...], ...], Ranks]:
    """Return the micro-batches that the GPUs compute at once, and all rows in them: ranks by length of sampled rows.

    A step's rows are random, and dealt by length to its micro-batches, forth and back
    (gpu_workers/train/data/encoding.py ShuffledSampler).
    """
    ranks, step = list(range(_SAMPLES)), rows * micro_batches
    random.Random(0).shuffle(ranks)  # noqa: S311 - the same order for each quote
    ranks *= -(-step // _SAMPLES)
    ranks = ranks[: len(ranks) // step * step]
    together: list[tuple[Ranks, ...]] = []
    for start in range(0, len(ranks), step):
        dealt = sorted(ranks[start : start + step])
        rounds = [dealt[at : at + micro_batches] for at in range(0, step, micro_batches)]
        rounds[1::2] = [each[::-1] for each in rounds[1::2]]
        hands = list(zip(*rounds, strict=True))
        together += [tuple(hands[at : at + gpu_count]) for at in range(0, micro_batches, gpu_count)]
    return tuple(together), tuple(ranks)


def _mean_of(parts: Iterable[Part]) -> Part:
    parts = list(parts)
    total = sum(number for _, _, number in parts)
    tokens = sum(mean * number for mean, _, number in parts)
    return tokens / total, sum(square * number for _, square, number in parts) / total, total
