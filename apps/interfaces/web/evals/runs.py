"""One run of an eval with its progress and its graded items, and the action that cancels runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from django.http import HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils.cache import patch_vary_headers
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods, require_safe

from apps.accounts.queries import name_of_actor
from apps.accounts.roles import Permission
from apps.batches.completions.queries import text_of
from apps.core.database.clock import db_now
from apps.core.database.keyset import read_page
from apps.core.errors import NotFound
from apps.core.http.confirmation import AffectedRow, ConfirmedAction, confirm
from apps.core.messages.translation import later
from apps.core.objects.page_tables import rows_at_once
from apps.core.templatetags.ui import number
from apps.interfaces.web.evals.run_forms import can_run_again
from apps.interfaces.web.evals.shown import shown_run
from apps.interfaces.web.shell.access import OrganizationRequest, may_write, organization_view
from apps.serving.evals import operations, queries
from apps.serving.evals.lifecycle import ACTIVE, EvalPhase, EvalRunStatus, ItemStatus
from apps.serving.evals.models import EvalItem, EvalRun
from apps.serving.evals.plans import SAMPLE
from apps.serving.evals.sources import SourceItem

_PAGE = 20
_MOST_CHARACTERS = 2_000  # of a text that a page shows
_STATUSES = {
    ItemStatus.FAIL: later("Failed"),
    ItemStatus.PASS: later("Passed"),
    ItemStatus.ERROR: later("Errors"),
}


@dataclass(frozen=True, kw_only=True)
class ShownItem:
    """A graded item as text. `grades` are the results of each criterion; `error` says why it has no answer."""

    item: EvalItem
    question: str
    answer: str
    reference: str
    error: str
    grades: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class RunStep:
    """The present step of a run in words, and its progress in percent."""

    words: str
    percent: int


@require_safe
@organization_view(Permission.VIEW, is_of_any_project=True)
def detail(request: OrganizationRequest, eval_id: str, run_id: str) -> HttpResponse:
    """Show a run with its items. htmx reloads its state until it has ended."""
    evaluated = queries.get_eval(organization=request.organization, id=eval_id)
    run = queries.get_run(evaluated=evaluated, id=run_id)
    status = request.GET.get("status", "")
    status = status if status in _STATUSES else ""
    found = queries.list_items(run=run)
    found, size = found.filter(status=status) if status else found, rows_at_once(request, "rows", _PAGE)
    page = read_page(found, request.GET, order=("number", "id"), size=size)
    address = reverse("web:eval_run", args=[evaluated.pk, run.pk])
    asked = f"status={status}&" if status else ""
    may_change = may_write(request, Permission.INFERENCE, evaluated.project_id)
    context = {
        "evaluated": evaluated,
        "shown": shown_run(run),
        "owner": name_of_actor(organization=request.organization, actor=run.created_by),
        "step": _step(run) if run.status in ACTIVE else None,
        "items": [_shown(row) for row in page.rows],
        "tabs": [
            {"label": label, "url": f"{address}?status={value}" if value else address, "current": value == status}
            for value, label in [("", gettext("All")), *((each.value, label) for each, label in _STATUSES.items())]
        ],
        "previous": f"{address}?{asked}before={page.previous['before']}" if page.has_previous else "",
        "next": f"{address}?{asked}after={page.next['after']}" if page.has_next else "",
        "can_be_cancelled": may_change and run.status in ACTIVE,
        "can_run_again": may_change and can_run_again(run),
    }
    response = render(request, "evals/run.html" + ("#state" if request.htmx else ""), context)
    patch_vary_headers(response, ["HX-Request"])
    return response


def _step(run: EvalRun) -> RunStep:
    """Return the present step: reading rows, preparing requests, collecting answers or collecting grades."""
    batch = run.batch
    if batch is None or not batch.total:
        is_read = run.status != EvalRunStatus.QUEUED
        return RunStep(words=gettext("Preparing the requests") if is_read else gettext("Reading the rows"), percent=0)
    done = batch.completed + batch.failed
    text = (
        gettext("%(done)s of %(total)s answers")
        if run.phase == EvalPhase.SAMPLING
        else gettext("%(done)s of %(total)s grades")
    )
    return RunStep(words=text % {"done": number(done), "total": number(batch.total)}, percent=100 * done // batch.total)


def _shown(row: EvalItem) -> ShownItem:
    item = msgspec.json.decode(row.source, type=SourceItem)
    answer = msgspec.json.decode(row.answers).get(SAMPLE) or {}
    given = (item.sample or {}).get("output_text", "")
    return ShownItem(
        item=row,
        question=_question_of(item.item)[:_MOST_CHARACTERS],
        answer=str(answer.get("text", given))[:_MOST_CHARACTERS],
        reference=str(item.item.get("reference") or "")[:_MOST_CHARACTERS],
        error=(answer.get("error") or {}).get("message", ""),
        grades=msgspec.json.decode(row.results),
    )


def _question_of(item: Mapping[str, object]) -> str:
    """Return the last message before the answer; if the row is no conversation, return its values."""
    messages = item.get("input")
    if isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        return text_of(messages[-1])
    return msgspec.json.encode({name: value for name, value in item.items() if name != "reference"}).decode()


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.INFERENCE)
def cancel(request: OrganizationRequest) -> HttpResponse:
    """Cancel one or several runs, after the user typed the name or the number of runs."""
    return confirm(request, _CANCEL)


def _find(request: OrganizationRequest, ids: Sequence[str]) -> list[AffectedRow]:
    found = queries.list_runs_of_all(organization=request.organization).filter(pk__in=ids).select_related("batch")
    return [
        AffectedRow(
            run.pk,
            run.name or run.pk,
            _effect_of(run),
            reverse("web:eval_run", args=[run.evaluated_id, run.pk]),
        )
        for run in found.defer("data_source")
    ]


def _effect_of(run: EvalRun) -> str:
    if run.status not in ACTIVE:
        return gettext("It has ended already. Nothing changes.")
    if run.batch is None:
        return gettext("No request is sent, and you pay nothing.")
    return gettext("You pay for the answers so far. They are not graded, and no more requests are sent.")


def _cancel(request: OrganizationRequest, run_id: str) -> None:
    runs = queries.list_runs_of_all(organization=request.organization).select_related("batch", "evaluated")
    run = runs.filter(pk=run_id).first()
    if run is None:
        raise NotFound(gettext("This run was deleted already."))
    operations.cancel_run(run=run, by=request.membership.user_id, now=db_now())


_CANCEL = ConfirmedAction[OrganizationRequest](
    parameter="run",
    verb=later("Cancel"),
    nouns=(later("run"), later("runs")),
    warning=later("A cancelled run cannot be continued."),
    done=later("Cancelled"),
    list_url_name="web:eval_list",
    list_title=later("Evals"),
    find=_find,
    act=_cancel,
)
