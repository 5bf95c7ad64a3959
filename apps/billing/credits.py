"""Lot movements other than spending: held for a refund or dispute, or expired."""

from django.db import transaction
from django.db.models import F, Sum
from django.utils.translation import gettext

from apps.accounts.models import Organization
from apps.billing.ledger import account, lock_wallet, post, posted_before
from apps.billing.lots import spendable_lots
from apps.billing.models import (
    AccountKind,
    CreditLot,
    Hold,
    HoldPurpose,
    HoldStatus,
    LedgerAccount,
    LotKind,
    PostingKind,
)
from apps.billing.tenant_batches import for_each
from apps.core.database.clock import db_now
from apps.core.errors import InvalidState, InvalidValue


@transaction.atomic
def set_credit_aside(
    *,
    organization: Organization | str,
    reference: str,
    amount_nano: int,
    purpose: HoldPurpose,
    by: str,
    idempotency_key: str,
    is_partial_allowed: bool = False,
) -> Hold | None:
    """Hold `amount_nano` of one paid lot while a card refund or a dispute is decided elsewhere.

    Raises InvalidValue when the lot has less unspent credit. With `is_partial_allowed` it holds what is left instead,
    or returns None when nothing is left.
    """
    wallet = lock_wallet(organization=organization)
    request = {"aside": reference, "amount_nano": amount_nano, "purpose": purpose}
    if found := posted_before(organization=organization, idempotency_key=idempotency_key, request=request):
        return Hold.objects.get(pk=found.source)
    lot = CreditLot.objects.select_for_update().get(organization_id=wallet.owner_id, reference=reference)
    free = min(lot.remaining_nano - lot.held_nano, wallet.balance_nano)
    if free < amount_nano and not is_partial_allowed:
        raise InvalidValue(
            gettext("Less of this payment is still unspent. Enter a smaller amount."),
            param="amount",
            available_nano=free,
        )
    held_nano = min(amount_nano, free)
    if held_nano <= 0:
        return None
    created = Hold.objects.create(
        organization_id=lot.organization_id, purpose=purpose, source=lot.pk, lot=lot, amount_nano=held_nano
    )
    CreditLot.objects.filter(pk=lot.pk).update(held_nano=F("held_nano") + held_nano)
    post(
        organization=organization,
        kind=PostingKind.HOLD,
        legs={wallet: -held_nano, account(organization=organization, kind=AccountKind.HOLD): held_nano},
        by=by,
        source=created.pk,
        idempotency_key=idempotency_key,
        request=request,
    )
    return created


@transaction.atomic
def end_set_aside(*, hold_id: str, is_paid_out: bool, by: str, reason: str, tax_nano: int = 0) -> Hold:
    """Close a hold of `set_credit_aside`, once: its cash was paid out, or its credit returns to the wallet."""
    found = Hold.objects.get(pk=hold_id)
    wallet = lock_wallet(organization=found.organization_id)
    found.refresh_from_db()
    captured = found.amount_nano if is_paid_out else 0
    if found.status == HoldStatus.CLOSED:
        if found.captured_nano != captured:
            raise InvalidState(gettext("hold %(hold_id)s ended otherwise") % {"hold_id": hold_id})
        return found
    lot = CreditLot.objects.select_for_update().get(pk=found.lot_id)
    lot.held_nano -= found.amount_nano
    lot.reversed_nano += captured
    lot.save(update_fields=["held_nano", "reversed_nano"])
    held = account(organization=found.organization_id, kind=AccountKind.HOLD)
    legs: dict[LedgerAccount, int] = {held: -found.amount_nano}
    if is_paid_out:
        legs[account(organization=None, kind=AccountKind.CASH_CLEARING)] = found.amount_nano + tax_nano
        legs[account(organization=None, kind=AccountKind.TAX_PAYABLE)] = -tax_nano
    else:
        legs[wallet] = found.amount_nano
    post(
        organization=found.organization_id,
        kind=PostingKind.PAYMENT_REFUNDED if is_paid_out else PostingKind.RELEASE,
        legs=legs,
        by=by,
        source=lot.pk,
        idempotency_key=f"settle:{hold_id}",
        request={"settle": hold_id, "capture_nano": captured, "tax_nano": tax_nano},
        reason=reason,
        lots={lot.pk: -captured} if captured else None,
    )
    found.status, found.captured_nano, found.closed_at = HoldStatus.CLOSED, captured, db_now()
    found.save(update_fields=["status", "captured_nano", "closed_at"])
    return found


# --- Expiry -----------------------------------------------------------------------------------------------------------


def expire_lots(*, limit: int = 100) -> int:
    """Take the rest of expired lots out of the wallets; return the nano taken. Safe to repeat."""
    expired = CreditLot.objects.filter(expires_at__lte=db_now(), remaining_nano__gt=0)
    owners = expired.order_by("organization_id").values_list("organization_id", flat=True).distinct()
    return for_each(owners[:limit], _expire_of, name="expired credit is taken out", now=db_now())


@transaction.atomic
def _expire_of(organization_id: str) -> int:
    """Expire credit that no job or slice holds.

    Holds made before the expiry count against the lots that expire first.
    """
    wallet = lock_wallet(organization=organization_id)
    of_lots = CreditLot.objects.filter(organization_id=organization_id).aggregate(nano=Sum("held_nano"))["nano"] or 0
    held = account(organization=organization_id, kind=AccountKind.HOLD).balance_nano - of_lots
    now = db_now()
    total = 0
    for lot in spendable_lots(organization_id=organization_id):
        left = lot.remaining_nano - lot.held_nano
        kept = min(left, held)
        held -= kept
        if lot.expires_at is None or lot.expires_at > now or left == kept:
            continue
        _post_expiry(wallet, lot, left - kept)
        total += left - kept
    return total


def _post_expiry(wallet: LedgerAccount, lot: CreditLot, amount_nano: int) -> None:
    # Promotional credit was never money, so its expiry reverses its cost. Paid credit that expires is breakage.
    kind = AccountKind.BREAKAGE if lot.kind == LotKind.PAID else AccountKind.PROMOTIONAL_CREDIT
    remaining = lot.remaining_nano - amount_nano
    post(
        organization=wallet.owner_id,
        kind=PostingKind.EXPIRY,
        legs={wallet: -amount_nano, account(organization=None, kind=kind): amount_nano},
        by="system",
        source=lot.pk,
        idempotency_key=f"expiry:{lot.pk}:{remaining}:{lot.movements.count()}",
        request={"expiry": lot.pk, "amount_nano": amount_nano},
        reason="Credit expired",
        lots={lot.pk: -amount_nano},
    )
