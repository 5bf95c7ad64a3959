"""The part of a counted file that a recipe trains.

Held-out rows are left out. The others are cut to the longest row the recipe allows; those that then train nothing are
left out too. Running text is split into pieces of that length instead.
"""

import bisect
from dataclasses import dataclass

from apps.contracts.chat import RowKind, TrainOn
from apps.contracts.runs import Hyperparameters
from apps.datasets.models import DatasetVersion, TokenCount
from apps.datasets.rows import kind_of
from apps.estimates.requests import pieces_of

_CUT = ("limit", "tokens", "trained_tokens", "untrained")


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The data of one epoch.

    Running text `is_split`: each piece is a row. `evaluation_tokens` are read in each evaluation; `row_lengths` are
    (tokens, rows) pairs.
    """

    rows: int
    tokens: int
    trained_tokens: int
    longest_row_tokens: int
    row_lengths: tuple[tuple[int, int], ...]
    evaluation_tokens: int = 0
    is_split: bool = False


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
    lengths = tuple((int(length), int(rows)) for length, rows in count.histogram)
    if is_text:
        lengths = _pieces(count, recipe.max_length)
        rows, tokens, trained = float(sum(n for _, n in lengths)), float(count.tokens), float(count.trained_tokens)
    else:
        tokens, trained, rows = _within(counted.version, count, recipe)
    left_out = recipe.validation_share if counted.validation is None else counted.left_out_rows / max(file_rows, 1)
    kept = 1.0 - left_out
    return TrainingData(
        rows=max(round(rows * kept), 0),
        tokens=round(tokens * kept),
        trained_tokens=round(trained * kept),
        longest_row_tokens=count.longest_row_tokens,
        row_lengths=lengths,
        evaluation_tokens=_evaluation_tokens(counted, recipe, tokens, kept),
        is_split=is_text,
    )


def _evaluation_tokens(counted: Counted, recipe: Hyperparameters, tokens: float, kept: float) -> int:
    validation = counted.validation
    if validation is None:
        return round(tokens * (1.0 - kept))
    rows = validation.rows or 0
    if counted.validation_count is not None and kind_of(validation) is RowKind.TEXT:
        return counted.validation_count.tokens
    if counted.validation_count is not None:
        return round(_within(validation, counted.validation_count, recipe)[0])
    return round(tokens * rows / max(counted.version.rows or 0, 1))


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

    The figures are exact at the limits that were counted, and interpolated between two of them.
    """
    max_length, rows = recipe.max_length, float(version.rows or 0)
    trains_all, sequences = recipe.train_on == TrainOn.ALL, 2 if kind_of(version) is RowKind.PREFERENCE else 1

    def trained_at(limit: int, tokens: float, trained: float, untrained: float) -> tuple[float, float, float]:
        if trains_all:
            return tokens, tokens, rows
        # A row that trains nothing is longer than the limit: it would have been cut to it.
        return max(tokens - sequences * limit * untrained, 0.0), trained, rows - untrained

    whole = trained_at(count.longest_row_tokens, count.tokens, count.trained_tokens, 0.0)
    if max_length >= count.longest_row_tokens:
        return whole
    cuts = [cut for cut in count.cuts if cut["limit"] < count.longest_row_tokens]
    points = [
        (0, (0.0, 0.0, 0.0)),
        *((cut["limit"], trained_at(*(cut[name] for name in _CUT))) for cut in cuts),
        (count.longest_row_tokens, whole),
    ]
    above = bisect.bisect_left([limit for limit, _ in points], max_length)
    (low, below_values), (high, values) = points[above - 1], points[above]
    share = (max_length - low) / (high - low)
    first, second, third = (
        before + share * (after - before) for before, after in zip(below_values, values, strict=True)
    )
    return first, second, third
