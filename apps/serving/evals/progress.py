"""The steps of a run: read its items and bound its cost, ask its model, ask its graders, and end it.

Tasks of the outbox do each step, so that a killed step is repeated. Between steps, an internal batch sends the
requests.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, groupby
from typing import Any

import msgspec
from django.db import transaction

from apps.accounts.queries import project_of_actor
from apps.batches.files import delete_file
from apps.batches.lifecycle import BatchStatus
from apps.batches.models import Batch, BatchFile
from apps.batches.operations import ENDPOINTS, create_eval_batch
from apps.billing.queries import get_balance
from apps.contracts.chat import split_lines
from apps.core.database.clock import db_now
from apps.core.database.transitions import try_advance
from apps.core.errors import DomainError, QuotaExceeded
from apps.core.money import dollars
from apps.core.objects.store import read_chunks, store
from apps.datasets.intake.versions import storage_left
from apps.serving.evals.costs import Asked, asked_by
from apps.serving.evals.lifecycle import ACTIVE, RUN_TRANSITIONS, EvalPhase, EvalRunStatus
from apps.serving.evals.models import EvalItem, EvalRun
from apps.serving.evals.notices import announce_end
from apps.serving.evals.plans import SAMPLE, Answers, Requests, RunPlan
from apps.serving.evals.quotes import asked_about, cost_of
from apps.serving.evals.results import finish
from apps.serving.evals.sources import SourceItem, read_items

MAX_ATTEMPTS = 8  # at a step, over eight minutes
_ROWS_AT_ONCE = 20
_MAX_LINE_BYTES = 32 * 1024 * 1024  # of a file of answers

# --- The first step ---------------------------------------------------------------------------------------------------


def prepare(run_id: str) -> None:
    """Read the items of a run, bound its cost and ask the first questions. Does nothing if this was done before."""
    unasked = EvalRun.objects.filter(pk=run_id, status__in=ACTIVE, batch=None)
    run = unasked.select_related("evaluated").first()
    if run is None or not _may_try(run):
        return
    try:
        if run.status == EvalRunStatus.QUEUED:
            _prepare(RunPlan(run))
        else:
            _grade(RunPlan(run))
    except DomainError as error:
        fail(run, error.code, error.message)


def _may_try(run: EvalRun) -> bool:
    """Count an attempt at the run's step and return whether it may go on.

    After MAX_ATTEMPTS that failed or were killed, the run fails.
    """
    if run.attempts >= MAX_ATTEMPTS:
        fail(run, "internal_error", "The run failed because of an error of ours. Create it again.")
        return False
    run.attempts += 1
    run.save(update_fields=["attempts"])
    return True


def _prepare(plan: RunPlan) -> None:
    run = plan.run
    metadata = run.evaluated.data_source_config.get("metadata") or {}
    items = read_items(
        plan.source, organization=run.organization_id, project_id=run.evaluated.project_id, metadata=metadata
    )
    rows: list[EvalItem] = []

    def asked() -> Iterator[Asked]:
        for number, item in enumerate(items):
            source, (requests, answers) = msgspec.json.encode(item), asked_about(plan, item)
            row = EvalItem(
                organization_id=run.organization_id, run=run, number=number, source=source.decode(), bytes=len(source),
                answers=msgspec.json.encode(answers).decode(),
            )  # fmt: skip
            rows.append(row)
            yield from requests

    cost = cost_of(plan, asked())
    size, left = sum(row.bytes for row in rows), storage_left(organization=run.organization_id)
    if left is not None and size > left:
        raise QuotaExceeded("Your organization's storage is too small for the items of the run: delete files.")
    _require_affordable(run, cost)
    changes: dict[str, Any] = {"highest_cost_nano": cost, "total": len(rows)}
    questions = ((number, plan.sampling(items[number])) for number, row in enumerate(rows) if row.answers == "{}")
    with transaction.atomic():
        if not try_advance(run, to=EvalRunStatus.IN_PROGRESS, transitions=RUN_TRANSITIONS, **changes):
            return  # it was canceled meanwhile
        EvalItem.objects.bulk_create(rows, batch_size=100)
        _ask(plan, questions, EvalPhase.SAMPLING)
    if run.batch is None:
        _grade(plan)


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
    """Read the answers of a batch and do the run's next step. Does nothing if this was done before."""
    batch = Batch.objects.select_related("input_file", "output_file", "error_file").get(pk=batch_id)
    run = EvalRun.objects.filter(batch=batch, status=EvalRunStatus.IN_PROGRESS).first()
    if run is not None and _may_try(run):
        _record_answers(run, batch)
        if reason := _failure_of(batch):
            finish(run=run, error=reason)
        elif run.phase == EvalPhase.SAMPLING:
            _grade(RunPlan(run))
        else:
            finish(run=run)
    for file in (batch.input_file, batch.output_file, batch.error_file):
        if file is not None and file.deleted_at is None:
            delete_file(file=file, by="system", now=db_now())


