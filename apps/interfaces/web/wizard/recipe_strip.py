"""The strip above every step: dataset, base model, method and schedule, each with a link to change it."""

from django.utils.translation import gettext, ngettext

from apps.contracts.hyperparameters import Hyperparameters, Method
from apps.core.templatetags.ui import number, tokens
from apps.finetuning.quotes.options import PoolQuote
from apps.finetuning.recipes.limits import TrainingKind
from apps.interfaces.web.wizard.plan import Plan
from apps.interfaces.web.wizard.steps.sequence import list_reachable


def recipe_strip(plan: Plan, quoted: PoolQuote | None, *, step: str) -> list[dict[str, str]]:
    """Return the strip's parts as the page of `step` shows them."""
    reachable, form = list_reachable(plan.draft), plan.form
    is_chosen = "compute" in reachable or step == "method"  # the method step shows the chosen option
    recipe = form.recipe if form and is_chosen and form.is_valid() else None
    version, model = plan.version, plan.base_model
    method = _method_words(form.kind, recipe) if form and recipe else ("", "")
    batch = (
        gettext("batch %(batch_size)s, up to %(max_length)s tokens a row")
        % {"batch_size": recipe.batch_size, "max_length": number(recipe.max_length)}
        if recipe
        else ""
    )
    parts = (
        (gettext("Dataset"), version.dataset.name if version else "", _dataset_detail(plan), "dataset"),
        (gettext("Base model"), model.display_name if model else "", _model_detail(plan), "model"),
        (gettext("Method"), *method, "method"),
        (gettext("Schedule"), _schedule(recipe.epochs, quoted) if recipe else "", batch, "method"),
    )
    return [
        {"name": name, "value": value, "detail": detail, "url": plan.draft.url(step) if step in reachable else ""}
        for name, value, detail, step in parts
    ]


def _method_words(kind: TrainingKind, recipe: Hyperparameters) -> tuple[str, str]:
    rate = gettext("rate %(learning_rate)s") % {"learning_rate": f"{recipe.learning_rate:g}"}
    if recipe.method is Method.FULL:
        return gettext(kind.name), gettext("every weight, %(rate)s") % {"rate": rate}
    scaled = " / √rank" if recipe.use_rslora else ""
    return gettext("%(method)s, rank %(rank)s") % {"method": gettext(kind.name), "rank": recipe.lora_rank}, gettext(
        "alpha %(lora_alpha)s%(scaled)s, %(rate)s"
    ) % {
        "lora_alpha": recipe.lora_alpha,
        "scaled": scaled,
        "rate": rate,
    }


def _dataset_detail(plan: Plan) -> str:
    if plan.version is None:
        return ""
    rows = gettext("%(rows)s rows") % {"rows": number(plan.version.rows)}
    return (
        gettext("%(rows)s, %(tokens)s tokens") % {"rows": rows, "tokens": tokens(plan.count.tokens)}
        if plan.count
        else rows
    )


def _model_detail(plan: Plan) -> str:
    model = plan.base_model
    if model is None:
        return ""
    if plan.start and plan.start.start_from.name:
        return gettext("continues %(model)s") % {"model": plan.draft.get("model")}
    return gettext("%(count)s parameters, %(licence)s") % {
        "count": tokens(model.parameter_count),
        "licence": model.licence or gettext("licence not stated"),
    }


def _schedule(epochs: int, quoted: PoolQuote | None) -> str:
    words = ngettext("%(epochs)s epoch", "%(epochs)s epochs", epochs) % {"epochs": epochs}
    return (
        gettext("%(words)s, %(steps)s steps") % {"words": words, "steps": number(quoted.estimate.steps)}
        if quoted
        else words
    )
