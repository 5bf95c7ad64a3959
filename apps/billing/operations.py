"""Movements of money: grants, holds, captures and releases. Each locks the wallet first, then looks for its key."""

import datetime
from typing import Any

from django.db import transaction
from django.db.models import F

from apps.billing.ledger import account, lock_wallet, post, posted_before
from apps.billing.models import AccountKind, Hold, LedgerTransaction
from apps.core import audit
from apps.core.clock import db_now
from apps.core.errors import DomainError, InvalidState, InvalidValue, QuotaExceeded
from apps.core.money import nano_to_usd


class InsufficientBalance(QuotaExceeded):
    """There is less in the wallet than the thing needs; adding credit is the fix."""


class CaptureAboveHold(DomainError):
    """More was to be charged than was set aside: a bug in the caller, never the customer's cost."""

    code = "capture_above_hold"


@transaction.atomic
def grant_credit(
    *, organization: Any, amount_nano: int, by: str, reason: str, idempotency_key: str
) -> LedgerTransaction:
    """Add promotional credit to the wallet, once per key."""
    if amount_nano <= 0:
        raise InvalidValue("a grant is a positive amount", param="amount")
    wallet = lock_wallet(organization=organization)
    request = {"grant": wallet.pk, "amount_nano": amount_nano}
    if found := posted_before(idempotency_key=idempotency_key, request=request):
        return found
    promotional = account(organization=None, kind=AccountKind.PROMOTIONAL_CREDIT)
    posted = post(
        organization=organization,
        kind="grant",
        legs={promotional: -amount_nano, wallet: amount_nano},
        by=by,
        source=wallet.pk,
        idempotency_key=idempotency_key,
        request=request,
        reason=reason,
    )
    audit.record(organization=organization, by=by, action="credit.granted", target=posted.pk, amount_nano=amount_nano)
    return posted


@transaction.atomic
def hold(
    *,
    organization: Any,
    purpose: str,
    source: str,
    amount_nano: int,
    by: str,
    idempotency_key: str,
    expires_at: datetime.datetime | None = None,
) -> Hold:
    """Set `amount_nano` aside for `source`. Raises InsufficientBalance. The same key returns the same hold."""
    wallet = lock_wallet(organization=organization)
    request = {"hold": source, "purpose": purpose, "amount_nano": amount_nano}
    if found := posted_before(idempotency_key=idempotency_key, request=request):
        return Hold.objects.get(pk=found.source)
    if wallet.balance_nano < amount_nano:
        raise insufficient_balance(wallet.balance_nano, amount_nano)
    created = Hold.objects.create(
        organization_id=wallet.organization_id or "",
        purpose=purpose,
        source=source,
        amount_nano=amount_nano,
        expires_at=expires_at,
    )
    held = account(organization=organization, kind=AccountKind.HOLD)
    post(
        organization=organization,
        kind="hold",
        legs={wallet: -amount_nano, held: amount_nano},
        by=by,
        source=created.pk,
        idempotency_key=idempotency_key,
        request=request,
    )
    return created


@transaction.atomic
def settle_hold(*, hold_id: str, capture_nano: int, by: str, reason: str = "") -> Hold:
    """Charge `capture_nano` of the hold, return the rest to the wallet and close it.

    Settling a closed hold again with the same amount changes nothing. Raises CaptureAboveHold, InvalidState.
    """
    found = Hold.objects.get(pk=hold_id)
    wallet = lock_wallet(organization=found.organization_id)
    found.refresh_from_db()
    if found.status == "closed":
        if found.captured_nano != capture_nano:
            raise InvalidState(f"hold {hold_id} was settled at another amount")
        return found
    if not found.captured_nano <= capture_nano <= found.amount_nano:
        raise CaptureAboveHold(f"hold {hold_id} holds {found.amount_nano} nano, not {capture_nano}")
    charge = capture_nano - found.captured_nano
    rest = found.amount_nano - capture_nano
    held = account(organization=found.organization_id, kind=AccountKind.HOLD)
    revenue = account(organization=None, kind=AccountKind.REVENUE)
    if charge or rest:
        post(
            organization=found.organization_id,
            kind="settle",
            legs={held: -(charge + rest), revenue: charge, wallet: rest},
            by=by,
            source=found.source,
            idempotency_key=f"settle:{hold_id}",
            request={"settle": hold_id, "capture_nano": capture_nano},
            reason=reason,
        )
    found.status, found.captured_nano, found.closed_at = "closed", capture_nano, db_now()
    found.save(update_fields=["status", "captured_nano", "closed_at"])
    return found


@transaction.atomic
def refund_source(*, organization: Any, source: str, by: str, reason: str) -> int:
    """Give back whatever was captured for `source` and not given back yet; return how much that was."""
    wallet = lock_wallet(organization=organization)
    holds = Hold.objects.filter(source=source, status="closed", captured_nano__gt=F("refunded_nano")).order_by("pk")
    total = 0
    for found in holds:
        amount_nano = found.captured_nano - found.refunded_nano
        post(
            organization=organization,
            kind="refund",
            legs={account(organization=None, kind=AccountKind.REVENUE): -amount_nano, wallet: amount_nano},
            by=by,
            source=found.source,
            idempotency_key=f"refund:{found.pk}",
            request={"refund": found.pk, "amount_nano": amount_nano},
            reason=reason,
        )
        found.refunded_nano = found.captured_nano
        found.save(update_fields=["refunded_nano"])
        total += amount_nano
    return total


def insufficient_balance(balance_nano: int, required_nano: int) -> InsufficientBalance:
    """Return the refusal, with what is missing."""
    missing = nano_to_usd(required_nano - balance_nano)
    return InsufficientBalance(
        f"This needs ${nano_to_usd(required_nano):.4f} and ${nano_to_usd(balance_nano):.4f} is available: "
        f"add ${missing:.4f} of credit, or lower the spend cap.",
        balance_nano=balance_nano,
        required_nano=required_nano,
    )
