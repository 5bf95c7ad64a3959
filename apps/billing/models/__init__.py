"""Models of billing, by subject."""

from apps.billing.models.budgets import (
    BillingProfile,
    Budget,
    BudgetAlert,
    BudgetMode,
    BudgetPeriod,
    BudgetScope,
    KeyLabel,
)
from apps.billing.models.invoices import ADJUSTMENT_TRANSITIONS, Adjustment, Invoice, InvoiceLine, LedgerCheck, PoolCost
from apps.billing.models.ledger import AccountKind, Hold, LedgerAccount, LedgerEntry, LedgerTransaction
from apps.billing.models.lots import CreditLot, LedgerSeal, LotKind, LotMovement
from apps.billing.models.usage import StorageSample, UsageConflict, UsageEvent, UsageSeries, VolumeRebate

__all__ = [
    "ADJUSTMENT_TRANSITIONS",
    "AccountKind",
    "Adjustment",
    "BillingProfile",
    "Budget",
    "BudgetAlert",
    "BudgetMode",
    "BudgetPeriod",
    "BudgetScope",
    "CreditLot",
    "Hold",
    "Invoice",
    "InvoiceLine",
    "KeyLabel",
    "LedgerAccount",
    "LedgerCheck",
    "LedgerEntry",
    "LedgerSeal",
    "LedgerTransaction",
    "LotKind",
    "LotMovement",
    "PoolCost",
    "StorageSample",
    "UsageConflict",
    "UsageEvent",
    "UsageSeries",
    "VolumeRebate",
]
