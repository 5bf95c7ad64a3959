"""The wizard's review: the whole plan on one page, with the hold, the delivery and the prices."""

import secrets
from collections.abc import Sequence

from django.urls import reverse
from django.utils.translation import gettext

from apps.billing.queries import get_balance
from apps.catalog.licences import is_licence_missing
from apps.contracts.hyperparameters import Hyperparameters, Objective
from apps.core.messages.translation import later
from apps.core.money import NANO_PER_CENT
from apps.finetuning.quotes.options import PoolQuote
from apps.finetuning.usage.charges import MINIMUM_SECONDS
from apps.interfaces.web.shell.access import OrganizationRequest
from apps.interfaces.web.wizard.forms import TRAINED
from apps.interfaces.web.wizard.plan import Plan, StepContext
from apps.interfaces.web.wizard.recipe_words import value_in_words
from apps.interfaces.web.wizard.steps.compute import quotes_of, samples
from apps.interfaces.web.wizard.steps.compute_table import TableView, compute_rows

FILES = {
    "adapter": later("Adapter"),
    "model": later("Model, 16 bits"),
    "merged_16bit": later("Merged model, 16 bits"),
    "gguf": later("GGUF, 16 bits"),
}


def review_context(request: OrganizationRequest, plan: Plan) -> StepContext:
    """Return the context of the review.

    A job can be launched if its pool can take it and the balance covers its cap.
    """
    quotes, problem = quotes_of(plan)
    named = named_quote(plan, quotes)
    cap_form = plan.compute_form
    cap_nano = named.maximum_nano(cap_form.cap_nano) if named else cap_form.cap_nano
    balance = get_balance(organization=plan.organization)
    left_nano = balance.available_nano - cap_nano if cap_nano is not None else None
    p50_nano = named.estimate.cost_nano_p50 if named else None
    must_accept = plan.base_model is not None and is_licence_missing(
        organization=plan.organization, base_model=plan.base_model
    )
    is_low = cap_nano is not None and named is not None and cap_nano < (named.least_cap_nano or 0)
    can_pay = left_nano is not None and left_nano >= 0
    missing_cents = max(0, -(left_nano // NANO_PER_CENT)) if left_nano is not None else 0  # rounded up
    view = TableView(chosen=named, now=plan.now, needed_by=cap_form.deadline)
    values: dict[str, object] = {
        "row": compute_rows([named], view=view)[0] if named else None,
        "cap_nano": cap_nano,
        "balance": balance,
        "left_nano": left_nano,
        "is_short": left_nano is not None and left_nano < 0,
        "missing_usd": f"{missing_cents / 100:.2f}" if missing_cents else "",
        "is_low": is_low,
        "may_lower": named is not None and balance.available_nano >= (named.least_cap_nano or 0),
        "is_firm": named is not None and named.is_firm and cap_nano == named.cap_nano,
        "is_tight": cap_nano is not None and p50_nano is not None and cap_nano < p50_nano,
        "may_launch": bool(named and named.is_launchable and can_pay and not is_low and not must_accept),
        "minimum_seconds": MINIMUM_SECONDS,
        "once": request.POST.get("once") or secrets.token_urlsafe(18),
        "full_recipe": _full_recipe(plan),
        "delivery": plan.delivery,
        "files": [(FILES[files.kind], files) for files in plan.delivery.files] if plan.delivery else [],
        "comparison": plan.after.words() if plan.has_held_out_rows else "",
        "samples": samples(plan, named),
        "compute_url": plan.draft.url(step="compute"),
        "method_url": plan.draft.url(step="method"),
        "review_url": plan.draft.url(step="review"),
        "unlabelled_url": plan.draft.url(step="review", labels="none"),
        "must_accept": must_accept,
        "rehearse_url": rehearsal_url(plan, named),
        "needs": "" if named else gettext("Choose compute again"),
    }
    return StepContext(values, named, problem)


def named_quote(plan: Plan, quotes: Sequence[PoolQuote]) -> PoolQuote | None:
    """Return the quote of the option that the draft names."""
    return next((quoted for quoted in quotes if quoted.key == plan.draft.get("pool")), None)


def rehearsal_url(plan: Plan, quoted: PoolQuote | None) -> str:
    """Return the address that asks for the quote's rehearsed memory; "" if it is known or cannot be rehearsed."""
    rehearsal = quoted.rehearsal if quoted and quoted.is_launchable else None
    if rehearsal is None or rehearsal.peak_bytes is not None:
        return ""
    query = plan.draft.url("review").partition("?")[2]
    return f"{reverse('web:job_rehearse')}?{query}&rehearsal={rehearsal.digest}"


def _full_recipe(plan: Plan) -> list[tuple[str, str, bool]]:
    """Return every setting of the run as (name, value, whether it differs from the model's choice)."""
    form = plan.form
    if form is None or not form.is_valid() or form.recipe is None:
        return []
    recipe, changed = form.recipe, form.changed
    trained = dict(TRAINED).get(recipe.train_on, "")
    betas = {Objective.DPO: recipe.dpo_beta, Objective.ORPO: recipe.orpo_beta}
    objective = {
        Objective.SUPERVISED: (gettext("Trained"), trained, "train_on" in changed),
        Objective.TEXT: (gettext("Trained"), gettext("Every token"), False),
    }
    return [
        objective.get(form.chosen_objective) or (gettext("Preference method"), form.chosen_objective.upper(), False),
        (
            gettext("Method"),
            f"{gettext(form.kind.name)}, NF4" if recipe.quantization else gettext(form.kind.name),
            False,
        ),
        (gettext("Epochs"), str(recipe.epochs), "epochs" in changed),
        (
            gettext("Learning rate"),
            f"{recipe.learning_rate:g}, {recipe.lr_scheduler}",
            bool({"learning_rate", "lr_scheduler"} & set(changed)),
        ),
        (
            gettext("Early stopping"),
            value_in_words("early_stopping_patience", recipe.early_stopping_patience),
            "early_stopping_patience" in changed,
        ),
        (
            gettext("Warm-up"),
            gettext("%(warmup_ratio)s of the steps") % {"warmup_ratio": f"{recipe.warmup_ratio:.0%}"},
            "warmup_ratio" in changed,
        ),
        (
            gettext("Batch"),
            value_in_words("batch_size", recipe.batch_size),
            "batch_size" in changed,
        ),
        (
            gettext("Longest row"),
            gettext("%(max_length)s tokens") % {"max_length": f"{recipe.max_length:,}"},
            "max_length" in changed,
        ),
        *(_adapter_lines(recipe, set(changed)) if form.kind.key != "full" else []),
        (gettext("Weight decay"), f"{recipe.weight_decay:g}", "weight_decay" in changed),
        (gettext("Gradient norm limit"), f"{recipe.max_grad_norm:g}", "max_grad_norm" in changed),
        (
            gettext("Held out"),
            gettext("%(validation_share)s of the rows") % {"validation_share": f"{recipe.validation_share:.0%}"},
            "validation_share" in changed,
        ),
        *(
            [(gettext("Beta"), f"{betas[recipe.objective]:g}", f"{recipe.objective}_beta" in changed)]
            if recipe.objective in betas
            else []
        ),
        (gettext("Seed"), str(recipe.seed), "seed" in changed),
    ]


def _adapter_lines(recipe: Hyperparameters, changed: set[str]) -> list[tuple[str, str, bool]]:
    modules = ", ".join(name.removesuffix("_proj") for name in recipe.target_modules)
    scaled = "alpha / √rank (rsLoRA)" if recipe.use_rslora else "alpha / rank"
    return [
        (
            gettext("Rank, alpha"),
            f"{recipe.lora_rank}, {recipe.lora_alpha}",
            bool({"lora_rank", "lora_alpha"} & changed),
        ),
        (gettext("Scaling"), scaled, "use_rslora" in changed),
        (gettext("Adapter dropout"), f"{recipe.lora_dropout:g}", "lora_dropout" in changed),
        (gettext("Adapted layers"), modules, "target_modules" in changed),
    ]
