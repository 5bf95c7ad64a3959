"""Bodies of the calls under /v1/fine_tuning/jobs, and the domain's request that they mean.

OpenAI's fields, and ours beside them, sent in `extra_body`: `lora {rank, alpha, dropout, target_modules, use_dora,
use_rslora}`, `quantization "nf4"` (QLoRA), `recipe {method, learning_rate, epochs, …}` with the ecosystem's names,
`compute {pool, gpu_count, node_count}`, `budget {max_cost_usd, quoted_max_usd}`, and `dry_run`.
"""

import hashlib
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from apps.contracts.evaluation import EvaluationPlan, Grader, GraderKind, problem_of
from apps.contracts.hyperparameters import Objective
from apps.core.errors import InvalidValue
from apps.estimates.machines import MAX_NODES
from apps.finetuning.jobs.creation import JobRequest
from apps.interfaces.api.requests.amounts import read_nano
from apps.interfaces.api.requests.recipes import (
    LoraChoice,
    Recipe,
    Setting,
    as_recipe,
    parse_method,
    parse_objective,
    settings_of,
)

Auto = Literal["auto"] | float | int | None


class OpenAiHyperparameters(msgspec.Struct, forbid_unknown_fields=True):
    n_epochs: Auto = "auto"
    batch_size: Auto = "auto"
    learning_rate_multiplier: Auto = "auto"


class Supervised(msgspec.Struct, forbid_unknown_fields=True):
    hyperparameters: OpenAiHyperparameters | None = None


class PreferenceHyperparameters(OpenAiHyperparameters, forbid_unknown_fields=True):
    beta: Auto = "auto"


class Preference(msgspec.Struct, forbid_unknown_fields=True):
    hyperparameters: PreferenceHyperparameters | None = None


class JobMethod(msgspec.Struct, forbid_unknown_fields=True):
    """`text` (continued pre-training on plain text) and `orpo` (preferences without a reference) are ours."""

    type: str = "supervised"
    supervised: Supervised | None = None
    dpo: Preference | None = None
    orpo: Preference | None = None
    text: Supervised | None = None
    reinforcement: Annotated[dict[str, Any], msgspec.Meta(description="Not offered.")] | None = None


class GraderChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: GraderKind = GraderKind.EXACT_MATCH
    operation: str = "eq"
    reference: str | None = None
    pattern: str = ""
    schema: dict[str, Any] = {}
    model: str = ""
    instructions: str = ""


class EvaluationChoice(msgspec.Struct, forbid_unknown_fields=True):
    """How base and tuned model are compared on the validation file after training."""

    grader: GraderChoice = msgspec.field(default_factory=GraderChoice)
    max_rows: Annotated[int, msgspec.Meta(ge=1, le=2_000)] = 500
    max_answers: Annotated[int, msgspec.Meta(ge=0, le=500)] = 100


class ComputeChoice(msgspec.Struct, forbid_unknown_fields=True):
    """`pool` may be the id of an estimate's option, such as "h200:4". If it is missing, the cheapest option is used.

    `node_count` machines of the pool share the `gpu_count` GPUs evenly, and train together. They are claimed together
    or not at all.
    """

    pool: str | None = None
    gpu_count: Annotated[int, msgspec.Meta(ge=1, le=64)] | None = None
    node_count: Annotated[int, msgspec.Meta(ge=1, le=MAX_NODES)] = 1


_Dollars = str | int | float | None


class CapChoice(msgspec.Struct, forbid_unknown_fields=True):
    max_cost_usd: _Dollars = None


class BudgetChoice(CapChoice, forbid_unknown_fields=True):
    quoted_max_usd: Annotated[
        _Dollars,
        msgspec.Meta(description="The `hold_usd` that you saw. If the maximum is higher by now, the job is refused."),
    ] = None


