"""The end of a run: grade each item and count the outcomes."""

from collections import Counter
from typing import Any

import msgspec
from django.db import transaction

from apps.contracts.evaluation.graders import SimilarityGrader, TextTooLong, UnknownVariable, fill
from apps.core.database.clock import db_now
from apps.core.database.transitions import try_advance
from apps.serving.evals.criteria import Criterion, Grade, ScoreModelCriterion, grade_of
from apps.serving.evals.lifecycle import RUN_TRANSITIONS, EvalRunStatus, ItemStatus
from apps.serving.evals.models import EvalItem, EvalRun
from apps.serving.evals.notices import announce_end
from apps.serving.evals.sources import SourceItem, names_with

MAX_COMPARED = 10_000_000  # characters of all texts whose similarity a run computes: ten seconds
_ROWS_AT_ONCE = 20
_TOO_MUCH = f"The run compares more than {MAX_COMPARED:,} characters. Use fewer items, criteria or shorter texts."
_MISSING = {"text": "", "error": {"code": "no_answer", "message": "The model gave no answer."}}
_USAGE = (("prompt_tokens", "input_tokens"), ("cached_tokens", "cached_tokens"), ("completion_tokens", "output_tokens"))


def finish(*, run: EvalRun, error: dict[str, str] | None = None) -> None:
    """Grade the items of a run and end it. With an error, it ends as failed, but its results are kept."""
    criteria: list[Criterion] = msgspec.convert(run.testing_criteria, list[Criterion])
    counts, left = _Counts(), MAX_COMPARED
    with transaction.atomic():
        graded: list[EvalItem] = []
        for row in run.items.order_by("number").iterator(_ROWS_AT_ONCE):
            answers = msgspec.json.decode(row.answers)
            if run.model_name and "s" not in answers:
                answers["s"] = _MISSING
                row.answers = msgspec.json.encode(answers).decode()
            grades, compared = _grade(row, answers, criteria, most_compared=left)
            left -= compared
            results = [_result(one, grade) for one, grade in zip(criteria, grades, strict=False)]
            row.status, row.results = _status_of(grades), msgspec.json.encode(results).decode()
            counts.add(row, grades, answers)
            graded.append(row)
            if len(graded) >= _ROWS_AT_ONCE:
                EvalItem.objects.bulk_update(graded, ["status", "results", "answers"])
                graded.clear()
        EvalItem.objects.bulk_update(graded, ["status", "results", "answers"])
        to = EvalRunStatus.FAILED if error else EvalRunStatus.COMPLETED
        changes = counts.changes(criteria)
        if not try_advance(run, to=to, transitions=RUN_TRANSITIONS, error=error, finished_at=db_now(), **changes):
            transaction.set_rollback(True)  # canceled, or another process was first
            return
        announce_end(run)


class _Counts:
    """The counts of a run's items."""

    def __init__(self) -> None:
        self._by_status = Counter[str]()
        self._passed, self._failed = Counter[int](), Counter[int]()
        self._usage: dict[str, Counter[str]] = {}

    def add(self, row: EvalItem, grades: list[Grade], answers: dict[str, Any]) -> None:
        self._by_status[row.status] += 1
        for number, grade in enumerate(grades):
            (self._passed if grade.is_passed else self._failed)[number] += 1
        for answer in answers.values():
            if "model" in answer:
                counted = self._usage.setdefault(answer["model"], Counter())
                counted.update({name: answer[key] for name, key in _USAGE} | {"invocation_count": 1})

    def changes(self, criteria: list[Criterion]) -> dict[str, Any]:
        return {
            "passed": self._by_status[ItemStatus.PASS],
            "failed": self._by_status[ItemStatus.FAIL],
            "errored": self._by_status[ItemStatus.ERROR],
            "criteria_results": [
                {"testing_criteria": one.name, "passed": self._passed[number], "failed": self._failed[number]}
                for number, one in enumerate(criteria)
            ],
            "usage": [{"model_name": name} | dict(counted) for name, counted in sorted(self._usage.items())],
        }


def _grade(
    row: EvalItem, answers: dict[str, Any], criteria: list[Criterion], *, most_compared: int
) -> tuple[list[Grade], int]:
    """Return a grade for each criterion, and the number of characters compared.

    An item without an answer has no grades. A comparison that would exceed `most_compared` is not made.
    """
    sample = answers.get("s")
    if (sample and sample.get("error")) or any(key[0] == "b" and one.get("error") for key, one in answers.items()):
        return [], 0
    names = names_with(msgspec.json.decode(row.source, type=SourceItem), sample["text"] if sample else None)
    grades, compared = [], 0
    for number, criterion in enumerate(criteria):
        compared += _compared_by(criterion, names)
        try:
            too_much = isinstance(criterion, SimilarityGrader) and compared > most_compared
            grades.append(Grade(0.0, False, _TOO_MUCH) if too_much else grade_of(number, criterion, names, answers))
        except KeyError:  # it was not asked before the run ended
            grades.append(Grade(0.0, False, "The model was not asked."))
    return grades, compared


def _compared_by(criterion: Criterion, names: dict[str, Any]) -> int:
    """Return the number of characters that a criterion compares."""
    if not isinstance(criterion, SimilarityGrader):
        return 0
    try:
        return len(fill(criterion.input, names)) + len(fill(criterion.reference, names))
    except (UnknownVariable, TextTooLong):
        return 0  # it compares nothing, and its grade says why


def _status_of(grades: list[Grade]) -> ItemStatus:
    if not grades or any(grade.error for grade in grades):
        return ItemStatus.ERROR
    return ItemStatus.PASS if all(grade.is_passed for grade in grades) else ItemStatus.FAIL


def _result(criterion: Criterion, grade: Grade) -> dict[str, object]:
    result: dict[str, object] = {
        "name": criterion.name,
        "type": msgspec.to_builtins(criterion)["type"],
        "score": grade.score,
        "passed": grade.is_passed,
    }
    if isinstance(criterion, ScoreModelCriterion):
        result["threshold"] = criterion.threshold
    return result | ({"error": grade.error} if grade.error else {})
