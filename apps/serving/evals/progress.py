"""The steps of a run: its items are read and its cost bounded, its model is asked, its graders are asked, it ends.

Tasks of the outbox take each step, so that a step which was killed is repeated. Between them, an internal batch sends
the requests.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from django.db import transaction

from apps.batches.files import delete_file, storage_left
from apps.batches.lifecycle import BatchStatus
from apps.batches.models import Batch, BatchFile
from apps.batches.operations import ENDPOINTS, create_eval_batch
from apps.billing.queries import get_balance
from apps.contracts.chat import split_lines
from apps.contracts.evaluation.graders import MAX_CHARACTERS, TextTooLong, UnknownVariable
from apps.core.database.clock import db_now
from apps.core.database.transitions import try_advance
from apps.core.errors import DomainError, QuotaExceeded
from apps.core.money import dollars
from apps.core.objects.store import read_chunks, store
from apps.serving.evals.costs import Asked, highest_cost_nano, most_tokens, require_model
from apps.serving.evals.criteria import (
    LABEL_TOKENS,
    Criterion,
    ModelCriterion,
    PairwiseCriterion,
    grading_requests,
    models_of,
)
from apps.serving.evals.lifecycle import RUN_TRANSITIONS, EvalPhase, EvalRunStatus
from apps.serving.evals.models import EvalItem, EvalRun
from apps.serving.evals.results import finish
from apps.serving.evals.sources import (
    DEFAULT_ANSWER_TOKENS,
    CompletionsSource,
    DataSource,
    SourceItem,
    names_with,
    question_of,
    read_items,
    sampling_request,
)

SAMPLE = "s"  # the key of the answer that is graded
_MAX_LINE_BYTES = 32 * 1024 * 1024  # of a file of answers
_UNKNOWN = {"text": ""}
_TOO_LONG = "A text has more than 8,000 characters once its variables are filled in."

Requests = dict[str, dict[str, object]]  # bodies by the key of their answer


class _RunPlan:
    """What a run asks: its source, criteria and models."""

    def __init__(self, run: EvalRun) -> None:
        self.run = run
        self.source = msgspec.convert(run.data_source, DataSource)
        self.criteria: list[Criterion] = msgspec.convert(run.testing_criteria, list[Criterion])

    @property
    def answer_tokens(self) -> int:
        params = self.source.sampling_params if isinstance(self.source, CompletionsSource) else None
        return (params and params.max_completion_tokens) or DEFAULT_ANSWER_TOKENS

    def model_of(self, key: str) -> str:
        """Return the model that is asked for the answer with this key: the run's, or one that it is compared with."""
        criterion = None if key == SAMPLE else self.criteria[int(key[1:])]
        return criterion.baseline_model if isinstance(criterion, PairwiseCriterion) else self.run.model_name

    def sampling(self, item: SourceItem) -> Requests:
        """Return the requests for the run's answer and for those it is compared with.

        Raises UnknownVariable, TextTooLong.
        """
        if not isinstance(self.source, CompletionsSource):
            return {}
        asked = {SAMPLE: self.run.model_name} if self.run.model_name else {}
        for number, criterion in enumerate(self.criteria):
            if isinstance(criterion, PairwiseCriterion):
                asked[f"b{number}"] = criterion.baseline_model
        if not asked:
            return {}
        messages = question_of(self.source, item)
        return {key: sampling_request(self.source, model, messages) for key, model in asked.items()}

    def grading(self, item: SourceItem, answers: Mapping[str, Any]) -> Requests:
        """Return the requests that grade the item's answer. Raises UnknownVariable, TextTooLong."""
        requests: Requests = {}
        for number in range(len(self.criteria)):
            requests |= self.grading_by(number, item, answers)
        return requests

    def grading_by(self, number: int, item: SourceItem, answers: Mapping[str, Any]) -> Requests:
        """Return the requests of one criterion. Raises UnknownVariable, TextTooLong."""
        names = names_with(item, answers[SAMPLE]["text"] if SAMPLE in answers else None)
        criterion, request, baseline = self.criteria[number], None, ""
        if isinstance(criterion, PairwiseCriterion) and isinstance(self.source, CompletionsSource):
            request, baseline = question_of(self.source, item), answers[f"b{number}"]["text"]
        return grading_requests(number, criterion, names, request=request, baseline=baseline)


# --- The first step ---------------------------------------------------------------------------------------------------


def prepare(run_id: str) -> None:
    """Read the items of a run, bound its cost and ask the first questions. Does nothing if that is done."""
    run = EvalRun.objects.select_related("evaluated").filter(pk=run_id, status=EvalRunStatus.QUEUED).first()
    if run is None:
        return
    try:
        _prepare(_RunPlan(run))
    except DomainError as error:
        fail(run, error.code, error.message)


