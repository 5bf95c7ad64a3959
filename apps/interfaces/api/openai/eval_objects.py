"""OpenAI's objects of evals, runs and output items."""

import datetime
from typing import Any, Literal, TypedDict

import msgspec
from django.conf import settings

from apps.interfaces.api.native.estimates import usd
from apps.serving.evals.lifecycle import ItemStatus
from apps.serving.evals.models import Eval, EvalItem, EvalRun
from apps.serving.evals.sources import (
    DEFAULT_ANSWER_TOKENS,
    CompletionsSource,
    DataSource,
    SamplingParams,
    SourceItem,
    question_of_item,
)

# What templates may name beside the items of stored completions.
_SAMPLE_SCHEMA = {
    "type": "object",
    "properties": {"output_text": {"type": "string"}, "output_json": {}},
}
_COMPLETION_SCHEMA = {
    "type": "object",
    "properties": {
        "item": {
            "type": "object",
            "properties": {
                "id": {"type": "string"},
                "model": {"type": "string"},
                "input": {"type": "array", "items": {"type": "object"}},
                "metadata": {"type": "object"},
            },
        },
        "sample": _SAMPLE_SCHEMA,
    },
}


class EvalObject(TypedDict):
    """OpenAI's eval, and the project that it is in."""

    id: str
    object: Literal["eval"]
    name: str
    created_at: int
    data_source_config: dict[str, Any]
    testing_criteria: list[dict[str, Any]]
    metadata: dict[str, str]
    project_id: str


class DeletedEval(TypedDict):
    eval_id: str
    object: Literal["eval.deleted"]
    deleted: Literal[True]


class ResultCounts(TypedDict):
    total: int
    passed: int
    failed: int
    errored: int


class CriterionResult(TypedDict):
    testing_criteria: str
    passed: int
    failed: int


class ModelUsage(TypedDict):
    model_name: str
    invocation_count: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    total_tokens: int


class EvalError(TypedDict):
    code: str
    message: str


class EvalRunObject(TypedDict):
    """OpenAI's run. `max_cost_usd` is the limit that was sent, `highest_cost_usd` the most that the run should cost."""

    id: str
    object: Literal["eval.run"]
    eval_id: str
    name: str
    status: str
    model: str
    created_at: int
    finished_at: int | None
    data_source: dict[str, Any]
    error: EvalError | None
    metadata: dict[str, str]
    per_model_usage: list[ModelUsage]
    per_testing_criteria_results: list[CriterionResult]
    report_url: str
    result_counts: ResultCounts
    max_cost_usd: str | None
    highest_cost_usd: str | None


class DeletedRun(TypedDict):
    run_id: str
    object: Literal["eval.run.deleted"]
    deleted: Literal[True]


class SampleUsage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    total_tokens: int


class SampleObject(TypedDict):
    """The answer that was graded. An answer that the data had already has no usage."""

    model: str
    input: list[dict[str, Any]]
    output: list[dict[str, Any]]
    finish_reason: str | None
    max_completion_tokens: int | None
    temperature: float | None
    top_p: float | None
    seed: int | None
    usage: SampleUsage | None
    error: EvalError | None


class OutputItemObject(TypedDict):
    id: str
    object: Literal["eval.run.output_item"]
    eval_id: str
    run_id: str
    created_at: int
    status: Literal["pass", "fail", "error"]
    datasource_item: dict[str, Any]
    datasource_item_id: int
    results: list[dict[str, Any]]
    sample: SampleObject


def eval_object(evaluated: Eval) -> EvalObject:
    return {
        "id": evaluated.pk,
        "object": "eval",
        "name": evaluated.name,
        "created_at": int(evaluated.created_at.timestamp()),
        "data_source_config": _config_object(evaluated.data_source_config),
        "testing_criteria": evaluated.testing_criteria,
        "metadata": evaluated.metadata,
        "project_id": evaluated.project_id,
    }


