"""The requests of a run: to its model, to the models that it is compared with, and to the grading models."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import msgspec

from apps.catalog.models import BaseModel
from apps.contracts.evaluation.graders import TextTooLong, UnknownVariable
from apps.serving.evals.costs import largest_body, require_model
from apps.serving.evals.criteria import Criterion, PairwiseCriterion, grading_requests, models_of, reason_of
from apps.serving.evals.models import EvalRun
from apps.serving.evals.sources import (
    DEFAULT_ANSWER_TOKENS,
    CompletionsSource,
    DataSource,
    SourceItem,
    names_with,
    question_of,
    sampling_request,
)

SAMPLE = "s"  # the key of the answer that is graded

Requests = dict[str, dict[str, object]]  # bodies by the key of their answer
Answers = dict[str, Any]


class RunPlan:
    """The plan of a run: its source, criteria and models."""

    def __init__(self, run: EvalRun) -> None:
        self.run = run
        self.source = msgspec.convert(run.data_source, DataSource)
        self.criteria: list[Criterion] = msgspec.convert(run.testing_criteria, list[Criterion])

    @cached_property
    def models(self) -> dict[str, BaseModel]:
        """The models that the run asks, by name. Raises InvalidValue if one no longer exists."""
        own = {self.run.model_name} if self.run.model_name else set()
        names = own | {each for _, each in models_of(self.criteria)}
        return {each: require_model(organization=self.run.organization_id, name=each, param="model") for each in names}

    @property
    def answer_tokens(self) -> int:
        params = self.source.sampling_params if isinstance(self.source, CompletionsSource) else None
        return (params and params.max_completion_tokens) or DEFAULT_ANSWER_TOKENS

    @cached_property
    def sampled(self) -> dict[str, str]:
        """The models that answer an item, by the key of their answer: the run's, and those it is compared with."""
        if not isinstance(self.source, CompletionsSource):
            return {}
        asked = {SAMPLE: self.run.model_name} if self.run.model_name else {}
        for number, criterion in enumerate(self.criteria):
            if isinstance(criterion, PairwiseCriterion):
                asked[f"b{number}"] = criterion.baseline_model
        return asked

    def sampling(self, item: SourceItem) -> Requests:
        """Return the requests for the item's answers. Raises UnknownVariable, TextTooLong."""
        if not self.sampled or not isinstance(self.source, CompletionsSource):
            return {}
        source, messages = self.source, question_of(self.source, item)
        contexts = {name: model.context_length for name, model in self.models.items()}
        return self._readable(
            {
                key: sampling_request(source, model, messages, context_length=contexts[model])
                for key, model in self.sampled.items()
            }
        )

    def grading(self, item: SourceItem, answers: Answers) -> tuple[Requests, Answers]:
        """Return the requests that grade the item's answer, and the reasons for those that could not be made."""
        requests: Requests = {}
        refused: Answers = {}
        for number in range(len(self.criteria)):
            try:
                requests |= self.grading_by(number, item, answers)
            except (UnknownVariable, TextTooLong) as error:
                refused[f"g{number}"] = no_answer(error)
        return requests, refused

    def grading_by(self, number: int, item: SourceItem, answers: Mapping[str, Any]) -> Requests:
        """Return the requests of one criterion. Raises UnknownVariable, TextTooLong."""
        names = names_with(item, answers[SAMPLE]["text"] if SAMPLE in answers else None)
        criterion, request, baseline = self.criteria[number], None, ""
        if isinstance(criterion, PairwiseCriterion) and isinstance(self.source, CompletionsSource):
            request, baseline = question_of(self.source, item), answers[f"b{number}"]["text"]
        return self._readable(grading_requests(number, criterion, names, request=request, baseline=baseline))

    def _readable(self, requests: Requests) -> Requests:
        for body in requests.values():
            if len(msgspec.json.encode(body)) > largest_body(self.models[str(body["model"])]):
                raise TextTooLong
        return requests


def no_answer(error: UnknownVariable | TextTooLong) -> dict[str, object]:
    """Return the placeholder for the answer to a request that could not be made."""
    return {"text": "", "error": {"code": "invalid_item", "message": reason_of(error)}}
