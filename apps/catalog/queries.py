"""Queries for base models and prices."""

import datetime
from collections.abc import Collection
from functools import cache, lru_cache
from pathlib import Path

import msgspec
from django.db.models import DateTimeField, F, Func, Q, QuerySet
from django.utils.translation import gettext

from apps.accounts.models import Organization, key_of
from apps.catalog.models import BaseModel, GpuType, PriceRule
from apps.catalog.pricing import batch_sku
from apps.contracts.adapter_files import MODEL_TYPES
from apps.contracts.chat import ChatRenderer
from apps.core.database.prepared import fetch_prepared
from apps.core.errors import InvalidState, NotFound
from apps.core.objects.store import read_object
from apps.core.secrets.sealing import place_of, unseal

_HUB_MODELS = Path(__file__).resolve().parent / "data" / "hub_models.json"
TOKENIZER_LIMIT_BYTES = 64 * 1024 * 1024
_SEALED = "SELECT token_sealed FROM catalog_hubtoken WHERE base_model_id = %(base_model)s"


class ModelNotFound(NotFound):
    """No base model, or no model of the organization, has this name. Unknown and foreign names get the same answer."""

    code = "model_not_found"


class ModelNotInstalled(InvalidState):
    """The model is listed for quotes, but its tokenizer, template or weights are not available here."""

    code = "model_not_installed"


class HubModel(msgspec.Struct, frozen=True, kw_only=True):
    """A repository that operators can choose. A lookup replaces these values with the hub's own."""

    family: str
    size: str
    repo: str
    model_type: str
    is_gated: bool
    is_instruct: bool
    licence: str | None
    shape: dict[str, int | None] | None
    source_url: str | None
    quantization: str = ""  # the format of weights that are stored in fewer than 16 bits

    def __str__(self) -> str:
        notes = (", gated" if self.is_gated else "") + (f", refused: {self.refusal}" if self.refusal else "")
        return f"{self.size}: {self.repo}{notes}"

    @property
    def refusal(self) -> str:
        """Return in a few words why a lookup of this repository is refused; "" if it can be installed."""
        if self.quantization:
            return f"{self.quantization} weights"
        return "" if self.model_type in MODEL_TYPES else f"{self.model_type} is not supported"


class _HubModels(msgspec.Struct, frozen=True):
    models: tuple[HubModel, ...]


@cache
def list_hub_models() -> tuple[HubModel, ...]:
    """Return the repositories to choose from, instruct models first. Models of one family follow each other."""
    return msgspec.json.decode(_HUB_MODELS.read_bytes(), type=_HubModels).models


def list_base_models(*, only_installed: bool = False) -> QuerySet[BaseModel]:
    """Return the models on offer, installed ones first, then from small to large."""
    models = BaseModel.objects.filter(retired_at=None)
    if only_installed:
        models = models.filter(is_installed=True)
    return models.order_by("-is_installed", "parameter_count", "name")


def get_base_model(*, name: str) -> BaseModel:
    """Return a model on offer by the name customers send in `model`. Raises ModelNotFound."""
    found = BaseModel.objects.filter(name=name, retired_at=None).first()
    if found is None:
        raise ModelNotFound(
            gettext("The model %(name)s does not exist or cannot be fine-tuned. GET /v1/models lists what can.")
            % {"name": repr(name[:100])},
            param="model",
        )
    return found


def list_gpu_types() -> QuerySet[GpuType]:
    return GpuType.objects.order_by("name")


def active_price(
    *, sku: str, organization: Organization | str | None = None, now: datetime.datetime | None = None
) -> PriceRule | None:
    """Return the present price of a SKU: the organization's own, or else the general one; None if there is none."""
    rules = _in_force(now).filter(Q(organization=None) | Q(organization_id=key_of(organization)), sku=sku)
    return rules.order_by(F("organization").asc(nulls_last=True)).first()


