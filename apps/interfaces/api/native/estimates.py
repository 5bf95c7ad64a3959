"""POST /api/v1/estimates: a job's requirements, duration and cost on each pool, before anything starts."""

import datetime
from collections.abc import Sequence
from typing import Annotated, Any, Generic, Literal, TypedDict, TypeVar

import msgspec
from django.conf import settings
from django.utils.dateparse import parse_datetime
from rest_framework.request import Request

from apps.accounts.roles import Permission
from apps.catalog.queries import get_base_model
from apps.contracts.hyperparameters import Method
from apps.core.database.clock import db_now
from apps.core.errors import InvalidValue
from apps.core.money import usd_decimal
from apps.datasets.queries import find_token_count, get_version
from apps.estimates.machines import MAX_NODES
from apps.estimates.ranking import Ranking
from apps.finetuning.jobs.files import data_facts, require_objective, require_ready
from apps.finetuning.quotes.computation import snapshot
from apps.finetuning.quotes.delivery import Delivery, deliver
from apps.finetuning.quotes.options import PoolQuote, Remedy, finish_seconds, rank_quotes
from apps.finetuning.quotes.queries import get_quotes
from apps.finetuning.recipes.completion import choose
from apps.interfaces.api.requests.recipes import (
    LoraChoice,
    Recipe,
    as_recipe,
    parse_method,
    parse_objective,
    settings_of,
)
from apps.interfaces.api.requests.sent_names import as_sent
from apps.interfaces.api.requests.times import unix_seconds
from apps.interfaces.api.views import ApiView


class MethodType(msgspec.Struct, forbid_unknown_fields=True):
    type: str


class EstimateRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`needed_by` is the deadline for the adapter, as Unix seconds or RFC 3339. The recommendation respects it.

    `node_count` machines of a pool train together.
    """

    model: str
    training_file: str
    quantization: str | None = None
    lora: LoraChoice | None = None
    recipe: Recipe | None = None
    method: MethodType | None = None
    needed_by: int | str | None = None
    exports: list[Literal["merged_16bit", "gguf"]] | None = None
    node_count: Annotated[int, msgspec.Meta(ge=1, le=MAX_NODES)] = 1


Value = TypeVar("Value")


class Percentiles(TypedDict, Generic[Value]):
    p10: Value
    p50: Value
    p90: Value


class RemedyObject(TypedDict):
    """`changes` are request fields to set, such as {"quantization": "nf4"}; `pool` is another pool to use."""

    key: str
    text: str
    peak_bytes: int
    changes: dict[str, Any]
    pool: str | None
    cost_usd: str | None
    note: str | None


class OptionObject(TypedDict):
    """A number of GPUs of a pool, shared evenly by `node_count` machines. Money is in dollars, as exact decimal texts.

    `cost_usd` includes the minimum charge. `hold_usd` is the maximum that you pay. If `price_policy` is "firm", a
    slower run continues at our expense; if it is "metered", it pauses there. `least_cap_usd` is the lowest valid
    `budget.max_cost_usd`. `finish_seconds`
    run from now and include queue, start-up and download. If the wait is unknown, they assume none.
    """

    id: str
    pool: str
    gpu_count: int
    node_count: int
    gpu_type: str
    region: str
    is_spot: bool
    expected_interruptions: float | None
    is_launchable: bool
    block_reason: str | None
    live_workers: int
    badges: list[str]
    meets_needed_by: bool | None
    price_policy: Literal["firm", "metered"]
    hold_usd: str | None
    least_cap_usd: str | None
    cost_usd: Percentiles[str | None]
    cost_usd_per_million_trained_tokens: str | None
    price_usd_per_hour: str | None
    finish_seconds: Percentiles[float] | None
    ways_to_fit: list[RemedyObject]
    estimate: dict[str, Any]


class OptionsObject(TypedDict):
    """`pools` has one entry for each pool and sensible number of GPUs; the other members name the ids of some."""

    needed_by: int | None
    recommended: str | None
    cheapest: str | None
    fastest: str | None
    pareto_front: list[str]
    pools: list[OptionObject]


class DeliveredFilesObject(TypedDict):
    kind: str
    bytes: int | None
    price_usd: str | None
    storage_usd_per_month: str | None


class ServingPrice(TypedDict):
    """`batch_input` and `batch_output` are the prices in requests of batches and of evals."""

    input: str | None
    output: str | None
    batch_input: str | None
    batch_output: str | None


class DeliveryObject(TypedDict):
    """The forms in which the result is delivered, and the price of each."""

    delivered_as: str
    is_served: bool
    may_be_served: bool
    reason: str
    files: list[DeliveredFilesObject]
    serving_usd_per_million_tokens: ServingPrice


class EstimateObject(OptionsObject):
    object: Literal["estimate"]
    model: str
    training_file: str
    recipe: dict[str, Any]
    delivery: DeliveryObject


class Estimates(ApiView):
    """Return a job's requirements, duration and cost on each pool, before anything starts."""

    required_scope = {"POST": Permission.VIEW}
    examples = {
        "POST": {"model": "anneal-demo", "training_file": "file-01m834k536k0gf5jc32faqfm5y", "quantization": "nf4"}
    }

    def post(self, request: Request, body: EstimateRequest) -> EstimateObject:
        with as_sent(request.data):
            return self._estimate(body)

    def _estimate(self, body: EstimateRequest) -> EstimateObject:
        now = db_now()
        needed_by = parse_needed_by(body.needed_by, now)
        base_model = get_base_model(name=body.model)
        version = get_version(organization=self.organization, id=body.training_file, param="training_file")
        require_ready(version, "training_file")
        count = find_token_count(version=version, base_model=base_model)
        given = body.recipe or {}
        method = parse_method(body.quantization, given.get("method")) or Method.LORA
        recipe = choose(
            base_model=base_model,
            method=method,
            asked=as_recipe(settings_of(body.lora, given)),
            objective=require_objective(parse_objective(body.method.type if body.method else None), version),
            data=data_facts(version=version, validation=None, count=count),
        ).hyperparameters
        quotes = get_quotes(
            base_model=base_model,
            version=version,
            recipe=recipe,
            now=now,
            count=count,
            max_age_seconds=settings.ESTIMATE_FACTS_SECONDS,
            node_count=body.node_count,
        )
        delivery = deliver(
            organization=self.organization, base_model=base_model, recipe=recipe, exports=body.exports or []
        )
        return {
            "object": "estimate",
            "model": base_model.name,
            "training_file": version.pk,
            "recipe": msgspec.to_builtins(recipe),
            "delivery": delivery_object(delivery),
            **options_object(quotes, needed_by=needed_by, now=now),
        }


def parse_needed_by(value: int | str | None, now: datetime.datetime) -> datetime.datetime | None:
    """Return the requested moment. Raises InvalidValue if it is malformed, has no time zone or lies in the past."""
    if value is None:
        return None
    try:
        moment = (
            parse_datetime(value) if isinstance(value, str) else datetime.datetime.fromtimestamp(value, datetime.UTC)
        )
    except (ValueError, OverflowError, OSError):
        moment = None
    if moment is None or moment.tzinfo is None:
        text = "needed_by must be Unix seconds, or RFC 3339 with a time zone, such as 2030-05-01T17:45:00Z."
        raise InvalidValue(text, param="needed_by")
    if moment <= now:
        raise InvalidValue("needed_by lies in the past: give a moment to come.", param="needed_by")
    return moment


def options_object(
    quotes: Sequence[PoolQuote], *, needed_by: datetime.datetime | None, now: datetime.datetime
) -> OptionsObject:
    """Return the options with their badges."""
    deadline_seconds = (needed_by - now).total_seconds() if needed_by else None
    ranking = rank_quotes(quotes, deadline_seconds=deadline_seconds)
    return {
        "needed_by": unix_seconds(needed_by),
        "recommended": ranking.recommended,
        "cheapest": ranking.cheapest,
        "fastest": ranking.fastest,
        "pareto_front": list(ranking.front),
        "pools": [option_object(quoted, ranking, deadline_seconds) for quoted in quotes],
    }


