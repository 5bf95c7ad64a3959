"""The new fine-tune wizard: dataset, model, method, compute, review, launch. What is chosen stands in the address."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.cache import patch_vary_headers
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from apps.accounts.models import Membership, Organization
from apps.accounts.roles import Permission
from apps.billing.queries import get_balance
from apps.catalog.models import BaseModel
from apps.catalog.queries import list_base_models
from apps.contracts.runs import Hyperparameters, Method
from apps.core.clock import db_now
from apps.core.errors import DomainError, NotFound
from apps.core.templatetags.ui import number, tokens
from apps.datasets.models import DatasetVersion
from apps.datasets.operations import request_count
from apps.datasets.queries import list_versions
from apps.finetuning.models import FineTuningJob
from apps.finetuning.operations import JobRequest, counting_model, create_job
from apps.finetuning.quoting import PoolQuote
from apps.web.access import organization_view
from apps.web.compute_table import ComputeRow, TableView, compute_rows
from apps.web.forms.wizard import METHOD_NAMES, RECIPE_FIELDS
from apps.web.wizard_compute import best_quote, compute_context, quotes_of, samples, spread
from apps.web.wizard_plan import LIVE_FIELDS, STEPS, Choices, Plan

HEADINGS = {
    "dataset": "Choose a dataset",
    "model": "Choose a base model",
    "method": "Choose a method",
    "compute": "Choose compute",
    "review": "Review and launch",
}
# Where a refusal of the job is mended; anything else is shown on the review itself.
_STEP_OF_PARAM = {
    "training_file": "dataset",
    "validation_file": "dataset",
    "model": "model",
    "suffix": "method",
    "compute.pool": "compute",
    "compute.gpu_count": "compute",
    "budget.max_cost": "compute",
}
_MODELS_SHOWN = 12
# What htmx asks for by its target: the price alone, or the price with the table it stands for.
_PARTS = {"price-live": "wizard/quote.html", "compute-live": "wizard/live.html"}


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.JOB_WRITE)
def new(request: HttpRequest, organization: Organization, membership: Membership) -> HttpResponse:
    """Show the step the address has come to; a POST launches the job that the review shows."""
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
    if plan.compute_form.errors:
        return "compute"
    return asked if asked in reachable else reachable[-1]


def _launch(request: HttpRequest, plan: Plan, membership: Membership) -> HttpResponse:
    cap_nano = request.POST.get("cap_nano", "")
    form = plan.form
    if plan.version is None or form is None or not form.is_valid() or not (cap_nano.isascii() and cap_nano.isdigit()):
        return redirect(plan.choices.url())
    asked = JobRequest(
        base_model=plan.choices.get("model"),
        training_file=plan.version.pk,
        validation_file=plan.validation.pk if plan.validation else None,
        method=Method(form.cleaned_data["method"]),
        hyperparameters=form.changed,
        pool=plan.choices.get("pool") or None,
        gpu_count=None if ":" in plan.choices.get("pool") else 1,  # an option's key names its GPUs
        spend_cap_nano=int(cap_nano),
        suffix=form.cleaned_data["suffix"],
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
    """Return the wizard's address with what is already there filled in, as far as it can be answered at once."""
    given = {"dataset": version.pk if version else "", "model": base_model.name if version and base_model else ""}
    return Choices({}).url(**given)


def again_url(job: FineTuningJob, *, changes: Mapping[str, Any] | None = None) -> str:
    """Return the wizard's address at the compute step, with a job's own recipe and what to change of it."""
    values = job.hyperparameters | dict(changes or {})
    recipe = {name: str(values[name]) for name in RECIPE_FIELDS if name in values}
    given = {
        "dataset": job.training_file_id,
        "validation": job.validation_file_id or "",
        "model": job.base_model.name,
        "method": values.get("method", job.method),
        "suffix": job.suffix,
    }
    return Choices({}).url(**(given | recipe))


# --- what the steps show --------------------------------------------------------------------------------------------


