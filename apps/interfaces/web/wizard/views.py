"""The new fine-tune wizard: dataset, model, method, compute, review, launch. The address holds the draft."""

import re

from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils.cache import patch_vary_headers
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from apps.accounts.roles import Permission
from apps.core.database.clock import db_now
from apps.core.errors import DomainError, NotFound
from apps.core.messages.translation import later
from apps.finetuning.jobs.creation import create_job
from apps.finetuning.jobs.requests import JobRequest
from apps.finetuning.pools.rehearsals import ask
from apps.interfaces.web.datasets.preparation import prepare as prepare_file
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view
from apps.interfaces.web.wizard.draft import Draft
from apps.interfaces.web.wizard.opening import open_plan
from apps.interfaces.web.wizard.plan import Plan, StepContext
from apps.interfaces.web.wizard.recipe_strip import recipe_strip
from apps.interfaces.web.wizard.steps.compute import quotes_of, spread
from apps.interfaces.web.wizard.steps.review import named_quote, rehearsal_url
from apps.interfaces.web.wizard.steps.sequence import STEPS, choose_step, list_reachable, step_that_fixes

# The parts that htmx asks for by target: the price alone, or the price with its table.
_PARTS = {"price-live": "wizard/live/method.html", "compute-live": "wizard/live/compute.html"}

_NAMES = {
    "dataset": later("Dataset"),
    "model": later("Model"),
    "method": later("Method"),
    "compute": later("Compute"),
    "review": later("Review"),
}


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.JOB_WRITE)
def new(request: OrganizationRequest) -> HttpResponse:
    """Show the step that the address has reached; a POST launches the reviewed job."""
    if request.method == "POST":
        return _launch(request, open_plan(request, Draft.of(request.POST), is_launch=True))
    plan = open_plan(request, Draft.of(request.GET))
    response = _page(request, plan, choose_step(plan, request.GET.get("step", "")), problem=plan.refusal)
    patch_vary_headers(response, ["HX-Request", "HX-Target"])
    return response


@require_POST
@organization_view(Permission.JOB_WRITE)
def prepare(request: OrganizationRequest) -> HttpResponse:
    """Count and compare the files that the address names, or have tasks do it. Then show the step of the address."""
    plan = open_plan(request, Draft.of(request.GET))
    if plan.version is not None:
        prepare_file(version=plan.version, base_model=plan.counting, other=plan.validation)
    plan = open_plan(request, Draft.of(request.GET))  # as it is now
    return _page(request, plan, choose_step(plan, request.GET.get("step", "")), problem=plan.refusal)


@require_POST
@organization_view(Permission.JOB_WRITE)
def rehearse(request: OrganizationRequest) -> HttpResponse:
    """Request the rehearsed memory of the reviewed plan, and show it once a worker has reported it."""
    plan = open_plan(request, Draft.of(request.GET))
    quoted = named_quote(plan, quotes_of(plan)[0])
    rehearsal = quoted.rehearsal if quoted else None
    is_coming = False
    if quoted and rehearsal and quoted.is_launchable and rehearsal.peak_bytes is None:
        is_coming = ask(organization=plan.organization, rehearsal=rehearsal, pool=quoted.pool, now=plan.now)
    shown = {"quote": quoted, "rehearse_url": rehearsal_url(plan, quoted) if is_coming else "", "is_coming": is_coming}
    response = render(request, "wizard/parts/rehearsal.html", shown)
    is_as_shown = rehearsal is not None and rehearsal.digest == request.GET.get("rehearsal")
    if not (quoted and quoted.is_launchable and is_as_shown):
        response.headers["HX-Refresh"] = "true"  # the figure changed the plan or its price
    return response


def _launch(request: OrganizationRequest, plan: Plan) -> HttpResponse:
    cap_nano = request.POST.get("cap_nano", "")
    form = plan.form
    is_complete = plan.version is not None and form is not None and form.is_valid()
    is_complete = is_complete and not (plan.after.errors or plan.tracking.errors or plan.compute_form.errors)
    if plan.gone:
        return redirect(Draft.of(request.POST).url())  # whose page says what is gone
    if not is_complete or not re.fullmatch("[0-9]{1,18}", cap_nano):
        return redirect(plan.draft.url())
    assert plan.version is not None and form is not None
    asked = JobRequest(
        base_model=plan.draft.get("model"),
        training_file=plan.version.pk,
        validation_file=plan.validation.pk if plan.validation else None,
        method=form.kind.method,
        objective=form.chosen_objective,
        hyperparameters=form.changed | ({"use_dora": True} if form.kind.use_dora else {}),
        pool=plan.draft.get("pool") or None,
        gpu_count=None if ":" in plan.draft.get("pool") else 1,  # a key with ":" includes the number of GPUs
        node_count=plan.compute_form.nodes,
        spend_cap_nano=plan.compute_form.cap_nano,
        shown_max_nano=int(cap_nano),
        suffix=form.cleaned_data["suffix"],
        project=plan.project.pk if plan.project else "",
        metadata=plan.labels,
        evaluation=plan.after.plan,
        exports=plan.after.exports,
        integrations=plan.tracking.integrations,
        idempotency_key=f"web:{request.POST.get('once', '')[:60]}" if request.POST.get("once") else None,
    )
    try:
        job = create_job(organization=plan.organization, request=asked, by=request.membership.user_id, now=db_now())
    except NotFound:
        raise
    except DomainError as refused:
        return _page(request, plan, "review", problem=refused, status=422)
    return redirect("web:job_detail", job_id=job.pk)


def _page(
    request: OrganizationRequest, plan: Plan, name: str, *, problem: DomainError | None = None, status: int = 0
) -> HttpResponse:
    step = STEPS[name]
    is_waiting = step.is_priced and (plan.is_uncounted or plan.is_uncompared)
    shown = StepContext({}) if is_waiting else step.context(request, plan)
    problem = problem or shown.problem
    part = _PARTS.get(request.headers.get("HX-Target", "").partition("#")[2])
    is_live = bool(part and request.htmx)
    # An unfinished grader must not hide the price.
    checked = () if is_waiting else set(step.forms) - ({"after", "tracking"} if is_live else set())
    forms = [form for form in (getattr(plan, each) for each in checked) if form is not None]
    is_bad = bool(problem or any(form.errors for form in forms))
    fix = step_that_fixes(problem) if problem else ""
    context = shown.values | {
        "step": name,
        "heading": step.heading,
        "steps": _steps(plan, name),
        "hidden": plan.draft.without(step.fields),
        "plan": plan,
        "quote": shown.quote,
        "hold_nano": shown.quote.maximum_nano(plan.compute_form.cap_nano) if shown.quote else None,
        "recipe": recipe_strip(plan, shown.quote, step=name),
        "spread": spread(shown.quote),
        "model_url": plan.draft.url("model"),
        "problem": problem,
        "problem_url": plan.draft.url(fix) if fix not in ("", name) else "",
        "is_live": is_live,
    }
    template = part if part and is_live else f"wizard/{'counting' if is_waiting else name}.html"
    return render(request, template, context, status=status or (422 if is_bad else 200))


def _steps(plan: Plan, now: str) -> list[dict[str, str]]:
    reachable, names = list_reachable(plan.draft), list(STEPS)
    return [
        {
            "name": _NAMES[name],
            "state": "now" if name == now else "done" if index < names.index(now) and name in reachable else "",
            "url": plan.draft.url(name),
        }
        for index, name in enumerate(names)
    ]
