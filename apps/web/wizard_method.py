"""The wizard's method step: every way to train with its price and what it delivers, the recipe, and what follows."""

from collections.abc import Mapping
from typing import Any

from django.http import HttpRequest

from apps.contracts.evaluation import EvaluationPlan
from apps.contracts.runs import Method, Objective
from apps.core.errors import DomainError
from apps.core.templatetags.ui import bytes_, usd
from apps.finetuning.delivery import Delivery, deliver
from apps.finetuning.limits import Kind
from apps.finetuning.operations import objective_of
from apps.finetuning.options import PoolQuote
from apps.web.forms.wizard import ADAPTER_FIELDS
from apps.web.wizard_compute import best_quote
from apps.web.wizard_plan import Plan

_WORDS = {
    "lora": "Trains a small adapter beside the frozen model. The usual choice.",
    "qlora": "The same, with the frozen model in 4 bits: less memory, slower.",
    "dora": "Trains direction and size of each weight apart: a little better at low ranks, slower.",
    "qdora": "DoRA over a model in 4 bits.",
    "full": "Trains every weight.",
}


def method_context(request: HttpRequest, plan: Plan) -> dict[str, Any]:
    """Return what the step shows; without prices where there is no quote for these choices."""
    form = plan.form
    assert form is not None and plan.base_model is not None
    kinds = form.kinds
    after: dict[str, Any] = {
        "after": plan.after,
        "tracking": plan.tracking,
        "can_be_graded": objective_of(plan.version) is not Objective.TEXT,
        "adapter_fields": ADAPTER_FIELDS,
        "judge_calls": 2 * EvaluationPlan().max_answers,  # base and tuned
    }
    try:
        quoted = {kind.key: best_quote(plan.quotes(kind)) for kind in kinds} if plan.form and form.is_valid() else {}
    except DomainError as error:
        return after | {"form": form, "problem": error, "needs": "No quote for these choices"}
    return after | {
        "form": form,
        "methods": [_choice(kind, quoted, plan) for kind in kinds],
        "quote": quoted.get(form.kind.key),
        "needs": "Mend the marked fields" if form.errors else "",
    }


def _choice(kind: Kind, quoted: Mapping[str, PoolQuote | None], plan: Plan) -> dict[str, Any]:
    form = plan.form
    assert form is not None and plan.base_model is not None
    recipe = form.recipe_of(kind) if form.is_valid() else None
    delivery = deliver(organization=plan.organization, base_model=plan.base_model, recipe=recipe) if recipe else None
    return {
        "value": kind.key,
        "title": kind.name,
        "text": " ".join([_WORDS[kind.key], *delivery_words(kind, delivery)]),
        "quote": quoted.get(kind.key),
        "checked": kind.key == form.kind.key,
    }


def delivery_words(kind: Kind, delivery: Delivery | None) -> list[str]:
    """Return what is to be known of a result that is not served here as an adapter."""
    if kind.delivered_as == "adapter":
        return []
    size = delivery.files[-1].bytes if delivery else None
    what = "a whole model" if kind.method is Method.FULL else "a merged model, because the engine refuses the adapter"
    return [f"Delivered as {what}{f', {bytes_(size)}' if size else ''}, kept at no charge; {_serving_words(delivery)}."]


def _serving_words(delivery: Delivery | None) -> str:
    if delivery is None or not delivery.may_be_served:
        return "not served here"
    prices = delivery.input_nano_per_million, delivery.output_nano_per_million
    cost = f", {usd(prices[0])} and {usd(prices[1])} per million tokens in and out" if None not in prices else ""
    return f"served only on a replica of its own, where the operator gives it one{cost}"
