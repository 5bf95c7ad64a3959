"""What of a file is trained: cut to the longest row allowed, without what is held out."""

import json
from pathlib import Path

import pytest

from apps.catalog.models import BaseModel
from apps.contracts.hyperparameters import Hyperparameters
from apps.datasets.models import DatasetVersion, TokenCount
from apps.estimates.requests import QuoteRequest
from apps.finetuning.quotes.inputs import task_of_job
from apps.finetuning.recipes.training_data import Counted, training_data

ROOT = Path(__file__).parents[4]
CUTS = [
    {"limit": 256, "tokens": 20_000, "trained_tokens": 4_000, "untrained": 20},
    {"limit": 512, "tokens": 30_000, "trained_tokens": 8_000, "untrained": 4},
    {"limit": 1_024, "tokens": 40_000, "trained_tokens": 10_000, "untrained": 0},
]
STARTS = [[57, 256, 80], [357, 456, 16], [601, 601, 4]]


def of(max_length: int, *, share: float = 0.0, **more: object):
    version = DatasetVersion(rows=100)
    count = TokenCount(
        tokens=40_000, trained_tokens=10_000, longest_row_tokens=900, histogram=[[500, 90], [900, 10]], cuts=CUTS,
        starts=STARTS,
    )  # fmt: skip
    recipe = Hyperparameters(max_length=max_length, validation_share=share)
    return training_data(Counted(version=version, count=count, **more), recipe)


@pytest.mark.parametrize(
    ("max_length", "expected"),
    [
        (4_096, (100, 40_000, 10_000)),
        (900, (100, 40_000, 10_000)),
        (512, (96, 27_952, 8_000)),
        (256, (80, 14_880, 4_000)),
        (384, (84, 19_040, 6_000)),
        (706, (100, 35_000, 9_000)),
        (128, (29, 1_642, 1_440)),
    ],
)
def test_rows_and_tokens_are_those_within_the_longest_row(max_length, expected) -> None:
    data = of(max_length)

    assert (data.rows, data.tokens, data.trained_tokens) == expected
    assert (data.held_out_rows, data.held_out_tokens) == (0, 0)


@pytest.mark.parametrize(("max_length", "rows"), [(56, 0), (57, 1), (100, 18), (356, 80), (357, 80), (600, 96)])
def test_rows_count_only_where_their_first_trained_token_is_within_the_longest_row(max_length, rows) -> None:
    """Rows are spread evenly within a bar of first trained tokens."""
    data = of(max_length)

    assert (data.rows, data.least_length) == (pytest.approx(rows, abs=1), 57)
    assert data.rows <= data.trained_tokens <= data.tokens
    assert bool(data.trained_tokens) == bool(rows)


def test_the_long_tail_of_lengths_is_divided_at_the_counted_limits() -> None:
    """Ten rows are longer than 500 tokens: seven up to 512, and three up to 900, of which four rows train nothing."""
    cuts = [CUTS[0] | {"over": 20}, CUTS[1] | {"over": 3}, CUTS[2]]
    count = TokenCount(
        tokens=40_000, trained_tokens=10_000, longest_row_tokens=900, histogram=[[500, 90], [900, 10]], cuts=cuts,
        starts=STARTS,
    )  # fmt: skip
    whole, cut = (
        training_data(Counted(version=DatasetVersion(rows=100), count=count), Hyperparameters(max_length=length))
        for length in (4_096, 512)
    )

    assert whole.row_lengths == ((500, 90), (512, 7), (900, 3))
    assert cut.rows == 96 and cut.row_lengths == ((500, 90), (512, 6), (900, 0))


def test_rows_that_are_trained_whole_are_all_kept_when_they_are_cut() -> None:
    count = TokenCount(tokens=40_000, trained_tokens=10_000, longest_row_tokens=900, histogram=[[900, 100]], cuts=CUTS)
    recipe = Hyperparameters(max_length=256, train_on="all")
    data = training_data(Counted(version=DatasetVersion(rows=100), count=count), recipe)

    assert (data.rows, data.tokens, data.trained_tokens, data.least_length) == (100, 20_000, 20_000, 1)