def _page(
    request: HttpRequest, plan: Plan, step: str, *, problem: DomainError | None = None, status: int = 0
) -> HttpResponse:
    is_counting = plan.is_counting and step in ("method", "compute", "review")
    if is_counting and plan.version and plan.base_model:
        request_count(version=plan.version, base_model=counting_model(plan.base_model))
    context: dict[str, Any] = {"quote": None} | ({} if is_counting else _CONTEXTS[step](request, plan))
    problem = problem or context.get("problem")
    is_bad = bool(problem or any(context[name].errors for name in ("form", "compute_form") if name in context))
    context |= {
        "step": step,
        "heading": HEADINGS[step],
        "steps": _steps(plan, step),
        "hidden": plan.choices.hidden(step),
        "plan": plan,
        "recipe": _recipe(plan, context["quote"]),
        "spread": spread(context["quote"]),
        "model_url": plan.choices.url(step="model"),
        "problem": problem,
        "problem_url": _mend_url(plan, problem, step),
    }
    template = f"wizard/{'counting' if is_counting else step}.html"
    if part := _PARTS.get(request.headers.get("HX-Target", "").partition("#")[2]):
        context["is_live"] = bool(request.headers.get("HX-Request"))
        template = part if context["is_live"] else template
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
        "validation_options": [(version.pk, f"{version.dataset.name}, {version.filename}") for version in ready],
        "needs": "Needs a dataset" if not plan.version else "Needs a base model",
    }


def _model(request: HttpRequest, plan: Plan) -> dict[str, Any]:
    models = list(list_base_models())
    wanted = request.GET.get("q", "").strip().lower()
    found = [model for model in models if wanted in f"{model.name} {model.display_name} {model.repo}".lower()]
    shown = found if wanted or "all" in request.GET else _first_models(found, plan.choices.get("model"))
    return {
        "models": [{"model": model, "licence": _short_licence(model)} for model in shown],
        "chosen": plan.choices.get("model") or (shown[0].name if shown else ""),
        "q": request.GET.get("q", ""),
        "hidden_count": len(found) - len(shown),
        "all_url": plan.choices.url(step="model") + "&all=1",
        "needs": "Needs a base model",
    }


def _first_models(models: Sequence[BaseModel], chosen: str) -> list[BaseModel]:
    """Return the installed models, the chosen one and the smallest of the rest."""
    listed = models[: max(_MODELS_SHOWN, sum(model.is_installed for model in models))]
    return [*listed, *(model for model in models if model.name == chosen and model not in listed)]


def _short_licence(model: BaseModel) -> str:
    return model.licence.partition(" (")[0] or "not stated"


def _method(request: HttpRequest, plan: Plan) -> dict[str, Any]:
    form = plan.form
    assert form is not None
    try:
        by_method = {method.value: best_quote(plan.quotes(method.value)) for method in Method}
    except DomainError as error:
        return {"form": form, "problem": error, "needs": "No quote for these choices"}
    method = form.data["method"]
    return {
        "form": form,
        "methods": _method_choices(by_method, method),
        "quote": by_method.get(method),
        "needs": "Mend the marked fields" if form.errors else "",
    }


def _method_choices(by_method: Mapping[str, PoolQuote | None], chosen: str) -> list[dict[str, Any]]:
    words = {
        "lora": "Trains a small adapter beside the frozen model. The usual choice.",
        "qlora": "The same, with the frozen model in 4 bits: less memory, slower.",
        "full": "Trains every weight. The result is a whole model to download, not served here.",
    }
    return [
        {
            "value": value,
            "title": METHOD_NAMES[Method(value)],
            "text": words[value],
            "quote": quoted,
            "checked": value == chosen,
        }
        for value, quoted in by_method.items()
    ]


