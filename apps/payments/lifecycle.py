"""The legal moves of what is paid and paid back. Money that arrives late counts: failed and expired may become paid."""

from apps.core.database.transitions import Transitions

TOPUP: Transitions = {
    "requested": frozenset({"open", "action_required", "paid", "failed", "expired"}),
    "open": frozenset({"paid", "failed", "expired"}),
    "action_required": frozenset({"paid", "failed", "expired"}),
    "failed": frozenset({"paid"}),
    "expired": frozenset({"paid"}),
}
TOPUP_IN_FLIGHT = ("requested", "open", "action_required")

# A bank can send a refund back days after it went out.
REFUND: Transitions = {
    "requested": frozenset({"pending", "succeeded", "failed"}),
    "pending": frozenset({"succeeded", "failed"}),
    "succeeded": frozenset({"failed"}),
}

PAGE: Transitions = {"requested": frozenset({"ready", "failed"})}
EVENT: Transitions = {"received": frozenset({"done", "ignored"})}
# An organization that owes: a week to pay, then nothing more is spent. Paying leads back from anywhere.
STANDING: Transitions = {
    "active": frozenset({"grace"}),
    "grace": frozenset({"active", "suspended"}),
    "suspended": frozenset({"active"}),
}
