"""Retraining plans: the list with their history, the form with its price, and the actions on a plan."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.contrib import messages
from django.http import HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from apps.accounts.queries import names_of_actors
from apps.accounts.roles import Permission, has_permission
from apps.core.database.clock import db_now
from apps.core.http.confirmation import AffectedRow, ConfirmedAction, confirm
from apps.core.http.forms import domain_errors_on, domain_errors_shown
from apps.core.messages.translation import later
from apps.core.money import dollars
from apps.core.templatetags.statuses import StatusLabel
from apps.finetuning.jobs.retraining import plans
from apps.finetuning.jobs.retraining.prices import price_of
from apps.finetuning.jobs.retraining.schedules import schedule_of
from apps.finetuning.jobs.retraining.triggers import MAX_A_DAY
from apps.finetuning.lifecycle import RETRAINING_OPEN, RetrainingStatus, RetrainingTrigger
from apps.finetuning.models import Retraining, RetrainingPlan
from apps.finetuning.queries import get_job
from apps.interfaces.web.jobs.retraining_forms import PlanForm, schedule_words
from apps.interfaces.web.shell.access import OrganizationRequest, may_write, organization_view
from apps.interfaces.web.shell.current_project import find_current_project, of_project

_SHOWN = 5  # retrainings of a plan
_STATES = {
    RetrainingStatus.WAITING: StatusLabel(later("Waiting"), "", "clock"),
    RetrainingStatus.TRAINING: StatusLabel(later("Training"), "info", live=True),
    RetrainingStatus.COMPARING: StatusLabel(later("Comparing"), "info", live=True),
    RetrainingStatus.CHECKING: StatusLabel(later("Comparing"), "info", live=True),
    RetrainingStatus.PROMOTING: StatusLabel(later("Promoting"), "info", live=True),
    RetrainingStatus.PROMOTED: StatusLabel(later("Promoted"), "ok", "check"),
    RetrainingStatus.KEPT: StatusLabel(later("Not promoted"), "line", "minus"),
    RetrainingStatus.SKIPPED: StatusLabel(later("Skipped"), "line", "minus"),
    RetrainingStatus.REFUSED: StatusLabel(later("Refused"), "bad", "circle-alert"),
    RetrainingStatus.FAILED: StatusLabel(later("Failed"), "bad", "circle-alert"),
}
_TRIGGERS = {
    RetrainingTrigger.SCHEDULE: later("Schedule"),
    RetrainingTrigger.GROWTH: later("New rows"),
    RetrainingTrigger.REQUEST: later("Started by hand"),
}


@dataclass(frozen=True, kw_only=True)
class ShownRetraining:
    """One row of a plan's history. `comparison` is in percentage points of the held-out rows."""

    retraining: Retraining
    state: StatusLabel
    trigger: str
    comparison: dict[str, float] | None


@dataclass(frozen=True, kw_only=True)
class ShownPlan:
    plan: RetrainingPlan
    begins: list[str]
    acts_as: str
    retrainings: list[ShownRetraining]
    is_busy: bool
    may_write: bool


@require_safe
@organization_view(Permission.VIEW)
def index(request: OrganizationRequest) -> HttpResponse:
    project = find_current_project(request)
    rows = of_project(project, plans.list_plans(organization=request.organization), field="source_job__project")
    found = list(rows.order_by("name"))
    names = names_of_actors(organization=request.organization, actors={plan.acts_as for plan in found})
    latest = plans.latest_retrainings(organization=request.organization, count=_SHOWN)
    projects = {plan.source_job.project_id for plan in found}
    writable = {each for each in projects if may_write(request, Permission.JOB_WRITE, each)}
    shown = [
        ShownPlan(
            plan=plan,
            begins=_begins(plan),
            acts_as=names[plan.acts_as],
            retrainings=[_shown(row) for row in latest.get(plan.pk, ())],
            is_busy=any(row.status in RETRAINING_OPEN for row in latest.get(plan.pk, ())),
            may_write=plan.source_job.project_id in writable,
        )
        for plan in found
    ]
    may_create = has_permission(request.membership.role, Permission.JOB_WRITE)
    return render(request, "jobs/retraining.html", {"plans": shown, "may_create": may_create, "project": project})


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.JOB_WRITE)
def create(request: OrganizationRequest) -> HttpResponse:
    """Ask which job to repeat; `?job=` chooses it, and the address fills in the form.

    A POST shows the price; a confirmed POST creates the plan.
    """
    job_id = request.GET.get("job", "").replace("\x00", "")
    job = get_job(organization=request.organization, id=job_id) if job_id else None
    return _edit(request, PlanForm(_sent(request), organization=request.organization, query=request.GET, job=job))


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.JOB_WRITE)
def edit(request: OrganizationRequest, plan_id: str) -> HttpResponse:
    """Show the plan's form, with the changes in the address. A POST shows the price; a confirmed POST changes it."""
    plan = plans.get_plan(organization=request.organization, id=plan_id)
    return _edit(request, PlanForm(_sent(request), organization=request.organization, query=request.GET, plan=plan))


def _sent(request: OrganizationRequest) -> QueryDict | None:
    return request.POST if request.method == "POST" else None


