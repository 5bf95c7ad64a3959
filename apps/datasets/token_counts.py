"""Token counts of a version under one base model, in one pass with bounded memory."""

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator

import msgspec

from apps.contracts.chat import ChatRenderer, ChatRow, PreferenceRow, RenderedRow, Row, TextRow

HISTOGRAM_BARS = 24
_TAIL_SHARE = 0.995  # bars of equal width cover the rows below this quantile; one last bar holds the tail
# The limits that a page offers; the pass counts what each would cut.
LIMITS = (256, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536, 131_072)
KEPT_LINES = 200


class MeasuredRow(msgspec.Struct, frozen=True, gc=False):
    """One row as it is trained: one sequence, or the two answers of a preference."""

    line: int
    sequences: tuple[RenderedRow, ...]

    @property
    def longest(self) -> int:
        return max(sequence.n_tokens for sequence in self.sequences)

    @property
    def least(self) -> int | None:
        """Return the smallest limit that leaves a trained token; None if no token is trained."""
        return min((sequence.trained[0][0] + 1 for sequence in self.sequences if sequence.trained), default=None)


class Cut(msgspec.Struct, kw_only=True):
    """The effect of a limit: rows it shortens, rows it leaves without trained tokens, and the tokens left."""

    limit: int
    over: int = 0
    untrained: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    over_lines: list[int] = msgspec.field(default_factory=list)
    untrained_lines: list[int] = msgspec.field(default_factory=list)


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of a pass."""

    rows: int
    tokens: int
    trained_tokens: int
    longest_row_tokens: int
    histogram: tuple[tuple[int, int], ...]  # ascending (upper bound in tokens, rows)
    starts: tuple[tuple[int, int, int], ...] = ()  # ascending (from, to, rows), by the rows' first trained token
    cuts: tuple[Cut, ...] = ()


def measure_rows(renderer: ChatRenderer, rows: Iterable[Row]) -> Iterator[MeasuredRow]:
    """Render rows of one kind in order, in batches. Raises RowError."""
    waiting: deque[tuple[int, int]] = deque()  # (line, sequences)

    def sequences() -> Iterator[ChatRow | TextRow]:
        for row in rows:
            sides = (row.chosen, row.rejected) if isinstance(row, PreferenceRow) else (row,)
            waiting.append((row.line_number, len(sides)))
            yield from sides

    rendered = renderer.render_many(sequences())
    for first in rendered:
        line, count = waiting.popleft()
        yield MeasuredRow(line, (first, *(next(rendered) for _ in range(count - 1))))


def count_rows(rows: Iterable[MeasuredRow], *, longest_limit: int = LIMITS[-1]) -> Lengths:
    """Add up the rows' tokens. Memory is one entry per distinct length and first trained token."""
    lengths, starts = Counter[int](), Counter[int]()
    tokens = trained = 0
    cuts = [Cut(limit=limit) for limit in LIMITS if limit <= longest_limit]
    for row in rows:
        longest = row.longest
        lengths[longest] += 1
        if row.least is not None:
            starts[row.least] += 1
        row_tokens = sum([sequence.n_tokens for sequence in row.sequences])
        row_trained = sum([sequence.n_trained for sequence in row.sequences])
        tokens, trained = tokens + row_tokens, trained + row_trained
        for cut in cuts:
            if longest <= cut.limit:
                break
            _note(cut, row, row_tokens, row_trained)
    for cut in cuts:
        cut.tokens, cut.trained_tokens = tokens - cut.tokens, trained - cut.trained_tokens
    return Lengths(
        rows=lengths.total(),
        tokens=tokens,
        trained_tokens=trained,
        longest_row_tokens=max(lengths, default=0),
        histogram=histogram_of(lengths),
        starts=bars_of_starts(starts),
        cuts=tuple(cuts),
    )


def _note(cut: Cut, row: MeasuredRow, tokens: int, trained: int) -> None:
    """Add what the limit removes from one row."""
    kept = [sequence.truncate(cut.limit) for sequence in row.sequences]
    left = sum(sequence.n_trained for sequence in kept)
    cut.over += 1
    cut.tokens += tokens - sum(sequence.n_tokens for sequence in kept)
    cut.trained_tokens += trained - left
    if len(cut.over_lines) < KEPT_LINES:
        cut.over_lines.append(row.line)
    if not left:
        cut.untrained += 1
        if len(cut.untrained_lines) < KEPT_LINES:
            cut.untrained_lines.append(row.line)


def histogram_of(lengths: Counter[int]) -> tuple[tuple[int, int], ...]:
    """Return ascending (upper bound, rows) pairs: bars of equal width, and the long tail as last bar."""
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


def bars_of_starts(starts: Counter[int]) -> tuple[tuple[int, int, int], ...]:
    """Return ascending (first, last, rows): bars of about as many rows, none across a counted limit.

    `starts` counts the rows by the position of their first trained token, from 1. A bar ends at positions that occur.
    """
    bars: list[tuple[int, int, int]] = []
    for start, rows in sorted(starts.items()):
        first, last, others = bars[-1] if bars else (0, 0, 0)
        is_near = bisect_left(LIMITS, last) == bisect_left(LIMITS, start)
        if bars and is_near and (others + rows) * HISTOGRAM_BARS <= starts.total():
            bars[-1] = (first, start, others + rows)
        else:
            bars.append((start, start, rows))
    return tuple(bars)


def _quantile(lengths: Counter[int], share: float) -> int:
    wanted, seen = share * lengths.total(), 0
    for length in sorted(lengths):
        seen += lengths[length]
        if seen >= wanted:
            return length
    return max(lengths)


def _round_width(width: float) -> int:
    """Return the next 1, 2, 4, 5 or 8 times a power of ten, for readable bounds."""
    power = 10 ** max(0, math.floor(math.log10(max(width, 1))))
    return next(factor * power for factor in (1, 2, 4, 5, 8, 10) if factor * power >= width)
