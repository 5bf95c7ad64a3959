"""Evaluation plans, graders, and the report that compares base and tuned model on held-out rows.

A report travels with the outcome of a run and is stored with the adapter version. Changes are additive only.
"""

import re
from enum import StrEnum
from typing import Any

from apps.contracts.struct import Struct, is_deeper

MAX_SCHEMA_BYTES = 16 * 1024
MAX_SCHEMA_DEPTH = 64
MAX_PATTERN_CHARACTERS = 512
# Python compiles a range of characters one by one if case does not matter: 15 ms for each of these.
MAX_WIDE_RANGES = 8
_WIDE_RANGE = re.compile(r"-(?:[^\x00-\xff]|\\[uUN])")
MAX_INSTRUCTION_CHARACTERS = 2_000
# A pattern inside a schema would run without a time limit.
_REFUSED_SCHEMA_KEYS = frozenset({"pattern", "patternProperties", "$ref", "$dynamicRef"})


class GraderKind(StrEnum):
    EXACT_MATCH = "exact_match"  # the answer equals the row's own, apart from surrounding spaces
    STRING_CHECK = "string_check"  # as OpenAI's grader of that name: eq, ne, like, ilike
    REGEX = "regex"  # the pattern is found in the answer
    JSON_SCHEMA = "json_schema"  # the answer is JSON and valid against the schema
    ROUGE_L = "rouge_l"  # F1 of the longest common subsequence of words
    JUDGE = "judge"  # a served model grades the answer; its calls go through the gateway and are billed


class Grader(Struct, frozen=True, kw_only=True):
    """One way to score an answer between 0 and 1. `reference` None: the row's own answer.

    A judge is `model`, by its name at the gateway, with the grading criteria `instructions`.
    """

    kind: GraderKind = GraderKind.EXACT_MATCH
    operation: str = "eq"
    reference: str | None = None
    pattern: str = ""
    schema: dict[str, Any] = {}
    model: str = ""
    instructions: str = ""


class EvaluationPlan(Struct, frozen=True, kw_only=True):
    """The settings of the evaluation after training.

    It uses the first validation rows, so that runs can be compared.
    """

    grader: Grader = Grader()
    max_rows: int = 500
    max_answers: int = 100  # answers are generated for this many of the rows
    max_answer_tokens: int = 256
    seconds: int = 240  # generating answers ends after this time
    judge_seconds: int = 300  # calling a judge ends after this time


class ConfidenceInterval(Struct, frozen=True, kw_only=True):
    """A value with its 95 % confidence interval."""

    value: float
    low: float
    high: float


class Comparison(Struct, frozen=True, kw_only=True):
    """One measure of base and tuned on the same rows. `difference` is tuned minus base, over pairs of rows."""

    name: str
    base: ConfidenceInterval
    tuned: ConfidenceInterval
    difference: ConfidenceInterval
    method: str  # of the intervals of base and tuned
    rows: int
    is_higher_better: bool = True

    @property
    def verdict(self) -> str:
        """The outcome: "better", "worse" or "level". It is level when the interval of the difference contains zero."""
        if self.difference.low <= 0 <= self.difference.high:
            return "level"
        return "better" if (self.difference.value > 0) == self.is_higher_better else "worse"


class WorseRow(Struct, frozen=True, kw_only=True):
    """A held-out row on which the tuned model does worse than its base; texts are truncated."""

    row: int  # counted from 1 among the evaluated rows
    prompt: str
    reference: str
    base_loss: float
    tuned_loss: float
    base_answer: str = ""
    tuned_answer: str = ""
    base_score: float | None = None
    tuned_score: float | None = None


class EvaluationReport(Struct, frozen=True, kw_only=True):
    """The results of an evaluation. `judge` is the grading model, with the tokens billed for its calls."""

    rows: int
    answers: int = 0
    grader: str = ""
    comparisons: tuple[Comparison, ...] = ()
    worse_rows: int = 0
    worse: tuple[WorseRow, ...] = ()  # the worst of them
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    judge: str = ""
    judge_calls: int = 0
    judge_input_tokens: int = 0
    judge_output_tokens: int = 0


def problem_of(grader: Grader) -> str | None:
    """Return why a grader cannot be used, or None."""
    match grader.kind:
        case GraderKind.STRING_CHECK if grader.operation not in ("eq", "ne", "like", "ilike"):
            return "operation must be eq, ne, like or ilike."
        case GraderKind.REGEX:
            return _problem_of_pattern(grader.pattern)
        case GraderKind.JSON_SCHEMA:
            return _problem_of_schema(grader.schema)
        case GraderKind.JUDGE if not grader.model:
            return "model must name the judge: a served base model or an ft:… version of your own."
        case GraderKind.JUDGE if len(grader.instructions) > MAX_INSTRUCTION_CHARACTERS:
            return f"instructions must have at most {MAX_INSTRUCTION_CHARACTERS:,} characters."
    return None


def _problem_of_pattern(pattern: str) -> str | None:
    if not pattern or len(pattern) > MAX_PATTERN_CHARACTERS:
        return f"pattern must have 1 to {MAX_PATTERN_CHARACTERS} characters."
    if len(_WIDE_RANGE.findall(pattern)) > MAX_WIDE_RANGES:
        return f"pattern may have {MAX_WIDE_RANGES} ranges of letters beyond Latin, such as а-я: use fewer."
    try:
        re.compile(pattern)
    except re.error as error:
        return f"pattern is not a regular expression: {error}. Use the syntax of Python's re."
    except (OverflowError, RecursionError):
        return "pattern repeats or nests too often: give a simpler one."
    return None


def _problem_of_schema(schema: dict[str, object]) -> str | None:
    if not schema:
        return "schema must be a JSON schema."
    if is_deeper(schema, MAX_SCHEMA_DEPTH):
        return f"schema must have at most {MAX_SCHEMA_DEPTH} levels."
    if len(repr(schema)) > MAX_SCHEMA_BYTES:
        return f"schema must have at most {MAX_SCHEMA_BYTES // 1024} KiB."
    if refused := _keys_of(schema) & _REFUSED_SCHEMA_KEYS:
        return f"schema must be without {', '.join(sorted(refused))}."
    return None


def _keys_of(value: object) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*(_keys_of(item) for item in value.values()))
    if isinstance(value, list):
        return set().union(*(_keys_of(item) for item in value))
    return set()
