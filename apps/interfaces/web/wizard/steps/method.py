"""The wizard's method step: every method with its price and delivery, the recipe, and the details."""

from collections.abc import Mapping, Sequence
from functools import partial

from django.utils.translation import gettext

from apps.accounts.models import Organization
from apps.catalog.models import BaseModel
from apps.catalog.queries import chat_renderer
from apps.contracts.chat import RowError, TrainOn
from apps.contracts.evaluation import EvaluationPlan
from apps.contracts.hyperparameters import Method, Objective
from apps.core.errors import DomainError
from apps.core.messages.translation import later
from apps.core.templatetags.ui import bytes_, usd
from apps.datasets.lifecycle import DatasetVersionStatus
from apps.datasets.queries import read_rows
from apps.finetuning.jobs.files import objective_of
from apps.finetuning.quotes.delivery import storage_nano_per_gb_month, whole_model_bytes, whole_model_prices
from apps.finetuning.quotes.options import PoolQuote
from apps.finetuning.recipes.limits import TrainingKind
from apps.finetuning.recipes.stored_requests import stored_request
from apps.interfaces.web.datasets.row_view import RowView, view_row
from apps.interfaces.web.shell.access import OrganizationRequest
from apps.interfaces.web.wizard.after_training_forms import (
    MAX_CRITERION_CHARACTERS,
    MAX_SCHEMA_CHARACTERS,
    is_too_long,
)
from apps.interfaces.web.wizard.forms import ADAPTER_FIELDS
from apps.interfaces.web.wizard.plan import Plan, StepContext
from apps.interfaces.web.wizard.recipe_words import NAMES, other_values
from apps.interfaces.web.wizard.steps.compute import best_quote

_WORDS = {
    "lora": later("Trains a small adapter on top of the frozen model. Best default."),
    "qlora": later("LoRA with a 4-bit base model. Uses less memory, trains slower."),
    "dora": later("Trains the direction and size of each weight separately. Slightly better at low ranks, slower."),
    "qdora": later("DoRA with a 4-bit base model."),
    "full": later("Trains every weight."),
}


def method_context(request: OrganizationRequest, plan: Plan) -> StepContext:
    """Return the context of the step, without prices if there is no quote for these choices."""
    form = plan.form
    assert form is not None and plan.base_model is not None
    kinds = form.kinds
    values: dict[str, object] = {
        "form": form,
        "is_of_project": plan.is_method_of_project,
        "after": plan.after,
        "is_grader_too_long": bool(plan.after.errors and plan.source and is_too_long(stored_request(plan.source))),
        "most_characters": (MAX_SCHEMA_CHARACTERS, MAX_CRITERION_CHARACTERS),
        "tracking": plan.tracking,
        "can_be_graded": objective_of(plan.version) is not Objective.TEXT,
        "adapter_fields": ADAPTER_FIELDS,
        "shown": _first_row(plan),
        "other_values": other_values(form.choices, form.recipe) if form.is_valid() and form.recipe else [],
        "dropped": [NAMES[name] for name in form.dropped],
        "our_choices_url": plan.draft.url("method", settings="") if form.kept else "",
        "judge_calls": 2 * EvaluationPlan().max_answers,  # base and tuned model
        "kept": partial(_kept, plan),  # called by the page only, not by the live panel
    }
    try:
        quoted = {key: best_quote(quotes) for key, quotes in plan.quotes_of_kinds(kinds).items()}
    except DomainError as error:
        problem = None if plan.shown_at_field(error) else error
        needs = gettext("No quote for these choices") if problem else gettext("Fix the highlighted fields")
        return StepContext(values | {"needs": needs}, problem=problem)
    costs = {key: quote.estimate.cost_nano_p50 for key, quote in quoted.items() if quote}
    values |= {
        "methods": partial(_choices, kinds, quoted, plan),  # called by the page only, not by the live panel
        "method_prices": [(kind.key, costs.get(kind.key)) for kind in kinds],
        "method_needs": [(key, quote.estimate.peak_bytes if quote else None) for key, quote in quoted.items()],
        "needs": gettext("Fix the highlighted fields") if form.errors else "",
    }
    return StepContext(values, quoted.get(form.kind.key))


def _first_row(plan: Plan) -> RowView | None:
    """Return the first row of the file as this recipe trains it.

    Return None without a file or recipe, or if the model is not installed.
    """
    model, version, form = plan.base_model, plan.version, plan.form
    if model is None or version is None or form is None or not form.is_valid() or form.recipe is None:
        return None
    if not model.is_installed or version.status != DatasetVersionStatus.READY:
        return None
    recipe, previews = form.recipe, read_rows(version=version, first_line=1, limit=1)
    if not previews or previews[0].row is None:
        return None
    try:
        renderer = chat_renderer(base_model=model)
        return view_row(previews[0].row, renderer, limit=recipe.max_length, train_on=TrainOn(recipe.train_on))
    except RowError:
        return None


def _kept(plan: Plan) -> dict[str, int | None]:
    """Return the size of the whole model in either export, and the price of storing files.

    The size is None if it is unknown; the price is None if storage costs nothing.
    """
    assert plan.base_model is not None
    size_bytes = whole_model_bytes(base_model=plan.base_model)
    return {"bytes": size_bytes, "nano_per_gb_month": storage_nano_per_gb_month(organization=plan.organization)}


def _choices(
    kinds: Sequence[TrainingKind], quoted: Mapping[str, PoolQuote | None], plan: Plan
) -> list[dict[str, object]]:
    assert plan.base_model is not None
    is_any_whole = any(kind.delivered_as != "adapter" for kind in kinds)
    served = _serving_words(plan.organization, plan.base_model) if is_any_whole else ""
    return [_choice(kind, quoted, plan, served) for kind in kinds]


def _choice(kind: TrainingKind, quoted: Mapping[str, PoolQuote | None], plan: Plan, served: str) -> dict[str, object]:
    form = plan.form
    assert form is not None and plan.base_model is not None
    return {
        "value": kind.key,
        "title": gettext(kind.name),
        "text": " ".join(
            filter(None, [f"{_WORDS[kind.key]}", kind.note, *_delivery_words(kind, plan.base_model, served)])
        ),
        "quote": quoted.get(kind.key),
        "checked": kind.key == form.kind.key,
    }


def _delivery_words(kind: TrainingKind, base_model: BaseModel, served: str) -> list[str]:
    """Return how a result that is not served as an adapter is delivered; return nothing for an adapter."""
    if kind.delivered_as == "adapter":
        return []
    size_bytes = whole_model_bytes(base_model=base_model)
    what = (
        gettext("a whole model")
        if kind.method is Method.FULL
        else gettext("a merged model, because the serving engine can't load the adapter")
    )
    if size_bytes:
        what = f"{what}, {bytes_(size_bytes)}"
    return [gettext("Delivered as %(what)s; %(served)s.") % {"what": what, "served": served}]


def _serving_words(organization: Organization, base_model: BaseModel) -> str:
    """Return whether a whole model can be served here, and at which price."""
    prices = whole_model_prices(organization=organization, base_model=base_model)
    if prices is None:
        return gettext("not served here")
    cost = (
        gettext(", %(prices)s and %(prices2)s per million tokens in and out")
        % {"prices": usd(prices[0]), "prices2": usd(prices[1])}
        if None not in prices
        else ""
    )
    return gettext("served only on its own replica, if the operator provides one%(cost)s") % {"cost": cost}
