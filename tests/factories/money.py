"""Credit, holds, spending and refunds of an organization."""

from typing import Any

from apps.accounts.models import Organization
from apps.billing.models import Hold, LedgerTransaction
from apps.billing.operations import grant_credit, hold, settle_hold
from apps.core.database.clock import db_now
from apps.payments.models import CardRefund, TopUp

USD = 1_000_000_000


def give_credit(
    organization: Organization, amount_nano: int = 100 * USD, *, key: str = "", **fields: Any
) -> LedgerTransaction:
    """Without a key of its own, an amount is given once, however often it is asked for."""
    return grant_credit(
        organization=organization, amount_nano=amount_nano, by="system", reason="test",
        idempotency_key=key or f"credit:{organization.pk}:{amount_nano}", **fields,
    )  # fmt: skip


def place_hold(organization: Organization, amount_nano: int, source: str = "ftjob-1", **fields: Any) -> Hold:
    """A job's hold; one for each source."""
    return hold(
        organization=organization, purpose="job", source=source, amount_nano=amount_nano, by="system",
        idempotency_key=f"hold:{source}", **fields,
    )  # fmt: skip


def spend(
    organization: Organization, amount_nano: int, source: str = "ftjob-1", *, held_nano: int = 0, **fields: Any
) -> Hold:
    """A hold, and a charge of all of it or of the given part."""
    held = place_hold(organization, held_nano or amount_nano, source, **fields)
    settle_hold(hold_id=held.pk, capture_nano=amount_nano, by="system")
    return held


def make_waiting_refund(organization: Organization) -> CardRefund:
    """A refund of a paid top-up that waits for a second operator."""
    topup = TopUp.objects.create(
        organization=organization, origin="user", amount_cents=50_000, requested_by="user_1", status="paid",
        paid_at=db_now(),
    )  # fmt: skip
    return CardRefund.objects.create(
        organization=organization, topup=topup, credit_cents=20_000, reason="r", status="waiting", needs_approval=True,
        requested_by="user_other",
    )  # fmt: skip
