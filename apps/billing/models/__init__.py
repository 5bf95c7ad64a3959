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
from apps.billing.models.invoices import (
    ADJUSTMENT_TRANSITIONS,
    Adjustment,
    AdjustmentKind,
    AdjustmentStatus,
    Invoice,
    InvoiceLine,
    LedgerCheck,
    LineKind,
    PoolCost,
)
from apps.billing.models.ledger import (
    AccountKind,
    Hold,
    HoldPurpose,
    HoldStatus,
    LedgerAccount,
    LedgerEntry,
    LedgerTransaction,
)
from apps.billing.models.lots import CreditLot, LedgerSeal, LotKind, LotMovement
from apps.billing.models.usage import StorageSample, UsageConflict, UsageEvent, UsageSeries, VolumeRebate

__all__ = [
    "ADJUSTMENT_TRANSITIONS",
    "AccountKind",
    "Adjustment",
    "AdjustmentKind",
    "AdjustmentStatus",
    "BillingProfile",
    "Budget",
    "BudgetAlert",
    "BudgetMode",
    "BudgetPeriod",
    "BudgetScope",
    "CreditLot",
    "Hold",
    "HoldPurpose",
    "HoldStatus",
    "Invoice",
    "InvoiceLine",
    "KeyLabel",
    "LedgerAccount",
    "LedgerCheck",
    "LedgerEntry",
    "LedgerSeal",
    "LedgerTransaction",
    "LineKind",
    "LotKind",
    "LotMovement",
    "PoolCost",
    "StorageSample",
    "UsageConflict",
    "UsageEvent",
    "UsageSeries",
    "VolumeRebate",
]
