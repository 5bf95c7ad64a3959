"""Status transitions of payments and refunds. Late money counts: failed and expired may become paid."""

from apps.core.database.transitions import Transitions

TOPUP: Transitions = {
    "requested": frozenset({"open", "action_required", "paid", "failed", "expired"}),
    "open": frozenset({"paid", "failed", "expired"}),
    "action_required": frozenset({"paid", "failed", "expired"}),
    "failed": frozenset({"paid"}),
    "expired": frozenset({"paid"}),
}
TOPUP_IN_FLIGHT = ("requested", "open", "action_required")

# A bank can return a refund days after it was sent.
REFUND: Transitions = {
    "requested": frozenset({"pending", "succeeded", "failed"}),
    "pending": frozenset({"succeeded", "failed"}),
    "succeeded": frozenset({"failed"}),
}

PAGE: Transitions = {"requested": frozenset({"ready", "failed"})}
EVENT: Transitions = {"received": frozenset({"done", "ignored"})}
# A debtor has a week to pay, then may not spend. Paying leads back to active from any status.
STANDING: Transitions = {
    "active": frozenset({"grace"}),
    "grace": frozenset({"active", "suspended"}),
    "suspended": frozenset({"active"}),
}