def _failure_of(batch: Batch) -> dict[str, str] | None:
    """Return the reason why the batch did not send all its requests; None if it did."""
    if batch.status == BatchStatus.COMPLETED and not batch.stop:
        return None
    late = {"code": f"batch_{batch.status}", "message": "The requests had no answers in time."}
    reason = batch.stop or (batch.errors[0] if batch.errors else late)
    return {"code": str(reason["code"]), "message": str(reason["message"])}


def _grade(plan: RunPlan) -> None:
    """Ask the grading models. End the run if there are none, or if it would cost more than its limit."""
    run, error = plan.run, None
    try:
        _require_within_limit(run, cost_of(plan, _asked_so_far(plan)))
        with transaction.atomic():
            is_current = {"pk": run.pk, "status": EvalRunStatus.IN_PROGRESS, "batch": run.batch_id}
            if not EvalRun.objects.select_for_update().filter(**is_current).exists():
                return  # canceled, or another process was first
            questions = ((row.number, plan.grading(item, answers)[0]) for row, item, answers in _answered(plan))
            if _ask(plan, questions, EvalPhase.GRADING):
                return
    except DomainError as refused:
        error = {"code": refused.code, "message": refused.message}
    finish(run=run, error=error)


def _answered(plan: RunPlan) -> Iterator[tuple[EvalItem, SourceItem, Answers]]:
    """Yield the items that have all their answers."""
    for row in plan.run.items.order_by("number").iterator(_ROWS_AT_ONCE):
        item, answers = msgspec.json.decode(row.source, type=SourceItem), msgspec.json.decode(row.answers)
        own = [answers.get(key) for key in (SAMPLE, *plan.sampled)]
        if not any(answer.get("error") for answer in own if answer) and plan.sampled.keys() <= answers.keys():
            yield row, item, answers


def _asked_so_far(plan: RunPlan) -> Iterator[Asked]:
    """Yield the requests for answers that were sent, and those that grade them.

    If a grading request cannot be made, its item gets the reason.
    """
    for row, item, answers in _answered(plan):
        for key, name in plan.sampled.items():
            yield Asked(name, answers[key]["input_tokens"], answers[key]["output_tokens"])
        requests, refused = plan.grading(item, answers)
        if refused:
            EvalItem.objects.filter(pk=row.pk).update(answers=msgspec.json.encode(answers | refused).decode())
        yield from map(asked_by, requests.values())


def _ask(plan: RunPlan, requests: Iterable[tuple[int, Requests]], phase: EvalPhase) -> bool:
    """Send the requests in a batch; return whether there are any."""
    lines = _lines(requests)
    first = next(lines, None)
    if first is None:
        return False
    run = plan.run
    run.phase, run.attempts = phase, 0
    own = project_of_actor(organization=run.organization_id, actor=run.created_by)  # a key pays in its own project
    run.batch = create_eval_batch(
        organization=run.organization_id, project_id=own or run.evaluated.project_id, run_id=run.pk,
        lines=chain([first], lines), by=run.created_by, now=db_now(),
    )  # fmt: skip
    run.save(update_fields=["batch", "phase", "attempts"])
    return True


def _lines(requests: Iterable[tuple[int, Requests]]) -> Iterator[bytes]:
    for number, bodies in requests:
        for key, body in bodies.items():
            line = {"custom_id": f"{number}.{key}", "method": "POST", "url": ENDPOINTS[0], "body": body}
            yield msgspec.json.encode(line) + b"\n"


def _record_answers(run: EvalRun, batch: Batch) -> None:
    """Store the answers of a batch with their items. Repeating it changes nothing."""
    for file in (batch.output_file, batch.error_file):
        for number, found in groupby(_answers_of(file), key=lambda one: int(one[0].partition(".")[0])):
            row = run.items.get(number=number)
            answers = msgspec.json.decode(row.answers)
            answers |= {custom_id.partition(".")[2]: answer for custom_id, answer in found}
            row.answers = msgspec.json.encode(answers).decode()
            row.bytes = len(row.source.encode()) + len(row.answers.encode())
            row.save(update_fields=["answers", "bytes"])


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


def fail(run: EvalRun, code: str, message: str) -> None:
    """End a run that cannot begin."""
    error = {"code": code, "message": message}
    with transaction.atomic():
        if try_advance(run, to=EvalRunStatus.FAILED, transitions=RUN_TRANSITIONS, error=error, finished_at=db_now()):
            announce_end(run)
