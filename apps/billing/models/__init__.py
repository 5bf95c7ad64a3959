"""Tables of billing, by noun."""

from apps.billing.models.ledger import AccountKind, Hold, LedgerAccount, LedgerEntry, LedgerTransaction
from apps.billing.models.lots import CreditLot, LedgerSeal, LotKind, LotMovement
from apps.billing.models.usage import UsageConflict, UsageEvent, UsageSeries

__all__ = [
    "AccountKind",
    "CreditLot",
    "Hold",
    "LedgerAccount",
    "LedgerEntry",
    "LedgerSeal",
    "LedgerTransaction",
    "LotKind",
    "LotMovement",
    "UsageConflict",
    "UsageEvent",
    "UsageSeries",
]
