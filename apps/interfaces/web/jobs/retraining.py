"""The page of retraining plans: when each begins, what its retrainings came to, and buttons to start and stop it."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils.dates import WEEKDAYS
from django.utils.translation import gettext
from django.views.decorators.http import require_POST, require_safe

from apps.accounts.queries import names_of_actors
from apps.accounts.roles import Permission, has_permission
from apps.core.database.clock import db_now
from apps.core.http.forms import domain_errors_shown
from apps.core.messages.translation import later
from apps.core.templatetags.statuses import StatusLabel
from apps.finetuning.jobs.retraining import plans
from apps.finetuning.jobs.retraining.schedules import schedule_of
from apps.finetuning.lifecycle import RETRAINING_OPEN, Cadence, RetrainingStatus, RetrainingTrigger
from apps.finetuning.models import Retraining, RetrainingPlan
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view

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


@require_safe
@organization_view(Permission.VIEW)
def index(request: OrganizationRequest) -> HttpResponse:
    found = list(plans.list_plans(organization=request.organization).order_by("name"))
    names = names_of_actors(organization=request.organization, actors={plan.acts_as for plan in found})
    latest = plans.latest_retrainings(organization=request.organization, count=_SHOWN)
    shown = [
        ShownPlan(
            plan=plan,
            begins=_begins(plan),
            acts_as=names[plan.acts_as],
            retrainings=[_shown(row) for row in latest.get(plan.pk, ())],
            is_busy=any(row.status in RETRAINING_OPEN for row in latest.get(plan.pk, ())),
        )
        for plan in found
    ]
    may_write = has_permission(request.membership.role, Permission.JOB_WRITE)
    return render(request, "jobs/retraining.html", {"plans": shown, "may_write": may_write})


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
    """Return what begins a retraining, in words."""
    words = []
    if schedule := schedule_of(plan):
        hour = f"{schedule.hour_utc:02}:00"
        match schedule.cadence:
            case Cadence.DAYS:
                words.append(gettext("Every %(days)s days at %(hour)s UTC") % {"days": schedule.value, "hour": hour})
            case Cadence.WEEK:
                day = WEEKDAYS[schedule.value - 1]
                words.append(gettext("Every %(weekday)s at %(hour)s UTC") % {"weekday": day, "hour": hour})
            case Cadence.MONTH:
                text = gettext("On day %(day)s of each month at %(hour)s UTC")
                words.append(text % {"day": schedule.value, "hour": hour})
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