def active_prices(
    *, skus: Collection[str], organization: Organization | str, batched: Collection[str] = ()
) -> dict[str, PriceRule]:
    """Return the price of each of these SKUs now, as `active_price` does. A SKU without a price is left out.

    For the token SKUs in `batched`, the price in batches is added under `batch_sku`. It is the usual price if batches
    have none.
    """
    skus = {*skus, *batched, *map(batch_sku, batched)}
    rules = _in_force(None).filter(Q(organization=None) | Q(organization_id=key_of(organization)), sku__in=skus)
    found = {rule.sku: rule for rule in rules.order_by(F("organization").asc(nulls_first=True))}
    return {batch_sku(sku): found[sku] for sku in batched if sku in found} | found


def list_active_prices(
    *, prefix: str, organization: Organization | str | None = None, now: datetime.datetime | None = None
) -> list[PriceRule]:
    """Return the organization's current price of each SKU that begins with `prefix`."""
    rules = _in_force(now).filter(
        Q(organization=None) | Q(organization_id=key_of(organization)), sku__startswith=prefix
    )
    own_last = rules.order_by("sku", F("organization").asc(nulls_first=True))
    return list({rule.sku: rule for rule in own_last}.values())


def list_all_active_prices(*, prefix: str) -> QuerySet[PriceRule]:
    """Return all prices in force, including those of single organizations."""
    return _in_force(None).filter(sku__startswith=prefix)


def list_current_prices(*, now: datetime.datetime) -> QuerySet[PriceRule]:
    """Return the prices in force and the future ones, for everybody and for single organizations."""
    rules = PriceRule.objects.filter(Q(effective_to=None) | Q(effective_to__gt=now))
    return rules.select_related("organization")


def list_past_prices(*, now: datetime.datetime, sku: str = "") -> QuerySet[PriceRule]:
    """Return the prices that ended, of one SKU or of all."""
    rules = PriceRule.objects.filter(effective_to__lte=now, **({"sku": sku} if sku else {}))
    return rules.select_related("organization")


def _in_force(now: datetime.datetime | None) -> QuerySet[PriceRule]:
    moment = now or Func(function="clock_timestamp", output_field=DateTimeField())
    return PriceRule.objects.filter(Q(effective_to=None) | Q(effective_to__gt=moment), effective_from__lte=moment)


def inference_sku(base_model: BaseModel, *, direction: str) -> str:
    """Return the SKU of a model's `input` or `output` tokens; adapters have the price of their base model."""
    return f"inference:{direction}:{base_model.name}"


def warm_sku(base_model: BaseModel) -> str:
    """Return the SKU of the time that an adapter of this model is kept warm."""
    return f"warm:{base_model.name}"


def hub_token_place(base_model: BaseModel) -> bytes:
    return place_of(table="catalog_hubtoken", column="token_sealed", row_id=base_model.pk)


def open_hub_token(*, base_model: BaseModel) -> str | None:
    """Return the token of a gated repository, or None. Raises SealBroken. Never log or show it."""
    found = fetch_prepared(_SEALED, {"base_model": base_model.pk})
    return unseal(bytes(found[0][0]), place=hub_token_place(base_model)) if found else None


def chat_renderer(*, base_model: BaseModel) -> ChatRenderer:
    """Return the model's renderer, cached in this process. Raises ModelNotInstalled."""
    if not base_model.chat_template or not base_model.tokenizer_key:
        raise ModelNotInstalled(
            gettext("%(display_name)s is not installed here, so its tokens cannot be counted. Choose another model.")
            % {"display_name": base_model.display_name},
            param="model",
        )
    tokens = tuple(sorted(base_model.special_tokens.items()))
    return _renderer(base_model.chat_template, base_model.tokenizer_key, tokens)


@lru_cache(maxsize=8)
def _renderer(chat_template: str, tokenizer_key: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatRenderer:
    # The key names the tokenizer's hash, so an entry never goes stale.
    tokenizer = read_object(tokenizer_key, limit_bytes=TOKENIZER_LIMIT_BYTES)
    tokens = dict(special_tokens)
    return ChatRenderer(
        chat_template,
        tokenizer,
        bos_token=tokens.get("bos_token", ""),
        eos_token=tokens.get("eos_token", ""),
        pad_token=tokens.get("pad_token", ""),
        unk_token=tokens.get("unk_token", ""),
    )
