"""The new fine-tune wizard: dataset, model, method, compute, review, launch. The address holds all choices."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.cache import patch_vary_headers
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from apps.accounts.models import Membership, Organization
from apps.accounts.roles import Permission
from apps.adapters.queries import list_versions as list_adapter_versions
from apps.catalog.models import BaseModel
from apps.catalog.queries import list_base_models
from apps.contracts.runs import Hyperparameters, Method, Objective
from apps.core.database.clock import db_now
from apps.core.errors import DomainError, NotFound
from apps.core.templatetags.ui import number, tokens
from apps.datasets.models import DatasetVersion
from apps.datasets.operations import request_count
from apps.datasets.queries import list_versions
from apps.finetuning.jobs.creation import JobRequest, create_job
from apps.finetuning.models import FineTuningJob
from apps.finetuning.quotes.options import PoolQuote
from apps.finetuning.recipes.limits import TrainingKind, kind_of
from apps.finetuning.recipes.requests import stored_request
from apps.finetuning.recipes.start_points import find_start_point
from apps.interfaces.web.account.tracker_forms import trackers_given
from apps.interfaces.web.shell.access import organization_view
from apps.interfaces.web.wizard.after_training_forms import given_of
from apps.interfaces.web.wizard.compute import compute_context, spread
from apps.interfaces.web.wizard.forms import RECIPE_FIELDS
from apps.interfaces.web.wizard.method import method_context
from apps.interfaces.web.wizard.plan import LIVE_FIELDS, STEPS, Choices, Plan
from apps.interfaces.web.wizard.review import review_context

HEADINGS = {
    "dataset": "Choose a dataset",
    "model": "Choose a base model",
    "method": "Choose a method",
    "compute": "Choose compute",
    "review": "Review and launch",
}
# The step where a refusal of the job is fixed. Any other refusal is shown on the review itself.
_STEP_OF_PARAM = {
    "training_file": "dataset",
    "validation_file": "dataset",
    "model": "model",
    "suffix": "method",
    "evaluation.grader": "method",
    "exports": "method",
    "compute.pool": "compute",
    "compute.gpu_count": "compute",
    "budget.max_cost_usd": "compute",
}
_CONTINUED_SHOWN = 20
# The parts that htmx asks for by target: the price alone, or the price with its table.
_PARTS = {"price-live": "wizard/quote.html", "compute-live": "wizard/live.html"}


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.JOB_WRITE)
def new(request: HttpRequest, organization: Organization, membership: Membership) -> HttpResponse:
    """Show the step that the address has reached; a POST launches the reviewed job."""
    plan = Plan(organization, Choices.of(request.POST if request.method == "POST" else request.GET))
    if request.method == "POST":
        return _launch(request, plan, membership)
    refusal = plan.refusal()
    step = "dataset" if refusal else _step(plan, request.GET.get("step", ""))
    response = _page(request, plan, step, problem=refusal)
    patch_vary_headers(response, ["HX-Request", "HX-Target"])
    return response


def _step(plan: Plan, asked: str) -> str:
    reachable = plan.choices.reachable()
    if plan.form is not None and "compute" in reachable and not plan.form.is_valid():
        is_shown_there = set(plan.form.errors) <= {"method", *LIVE_FIELDS}
        return "compute" if asked == "compute" and is_shown_there else "method"
    if "compute" in reachable and (plan.after.errors or plan.tracking.errors):
        return "method"
    if plan.compute_form.errors:
        return "compute"
    return asked if asked in reachable else reachable[-1]


def _launch(request: HttpRequest, plan: Plan, membership: Membership) -> HttpResponse:
    cap_nano = request.POST.get("cap_nano", "")
    form = plan.form
    is_complete = plan.version is not None and form is not None and form.is_valid()
    is_complete = is_complete and not plan.after.errors and not plan.tracking.errors
    if not is_complete or not re.fullmatch("[0-9]{1,18}", cap_nano):
        return redirect(plan.choices.url())
    assert plan.version is not None and form is not None
    asked = JobRequest(
        base_model=plan.choices.get("model"),
        training_file=plan.version.pk,
        validation_file=plan.validation.pk if plan.validation else None,
        method=form.kind.method,
        objective=form.chosen_objective,
        hyperparameters=form.changed | ({"use_dora": True} if form.kind.use_dora else {}),
        pool=plan.choices.get("pool") or None,
        gpu_count=None if ":" in plan.choices.get("pool") else 1,  # a key with ":" includes the number of GPUs
        spend_cap_nano=int(cap_nano),
        suffix=form.cleaned_data["suffix"],
        evaluation=plan.after.plan,
        exports=plan.after.exports,
        integrations=plan.tracking.integrations,
        idempotency_key=f"web:{request.POST.get('once', '')[:60]}" if request.POST.get("once") else None,
    )
    try:
        job = create_job(organization=plan.organization, request=asked, by=membership.user_id, now=db_now())
    except NotFound:
        raise
    except DomainError as refused:
        return _page(request, plan, "review", problem=refused, status=422)
    return redirect("web:job_detail", job_id=job.pk)


def first_url(version: DatasetVersion | None, base_model: BaseModel | None) -> str:
    """Return the wizard's address with the file filled in and, if there is a file, the model."""
    given = {"dataset": version.pk if version else "", "model": base_model.name if version and base_model else ""}
    return Choices({}).url(**given)


