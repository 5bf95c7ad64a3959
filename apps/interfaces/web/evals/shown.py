"""Runs as pages show them."""

from dataclasses import dataclass

from apps.serving.evals.lifecycle import EvalRunStatus
from apps.serving.evals.models import EvalRun


@dataclass(frozen=True, kw_only=True)
class Score:
    """The number of answers of a run that passed one criterion, or all criteria.

    `share` is None without a graded answer.
    """

    name: str
    passed: int
    graded: int

    @property
    def share(self) -> float | None:
        return self.passed / self.graded if self.graded else None


@dataclass(frozen=True, kw_only=True)
class ShownRun:
    """A run as pages show it; `state` is a word of the table of states."""

    run: EvalRun
    state: str
    total: Score
    scores: list[Score]


def shown_run(run: EvalRun) -> ShownRun:
    return ShownRun(
        run=run,
        state="cancelled" if run.status == EvalRunStatus.CANCELED else run.status,
        total=Score(name="", passed=run.passed, graded=run.passed + run.failed),
        scores=[
            Score(name=one["testing_criteria"], passed=one["passed"], graded=one["passed"] + one["failed"])
            for one in run.criteria_results
        ],
    )
