"""Tables of billing, by noun."""

from apps.billing.models.budgets import (
    BillingProfile,
    Budget,
    BudgetAlert,
    BudgetMode,
    BudgetPeriod,
    BudgetScope,
    KeyLabel,
)
from apps.billing.models.ledger import AccountKind, Hold, LedgerAccount, LedgerEntry, LedgerTransaction
from apps.billing.models.lots import CreditLot, LedgerSeal, LotKind, LotMovement
from apps.billing.models.usage import StorageSample, UsageConflict, UsageEvent, UsageSeries, VolumeRebate

__all__ = [
    "AccountKind",
    "BillingProfile",
    "Budget",
    "BudgetAlert",
    "BudgetMode",
    "BudgetPeriod",
    "BudgetScope",
    "CreditLot",
    "Hold",
    "KeyLabel",
    "LedgerAccount",
    "LedgerEntry",
    "LedgerSeal",
    "LedgerTransaction",
    "LotKind",
    "LotMovement",
    "StorageSample",
    "UsageConflict",
    "UsageEvent",
    "UsageSeries",
    "VolumeRebate",
]
