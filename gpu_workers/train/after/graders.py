"""Scores of answers, between 0 and 1. Answers and patterns are the customer's: everything here is bounded in time."""

import json
from collections.abc import Sequence

import jsonschema
import regex

from apps.contracts.evaluation import Grader, GraderKind

_REGEX_SECONDS = 1.0
_MAX_WORDS = 2_000


def grade(grader: Grader, answer: str, reference: str) -> float:
    """Return the score of an answer; `reference` is the row's own answer. A judge's scores come from `judge`."""
    expected = reference if grader.reference is None else grader.reference
    match grader.kind:
        case GraderKind.EXACT_MATCH:
            return float(answer.strip() == expected.strip())
        case GraderKind.STRING_CHECK:
            return float(_check(grader.operation, answer.strip(), expected.strip()))
        case GraderKind.REGEX:
            return float(_is_found(grader.pattern, answer))
        case GraderKind.JSON_SCHEMA:
            return float(_is_valid(answer, grader))
        case GraderKind.ROUGE_L:
            return rouge_l(answer.split(), expected.split())
        case GraderKind.JUDGE:
            raise ValueError("a judge is asked, not computed")


def _check(operation: str, answer: str, expected: str) -> bool:
    match operation:
        case "ne":
            return answer != expected
        case "like":
            return expected in answer
        case "ilike":
            return expected.casefold() in answer.casefold()
        case _:
            return answer == expected


def _is_found(pattern: str, answer: str) -> bool:
    try:
        return regex.search(pattern, answer, timeout=_REGEX_SECONDS) is not None
    except TimeoutError:
        return False


def _is_valid(answer: str, grader: Grader) -> bool:
    try:
        jsonschema.Draft202012Validator(grader.schema).validate(json.loads(answer))
    except (ValueError, RecursionError, jsonschema.ValidationError, jsonschema.SchemaError):
        return False
    return True


def rouge_l(answer: Sequence[str], reference: Sequence[str]) -> float:
    """Return ROUGE-L's F1 over words (Lin 2004, beta 1)."""
    answer, reference = answer[:_MAX_WORDS], reference[:_MAX_WORDS]
    if not answer or not reference:
        return float(not answer and not reference)
    row = [0] * (len(reference) + 1)
    for word in answer:
        diagonal = 0
        for index, other in enumerate(reference, start=1):
            diagonal, row[index] = row[index], diagonal + 1 if word == other else max(row[index], row[index - 1])
    common = row[-1]
    return 2 * common / (len(answer) + len(reference))
