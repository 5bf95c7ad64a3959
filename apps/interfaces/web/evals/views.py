"""Evals: the list, the same rows as CSV, the page of one with the scores of its runs by criterion, and deletion."""

from collections.abc import Sequence

from django.db.models import Q
from django.http import HttpResponse, HttpResponseBase
from django.shortcuts import render
from django.utils.cache import patch_vary_headers
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods, require_safe

from apps.accounts.queries import name_of_actor
from apps.accounts.roles import Permission, has_permission
from apps.core.http.confirmation import AffectedRow, ConfirmedAction, confirm
from apps.core.messages.translation import later
from apps.core.objects.page_tables import rows_at_once
from apps.interfaces.web.evals.run_forms import can_run_again
from apps.interfaces.web.evals.shown import shown_run
from apps.interfaces.web.shell.access import OrganizationRequest, may_write, organization_view
from apps.interfaces.web.shell.current_project import find_current_project, of_project
from apps.interfaces.web.shell.listing import NEWEST_FIRST, Filter, Listing, render_list
from apps.serving.evals import operations, queries
from apps.serving.evals.lifecycle import ACTIVE
from apps.serving.evals.models import Eval

_SHOWN = 50  # runs of an eval
_OF_PLAN = Q(metadata__has_key="retraining_plan")
_LIST = Listing[Eval](
    name=later("evals"),
    hint=later("Name or ID"),
    url_name="web:eval_list",
    export_url_name="web:eval_export",
    searched=("name", "id"),
    filters={
        "of": Filter(
            later("Made by"),
            {
                "": (later("All"), Q()),
                "members": (later("Members"), ~_OF_PLAN),
                "plans": (later("Retraining"), _OF_PLAN),
            },
        )
    },
    orders=NEWEST_FIRST,
)
_EXPORTED = ("id", "name", "criteria", "created_at")


@require_safe
@organization_view(Permission.VIEW)
def index(request: OrganizationRequest) -> HttpResponse:
    project = find_current_project(request)
    page = _LIST.page(request, of_project(project, queries.list_evals(organization=request.organization)))
    latest = queries.latest_runs(organization=request.organization, evals=page.rows)
    rows = [
        {
            "evaluated": one,
            "latest": shown_run(latest[one.pk]) if one.pk in latest else None,
            "criteria": _criteria(one),
        }
        for one in page.rows
    ]
    may_create = has_permission(request.membership.role, Permission.INFERENCE)
    return render_list(request, "evals/list.html", page, {"evals": rows, "may_write": may_create, "project": project})


@require_safe
@organization_view(Permission.VIEW)
def export(request: OrganizationRequest) -> HttpResponseBase:
    evals = of_project(find_current_project(request), queries.list_evals(organization=request.organization))
    return _LIST.export(request, evals, header=_EXPORTED, cells=_exported)


def _exported(one: Eval) -> tuple[object, ...]:
    return one.pk, one.name, ", ".join(name for name, _ in _criteria(one)), one.created_at.isoformat()


@require_safe
@organization_view(Permission.VIEW, is_of_any_project=True)
def detail(request: OrganizationRequest, eval_id: str) -> HttpResponse:
    """Show an eval with its latest runs. htmx reloads them until all have ended."""
    evaluated = queries.get_eval(organization=request.organization, id=eval_id)
    runs = queries.list_runs(evaluated=evaluated).defer("data_source").order_by("-created_at", "-pk")
    shown = [shown_run(run) for run in runs[: rows_at_once(request, "runs", _SHOWN)]]
    context = {
        "evaluated": evaluated,
        "owner": name_of_actor(organization=request.organization, actor=evaluated.created_by),
        "criteria": _criteria(evaluated),
        "runs": [(each, can_run_again(each.run)) for each in shown],
        "may_write": may_write(request, Permission.INFERENCE, evaluated.project_id),
        "is_live": any(each.run.status in ACTIVE for each in shown),
    }
    response = render(request, "evals/detail.html" + ("#runs" if request.htmx else ""), context)
    patch_vary_headers(response, ["HX-Request"])
    return response


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.INFERENCE)
def delete(request: OrganizationRequest) -> HttpResponse:
    """Delete one or several evals with their runs, after the user typed the name or the number of evals."""
    return confirm(request, _DELETE)


def _find(request: OrganizationRequest, ids: Sequence[str]) -> list[AffectedRow]:
    effect = gettext("Its runs are deleted with their answers and grades.")
    found = queries.list_evals(organization=request.organization).filter(pk__in=ids)
    return [AffectedRow(one.pk, one.name or one.pk, effect) for one in found]


def _delete(request: OrganizationRequest, eval_id: str) -> None:
    evaluated = queries.get_eval(organization=request.organization, id=eval_id)
    operations.delete_eval(evaluated=evaluated, by=request.membership.user_id)


_DELETE = ConfirmedAction[OrganizationRequest](
    parameter="eval",
    verb=later("Delete"),
    nouns=(later("eval"), later("evals")),
    warning=later("A deleted eval cannot be restored."),
    done=later("Deleted"),
    list_url_name="web:eval_list",
    list_title=later("Evals"),
    find=_find,
    act=_delete,
)


def _criteria(evaluated: Eval) -> list[tuple[str, str]]:
    """Return the name and the type of each criterion."""
    return [(str(one.get("name", "")), str(one.get("type", ""))) for one in evaluated.testing_criteria]
