"""Balance, charges and ledger sum of the key's organization."""

from typing import Literal, TypedDict

from rest_framework.request import Request

from apps.accounts.roles import Permission
from apps.billing.queries import get_balance, get_ledger_sum_nano, get_spending
from apps.core.money import usd_decimal
from apps.interfaces.api.views import ApiView


class BillingObject(TypedDict):
    object: Literal["billing"]
    available_usd: str
    held_usd: str
    ledger_sum_nano: int
    tokens_billed: int
    unrated_requests: int
    inference_usd: str
    training_usd: str


class BillingView(ApiView):
    required_scope = {"GET": Permission.VIEW}

    def get(self, request: Request) -> BillingObject:
        """Return balance, spending and the sum of the organization's ledger entries, which is zero.

        Usage is charged every few seconds. `unrated_requests` counts the requests recorded but not yet charged.
        """
        balance = get_balance(organization=self.organization)
        spending = get_spending(organization=self.organization)
        return {
            "object": "billing",
            "available_usd": usd_decimal(balance.available_nano),
            "held_usd": usd_decimal(balance.held_nano),
            "ledger_sum_nano": get_ledger_sum_nano(),
            "tokens_billed": spending.tokens_billed,
            "unrated_requests": spending.unrated_requests,
            "inference_usd": usd_decimal(spending.inference_nano),
            "training_usd": usd_decimal(spending.training_nano),
        }