def _review(request: HttpRequest, plan: Plan) -> dict[str, Any]:
    quotes, problem = quotes_of(plan)
    named = next((quoted for quoted in quotes if quoted.key == plan.choices.get("pool")), None)
    cap_form = plan.compute_form
    cap_nano = cap_form.cap_nano or (named.cap_nano if named else None)
    balance = get_balance(organization=plan.organization)
    left_nano = balance.available_nano - cap_nano if cap_nano is not None else None
    p50_nano = named.estimate.cost_nano_p50 if named else None
    return {
        "quote": named,
        "row": _review_row(named, plan) if named else None,
        "cap_nano": cap_nano,
        "balance": balance,
        "left_nano": left_nano,
        "is_short": left_nano is not None and left_nano < 0,
        "is_tight": cap_nano is not None and p50_nano is not None and cap_nano < p50_nano,
        "may_launch": bool(named and named.is_launchable and left_nano is not None and left_nano >= 0),
        "once": request.POST.get("once") or secrets.token_urlsafe(18),
        "full_recipe": _full_recipe(plan),
        "samples": samples(plan, named),
        "compute_url": plan.choices.url(step="compute"),
        "problem": problem,
        "needs": "" if named else "Choose compute again",
    }


def _review_row(quoted: PoolQuote, plan: Plan) -> ComputeRow:
    view = TableView(chosen=quoted, now=db_now(), needed_by=plan.compute_form.deadline)
    return compute_rows([quoted], view=view)[0]


_CONTEXTS = {"dataset": _dataset, "model": _model, "method": _method, "compute": compute_context, "review": _review}


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


def _recipe(plan: Plan, quoted: PoolQuote | None) -> list[dict[str, str]]:
    """Return the strip above every step: each part links to where it is changed."""
    reachable = plan.choices.reachable()
    version, model, form = plan.version, plan.base_model, plan.form
    recipe = form.recipe if form and "compute" in reachable and form.is_valid() else None
    parts: list[tuple[str, str, str, str]] = [
        ("Dataset", version.dataset.name if version else "", _dataset_detail(plan), "dataset"),
        ("Base model", model.display_name if model else "", _model_detail(model), "model"),
        (
            "Method",
            *(_method_words(recipe) if recipe else ("", "")),
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


def _method_words(recipe: Hyperparameters) -> tuple[str, str]:
    name, rate = METHOD_NAMES[recipe.method], f"rate {recipe.learning_rate:g}"
    if recipe.method is Method.FULL:
        return name, f"every weight, {rate}"
    return f"{name}, rank {recipe.lora_rank}", f"alpha {recipe.lora_alpha}, {rate}"


def _dataset_detail(plan: Plan) -> str:
    if plan.version is None:
        return ""
    rows = f"{number(plan.version.rows)} rows"
    return f"{rows}, {tokens(plan.count.tokens)} tokens" if plan.count else rows


def _model_detail(model: BaseModel | None) -> str:
    if model is None:
        return ""
    return f"{tokens(model.parameter_count)} parameters, {_short_licence(model)}"


def _schedule(epochs: int, quoted: PoolQuote | None) -> str:
    words = f"{epochs} epoch{'' if epochs == 1 else 's'}"
    return f"{words}, {number(quoted.estimate.steps)} steps" if quoted else words


def _full_recipe(plan: Plan) -> list[tuple[str, str, bool]]:
    """Return every setting of the run as (name, value, whether it differs from the model's choice)."""
    form = plan.form
    if form is None or not form.is_valid() or form.recipe is None:
        return []
    recipe, changed = form.recipe, form.changed
    modules = ", ".join(name.removesuffix("_proj") for name in recipe.target_modules)
    return [
        ("Method", "QLoRA, NF4" if recipe.quantization else METHOD_NAMES[recipe.method], False),
        ("Epochs", str(recipe.epochs), "epochs" in changed),
        ("Learning rate", f"{recipe.learning_rate:g}, {recipe.lr_scheduler}", "learning_rate" in changed),
        ("Warm-up", f"{recipe.warmup_ratio:.0%} of the steps", False),
        ("Batch", f"{recipe.batch_size} rows a step", "batch_size" in changed),
        ("Longest row", f"{recipe.max_length:,} tokens", "max_length" in changed),
        ("Rank, alpha", f"{recipe.lora_rank}, {recipe.lora_alpha}", bool({"lora_rank", "lora_alpha"} & set(changed))),
        ("Adapter dropout", f"{recipe.lora_dropout:g}", False),
        ("Adapted layers", modules, False),
        ("Weight decay", f"{recipe.weight_decay:g}", False),
        ("Gradient norm limit", f"{recipe.max_grad_norm:g}", False),
        ("Seed", str(recipe.seed), False),
    ]
