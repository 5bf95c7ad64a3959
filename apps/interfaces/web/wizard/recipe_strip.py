"""The strip above every step: dataset, base model, method and schedule, each with a link to change it."""

from apps.contracts.runs import Hyperparameters, Method
from apps.core.templatetags.ui import number, tokens
from apps.finetuning.quotes.options import PoolQuote
from apps.finetuning.recipes.limits import TrainingKind
from apps.interfaces.web.wizard.plan import Plan
from apps.interfaces.web.wizard.steps import list_reachable


def recipe_strip(plan: Plan, quoted: PoolQuote | None, *, step: str) -> list[dict[str, str]]:
    """Return the strip's parts as the page of `step` shows them."""
    reachable, form = list_reachable(plan.draft), plan.form
    is_chosen = "compute" in reachable or step == "method"  # the method step shows the chosen option
    recipe = form.recipe if form and is_chosen and form.is_valid() else None
    version, model = plan.version, plan.base_model
    method = _method_words(form.kind, recipe) if form and recipe else ("", "")
    batch = f"batch {recipe.batch_size}, up to {number(recipe.max_length)} tokens a row" if recipe else ""
    parts = (
        ("Dataset", version.dataset.name if version else "", _dataset_detail(plan), "dataset"),
        ("Base model", model.display_name if model else "", _model_detail(plan), "model"),
        ("Method", *method, "method"),
        ("Schedule", _schedule(recipe.epochs, quoted) if recipe else "", batch, "method"),
    )
    return [
        {"name": name, "value": value, "detail": detail, "url": plan.draft.url(step) if step in reachable else ""}
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
    if plan.start and plan.start.start_from.name:
        return f"continues {plan.draft.get('model')}"
    return f"{tokens(model.parameter_count)} parameters, {model.licence or 'licence not stated'}"


def _schedule(epochs: int, quoted: PoolQuote | None) -> str:
    words = f"{epochs} epoch{'' if epochs == 1 else 's'}"
    return f"{words}, {number(quoted.estimate.steps)} steps" if quoted else words