def _prepare(plan: _RunPlan) -> None:
    run = plan.run
    metadata = run.evaluated.data_source_config.get("metadata") or {}
    items = read_items(plan.source, organization=run.organization_id, metadata=metadata)
    rows, requests = [], {}
    for number, item in enumerate(items):
        source = msgspec.json.encode(item)
        row = EvalItem(
            organization_id=run.organization_id, run=run, number=number, source=source.decode(), bytes=len(source)
        )
        try:
            requests[number] = plan.sampling(item)
        except (UnknownVariable, TextTooLong) as error:
            row.answers = msgspec.json.encode({SAMPLE: _no_answer(error)}).decode()
        rows.append(row)
    size, left = sum(row.bytes for row in rows), storage_left(organization=run.organization_id)
    if left is not None and size > left:
        raise QuotaExceeded("Your organization's storage is too small for the items of the run: delete files.")
    cost = _highest_cost(plan, items, requests)
    _require_affordable(run, cost)
    changes: dict[str, Any] = {"highest_cost_nano": cost, "total": len(rows)}
    with transaction.atomic():
        if not try_advance(run, to=EvalRunStatus.IN_PROGRESS, transitions=RUN_TRANSITIONS, **changes):
            return  # it was canceled meanwhile
        EvalItem.objects.bulk_create(rows)
        _ask(plan, requests, EvalPhase.SAMPLING)
    if run.batch is None:
        _grade(plan)


def _highest_cost(plan: _RunPlan, items: list[SourceItem], requests: Mapping[int, Requests]) -> int:
    """Return the most that all requests of the run should cost, those of the graders included."""

    def asked() -> Iterator[Asked]:
        for number, item in enumerate(items):
            bodies = requests.get(number, {})
            yield from (Asked(str(body["model"]), most_tokens(body), plan.answer_tokens) for body in bodies.values())
            yield from _gradings(plan, item)

    return _cost_of(plan, asked())


def _cost_of(plan: _RunPlan, asked: Iterable[Asked]) -> int:
    run = plan.run
    names = {each for _, each in models_of(plan.criteria)} | ({run.model_name} if run.model_name else set())
    models = {each: require_model(organization=run.organization_id, name=each, param="model") for each in names}
    return highest_cost_nano(organization=run.organization_id, base_models=models, asked=asked)


def _gradings(plan: _RunPlan, item: SourceItem) -> Iterator[Asked]:
    """Yield the requests that grade an answer which is not known yet. It counts four tokens for each of its own."""
    unknown = {f"b{number}": _UNKNOWN for number, one in enumerate(plan.criteria) if isinstance(one, PairwiseCriterion)}
    if plan.run.model_name:
        unknown[SAMPLE] = _UNKNOWN
    for number, criterion in enumerate(plan.criteria):
        if isinstance(criterion, ModelCriterion):
            spare = _places_of(criterion) * plan.answer_tokens * 4 if unknown else 0
            for body in _gradable(plan, item, unknown, number):
                yield Asked(str(body["model"]), most_tokens(body) + spare, int(str(body["max_completion_tokens"])))


def _gradable(plan: _RunPlan, item: SourceItem, answers: Mapping[str, Any], number: int) -> list[dict[str, object]]:
    try:
        return list(plan.grading_by(number, item, answers).values())
    except (UnknownVariable, TextTooLong):  # with the answer it may be known
        longest = {"role": "user", "content": "x" * MAX_CHARACTERS}
        criterion = plan.criteria[number]
        assert isinstance(criterion, ModelCriterion)
        return [{"model": criterion.model, "messages": [longest], "max_completion_tokens": LABEL_TOKENS}]


def _places_of(criterion: ModelCriterion) -> int:
    """Return how many answers a question of this criterion repeats."""
    return 2 if isinstance(criterion, PairwiseCriterion) else msgspec.json.encode(criterion).count(b"{{")


def _require_affordable(run: EvalRun, cost_nano: int) -> None:
    _require_within_limit(run, cost_nano)
    available = get_balance(organization=run.organization_id).available_nano
    if cost_nano > available:
        raise QuotaExceeded(
            f"The run can cost {dollars(cost_nano)}, and {dollars(available)} is available: add credit, or use fewer "
            "items or fewer tokens."
        )


def _require_within_limit(run: EvalRun, cost_nano: int) -> None:
    if run.cost_limit_nano is not None and cost_nano > run.cost_limit_nano:
        raise QuotaExceeded(
            f"The run can cost {dollars(cost_nano)}, more than its max_cost_usd of {dollars(run.cost_limit_nano)}: "
            "use fewer items or fewer tokens, or raise max_cost_usd."
        )


# --- Between the batches ----------------------------------------------------------------------------------------------


def go_on(batch_id: str) -> None:
    """Read the answers of a batch and take the run's next step. Does nothing if that is done."""
    batch = Batch.objects.select_related("input_file", "output_file", "error_file").get(pk=batch_id)
    run = EvalRun.objects.filter(batch=batch, status=EvalRunStatus.IN_PROGRESS).first()
    if run is not None:
        _record_answers(run, batch)
        if batch.stop or batch.status != BatchStatus.COMPLETED:
            reason = batch.stop or {"code": f"batch_{batch.status}", "message": "The requests had no answers in time."}
            finish(run=run, error={"code": str(reason["code"]), "message": str(reason["message"])})
        elif run.phase == EvalPhase.SAMPLING:
            _grade(_RunPlan(run))
        else:
            finish(run=run)
    for file in (batch.input_file, batch.output_file, batch.error_file):
        if file is not None and file.deleted_at is None:
            delete_file(file=file, by="system", now=db_now())


