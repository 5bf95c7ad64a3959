"""Reading balances and the ledger."""

from dataclasses import dataclass
from typing import Any

from django.db.models import QuerySet, Sum

from apps.billing.models import AccountKind, LedgerAccount, LedgerEntry, LedgerTransaction


@dataclass(frozen=True)
class Balance:
    available_nano: int
    held_nano: int


def get_balance(*, organization: Any) -> Balance:
    kinds = dict(
        LedgerAccount.objects.filter(organization_id=getattr(organization, "pk", organization)).values_list(
            "kind", "balance_nano"
        )
    )
    return Balance(available_nano=kinds.get(AccountKind.WALLET, 0), held_nano=kinds.get(AccountKind.HOLD, 0))


def list_transactions(*, organization: Any) -> QuerySet[LedgerTransaction]:
    """Return the organization's transactions, newest first, with their entries and accounts."""
    rows = LedgerTransaction.objects.filter(organization_id=getattr(organization, "pk", organization))
    return rows.order_by("-created_at", "-id").prefetch_related("entries__account")


def get_ledger_sum_nano() -> int:
    """Return the sum of every entry visible to the caller: zero, or the books are broken."""
    return LedgerEntry.objects.aggregate(total=Sum("amount_nano"))["total"] or 0
