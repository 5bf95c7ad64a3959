"""The list of evals, the same rows as CSV, and one eval with the scores of its runs by criterion."""

from dataclasses import dataclass

from django.db.models import Q
from django.http import HttpResponse, HttpResponseBase
from django.shortcuts import render
from django.utils.cache import patch_vary_headers
from django.views.decorators.http import require_safe

from apps.accounts.queries import name_of_actor
from apps.accounts.roles import Permission
from apps.core.messages.translation import later
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view
from apps.interfaces.web.shell.listing import NEWEST_FIRST, Filter, Listing, render_list
from apps.serving.evals import queries
from apps.serving.evals.lifecycle import ACTIVE, EvalRunStatus
from apps.serving.evals.models import Eval, EvalRun

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


@dataclass(frozen=True, kw_only=True)
class Score:
    """How many answers of a run passed one criterion, or all of them. `share` is None without a graded answer."""

    name: str
    passed: int
    graded: int

    @property
    def share(self) -> float | None:
        return self.passed / self.graded if self.graded else None


@dataclass(frozen=True, kw_only=True)
class ShownRun:
    """A run as pages show it; `state` is a word of the table of states."""

    run: EvalRun
    state: str
    total: Score
    scores: list[Score]


@require_safe
@organization_view(Permission.VIEW)
def index(request: OrganizationRequest) -> HttpResponse:
    page = _LIST.page(request, queries.list_evals(organization=request.organization))
    latest = queries.latest_runs(organization=request.organization, evals=page.rows)
    rows = [
        {"evaluated": one, "latest": _shown(latest[one.pk]) if one.pk in latest else None, "criteria": _criteria(one)}
        for one in page.rows
    ]
    return render_list(request, "evals/list.html", page, {"evals": rows})


@require_safe
@organization_view(Permission.VIEW)
def export(request: OrganizationRequest) -> HttpResponseBase:
    evals = queries.list_evals(organization=request.organization)
    return _LIST.export(request, evals, header=_EXPORTED, cells=_exported)


def _exported(one: Eval) -> tuple[object, ...]:
    return one.pk, one.name, ", ".join(name for name, _ in _criteria(one)), one.created_at.isoformat()


@require_safe
@organization_view(Permission.VIEW)
def detail(request: OrganizationRequest, eval_id: str) -> HttpResponse:
    """Show an eval with its latest runs. Until all of them have ended, htmx asks again for them."""
    evaluated = queries.get_eval(organization=request.organization, id=eval_id)
    runs = queries.list_runs(evaluated=evaluated).defer("data_source").order_by("-created_at", "-pk")[:_SHOWN]
    shown = [_shown(run) for run in runs]
    context = {
        "evaluated": evaluated,
        "owner": name_of_actor(organization=request.organization, actor=evaluated.created_by),
        "criteria": _criteria(evaluated),
        "runs": shown,
        "is_live": any(each.run.status in ACTIVE for each in shown),
    }
    response = render(request, "evals/detail.html" + ("#runs" if request.htmx else ""), context)
    patch_vary_headers(response, ["HX-Request"])
    return response


def _criteria(evaluated: Eval) -> list[tuple[str, str]]:
    """Return the name and the type of each criterion."""
    return [(str(one.get("name", "")), str(one.get("type", ""))) for one in evaluated.testing_criteria]


def _shown(run: EvalRun) -> ShownRun:
    return ShownRun(
        run=run,
        state="cancelled" if run.status == EvalRunStatus.CANCELED else run.status,
        total=Score(name="", passed=run.passed, graded=run.passed + run.failed),
        scores=[
            Score(name=one["testing_criteria"], passed=one["passed"], graded=one["passed"] + one["failed"])
            for one in run.criteria_results
        ],
    )