def test_of_a_preference_that_trains_nothing_both_answers_are_left_out() -> None:
    count = TokenCount(
        tokens=80_000, trained_tokens=10_000, longest_row_tokens=900, histogram=[[900, 100]],
        cuts=[{"limit": 256, "tokens": 40_000, "trained_tokens": 4_000, "untrained": 20}],
        starts=[[40, 256, 80], [300, 300, 20]],
    )  # fmt: skip
    version = DatasetVersion(rows=100, kind="preference")
    data = training_data(Counted(version=version, count=count), Hyperparameters(max_length=256))

    assert (data.rows, data.tokens) == (80, 40_000 - 2 * 20 * 256)


def test_what_is_held_out_is_evaluated_not_trained() -> None:
    data = of(4_096, share=0.25)

    assert (data.rows, data.tokens, data.trained_tokens) == (75, 30_000, 7_500)
    assert (data.held_out_rows, data.held_out_tokens) == (25, 10_000)


def test_a_validation_file_is_evaluated_whole_and_nothing_is_held_out_beside_it() -> None:
    file = DatasetVersion(rows=20)
    count = TokenCount(tokens=9_000, trained_tokens=900, longest_row_tokens=600, histogram=[], cuts=[])

    counted, guessed = (of(4_096, validation=file, validation_count=each) for each in (count, None))

    assert (counted.rows, counted.held_out_rows, counted.held_out_tokens) == (100, 20, 9_000)
    assert (guessed.held_out_rows, guessed.held_out_tokens) == (20, 8_000)


def test_an_evaluation_of_a_large_validation_file_is_quoted_by_the_rows_that_it_reads() -> None:
    base = BaseModel(display_name="Demo", config=json.loads((ROOT / "demo/base_model/config.json").read_text()))
    count = TokenCount(tokens=900_000, trained_tokens=9, longest_row_tokens=600, histogram=[], cuts=[])
    data = of(4_096, validation=DatasetVersion(rows=10_000), validation_count=count)

    def task(**changes: object) -> QuoteRequest:
        return task_of_job(base, data, Hyperparameters(**changes), node_count=1).request

    assert (task().held_out_rows, task().evaluations, task().evaluation_tokens) == (10_000, 3, 256 * 90)
    assert task(batch_size=50, eval_steps=100).evaluation_tokens == 1_000 * 90  # a fifth of the rows trained between
    assert task(batch_size=50, eval_steps=10_000).evaluation_tokens == 900_000


def test_without_counted_limits_the_cut_is_in_proportion() -> None:
    count = TokenCount(
        tokens=40_000, trained_tokens=8_000, longest_row_tokens=800, histogram=[[800, 100]], cuts=[],
        starts=[[1, 1, 100]],
    )  # fmt: skip
    data = training_data(Counted(version=DatasetVersion(rows=100), count=count), Hyperparameters(max_length=400))

    assert (data.tokens, data.trained_tokens) == (20_000, 4_000)


@pytest.mark.parametrize(
    ("max_length", "rows", "lengths"),
    [(4_096, 11, ((100, 10), (4_000, 1))), (512, 18, ((100, 10), (416, 1), (512, 7)))],
)
def test_running_text_is_trained_in_pieces_and_none_of_it_is_cut(max_length, rows, lengths) -> None:
    version = DatasetVersion(rows=11, kind="text")
    count = TokenCount(
        tokens=5_000,
        trained_tokens=5_000,
        longest_row_tokens=4_000,
        histogram=[[99, 0], [100, 10], [3_999, 0], [4_000, 1]],
        cuts=[{"limit": 512, "tokens": 1_512, "trained_tokens": 1_512, "untrained": 0}],
    )

    data = training_data(Counted(version=version, count=count), Hyperparameters(max_length=max_length))

    assert (data.rows, data.tokens, data.trained_tokens, data.row_lengths) == (rows, 5_000, 5_000, lengths)
