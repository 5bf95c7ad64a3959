"""OpenAI's graders as calls of their own: their fields, their templates, and the reward of one answer."""

import ast
import json
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from apps.contracts.evaluation.text_scores import bleu, check, gleu, rouge_l, rouge_n

MAX_CHARACTERS = 8_000  # of a text, before and after its variables are filled in
MAX_GRADERS = 10
MAX_VARIABLES = 100  # of all texts of a criterion or a template, which are filled in for each of many items
_VARIABLE = re.compile(r"\{\{\s*([^{}\s]{1,200})\s*\}\}")

Text = Annotated[str, Meta(max_length=MAX_CHARACTERS)]
Name = Annotated[str, Meta(min_length=1, max_length=64)]
Metric = Literal[
    "fuzzy_match", "bleu", "gleu", "rouge_1", "rouge_2", "rouge_3", "rouge_4", "rouge_5", "rouge_l", "cosine", "meteor"
]


class _Grader(msgspec.Struct, tag_field="type", frozen=True):
    pass


class StringCheckGrader(_Grader, tag="string_check", forbid_unknown_fields=True, frozen=True):
    """`input` and `reference` may hold variables such as `{{sample.output_text}}` and `{{item.answer}}`."""

    name: Name
    input: Text
    reference: Text
    operation: Literal["eq", "ne", "like", "ilike"]


class SimilarityGrader(
    msgspec.Struct, tag_field="type", tag="text_similarity", forbid_unknown_fields=True, frozen=True
):
    """`cosine` needs embeddings and `meteor` a dictionary of synonyms, so neither is offered."""

    name: Name
    input: Text
    reference: Text
    evaluation_metric: Metric
    pass_threshold: float | None = None


class ScoreModelGrader(_Grader, tag="score_model", frozen=True):
    """A model that grades. It is not offered as a call of its own; a job's `evaluation.grader` may be a judge."""


class LabelModelGrader(_Grader, tag="label_model", frozen=True):
    """A model that labels. It is not offered."""


class PythonGrader(_Grader, tag="python", frozen=True):
    """A program that grades. It is not offered, because nothing here runs a customer's code."""


PartName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
PartGrader = StringCheckGrader | SimilarityGrader | ScoreModelGrader | LabelModelGrader | PythonGrader


class MultiGrader(_Grader, tag="multi", forbid_unknown_fields=True, frozen=True):
    """`calculate_output` is a formula of the names in `graders`, such as `0.7 * exact + 0.3 * close`."""

    name: Name
    graders: Annotated[dict[PartName, PartGrader], Meta(min_length=1, max_length=MAX_GRADERS)]
    calculate_output: Annotated[str, Meta(min_length=1, max_length=500)]


AnyGrader = PartGrader | MultiGrader


class FormulaError(Exception):
    """The formula cannot be read, or names what is neither a grader nor a function."""


class UnknownVariable(Exception):
    """A template names a value that neither the item nor the sample has."""


class TextTooLong(Exception):
    """A text has more than MAX_CHARACTERS once its variables are filled in."""