def again_url(job: FineTuningJob, *, changes: Mapping[str, Any] | None = None) -> str:
    """Return the wizard's address at the compute step, with a job's own recipe and the given changes."""
    values = job.hyperparameters | dict(changes or {})
    recipe = {name: str(values[name]) for name in RECIPE_FIELDS if name in values}
    given = {
        "dataset": job.training_file_id,
        "validation": job.validation_file_id or "",
        "model": beginning_of(job),
        "method": kind_of(base_model=job.base_model, recipe=msgspec.convert(values, Hyperparameters)).key,
        "objective": values["objective"] if Objective(values["objective"]).is_preference else "",
        "suffix": job.suffix,
    }
    requested = stored_request(job)
    return Choices({}).url(**(given | recipe | given_of(requested) | trackers_given(requested)))


def beginning_of(job: FineTuningJob) -> str:
    """Return what the job began with, by its name in the address; the base model if that was deleted meanwhile."""
    name = stored_request(job).start_from.name
    try:
        return name if name and find_start_point(organization=job.organization_id, model=name) else job.base_model.name
    except NotFound:
        return job.base_model.name


# --- Contexts of the steps --------------------------------------------------------------------------------------------


def _page(
    request: HttpRequest, plan: Plan, step: str, *, problem: DomainError | None = None, status: int = 0
) -> HttpResponse:
    is_priced = step in ("method", "compute", "review")
    if is_priced and plan.is_counting and plan.version and plan.counting:
        request_count(version=plan.version, base_model=plan.counting)
    is_waiting = is_priced and (plan.is_counting or plan.is_comparing)
    context: dict[str, Any] = {"quote": None} | ({} if is_waiting else _CONTEXTS[step](request, plan))
    problem = problem or context.get("problem")
    part = _PARTS.get(request.headers.get("HX-Target", "").partition("#")[2])
    is_live = bool(part and request.headers.get("HX-Request"))
    # An unfinished grader must not hide the price.
    looked_at = ("form", "compute_form") if is_live else ("form", "compute_form", "after", "tracking")
    is_bad = bool(problem or any(context[name].errors for name in looked_at if name in context))
    context |= {
        "step": step,
        "heading": HEADINGS[step],
        "steps": _steps(plan, step),
        "hidden": plan.choices.hidden(step),
        "plan": plan,
        "recipe": _recipe(plan, context["quote"], step=step),
        "spread": spread(context["quote"]),
        "model_url": plan.choices.url(step="model"),
        "problem": problem,
        "problem_url": _mend_url(plan, problem, step),
    }
    template = f"wizard/{'counting' if is_waiting else step}.html"
    if part:
        context["is_live"] = is_live
        template = part if is_live else template
    return render(request, template, context, status=status or (422 if is_bad else 200))


def _mend_url(plan: Plan, problem: DomainError | None, step: str) -> str:
    if problem is None:
        return ""
    param = problem.param or ""
    wanted = _STEP_OF_PARAM.get(param, "method" if param.startswith("hyperparameters") else "")
    if not wanted and problem.code == "insufficient_quota" and "required_nano" in problem.data:
        wanted = "compute"  # a lower spend cap is a fix
    return plan.choices.url(step=wanted) if wanted and wanted != step else ""


def _dataset(request: HttpRequest, plan: Plan) -> dict[str, Any]:
    versions = list(list_versions(organization=plan.organization, purpose="fine-tune").defer("errors")[:200])
    ready = [version for version in versions if version.status == "ready"]
    chosen = plan.choices.get("dataset") or (ready[0].pk if ready else "")
    return {
        "versions": versions,
        "chosen": chosen,
        "validation_options": [
            (version.pk, f"{version.dataset.name}, version {version.number}: {version.filename}") for version in ready
        ],
        "needs": "Needs a base model" if chosen else "Needs a dataset",
    }


