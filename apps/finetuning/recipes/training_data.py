"""The part of a counted file that a recipe trains.

Held-out rows are left out. The others are cut to the longest row the recipe allows; those that then train nothing are
left out too. Running text is split into pieces of that length instead.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from apps.contracts.chat import RowKind, TrainOn
from apps.contracts.hyperparameters import Hyperparameters
from apps.datasets.models import DatasetVersion, TokenCount
from apps.datasets.rows import kind_of
from apps.estimates.requests import pieces_of


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The data of one epoch.

    Running text `is_split`: each piece is a row. `held_out_tokens` are those of the `held_out_rows`; `row_lengths` are
    (tokens, rows) pairs. With a longest row below `least_length`, no row would have a trained token.
    """

    rows: int
    tokens: int
    trained_tokens: int
    longest_row_tokens: int
    row_lengths: tuple[tuple[int, int], ...]
    held_out_rows: int = 0
    held_out_tokens: int = 0
    is_split: bool = False
    least_length: int = 1


@dataclass(frozen=True, kw_only=True)
class Counted:
    """The files of a job with their counts, all by one tokenizer; the validation file may be uncounted.

    `left_out_rows` of the training file repeat the validation file; they are assumed to be like the other rows.
    """

    version: DatasetVersion
    count: TokenCount
    validation: DatasetVersion | None = None
    validation_count: TokenCount | None = None
    left_out_rows: int = 0


def training_data(counted: Counted, recipe: Hyperparameters) -> TrainingData:
    """Return the data to train on. An uncounted validation file is assumed to have rows like the training file's."""
    count, file_rows = counted.count, counted.version.rows or 0
    is_text = kind_of(counted.version) is RowKind.TEXT
    if is_text:
        lengths = _pieces(count, recipe.max_length)
        rows, tokens, trained = float(sum(n for _, n in lengths)), float(count.tokens), float(count.trained_tokens)
    else:
        tokens, trained, rows = _within(counted.version, count, recipe)
        lengths = _without_longest(_bars(count), file_rows - round(rows))
    left_out = recipe.validation_share if counted.validation is None else counted.left_out_rows / max(file_rows, 1)
    kept = 1.0 - left_out
    held_rows, held_tokens = _held_out(counted, recipe, rows, tokens)
    return TrainingData(
        rows=max(round(rows * kept), 0),
        tokens=round(tokens * kept),
        trained_tokens=round(trained * kept),
        longest_row_tokens=count.longest_row_tokens,
        row_lengths=lengths,
        held_out_rows=round(held_rows),
        held_out_tokens=round(held_tokens),
        is_split=is_text,
        least_length=1 if is_text or recipe.train_on == TrainOn.ALL or not count.starts else count.starts[0][0],
    )


def _held_out(counted: Counted, recipe: Hyperparameters, rows: float, tokens: float) -> tuple[float, float]:
    """Return rows and tokens that are held out. The training file has `rows` and `tokens`."""
    validation, count = counted.validation, counted.validation_count
    if validation is None or count is None:
        of_file = (validation.rows or 0) / max(counted.version.rows or 0, 1) if validation else recipe.validation_share
        return rows * of_file, tokens * of_file
    if kind_of(validation) is RowKind.TEXT:
        return sum(number for _, number in _pieces(count, recipe.max_length)), count.tokens
    held_tokens, _, held_rows = _within(validation, count, recipe)
    return held_rows, held_tokens


def _bars(count: TokenCount) -> list[tuple[int, int]]:
    """Return the histogram, its last bar divided at the limits for which the longer rows were counted.

    The other bars are narrow. The last one is the long tail, in which attention takes much of the time.
    """
    bars = [(int(bound), int(rows)) for bound, rows in count.histogram]
    if not bars:
        return []
    (low, _), (high, left) = bars[-2] if bars[1:] else (0, 0), bars.pop()
    for cut in count.cuts:
        if low < cut["limit"] < high and cut.get("over", left + 1) <= left:
            bars.append((cut["limit"], left - cut["over"]))
            left = cut["over"]
    return [*bars, (high, left)]


def _without_longest(bars: list[tuple[int, int]], left_out: int) -> tuple[tuple[int, int], ...]:
    """Return the bars without so many of the longest rows. A row that trains nothing is longer than the limit."""
    kept = []
    for bound, rows in reversed(bars):
        kept.append((bound, rows - min(rows, left_out)))
        left_out -= min(rows, left_out)
    return tuple(reversed(kept))


def _pieces(count: TokenCount, max_length: int) -> tuple[tuple[int, int], ...]:
    """Return (tokens, number) of the pieces that a trainer makes of running text; no text is cut off.

    Only the histogram of row lengths is known. Each row is taken at the middle of its bar, scaled so that the sum is
    the counted tokens.
    """
    middles, before = [], 0
    for bound, rows in count.histogram:
        middles.append(((before + 1 + bound) / 2, int(rows)))
        before = bound
    total = sum(middle * rows for middle, rows in middles)
    scale = count.tokens / total if total else 1.0
    rows_of_length = [(max(round(middle * scale), 1), rows) for middle, rows in middles]
    return pieces_of(rows_of_length, max_length)


def _within(version: DatasetVersion, count: TokenCount, recipe: Hyperparameters) -> tuple[float, float, float]:
    """Return tokens, trained tokens and number of the rows that the recipe trains, cut to its longest row.

    The figures are exact at the limits that were counted, and interpolated between two of them. The rows are also exact
    below the first trained token of all rows: none is trained there.
    """
    max_length, rows = recipe.max_length, float(version.rows or 0)
    if max_length >= count.longest_row_tokens:
        return count.tokens, count.tokens if recipe.train_on == TrainOn.ALL else count.trained_tokens, rows
    cuts = [cut for cut in count.cuts if cut["limit"] < count.longest_row_tokens]
    ends = [(cut["limit"], cut["tokens"]) for cut in cuts]
    tokens = _between([(0, 0), *ends, (count.longest_row_tokens, count.tokens)], max_length)
    if recipe.train_on == TrainOn.ALL:
        return tokens, tokens, rows
    bars = [(first, last, number) for first, last, number in count.starts if first <= max_length]
    if not bars:
        return 0.0, 0.0, 0.0
    within = sum(number * min((max_length - first + 1) / (last - first + 1), 1) for first, last, number in bars)
    kept = min(max(within, 1.0), rows)  # a bar begins with a row
    # A row that trains nothing is longer than the limit: it would have been cut to it. Each other has a trained token.
    sequences, least = 2 if kind_of(version) is RowKind.PREFERENCE else 1, bars[0][0]
    tokens = max(tokens - sequences * max_length * (rows - kept), kept * least)
    ends = [(cut["limit"], cut["trained_tokens"]) for cut in cuts if cut["limit"] >= least]
    trained = _between([(least - 1, 0), *ends, (count.longest_row_tokens, count.trained_tokens)], max_length)
    return tokens, min(max(trained, kept), tokens), kept


def _between(points: Sequence[tuple[int, int]], length: int) -> float:
    """Return the value at a length between two of the points, which ascend."""
    above = bisect.bisect_left([limit for limit, _ in points], length)
    (low, before), (high, after) = points[above - 1], points[above]
    return before + (length - low) / (high - low) * (after - before)
