"""The requests and the maximum cost of a run, before it is created and again before it sends anything."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from apps.accounts.models import Organization
from apps.contracts.evaluation.graders import MAX_CHARACTERS, TextTooLong, UnknownVariable
from apps.core.database.tenancy import id_of
from apps.core.errors import InvalidValue
from apps.serving.evals.costs import Asked, asked_by, highest_cost_nano, require_model
from apps.serving.evals.criteria import (
    MAX_MESSAGES_CHARACTERS,
    Criterion,
    ModelCriterion,
    PairwiseCriterion,
    SentCriterion,
    check_criteria,
    label_tokens,
    models_of,
)
from apps.serving.evals.models import EvalRun
from apps.serving.evals.plans import SAMPLE, Answers, RunPlan, no_answer
from apps.serving.evals.sources import CompletionsSource, DataSource, SourceItem, check_source, read_items

MAX_REQUEST_BYTES = 64 * 1024 * 1024  # of all requests of a run, the graders' included
_UNKNOWN = {"text": ""}


@dataclass(frozen=True, kw_only=True)
class RunQuote:
    """A run that is not created yet: its items, those that cannot be asked about, its requests, and its maximum cost.

    `reason` is that of the first item that no model can be asked about.
    """

    items: int
    unasked: int
    reason: str
    requests: int
    highest_cost_nano: int


def quote_run(
    *, organization: Organization | str, project_id: str, criteria: Sequence[SentCriterion], source: DataSource
) -> RunQuote:
    """Return the requests and the cost of a run with these criteria, of an eval in the project. Nothing is stored.

    Raises InvalidValue, UnknownFile, PriceMissing.
    """
    checked = check_criteria(criteria)
    model_name = check_run(organization=organization, criteria=checked, source=source)
    plan = RunPlan(
        EvalRun(
            organization_id=id_of(organization),
            model_name=model_name,
            data_source=msgspec.to_builtins(source),
            testing_criteria=msgspec.to_builtins(checked),
        )
    )
    items = read_items(plan.source, organization=organization, project_id=project_id, metadata={})
    reasons: list[str] = []
    requests = 0

    def asked() -> Iterator[Asked]:
        nonlocal requests
        for item in items:
            each, answers = asked_about(plan, item)
            reasons.extend(answer["error"]["message"] for answer in answers.values())
            requests += len(each)
            yield from each

    cost = cost_of(plan, asked())
    return RunQuote(
        items=len(items), unasked=len(reasons), reason=next(iter(reasons), ""), requests=requests,
        highest_cost_nano=cost,
    )  # fmt: skip


def check_run(*, organization: Organization | str, criteria: list[Criterion], source: DataSource) -> str:
    """Return the name of the model that a run asks; "" if it asks none. Raises InvalidValue and UnknownFile."""
    check_source(source, organization=organization)
    model_name = (source.model or "") if isinstance(source, CompletionsSource) else ""
    if any(isinstance(one, PairwiseCriterion) for one in criteria) and not isinstance(source, CompletionsSource):
        raise InvalidValue("A pairwise_model criterion needs a data source of type 'completions'.", param="data_source")
    asked = [("data_source.model", model_name)] if model_name else []
    for place, each in [*asked, *models_of(criteria)]:
        require_model(organization=organization, name=each, param=place)
    return model_name


def asked_about(plan: RunPlan, item: SourceItem) -> tuple[list[Asked], Answers]:
    """Return the requests about an item, and the placeholder for its answer if its question cannot be made."""
    try:
        requests = plan.sampling(item)
    except (UnknownVariable, TextTooLong) as error:
        return [], {SAMPLE: no_answer(error)}
    return [*map(asked_by, requests.values()), *gradings(plan, item)], {}


def cost_of(plan: RunPlan, asked: Iterable[Asked]) -> int:
    """Return the maximum cost of the requests. Raises InvalidValue if they are too large together."""
    organization = plan.run.organization_id
    return highest_cost_nano(organization=organization, base_models=plan.models, asked=_bounded(asked))


def _bounded(asked: Iterable[Asked]) -> Iterator[Asked]:
    size = 0
    for one in asked:
        size += one.bytes
        if size > MAX_REQUEST_BYTES:
            raise InvalidValue(
                f"The requests of the run exceed {MAX_REQUEST_BYTES // 1024**2} MiB: use fewer items, fewer criteria "
                "or shorter templates.",
                param="data_source",
            )
        yield one


def gradings(plan: RunPlan, item: SourceItem) -> Iterator[Asked]:
    """Yield the requests that grade an answer that does not exist yet. Each of its tokens counts as four."""
    unknown = dict.fromkeys(plan.sampled, _UNKNOWN)
    for number, criterion in enumerate(plan.criteria):
        if isinstance(criterion, ModelCriterion):
            spare = _places_of(criterion) * plan.answer_tokens * 4 if unknown else 0
            try:
                for body in plan.grading_by(number, item, unknown).values():
                    yield asked_by(body, spare_tokens=spare)
            except (UnknownVariable, TextTooLong):  # with the answer it may be known
                # All messages that the criterion can ask. A character has at most four tokens.
                count = 4 if isinstance(criterion, PairwiseCriterion) else len(criterion.input)
                most = min(count * MAX_CHARACTERS, MAX_MESSAGES_CHARACTERS)
                yield Asked(criterion.model, 4 * most, label_tokens(criterion))


def _places_of(criterion: ModelCriterion) -> int:
    """Return the number of answers that a question of this criterion repeats."""
    return 2 if isinstance(criterion, PairwiseCriterion) else msgspec.json.encode(criterion).count(b"{{")
