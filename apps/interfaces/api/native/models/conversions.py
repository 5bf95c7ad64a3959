"""/api/v1/models/{model}/conversions: the forms that a finished model can be converted to, their prices and orders."""

from dataclasses import replace
from typing import Annotated, Literal, TypedDict

import msgspec
from msgspec import Meta
from rest_framework.request import Request

from apps.accounts.roles import Permission
from apps.adapters.models import AdapterVersion
from apps.core.database.clock import db_now
from apps.core.errors import ErrorDetails
from apps.core.money import usd_decimal
from apps.finetuning.conversions.orders import ConversionOffer, cancel, get_conversion, list_offers, order
from apps.interfaces.api.requests.amounts import read_nano
from apps.interfaces.api.requests.pagination import ListObject, list_object
from apps.interfaces.api.views import ApiView
from apps.serving.aliases import get_exact_version


class ConversionBody(msgspec.Struct, forbid_unknown_fields=True):
    """`quoted_max_usd` confirms the price in the GET answer. The order is refused if the price has risen above it."""

    kind: Annotated[str, Meta(description="merged_16bit or gguf.")]
    quoted_max_usd: Annotated[str | float | int, Meta(description="An amount in dollars, such as 0.25.")]


class ConversionObject(TypedDict):
    """One form of a model.

    `status` is `offered`, `refused`, `waiting`, `running`, `succeeded`, `failed` or `cancelled`.
    `price_usd` is the price of an open order, or else today's quote. `bytes` is a quote until the order has succeeded.
    `refusal` is why it cannot be ordered now, and
    `problem` why the last attempt made nothing. `cost_usd` is what was charged.
    """

    object: Literal["model.conversion"]
    id: str | None
    model: str
    kind: str
    status: str
    bytes: int | None
    price_usd: str
    cost_usd: str
    refusal: ErrorDetails | None
    problem: str | None
    created_at: int | None


class ModelConversions(ApiView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.ADAPTER_WRITE}
    examples = {"POST": {"kind": "gguf", "quoted_max_usd": "0.25"}}

    def get(self, request: Request, model: str) -> ListObject[ConversionObject]:
        """List the forms that a fine-tuned model can be converted to, with the price or the state of each."""
        version = get_exact_version(organization=self.organization, model_name=model)
        return list_object([_object(version, offer) for offer in list_offers(version=version)])

    def post(self, request: Request, model: str, body: ConversionBody) -> ConversionObject:
        """Order a form of a fine-tuned model. An idle trainer makes it; then its files are listed with the model's.

        The price is held, and charged once when the files are there. Ordering what is ordered already returns the
        order.
        """
        version = get_exact_version(organization=self.organization, model_name=model)
        shown = read_nano("quoted_max_usd", body.quoted_max_usd, example="0.25")
        order(version=version, kind=body.kind, shown_nano=shown, by=self.actor, now=db_now())
        return next(_object(version, each) for each in list_offers(version=version) if each.kind == body.kind)


class ModelConversionCancel(ApiView):
    required_scope = {"POST": Permission.ADAPTER_WRITE}

    def post(self, request: Request, model: str, conversion_id: str) -> ConversionObject:
        """Cancel an order that no trainer has taken yet. What was held returns, and nothing is charged."""
        version = get_exact_version(organization=self.organization, model_name=model)
        found = cancel(conversion=get_conversion(version=version, id=conversion_id), by=self.actor)
        offer = next(each for each in list_offers(version=version) if each.kind == found.kind)
        return _object(version, replace(offer, conversion=found))


def _object(version: AdapterVersion, offer: ConversionOffer) -> ConversionObject:
    made = offer.conversion
    return {
        "object": "model.conversion",
        "id": made.pk if made else None,
        "model": version.model_name,
        "kind": offer.kind,
        "status": made.status if made else "refused" if offer.refusal else "offered",
        "bytes": made.bytes if made and made.ended_at else offer.bytes,
        "price_usd": usd_decimal(made.price_nano if made and offer.is_open else offer.price_nano),
        "cost_usd": usd_decimal(made.cost_nano if made else 0),
        "refusal": offer.refusal.as_openai()["error"] if offer.refusal else None,
        "problem": (made.problem or None) if made else None,
        "created_at": int(made.created_at.timestamp()) if made else None,
    }
