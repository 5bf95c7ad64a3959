"""Statuses of payments, refunds, pages, events and standings, and their legal transitions.

Late money counts: a failed or expired top-up may become paid.
"""

from enum import StrEnum

from apps.core.database.transitions import Transitions


class TopUpStatus(StrEnum):
    """Where a card payment for credit is."""

    REQUESTED = "requested"
    OPEN = "open"
    ACTION_REQUIRED = "action_required"
    PAID = "paid"
    FAILED = "failed"
    EXPIRED = "expired"


TOPUP: Transitions = {
    TopUpStatus.REQUESTED: frozenset(
        {
            TopUpStatus.OPEN,
            TopUpStatus.ACTION_REQUIRED,
            TopUpStatus.PAID,
            TopUpStatus.FAILED,
            TopUpStatus.EXPIRED,
        }
    ),
    TopUpStatus.OPEN: frozenset({TopUpStatus.PAID, TopUpStatus.FAILED, TopUpStatus.EXPIRED}),
    TopUpStatus.ACTION_REQUIRED: frozenset({TopUpStatus.PAID, TopUpStatus.FAILED, TopUpStatus.EXPIRED}),
    TopUpStatus.FAILED: frozenset({TopUpStatus.PAID}),
    TopUpStatus.EXPIRED: frozenset({TopUpStatus.PAID}),
}
TOPUP_IN_FLIGHT = (TopUpStatus.REQUESTED, TopUpStatus.OPEN, TopUpStatus.ACTION_REQUIRED)


class RefundStatus(StrEnum):
    """Where a refund to a card is. One that waits needs a second operator; a rejected one has failed."""

    WAITING = "waiting"
    REQUESTED = "requested"
    PENDING = "pending"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


# A bank can return a refund days after it was sent.
REFUND: Transitions = {
    RefundStatus.WAITING: frozenset({RefundStatus.REQUESTED, RefundStatus.FAILED}),
    RefundStatus.REQUESTED: frozenset({RefundStatus.PENDING, RefundStatus.SUCCEEDED, RefundStatus.FAILED}),
    RefundStatus.PENDING: frozenset({RefundStatus.SUCCEEDED, RefundStatus.FAILED}),
    RefundStatus.SUCCEEDED: frozenset({RefundStatus.FAILED}),
}


class PageStatus(StrEnum):
    """Where a hosted page is."""

    REQUESTED = "requested"
    READY = "ready"
    FAILED = "failed"


PAGE: Transitions = {PageStatus.REQUESTED: frozenset({PageStatus.READY, PageStatus.FAILED})}


class EventStatus(StrEnum):
    """Where an event of the inbox is; `ignored` is about an object that is not ours."""

    RECEIVED = "received"
    DONE = "done"
    IGNORED = "ignored"


EVENT: Transitions = {EventStatus.RECEIVED: frozenset({EventStatus.DONE, EventStatus.IGNORED})}


class StandingStatus(StrEnum):
    """Whether an organization pays its debts."""

    ACTIVE = "active"
    GRACE = "grace"
    SUSPENDED = "suspended"


# A debtor has a week to pay, then may not spend. Paying leads back to active from any status.
STANDING: Transitions = {
    StandingStatus.ACTIVE: frozenset({StandingStatus.GRACE}),
    StandingStatus.GRACE: frozenset({StandingStatus.ACTIVE, StandingStatus.SUSPENDED}),
    StandingStatus.SUSPENDED: frozenset({StandingStatus.ACTIVE}),
}


class DisputeStatus(StrEnum):
    """Stripe's words for a dispute, stored as they are (https://docs.stripe.com/api/disputes/object)."""

    WARNING_NEEDS_RESPONSE = "warning_needs_response"
    WARNING_UNDER_REVIEW = "warning_under_review"
    WARNING_CLOSED = "warning_closed"
    NEEDS_RESPONSE = "needs_response"
    UNDER_REVIEW = "under_review"
    WON = "won"
    LOST = "lost"
    PREVENTED = "prevented"


DISPUTE_CLOSED = frozenset(
    {DisputeStatus.WON, DisputeStatus.LOST, DisputeStatus.WARNING_CLOSED, DisputeStatus.PREVENTED}
)
