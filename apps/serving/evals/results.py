"""The end of a run: each item is graded, and the outcomes are counted."""

from collections import Counter
from typing import Any

import msgspec
from django.db import transaction

from apps.contracts.evaluation.graders import TextTooLong
from apps.core.database.clock import db_now
from apps.core.database.transitions import try_advance
from apps.serving.evals.criteria import Criterion, Grade, ScoreModelCriterion, grade_of
from apps.serving.evals.lifecycle import RUN_TRANSITIONS, EvalRunStatus, ItemStatus
from apps.serving.evals.models import EvalItem, EvalRun
from apps.serving.evals.sources import SourceItem, names_with

_TOO_LONG = "A text has more than 8,000 characters once its variables are filled in."
_USAGE = (("prompt_tokens", "input_tokens"), ("cached_tokens", "cached_tokens"), ("completion_tokens", "output_tokens"))


def finish(*, run: EvalRun, error: dict[str, str] | None = None) -> None:
    """Grade the items of a run and end it, as failed if there is an error. Its results are kept either way."""
    criteria: list[Criterion] = msgspec.convert(run.testing_criteria, list[Criterion])
    by_status = Counter[str]()
    passed, failed = Counter[int](), Counter[int]()
    usage: dict[str, Counter[str]] = {}
    rows = list(run.items.order_by("number"))
    for row in rows:
        answers = msgspec.json.decode(row.answers)
        grades = _grade(row, answers, criteria)
        for number, grade in enumerate(grades):
            (passed if grade.is_passed else failed)[number] += 1
        row.status = _status_of(grades)
        row.results = msgspec.json.encode(
            [_result(one, grade) for one, grade in zip(criteria, grades, strict=False)]
        ).decode()
        by_status[row.status] += 1
        for answer in answers.values():
            if "model" in answer:
                counted = usage.setdefault(answer["model"], Counter())
                counted.update({name: answer[key] for name, key in _USAGE} | {"invocation_count": 1})
    changes: dict[str, Any] = {
        "passed": by_status[ItemStatus.PASS],
        "failed": by_status[ItemStatus.FAIL],
        "errored": by_status[ItemStatus.ERROR],
        "criteria_results": [
            {"testing_criteria": one.name, "passed": passed[number], "failed": failed[number]}
            for number, one in enumerate(criteria)
        ],
        "usage": [{"model_name": name} | dict(counted) for name, counted in sorted(usage.items())],
        "error": error,
        "finished_at": db_now(),
    }
    with transaction.atomic():
        to = EvalRunStatus.FAILED if error else EvalRunStatus.COMPLETED
        if try_advance(run, to=to, transitions=RUN_TRANSITIONS, **changes):
            EvalItem.objects.bulk_update(rows, ["status", "results"], batch_size=100)


def _grade(row: EvalItem, answers: dict[str, Any], criteria: list[Criterion]) -> list[Grade]:
    """Return a grade for each criterion; none if the item has no answer to grade."""
    sample = answers.get("s")
    if (sample and sample.get("error")) or any(key[0] == "b" and one.get("error") for key, one in answers.items()):
        return []
    names = names_with(msgspec.json.decode(row.source, type=SourceItem), sample["text"] if sample else None)
    grades = []
    for number, criterion in enumerate(criteria):
        try:
            grades.append(grade_of(number, criterion, names, answers))
        except KeyError:  # its question could not be made, or was not asked before the run ended
            grades.append(Grade(0.0, False, "The model was not asked."))
        except TextTooLong:
            grades.append(Grade(0.0, False, _TOO_LONG))
    return grades


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
