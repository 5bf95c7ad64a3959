"""/v1/fine_tuning/alpha/graders: check a grader, and try it on one answer, before a job uses it."""

import time
from typing import Annotated, Any, TypedDict, cast

import msgspec
from msgspec import Meta
from rest_framework.request import Request

from apps.accounts.roles import Permission
from apps.contracts.evaluation.graders import (
    MAX_CHARACTERS,
    AnyGrader,
    FormulaError,
    LabelModelGrader,
    MultiGrader,
    PythonGrader,
    Reward,
    ScoreModelGrader,
    SimilarityGrader,
    TextTooLong,
    grade,
)
from apps.core.errors import InvalidValue
from apps.interfaces.api.views import ApiView

_NOT_OFFERED: dict[type, str] = {
    ScoreModelGrader: "'score_model' as a call: a job's evaluation.grader may be a judge, with a model that grades",
    LabelModelGrader: "'label_model': use 'string_check'",
    PythonGrader: "'python', because nothing here runs your code: use 'multi' with a formula",
}
_NO_METRICS = {
    "cosine": "it needs embeddings",
    "meteor": "it needs a dictionary of synonyms",
}
_ERRORS = (
    "formula_parse_error", "sample_parse_error", "truncated_observation_error", "unresponsive_reward_error",
    "invalid_variable_error", "other_error", "python_grader_server_error", "python_grader_runtime_error",
    "model_grader_server_error", "model_grader_refusal_error", "model_grader_parse_error",
)  # fmt: skip
_DETAILS = (
    "python_grader_server_error_type", "python_grader_runtime_error_details", "model_grader_server_error_details",
)  # fmt: skip
EXAMPLE = {
    "type": "string_check",
    "name": "exact",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "operation": "eq",
}


class CheckGrader(msgspec.Struct, forbid_unknown_fields=True):
    grader: AnyGrader


class RunGrader(msgspec.Struct, forbid_unknown_fields=True):
    """`model_sample` is the answer, `{{sample.output_text}}`; `item` has the values of `{{item.…}}`."""

    grader: AnyGrader
    model_sample: Annotated[str, Meta(max_length=MAX_CHARACTERS)]
    item: Any = None


class CheckedGrader(TypedDict):
    grader: dict[str, Any]


class GradingObject(TypedDict):
    """`errors` has OpenAI's names: the one that is true says why a score is missing, which then counts 0."""

    name: str
    type: str
    errors: dict[str, Any]
    execution_time: float
    scores: dict[str, float]
    token_usage: int | None
    sampled_model_name: str | None


class RewardObject(TypedDict):
    """`sub_rewards` has the parts of a multi grader."""

    reward: float
    sub_rewards: dict[str, float]
    metadata: GradingObject
    model_grader_token_usage_per_model: dict[str, Any]


class GraderValidation(ApiView):
    required_scope = {"POST": Permission.VIEW}
    examples = {"POST": {"grader": EXAMPLE}}

    def post(self, request: Request, body: CheckGrader) -> CheckedGrader:
        """Check a grader's fields and its formula; return it as it was sent."""
        _graded(body.grader, model_sample="", item=None)
        return {"grader": _sent(request)}


class GraderRun(ApiView):
    required_scope = {"POST": Permission.VIEW}
    examples = {"POST": {"grader": EXAMPLE, "model_sample": "red", "item": {"answer": "red"}}}

    def post(self, request: Request, body: RunGrader) -> RewardObject:
        """Score one answer with a grader."""
        began = time.monotonic()
        found = _graded(body.grader, model_sample=body.model_sample, item=body.item)
        sent = _sent(request)
        return {
            "reward": found.reward,
            "sub_rewards": found.parts,
            "metadata": {
                "name": sent["name"],
                "type": sent["type"],
                "errors": {name: name == found.error for name in _ERRORS} | dict.fromkeys(_DETAILS),
                "execution_time": round(time.monotonic() - began, 6),
                "scores": found.parts or {sent["name"]: found.reward},
                "token_usage": None,
                "sampled_model_name": None,
            },
            "model_grader_token_usage_per_model": {},
        }


def _sent(request: Request) -> dict[str, Any]:
    """Return the grader as it was sent."""
    return cast(dict[str, Any], cast(dict[str, object], request.data)["grader"])


def _graded(grader: AnyGrader, *, model_sample: str, item: object) -> Reward:
    """Return the reward. Raises InvalidValue for what is not offered, a wrong formula or a text that is too long."""
    _refuse_not_offered(grader)
    try:
        return grade(grader, model_sample=model_sample, item=item)
    except FormulaError as error:
        raise InvalidValue(str(error), param="grader.calculate_output") from error
    except TextTooLong as error:
        text = f"With its variables, a text of the grader has more than {MAX_CHARACTERS:,} characters: shorten it."
        raise InvalidValue(text, param="grader") from error


def _refuse_not_offered(grader: AnyGrader) -> None:
    is_multi = isinstance(grader, MultiGrader)
    for name, part in grader.graders.items() if isinstance(grader, MultiGrader) else [("", grader)]:
        place = f"grader.graders.{name}" if is_multi else "grader"
        if reason := _NOT_OFFERED.get(type(part)):
            raise InvalidValue(f"Anneal does not offer {reason}.", param=f"{place}.type", code="not_offered")
        if isinstance(part, SimilarityGrader) and (reason := _NO_METRICS.get(part.evaluation_metric)):
            text = f"Anneal does not offer '{part.evaluation_metric}', because {reason}: use another metric."
            raise InvalidValue(text, param=f"{place}.evaluation_metric", code="not_offered")