class CreateJob(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/fine_tuning/jobs."""

    model: Annotated[str, msgspec.Meta(description="Required, unless the project has a base model.")] | None = None
    training_file: str
    validation_file: str | None = None
    suffix: str | None = None
    seed: int | None = None
    metadata: dict[str, str] | None = None
    integrations: list[dict[str, Any]] | None = None
    hyperparameters: OpenAiHyperparameters | None = None
    method: JobMethod | None = None
    lora: LoraChoice | None = None
    quantization: str | None = None
    recipe: Recipe | None = None
    evaluation: EvaluationChoice | None = None
    exports: list[Literal["merged_16bit", "gguf"]] | None = None
    compute: ComputeChoice | None = None
    budget: BudgetChoice | None = None
    dry_run: bool = False
    needed_by: int | str | None = None


class ResumeJob(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST …/jobs/{id}/resume, where OpenAI's clients send none."""

    budget: CapChoice | None = None


class RetryJob(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST …/jobs/{id}/retry."""

    budget: BudgetChoice | None = None


class MoveJob(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST …/jobs/{id}/moves. `option` is a pool, or a pool and its GPUs, such as h200:4.

    `node_count` machines share the GPUs, by default as many as before. `quoted_max_usd` confirms the option's
    `maximum_usd`.
    """

    option: str
    quoted_max_usd: str | float
    node_count: int | None = None


def parse_request(body: CreateJob, data: object, *, is_retry: bool = False) -> JobRequest:
    """Return the domain's request; `data` is the body as sent. Raises InvalidValue that names the field."""
    objective = parse_objective(body.method.type if body.method else None)
    _require_one_method(body.method)
    method = parse_method(body.quantization, (body.recipe or {}).get("method"))
    return JobRequest(
        base_model=body.model or "",
        training_file=body.training_file,
        validation_file=body.validation_file,
        method=method,
        objective=objective,
        hyperparameters=as_recipe(_settings(body)),
        pool=body.compute.pool if body.compute else None,
        gpu_count=body.compute.gpu_count if body.compute else None,
        node_count=body.compute.node_count if body.compute else 1,
        spend_cap_nano=cap_nano(body.budget),
        shown_max_nano=quoted_max_nano(body.budget),
        suffix=body.suffix,
        seed=body.seed,
        metadata=body.metadata or {},
        integrations=body.integrations or (),
        evaluation=evaluation_plan(body.evaluation),
        exports=body.exports or (),
        fingerprint=hashlib.sha256(msgspec.json.encode(data, order="sorted")).hexdigest(),
        is_retry=is_retry,
    )


def _require_one_method(method: JobMethod | None) -> None:
    """Raise InvalidValue if settings of a method other than the chosen one were sent, because they have no effect."""
    if method is None:
        return
    names = [field.name for field in msgspec.structs.fields(method) if field.name != "type"]
    for name in names:
        if name != method.type and getattr(method, name) is not None:
            text = f"'method.type' is '{method.type}': send 'method.{method.type}' in place of 'method.{name}'."
            raise InvalidValue(text, param=f"method.{name}")


def _settings(body: CreateJob) -> Iterator[Setting]:
    """Yield every setting of the recipe in the body. As at OpenAI, those of `method` replace the older ones."""
    kind = body.method.type if body.method else Objective.SUPERVISED
    of_method = getattr(body.method, kind, None)
    if of_method and of_method.hyperparameters:
        yield from _settings_of_openai(f"method.{kind}.hyperparameters", of_method.hyperparameters, kind)
    else:
        yield from _settings_of_openai("hyperparameters", body.hyperparameters, Objective.SUPERVISED)
    yield Setting("seed", "seed", body.seed)
    yield from settings_of(body.lora, body.recipe or {})


def _settings_of_openai(at: str, given: OpenAiHyperparameters | None, kind: str) -> Iterator[Setting]:
    if given is None:
        return
    for field in msgspec.structs.fields(given):
        name = {"n_epochs": "epochs", "beta": f"{kind}_beta"}.get(field.name, field.name)
        yield Setting(name, f"{at}.{field.name}", getattr(given, field.name))


def evaluation_plan(choice: EvaluationChoice | None) -> EvaluationPlan | None:
    """Return the plan for the worker; None for the default plan. Raises InvalidValue."""
    if choice is None:
        return None
    asked = choice.grader
    grader = Grader(
        kind=asked.type,
        operation=asked.operation,
        reference=asked.reference,
        pattern=asked.pattern,
        schema=asked.schema,
        model=asked.model,
        instructions=asked.instructions,
    )
    if problem := problem_of(grader):
        raise InvalidValue(problem, param="evaluation.grader")
    return EvaluationPlan(grader=grader, max_rows=choice.max_rows, max_answers=choice.max_answers)


def cap_nano(budget: CapChoice | None) -> int | None:
    """Return the requested spend cap in nano-USD; None if there is none. Raises InvalidValue."""
    return _nano("budget.max_cost_usd", budget.max_cost_usd) if budget else None


def quoted_max_nano(budget: BudgetChoice | None) -> int | None:
    """Return the maximum that the customer was shown in nano-USD; None if it was not sent. Raises InvalidValue."""
    return _nano("budget.quoted_max_usd", budget.quoted_max_usd) if budget else None


def shown_max_nano(body: MoveJob) -> int:
    """Return the maximum that the customer was shown for the option, in nano-USD. Raises InvalidValue."""
    return _nano("quoted_max_usd", body.quoted_max_usd) or 0


def _nano(param: str, amount: _Dollars) -> int | None:
    return None if amount is None else read_nano(param, amount)
