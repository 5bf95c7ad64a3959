"""Movements of money in the organization's accounts, prices, and requests for credit."""

from typing import Annotated, Literal, TypedDict

import msgspec
from msgspec import Meta
from rest_framework.request import Request

from apps.accounts.models import Organization
from apps.accounts.roles import Permission
from apps.billing.books.credit_requests import get_request, list_requests, request_credit
from apps.billing.models import AccountKind, CreditRequest, LedgerTransaction
from apps.billing.queries import list_transactions, own_amounts, sources_of_holds
from apps.catalog.queries import list_active_prices
from apps.core.money import usd_decimal
from apps.finetuning.pools.prices import name_skus
from apps.interfaces.api.requests.amounts import read_nano
from apps.interfaces.api.requests.pagination import ListObject, PageQuery, list_object, page, page_together
from apps.interfaces.api.requests.times import Moment, time_of, unix_seconds
from apps.interfaces.api.views import ApiView

_WORK = ("ftjob-", "conv_")  # ids of the work that a charge can be for


class LedgerQuery(PageQuery):
    start_time: Moment | None = None
    end_time: Moment | None = None


class MovementObject(TypedDict):
    """One posting. `available_usd` and `held_usd` are what it added to the balance and to what is held.

    `source` is the job or conversion that it is for.
    """

    object: Literal["ledger.movement"]
    id: str
    kind: str
    reason: str
    source: str | None
    available_usd: str
    held_usd: str
    created_at: int


class LedgerList(ApiView):
    required_scope = {"GET": Permission.VIEW}

    def get(self, request: Request, query: LedgerQuery) -> ListObject[MovementObject]:
        """List every movement of the organization's money, newest first."""
        posted = list_transactions(organization=self.organization)
        rows = posted if query.start_time is None else posted.filter(created_at__gte=time_of(query.start_time))
        rows = rows if query.end_time is None else rows.filter(created_at__lt=time_of(query.end_time))
        return page_together(query, rows, lambda found: _movements(self.organization, found), places=posted)


class PriceTier(TypedDict):
    from_units: int
    price_nano: int


class PriceObject(TypedDict):
    """`per` units cost `price_nano` billionths of a dollar. Units beyond those of a tier in a month cost its price.

    `is_own` is true for a price of your organization alone.
    """

    object: Literal["price"]
    id: str
    sku: str
    name: str
    unit: str
    per: int
    price_nano: int
    tiers: list[PriceTier]
    is_own: bool
    effective_from: int


class PriceList(ApiView):
    required_scope = {"GET": Permission.VIEW}

    def get(self, request: Request) -> ListObject[PriceObject]:
        """List every price that the organization pays now, by SKU."""
        rules = list_active_prices(prefix="", organization=self.organization)
        names = name_skus(rule.sku for rule in rules)
        found: list[PriceObject] = [
            {
                "object": "price",
                "id": rule.pk,
                "sku": rule.sku,
                "name": names[rule.sku].name,
                "unit": rule.unit,
                "per": rule.per,
                "price_nano": rule.price_nano,
                "tiers": rule.tiers,
                "is_own": rule.organization_id is not None,
                "effective_from": int(rule.effective_from.timestamp()),
            }
            for rule in rules
        ]
        return list_object(found)


class AskForCredit(msgspec.Struct, forbid_unknown_fields=True):
    """The operators read the note."""

    amount_usd: Annotated[str, Meta(max_length=30, examples=["250.00"])] | float
    note: Annotated[str, Meta(max_length=300)] = ""


class CreditRequestObject(TypedDict):
    """`status` is `open`, `granted` or `declined`. `answer` is the operator's reason."""

    object: Literal["credit_request"]
    id: str
    status: str
    amount_usd: str
    note: str
    granted_usd: str | None
    answer: str | None
    requested_by: str
    requested_at: int
    decided_at: int | None


class CreditRequestList(ApiView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.JOB_WRITE}
    examples = {"POST": {"amount_usd": "250.00", "note": "For the evaluation in March."}}

    def get(self, request: Request, query: PageQuery) -> ListObject[CreditRequestObject]:
        """List the organization's requests for credit, newest first."""
        rows = list_requests(organization=self.organization)
        return page(query, rows, _credit_object, order=("-requested_at", "-id"))

    def post(self, request: Request, body: AskForCredit) -> CreditRequestObject:
        """Ask the operators for credit, in the name of the key's creator. One request can be open at a time.

        The creator gets the answer by mail; for a service account, the organization's owners do.
        """
        asked = request_credit(
            organization=self.organization,
            amount_nano=read_nano("amount_usd", body.amount_usd, example="250.00"),
            note=body.note,
            by=self.creator,
        )
        return _credit_object(get_request(organization=self.organization, id=asked.pk))


class CreditRequestDetail(ApiView):
    required_scope = {"GET": Permission.VIEW}

    def get(self, request: Request, request_id: str) -> CreditRequestObject:
        """Return a request for credit, and its answer."""
        return _credit_object(get_request(organization=self.organization, id=request_id))


def _movements(organization: Organization, found: list[LedgerTransaction]) -> list[MovementObject]:
    holds = sources_of_holds(organization=organization, ids=[posted.source for posted in found])
    return [_movement(posted, holds.get(posted.source, posted.source)) for posted in found]


def _movement(posted: LedgerTransaction, source: str) -> MovementObject:
    moved = own_amounts(posted)
    return {
        "object": "ledger.movement",
        "id": posted.pk,
        "kind": posted.kind,
        "reason": posted.reason,
        "source": source if source.startswith(_WORK) else None,
        "available_usd": usd_decimal(moved[AccountKind.WALLET]),
        "held_usd": usd_decimal(moved[AccountKind.HOLD]),
        "created_at": int(posted.created_at.timestamp()),
    }


def _credit_object(asked: CreditRequest) -> CreditRequestObject:
    return {
        "object": "credit_request",
        "id": asked.pk,
        "status": asked.status,
        "amount_usd": usd_decimal(asked.amount_nano),
        "note": asked.note,
        "granted_usd": None if asked.granted_nano is None else usd_decimal(asked.granted_nano),
        "answer": asked.answer or None,
        "requested_by": asked.requested_by,
        "requested_at": int(asked.requested_at.timestamp()),
        "decided_at": unix_seconds(asked.decided_at),
    }