def option_object(quoted: PoolQuote, ranking: Ranking, deadline_seconds: float | None) -> OptionObject:
    """Return one row of the table."""
    estimate, finish = quoted.estimate, finish_seconds(quoted.estimate)
    badges = [name for name in ("recommended", "cheapest", "fastest") if getattr(ranking, name) == quoted.key]
    meets = None if deadline_seconds is None or finish is None else finish[2] <= deadline_seconds
    return {
        "id": quoted.key,
        "pool": quoted.pool.name,
        "gpu_count": quoted.gpu_count,
        "node_count": quoted.node_count,
        "gpu_type": quoted.pool.gpu_type.name,
        "region": quoted.pool.region_id,
        "is_spot": quoted.pool.is_spot,
        "expected_interruptions": estimate.interruptions if quoted.pool.is_spot else None,
        "is_launchable": quoted.is_launchable,
        "block_reason": quoted.block_reason or None,
        "live_workers": quoted.live_workers,
        "badges": badges,
        "meets_needed_by": meets,
        "price_policy": "firm" if quoted.is_firm else "metered",
        "hold_usd": usd(quoted.cap_nano),
        "least_cap_usd": usd(quoted.least_cap_nano),
        "cost_usd": _percentiles([usd(getattr(estimate, f"cost_nano_{name}")) for name in _PERCENTILES]),
        "cost_usd_per_million_trained_tokens": usd(estimate.cost_nano_per_million_trained_tokens),
        "price_usd_per_hour": usd(quoted.price.price_nano * 3_600_000 // quoted.price.per) if quoted.price else None,
        "finish_seconds": _percentiles(finish) if finish else None,
        "ways_to_fit": [_remedy_object(way) for way in quoted.ways],
        "estimate": snapshot(estimate),
    }


def delivery_object(delivery: Delivery) -> DeliveryObject:
    """Return the forms in which the result is delivered and the price of each, before anything is launched."""
    return {
        "delivered_as": delivery.delivered_as,
        "is_served": delivery.is_served,
        "may_be_served": delivery.may_be_served,
        "reason": delivery.reason,
        "files": [
            {
                "kind": files.kind,
                "bytes": files.bytes,
                "price_usd": usd(files.price_nano),
                "storage_usd_per_month": usd(files.storage_nano_per_month),
            }
            for files in delivery.files
        ],
        "serving_usd_per_million_tokens": {
            "input": usd(delivery.input_nano_per_million),
            "output": usd(delivery.output_nano_per_million),
            "batch_input": usd(delivery.batch_input_nano_per_million),
            "batch_output": usd(delivery.batch_output_nano_per_million),
        },
    }


def _remedy_object(way: Remedy) -> RemedyObject:
    changes: dict[str, object] = {}
    if method := way.changes.get("method"):
        changes["quantization"] = "nf4" if method == Method.QLORA else "none"
    if recipe := {name: value for name, value in way.changes.items() if name != "method"}:
        changes["recipe"] = recipe
    return {
        "key": way.fix.key,
        "text": way.fix.text,
        "peak_bytes": way.fix.peak_bytes,
        "changes": changes,
        "pool": way.pool,
        "cost_usd": usd(way.cost_nano),
        "note": way.note or None,
    }


_PERCENTILES = ("p10", "p50", "p90")


def _percentiles(values: Sequence[Value]) -> Percentiles[Value]:
    p10, p50, p90 = values
    return {"p10": p10, "p50": p50, "p90": p90}


def usd(nano: int | None) -> str | None:
    """Return an exact amount in dollars; None stays None."""
    return None if nano is None else usd_decimal(nano)
