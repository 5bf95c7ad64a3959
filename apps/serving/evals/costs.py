"""The models that a run asks, and the maximum cost of their answers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from apps.accounts.models import Organization
from apps.adapters.lifecycle import AdapterVersionStatus
from apps.adapters.queries import get_version_by_name
from apps.billing.usage.metering import price_ceiling
from apps.catalog.models import BaseModel
from apps.catalog.pricing import batch_sku
from apps.catalog.queries import active_prices, get_base_model, inference_sku
from apps.core.errors import DomainError, InvalidValue, NotFound, Status
from apps.serving.aliases import list_aliases

_TEMPLATE_TOKENS = 256  # the most that a chat template adds
_WHOLE_CONTEXT = 2**31
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_FIXED_BYTES, _BYTES_PER_TOKEN = 256 * 1024, 16  # as the gateway's own limit of a body
_SILENT = (AdapterVersionStatus.REFUSED, AdapterVersionStatus.FILES_ONLY)


class PriceMissing(DomainError):
    """The operator has set no price for a model, so nothing can be asked of it."""

    code = "price_not_set"
    status = Status.UNPROCESSABLE


@dataclass(frozen=True)
class Asked:
    """A request to a model, with the most tokens that it can have. `bytes` is the length of its body, if known."""

    model_name: str
    input_tokens: int
    output_tokens: int
    bytes: int = 0


def asked_by(body: Mapping[str, object], *, spare_tokens: int = 0) -> Asked:
    """Return a request with its most tokens. Each token has at least one byte of the body, except in images and audio.

    `spare_tokens` are the tokens of answers that the request will repeat.
    """
    size = len(msgspec.json.encode(body))
    tokens = _WHOLE_CONTEXT if _has_media(body["messages"]) else size + _TEMPLATE_TOKENS + spare_tokens
    return Asked(str(body["model"]), tokens, int(str(body["max_completion_tokens"])), size)


def _has_media(messages: object) -> bool:
    assert isinstance(messages, list)
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(not isinstance(part, Mapping) or part.get("type") not in _TEXT_PARTS for part in parts)


def largest_body(model: BaseModel) -> int:
    """Return the size in bytes of the largest body that the model can read, images included."""
    return _FIXED_BYTES + model.context_length * _BYTES_PER_TOKEN


def require_model(*, organization: Organization | str, name: str, param: str) -> BaseModel:
    """Return the base model behind a name that the organization can ask. Raises InvalidValue."""
    try:
        named = list_aliases(organization=organization).filter(model_name=name)
        alias = named.first() if "\x00" not in name else None
        if alias is not None:
            return alias.adapter.base_model
        if name.startswith("ft:"):
            version = get_version_by_name(organization=organization, model_name=name, param=param)
            if version.status not in _SILENT:
                return version.adapter.base_model
        else:
            model = get_base_model(name=name)
            if model.is_installed:
                return model
    except NotFound as missing:
        raise InvalidValue(
            f"The model '{name[:60]}' does not exist: name one that is served.", param=param
        ) from missing
    raise InvalidValue(f"The model '{name[:60]}' answers no requests here: name one that is served.", param=param)


def highest_cost_nano(
    *, organization: Organization | str, base_models: Mapping[str, BaseModel], asked: Iterable[Asked]
) -> int:
    """Return the maximum cost of all requests, at the prices of batches. `base_models`: by a model's name.

    Raises PriceMissing.
    """
    skus = {inference_sku(model, direction=way) for model in base_models.values() for way in ("input", "output")}
    prices = active_prices(skus=(), batched=skus, organization=organization)
    total = 0
    for one in asked:
        model = base_models[one.model_name]
        tokens = {
            "input": min(one.input_tokens, model.context_length),
            "output": min(one.output_tokens, model.context_length),
        }
        for way, quantity in tokens.items():
            price = prices.get(batch_sku(inference_sku(model, direction=way)))
            if price is None:
                raise PriceMissing(f"The model '{one.model_name[:60]}' has no price here.")
            total += price_ceiling(quantity=quantity, price_nano=price.price_nano, per=price.per)
    return total