def _config_object(config: dict[str, Any]) -> dict[str, Any]:
    if config["type"] != "custom":
        return {"type": config["type"], "metadata": config.get("metadata") or {}, "schema": _COMPLETION_SCHEMA}
    properties = {"item": config["item_schema"]}
    if config.get("include_sample_schema"):
        properties["sample"] = _SAMPLE_SCHEMA
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "custom", "schema": schema}


def run_object(run: EvalRun) -> EvalRunObject:
    return {
        "id": run.pk,
        "object": "eval.run",
        "eval_id": run.evaluated_id,
        "name": run.name,
        "status": run.status,
        "model": run.model_name,
        "created_at": _seconds(run.created_at),
        "finished_at": _seconds(run.finished_at) if run.finished_at else None,
        "data_source": run.data_source,
        "error": run.error,
        "metadata": run.metadata,
        "per_model_usage": [
            {
                "model_name": one["model_name"],
                "invocation_count": one["invocation_count"],
                "prompt_tokens": one["prompt_tokens"],
                "completion_tokens": one["completion_tokens"],
                "cached_tokens": one["cached_tokens"],
                "total_tokens": one["prompt_tokens"] + one["completion_tokens"],
            }
            for one in run.usage
        ],
        "per_testing_criteria_results": run.criteria_results,
        "report_url": f"{settings.PUBLIC_URL}/evals/{run.evaluated_id}/runs/{run.pk}",
        "result_counts": {
            "total": run.total,
            "passed": run.passed,
            "failed": run.failed,
            "errored": run.errored,
        },
        "max_cost_usd": usd(run.cost_limit_nano),
        "highest_cost_usd": usd(run.highest_cost_nano),
    }


class ItemRenderer:
    """Renders the items of one run, whose data source is read once."""

    def __init__(self, run: EvalRun) -> None:
        self._run, self._source = run, msgspec.convert(run.data_source, DataSource)

    def render(self, row: EvalItem) -> OutputItemObject:
        item, run = msgspec.json.decode(row.source, type=SourceItem), self._run
        return {
            "id": row.pk,
            "object": "eval.run.output_item",
            "eval_id": run.evaluated_id,
            "run_id": run.pk,
            "created_at": _seconds(row.created_at),
            "status": ItemStatus(row.status).value,  # type: ignore[typeddict-item]  # pending ones are not listed
            "datasource_item": item.item,
            "datasource_item_id": row.number,
            "results": msgspec.json.decode(row.results),
            "sample": self._sample(item, msgspec.json.decode(row.answers).get("s")),
        }

    def _sample(self, item: SourceItem, answer: dict[str, Any] | None) -> SampleObject:
        source = self._source if isinstance(self._source, CompletionsSource) else None
        params = (source and source.sampling_params) or SamplingParams()
        text = answer["text"] if answer else (item.sample or {}).get("output_text")
        output: dict[str, Any] = {"role": "assistant", "content": text}
        if answer and answer.get("tool_calls"):
            output["tool_calls"] = answer["tool_calls"]
        has_usage = answer is not None and "input_tokens" in answer
        return {
            "model": self._run.model_name,
            "input": question_of_item(source, item) if source else [],
            "output": [output] if isinstance(text, str) else [],
            "finish_reason": answer.get("finish_reason") if answer else None,
            "max_completion_tokens": (params.max_completion_tokens or DEFAULT_ANSWER_TOKENS) if answer else None,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": params.seed,
            "usage": _usage_object(answer) if answer and has_usage else None,
            "error": answer.get("error") if answer else None,
        }


def _usage_object(answer: dict[str, Any]) -> SampleUsage:
    return {
        "prompt_tokens": answer["input_tokens"],
        "completion_tokens": answer["output_tokens"],
        "cached_tokens": answer["cached_tokens"],
        "total_tokens": answer["input_tokens"] + answer["output_tokens"],
    }


def _seconds(moment: datetime.datetime) -> int:
    return int(moment.timestamp())
