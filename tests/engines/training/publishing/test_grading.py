"""Scores of answers, and the intervals of what they show."""

import numpy as np
import pytest

from apps.contracts.evaluation import Grader, GraderKind, problem_of
from apps.contracts.evaluation.paired_shares import wilson
from apps.contracts.evaluation.text_scores import rouge_l
from gpu_workers.train.after.graders import grade
from gpu_workers.train.after.intervals import compare_ratio, compare_scores


@pytest.mark.parametrize(
    ("grader", "answer", "score"),
    [
        (Grader(), " red\n", 1.0),
        (Grader(), "red car", 0.0),
        (Grader(kind=GraderKind.STRING_CHECK, operation="ilike", reference="RED"), "a red car", 1.0),
        (Grader(kind=GraderKind.STRING_CHECK, operation="ne", reference="red"), "red", 0.0),
        (Grader(kind=GraderKind.REGEX, pattern=r"^r\w+$"), "red", 1.0),
        (Grader(kind=GraderKind.REGEX, pattern=r"(a+)+$"), "a" * 60 + "b", 0.0),  # would run for years
        (Grader(kind=GraderKind.JSON_SCHEMA, schema={"type": "object", "required": ["x"]}), '{"x": 1}', 1.0),
        (Grader(kind=GraderKind.JSON_SCHEMA, schema={"type": "object", "required": ["x"]}), "{}", 0.0),
        (Grader(kind=GraderKind.JSON_SCHEMA, schema={"type": "object"}), "no json", 0.0),
    ],
)
def test_an_answer_is_graded(grader, answer, score):
    assert problem_of(grader) is None
    assert grade(grader, answer, "red") == score


def test_rouge_l_is_the_f1_of_the_longest_common_subsequence():
    assert rouge_l(
        ["the", "cat", "sat", "on", "the", "mat"], ["the", "cat", "is", "on", "the", "mat"]
    ) == pytest.approx(5 / 6)
    assert rouge_l([], ["a"]) == 0.0


def test_a_grader_that_could_run_for_ever_or_makes_no_sense_is_refused():
    assert problem_of(Grader(kind=GraderKind.REGEX, pattern="(")) is not None
    assert problem_of(Grader(kind=GraderKind.REGEX, pattern="[a-z]{2,3}[а-я]+" * 8)) is None
    for wide in ("[!-\uffff]", r"[!-\uffff]", r"[!-\U0010ffff]"):
        assert "ranges" in str(problem_of(Grader(kind=GraderKind.REGEX, pattern=f"(?i){wide * 9}")))
    assert problem_of(Grader(kind=GraderKind.STRING_CHECK, operation="gt")) is not None
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a+)+$"}}}
    assert "pattern" in str(problem_of(Grader(kind=GraderKind.JSON_SCHEMA, schema=schema)))


def test_intervals_are_wilsons_for_shares_and_hold_the_value_elsewhere():
    interval = wilson(8, 10)
    assert (interval.low, interval.high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert wilson(0, 10).low == 0.0
    draw = np.random.default_rng(1)
    base, weight = draw.normal(2.0, 0.3, 200), np.ones(200)
    loss = compare_ratio("loss", base, base - 0.5, weight, is_higher_better=False)
    assert loss.verdict == "better" and loss.base.low < 2.0 < loss.base.high
    level = compare_scores("exact_match", np.array([1.0, 0.0] * 20), np.array([0.0, 1.0] * 20))
    assert (level.verdict, level.method) == ("level", "Wilson 95 %")