class Reward(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a grader. `error` names why a score is missing, in OpenAI's words; it then counts 0."""

    reward: float
    parts: dict[str, float] = {}  # of a multi grader
    error: Literal["", "formula_parse_error", "invalid_variable_error", "sample_parse_error"] = ""


def grade(grader: AnyGrader, *, model_sample: str, item: object) -> Reward:
    """Return the reward of an answer. Raises FormulaError, TextTooLong."""
    names = names_of(model_sample, item)
    error: Literal["", "invalid_variable_error", "sample_parse_error"] = ""

    def score_of(part: PartGrader) -> float:
        nonlocal error
        try:
            return grade_text(part, names)
        except UnknownVariable as unknown:
            is_json_wanted = str(unknown).startswith("sample.output_json") and "output_json" not in names["sample"]
            error = "sample_parse_error" if is_json_wanted else "invalid_variable_error"
            return 0.0

    if not isinstance(grader, MultiGrader):
        return Reward(reward=score_of(grader), error=error)
    parts = {name: score_of(part) for name, part in grader.graders.items()}
    try:
        reward = calculate(grader.calculate_output, parts)
    except ArithmeticError:
        return Reward(reward=0.0, parts=parts, error="formula_parse_error")
    return Reward(reward=reward, parts=parts, error=error)


def grade_text(grader: PartGrader, names: Mapping[str, object]) -> float:
    """Return the score of a text. Raises UnknownVariable, TextTooLong."""
    if not isinstance(grader, StringCheckGrader | SimilarityGrader):
        raise TypeError(f"{type(grader).__name__} is not offered")
    text, reference = fill(grader.input, names), fill(grader.reference, names)
    if isinstance(grader, StringCheckGrader):
        return float(check(grader.operation, text, reference))
    return _similarity(grader.evaluation_metric, text, reference)


def _similarity(metric: Metric, text: str, reference: str) -> float:
    if metric == "fuzzy_match":
        return rouge_l(text, reference)
    words, others = text.split(), reference.split()
    match metric:
        case "bleu":
            return bleu(words, others)
        case "gleu":
            return gleu(words, others)
        case "rouge_l":
            return rouge_l(words, others)
        case _:
            return rouge_n(words, others, int(metric[-1]))


def names_of(model_sample: str, item: object) -> dict[str, Any]:
    """Return the values that templates may name: `item`, and `sample` with the answer as text and, if it is, JSON."""
    sample: dict[str, object] = {"output_text": model_sample}
    try:
        value = json.loads(model_sample)
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is in no text
        sample["output_json"] = value
    except (ValueError, RecursionError):
        pass  # an answer that is not JSON has no such value
    return {"item": item, "sample": sample}


def fill(template: str, names: Mapping[str, object]) -> str:
    """Return the template with its variables filled in. Raises UnknownVariable, TextTooLong."""
    parts, length, end = [], 0, 0
    for found in _VARIABLE.finditer(template):
        parts += [template[end : found.start()], _text(value_at(names, found[1]))]
        end = found.end()
        length += len(parts[-1]) + len(parts[-2])
        if length > MAX_CHARACTERS:
            raise TextTooLong
    if length + len(template) - end > MAX_CHARACTERS:
        raise TextTooLong
    return "".join([*parts, template[end:]])


def count_variables(*texts: str) -> int:
    """Return how many variables the templates may have at most."""
    return sum(text.count("{{") for text in texts)


def value_at(names: Mapping[str, object], path: str) -> object:
    """Return the value at a place such as `item.answers.0`. Raises UnknownVariable."""
    value: object = names
    for key in path.split("."):
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isascii() and key.isdigit() and int(key[:9]) < len(value):
            value = value[int(key[:9])]
        else:
            raise UnknownVariable(path)
    return value


def _text(value: object) -> str:
    try:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise TextTooLong from error


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "min": min, "max": max, "abs": abs, "floor": math.floor, "ceil": math.ceil, "exp": math.exp, "sqrt": math.sqrt,
    "log": math.log,
}  # fmt: skip


def calculate(formula: str, scores: Mapping[str, float]) -> float:
    """Return the formula's result: numbers, names of scores, + - * / ^, and a few functions.

    Raises FormulaError, and ArithmeticError if there is no finite result for these scores.
    """
    try:
        tree = ast.parse(formula.strip().replace("^", "**"), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise FormulaError("calculate_output must be a formula, such as 0.7 * exact + 0.3 * close.") from error
    try:
        reward = float(_evaluate(tree, scores))
    except (ValueError, TypeError, RecursionError) as error:  # a root of -1, max of one number
        raise ArithmeticError(str(error)) from error
    if not math.isfinite(reward):
        raise ArithmeticError("not finite")
    return reward


def _evaluate(node: ast.AST, scores: Mapping[str, float]) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return float(number)
        case ast.Name(id=name) if name in scores:
            return scores[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(left, scores), _evaluate(right, scores))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(operand, scores))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return float(_FUNCTIONS[name](*(_evaluate(one, scores) for one in arguments)))
    known = ", ".join([*scores, *_FUNCTIONS])
    raise FormulaError(f"calculate_output takes numbers, + - * / ^ and these names alone: {known}.")
