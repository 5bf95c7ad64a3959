"""Intervals of shares: Wilson's, Newcombe's of pairs, and when one model is surely better than another."""

import pytest

from apps.contracts.evaluation import ConfidenceInterval
from apps.contracts.evaluation.paired_shares import compare_pairs, is_surely_above


def test_the_interval_of_pairs_is_newcombes() -> None:
    """The figures of Bentur et al. 2009, as Fagerland, Lydersen and Laake 2014 give them for this method."""
    found = compare_pairs(both=1, only_new=1, only_old=7, neither=12)

    assert (found.rows, found.new_passed, found.old_passed) == (21, 2, 8)
    assert found.difference.value == pytest.approx(-6 / 21)
    assert (found.difference.low, found.difference.high) == pytest.approx((-0.507, -0.026), abs=5e-4)


@pytest.mark.parametrize(("rows", "at_least"), [(10, 0.2), (1_000, 0.002)])
def test_models_that_pass_the_same_rows_are_level_within_what_so_few_rows_show(rows: int, at_least: float) -> None:
    level = compare_pairs(both=rows, only_new=0, only_old=0, neither=0).difference

    assert level.value == 0 and level.low < -at_least and level.high > at_least


@pytest.mark.parametrize("counts", [(0, 5, 0, 5), (20, 1, 19, 0), (3, 4, 5, 6), (0, 0, 0, 7)])
def test_swapping_the_models_turns_the_interval_around(counts: tuple[int, int, int, int]) -> None:
    both, new, old, neither = counts
    one = compare_pairs(both=both, only_new=new, only_old=old, neither=neither).difference
    other = compare_pairs(both=both, only_new=old, only_old=new, neither=neither).difference

    assert (one.low, one.high) == pytest.approx((-other.high, -other.low))
    assert -1 <= one.low <= one.value <= one.high <= 1


def test_there_is_nothing_to_say_without_rows() -> None:
    with pytest.raises(ValueError, match="no rows"):
        compare_pairs(both=0, only_new=0, only_old=0, neither=0)


def test_a_model_is_surely_better_only_if_chance_does_not_explain_it() -> None:
    def of(value: float, width: float) -> ConfidenceInterval:
        return ConfidenceInterval(value=value, low=value - width, high=value + width)

    assert is_surely_above(of(0.8, 0.05), of(0.6, 0.05))
    assert not is_surely_above(of(0.64, 0.05), of(0.6, 0.05))
    assert not is_surely_above(of(0.6, 0.01), of(0.8, 0.01))
