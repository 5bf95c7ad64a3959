"""POST /api/v1/estimates: what a job would need, take and cost on each pool, before anything is started."""

from typing import Any

import msgspec
from rest_framework.request import Request
from rest_framework.response import Response

from apps.api.fine_tuning import LoraChoice, parse_method
from apps.api.parsers import read_body
from apps.api.views import ApiView
from apps.catalog.queries import get_base_model
from apps.core.clock import db_now
from apps.core.money import nano_to_usd
from apps.datasets.queries import get_version
from apps.finetuning.operations import get_quotes, require_ready
from apps.finetuning.quoting import PoolQuote, snapshot
from apps.finetuning.recipes import resolve


class EstimateRequest(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    training_file: str
    quantization: str | None = None
    lora: LoraChoice | None = None
    recipe: dict[str, Any] | None = None


class Estimates(ApiView):
    required_scope = {"POST": "view"}

    def post(self, request: Request) -> Response:
        body = read_body(request.data, EstimateRequest)
        base_model = get_base_model(name=body.model)
        version = get_version(organization=self.organization, id=body.training_file, param="training_file")
        require_ready(version, "training_file")
        lora = body.lora or LoraChoice()
        asked = {
            "lora_rank": lora.rank,
            "lora_alpha": lora.alpha,
            "lora_dropout": lora.dropout,
            "target_modules": lora.target_modules,
        } | (body.recipe or {})
        recipe = resolve(base_model=base_model, method=parse_method(body.quantization), asked=asked)
        quotes = get_quotes(base_model=base_model, version=version, recipe=recipe, now=db_now())
        return Response(
            {
                "object": "estimate",
                "model": base_model.name,
                "training_file": version.pk,
                "recipe": msgspec.to_builtins(recipe),
                "pools": [pool_object(quoted) for quoted in quotes],
            }
        )


def pool_object(quoted: PoolQuote) -> dict[str, Any]:
    """Return one row of the table; money in dollars as decimal strings, exact."""
    estimate = quoted.estimate
    return {
        "pool": quoted.pool.name,
        "gpu_type": quoted.pool.gpu_type.name,
        "region": quoted.pool.region,
        "is_launchable": quoted.is_launchable,
        "block_reason": quoted.block_reason or None,
        "live_workers": quoted.live_workers,
        "hold_usd": _usd(quoted.cap_nano),
        "cost_usd": {name: _usd(getattr(estimate, f"cost_nano_{name}")) for name in ("p10", "p50", "p90")},
        "price_usd_per_hour": _usd(quoted.price.price_nano * 3_600_000 // quoted.price.per) if quoted.price else None,
        "estimate": snapshot(estimate),
    }


def _usd(nano: int | None) -> str | None:
    return None if nano is None else str(nano_to_usd(nano))