def _grade(plan: _RunPlan) -> None:
    """Ask the models that grade; end the run if there are none, or if it would cost more than its limit."""
    requests: dict[int, Requests] = {}
    asked: list[Asked] = []
    for row in plan.run.items.order_by("number"):
        item, answers = msgspec.json.decode(row.source, type=SourceItem), msgspec.json.decode(row.answers)
        if any(answer.get("error") for answer in answers.values()):
            continue
        asked += [Asked(plan.model_of(key), one["input_tokens"], one["output_tokens"]) for key, one in answers.items()]
        try:
            requests[row.number] = plan.grading(item, answers)
        except (UnknownVariable, TextTooLong):
            continue  # the result says so
        bodies = requests[row.number].values()
        asked += [Asked(str(b["model"]), most_tokens(b), int(str(b["max_completion_tokens"]))) for b in bodies]
    run, error = plan.run, None
    try:
        _require_within_limit(run, _cost_of(plan, asked))
        with transaction.atomic():
            is_current = {"pk": run.pk, "status": EvalRunStatus.IN_PROGRESS, "batch": run.batch_id}
            if not EvalRun.objects.select_for_update().filter(**is_current).exists():
                return  # canceled, or another process was first
            if _ask(plan, requests, EvalPhase.GRADING):
                return
    except DomainError as refused:
        error = {"code": refused.code, "message": refused.message}
    finish(run=run, error=error)


def _ask(plan: _RunPlan, requests: Mapping[int, Requests], phase: EvalPhase) -> bool:
    """Send the requests in a batch; return whether there are any."""
    if not any(requests.values()):
        return False
    run = plan.run
    run.phase = phase
    run.batch = create_eval_batch(
        organization=run.organization_id, run_id=run.pk, lines=_lines(requests), by=run.created_by, now=db_now()
    )
    run.save(update_fields=["batch", "phase"])
    return True


def _lines(requests: Mapping[int, Requests]) -> Iterator[bytes]:
    for number, bodies in requests.items():
        for key, body in bodies.items():
            line = {"custom_id": f"{number}.{key}", "method": "POST", "url": ENDPOINTS[0], "body": body}
            yield msgspec.json.encode(line) + b"\n"


def _record_answers(run: EvalRun, batch: Batch) -> None:
    """Keep the answers of a batch with their items. Repeating it changes nothing."""
    rows = {row.number: row for row in run.items.all()}
    answers = {number: msgspec.json.decode(row.answers) for number, row in rows.items()}
    for file in (batch.output_file, batch.error_file):
        for custom_id, answer in _answers_of(file):
            place, _, key = custom_id.partition(".")
            answers[int(place)][key] = answer
    changed = []
    for number, row in rows.items():
        row.answers = msgspec.json.encode(answers[number]).decode()
        row.bytes = len(row.source.encode()) + len(row.answers.encode())
        changed.append(row)
    EvalItem.objects.bulk_update(changed, ["answers", "bytes"], batch_size=100)


def _answers_of(file: BatchFile | None) -> Iterator[tuple[str, dict[str, object]]]:
    if file is None:
        return
    with store().open_stream(file.object_key) as stream:
        for line in split_lines(read_chunks(stream), max_line_bytes=_MAX_LINE_BYTES):
            found = msgspec.json.decode(line.data, type=dict[str, Any])
            yield found["custom_id"], _answer_of(found)


def _answer_of(line: Mapping[str, Any]) -> dict[str, object]:
    body = (line["response"] or {}).get("body") or {}
    if line["error"] or body.get("error"):
        error = line["error"] or body["error"]
        return {"text": "", "error": {"code": str(error.get("code")), "message": str(error.get("message"))[:500]}}
    choice, usage = body["choices"][0], body["usage"]
    return {
        "text": choice["message"].get("content") or "",
        "tool_calls": choice["message"].get("tool_calls"),
        "finish_reason": choice["finish_reason"],
        "model": body["model"],
        "input_tokens": usage["prompt_tokens"],
        "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        "output_tokens": usage["completion_tokens"],
    }


def _no_answer(error: UnknownVariable | TextTooLong) -> dict[str, object]:
    text = _TOO_LONG if isinstance(error, TextTooLong) else f"There is no {str(error)[:200]}."
    return {"text": "", "error": {"code": "invalid_item", "message": text}}


def fail(run: EvalRun, code: str, message: str) -> None:
    """End a run that cannot begin."""
    error = {"code": code, "message": message}
    try_advance(run, to=EvalRunStatus.FAILED, transitions=RUN_TRANSITIONS, error=error, finished_at=db_now())
