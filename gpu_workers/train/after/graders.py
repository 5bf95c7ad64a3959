"""Scores of answers, between 0 and 1.

Answers and patterns are the customer's, so everything here is limited in time.
"""

import json

import jsonschema
import regex

from apps.contracts.evaluation import Grader, GraderKind
from apps.contracts.evaluation.text_scores import check, rouge_l

_REGEX_SECONDS = 1.0
_MAX_WORDS = 2_000


def grade(grader: Grader, answer: str, reference: str) -> float:
    """Return the score of an answer; `reference` is the row's own answer. A judge's scores come from `judge`."""
    expected = reference if grader.reference is None else grader.reference
    match grader.kind:
        case GraderKind.EXACT_MATCH:
            return float(answer.strip() == expected.strip())
        case GraderKind.STRING_CHECK:
            return float(check(grader.operation, answer.strip(), expected.strip()))
        case GraderKind.REGEX:
            return float(_is_found(grader.pattern, answer))
        case GraderKind.JSON_SCHEMA:
            return float(_is_valid(answer, grader))
        case GraderKind.ROUGE_L:
            return rouge_l(answer.split()[:_MAX_WORDS], expected.split()[:_MAX_WORDS])
        case GraderKind.JUDGE:
            raise ValueError("a judge is asked, not computed")


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