def _model(request: HttpRequest, plan: Plan) -> dict[str, Any]:
    models = list(list_base_models())
    wanted = request.GET.get("q", "").strip().lower()
    found = [model for model in models if wanted in f"{model.name} {model.display_name} {model.repo}".lower()]
    usable = [model for model in found if model.is_installed]
    others = [model for model in found if not model.is_installed]
    chosen = plan.choices.get("model")
    is_all = bool(wanted or not usable or "all" in request.GET or any(model.name == chosen for model in others))
    preselected = chosen or (usable[0].name if usable else "")
    return {
        "continued": _continued(plan, chosen),
        "usable": usable,
        "others": [
            {"model": model, "url": plan.choices.url(step="method", model=model.name, pool="", cap="")}
            for model in (others if is_all else [])
        ],
        "chosen": preselected,
        "q": request.GET.get("q", ""),
        "hidden_count": 0 if is_all else len(others),
        "all_url": plan.choices.url(step="model") + "&all=1",
        "usable_url": plan.choices.url(step="model") if "all" in request.GET and usable else "",
        "needs": "Priced at the next step" if preselected else "Needs a base model",
    }


def _continued(plan: Plan, chosen: str) -> list[dict[str, Any]]:
    """Return what can be trained further: the newest versions, and a checkpoint that the address names."""
    newest = list_adapter_versions(organization=plan.organization)[:_CONTINUED_SHOWN]
    found = [
        {
            "name": version.model_name,
            "title": f"{version.adapter.name}, {version.label}",
            "base": version.adapter.base_model.display_name,
            "made": version.created_at,
        }
        for version in newest
        if version.method != Method.FULL
    ]
    if plan.beginning and plan.beginning.start_from.name and all(one["name"] != chosen for one in found):
        is_checkpoint = bool(plan.beginning.start_from.checkpoint)
        title = "Checkpoint" if is_checkpoint else chosen
        found.insert(0, {"name": chosen, "title": title, "base": plan.beginning.base_model.display_name, "made": ""})
    return found


_CONTEXTS = {
    "dataset": _dataset,
    "model": _model,
    "method": method_context,
    "compute": compute_context,
    "review": review_context,
}


def _steps(plan: Plan, now: str) -> list[dict[str, str]]:
    reachable = plan.choices.reachable()
    current = STEPS.index(now)
    return [
        {
            "name": step.capitalize(),
            "state": "now" if step == now else "done" if index < current and step in reachable else "",
            "url": plan.choices.url(step=step),
        }
        for index, step in enumerate(STEPS)
    ]


def _recipe(plan: Plan, quoted: PoolQuote | None, *, step: str) -> list[dict[str, str]]:
    """Return the parts of the strip above every step; each links to the step that changes it."""
    reachable = plan.choices.reachable()
    version, model, form = plan.version, plan.base_model, plan.form
    is_chosen = "compute" in reachable or step == "method"  # the method step shows the chosen option
    recipe = form.recipe if form and is_chosen and form.is_valid() else None
    parts: list[tuple[str, str, str, str]] = [
        ("Dataset", version.dataset.name if version else "", _dataset_detail(plan), "dataset"),
        ("Base model", model.display_name if model else "", _model_detail(plan), "model"),
        (
            "Method",
            *(_method_words(form.kind, recipe) if form and recipe else ("", "")),
            "method",
        ),
        (
            "Schedule",
            _schedule(recipe.epochs, quoted) if recipe else "",
            f"batch {recipe.batch_size}, up to {number(recipe.max_length)} tokens a row" if recipe else "",
            "method",
        ),
    ]
    return [
        {
            "name": name,
            "value": value,
            "detail": detail,
            "url": plan.choices.url(step=step) if step in reachable else "",
        }
        for name, value, detail, step in parts
    ]


def _method_words(kind: TrainingKind, recipe: Hyperparameters) -> tuple[str, str]:
    rate = f"rate {recipe.learning_rate:g}"
    if recipe.method is Method.FULL:
        return kind.name, f"every weight, {rate}"
    scaled = " / √rank" if recipe.use_rslora else ""
    return f"{kind.name}, rank {recipe.lora_rank}", f"alpha {recipe.lora_alpha}{scaled}, {rate}"


def _dataset_detail(plan: Plan) -> str:
    if plan.version is None:
        return ""
    rows = f"{number(plan.version.rows)} rows"
    return f"{rows}, {tokens(plan.count.tokens)} tokens" if plan.count else rows


def _model_detail(plan: Plan) -> str:
    model = plan.base_model
    if model is None:
        return ""
    if plan.beginning and plan.beginning.start_from.name:
        return f"continues {plan.choices.get('model')}"
    return f"{tokens(model.parameter_count)} parameters, {model.licence or 'licence not stated'}"


def _schedule(epochs: int, quoted: PoolQuote | None) -> str:
    words = f"{epochs} epoch{'' if epochs == 1 else 's'}"
    return f"{words}, {number(quoted.estimate.steps)} steps" if quoted else words