def _edit(request: OrganizationRequest, form: PlanForm) -> HttpResponse:
    """Return the form; for htmx, only its price. The plan is saved only if the price of its values was shown."""
    price = None
    if form.is_valid() and form.criteria.is_valid():
        with domain_errors_on(form), form.criteria.errors_placed():
            if request.POST.get("confirmed") == form.fingerprint and not request.htmx:
                return _keep(request, form)
            now = db_now()
            drafted = plans.draft_plan(organization=request.organization, request=form.asked, now=now, plan=form.plan)
            price = price_of(plan=drafted, by=request.membership.user_id, now=now)
            if price.is_above_limit:
                text = gettext("The training alone may cost %(price)s now. Set a higher limit, or use fewer rows.")
                form.add_error("max_usd", text % {"price": dollars(price.held_nano or 0)})
    context = {
        "form": form,
        "plan": form.plan,
        "criteria": form.criteria,
        "price": None if form.errors or form.criteria.errors else price,
        "most_a_day": MAX_A_DAY,
    }
    is_wrong = bool(form.errors or form.criteria.errors) and not request.htmx
    part = "#criteria" if form.is_changed else "#price"
    page = "jobs/retraining_form.html" + (part if request.htmx else "")
    return render(request, page, context, status=422 if is_wrong else 200)


def _keep(request: OrganizationRequest, form: PlanForm) -> HttpResponse:
    """Create or change the plan. Raises the errors of either."""
    by, now = request.membership.user_id, db_now()
    if form.plan is None:
        plans.create_plan(organization=request.organization, request=form.asked, by=by, now=now)
        messages.success(request, gettext("The plan is created. It acts in your name."))
    else:
        plans.change_plan(plan=form.plan, request=form.asked, by=by, now=now)
        messages.success(request, gettext("The plan is saved. From now on it acts in your name."))
    return redirect("web:job_retraining")


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.JOB_WRITE)
def delete(request: OrganizationRequest) -> HttpResponse:
    """Delete a plan, after the user typed its name."""
    return confirm(request, _DELETE)


def _find(request: OrganizationRequest, ids: Sequence[str]) -> list[AffectedRow]:
    effect = gettext("Its history is deleted. A job that it started continues, but its model is not promoted.")
    found = plans.list_plans(organization=request.organization).filter(pk__in=ids)
    return [AffectedRow(plan.pk, plan.name, effect) for plan in found]


def _delete(request: OrganizationRequest, plan_id: str) -> None:
    plan = plans.get_plan(organization=request.organization, id=plan_id)
    plans.delete_plan(plan=plan, by=request.membership.user_id, now=db_now())


_DELETE = ConfirmedAction[OrganizationRequest](
    parameter="plan",
    verb=later("Delete"),
    nouns=(later("retraining plan"), later("retraining plans")),
    warning=later("A deleted plan cannot be restored. To only stop it, use Stop in the list."),
    done=later("Deleted"),
    list_url_name="web:job_retraining",
    list_title=later("Retraining"),
    find=_find,
    act=_delete,
)


@require_POST
@organization_view(Permission.JOB_WRITE)
def start(request: OrganizationRequest, plan_id: str) -> HttpResponse:
    """Begin a retraining now."""
    plan = plans.get_plan(organization=request.organization, id=plan_id)
    with domain_errors_shown(request):
        plans.request_retraining(plan=plan, by=request.membership.user_id, now=db_now())
        messages.success(request, gettext("The retraining starts within a minute."))
    return redirect("web:job_retraining")


@require_POST
@organization_view(Permission.JOB_WRITE)
def switch(request: OrganizationRequest, plan_id: str) -> HttpResponse:
    """Stop a plan, or resume it in the name of this member."""
    plan = plans.get_plan(organization=request.organization, id=plan_id)
    changed = dataclasses.replace(plans.request_of(plan), is_enabled=request.POST.get("enabled") == "1")
    with domain_errors_shown(request):
        plans.change_plan(plan=plan, request=changed, by=request.membership.user_id, now=db_now())
    return redirect("web:job_retraining")


def _begins(plan: RetrainingPlan) -> list[str]:
    """Return in words what starts a retraining."""
    words = []
    if schedule := schedule_of(plan):
        days = schedule_words(schedule)
        words.append(gettext("%(days)s at %(hour)s UTC") % {"days": days, "hour": f"{schedule.hour_utc:02}:00"})
    if plan.min_new_rows:
        words.append(gettext("When the dataset has %(rows)s more rows") % {"rows": f"{plan.min_new_rows:,}"})
    return words


def _shown(retraining: Retraining) -> ShownRetraining:
    return ShownRetraining(
        retraining=retraining,
        state=_STATES[RetrainingStatus(retraining.status)],
        trigger=_TRIGGERS[RetrainingTrigger(retraining.trigger)],
        comparison=_comparison(retraining.held_out_result),
    )


def _comparison(result: dict[str, Any] | None) -> dict[str, float] | None:
    if result is None:
        return None
    shares = {name: 100 * result[f"{name}_passed"] / result["rows"] for name in ("new", "old")}
    return shares | {name: 100 * result["difference"][name] for name in ("value", "low", "high")}
