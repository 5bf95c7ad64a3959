"""Manual credits and debits by operators. Each needs a reason, and a second operator above a daily limit."""

import datetime

from django.db import transaction
from django.db.models import F, Q, Sum
from django.utils.translation import gettext

from apps.accounts.models import Organization
from apps.billing.books.credit_requests import note_granted
from apps.billing.budgets import Attribution, record_spending
from apps.billing.ledger import account, lock_wallet, post
from apps.billing.lots import open_lot, returns_for
from apps.billing.models import (
    ADJUSTMENT_TRANSITIONS,
    AccountKind,
    Adjustment,
    AdjustmentKind,
    AdjustmentStatus,
    Hold,
    HoldPurpose,
    HoldStatus,
    LedgerAccount,
    LedgerTransaction,
    LotKind,
    PostingKind,
)
from apps.core import audit
from apps.core.database import locks
from apps.core.database.clock import db_now
from apps.core.database.transitions import advance
from apps.core.errors import InvalidState, InvalidValue, PermissionDenied
from apps.core.ids import new_id
from apps.core.money import NANO_PER_USD, dollars

SECOND_APPROVER_ABOVE_NANO = 100 * NANO_PER_USD  # in 24 hours, per operator and per organization
_DAY = datetime.timedelta(hours=24)


@transaction.atomic
def request_adjustment(
    *,
    organization: Organization | str,
    amount_nano: int,
    reason: str,
    by: str,
    now: datetime.datetime,
    refund_of: str = "",
    id: str | None = None,
) -> Adjustment:
    """Give credit, take it (negative amount), or refund part of a job's charge.

    The adjustment is posted at once while two sums of the last 24 hours stay within the limit: the unapproved
    adjustments of this operator, and those of this organization. Otherwise another operator must approve it. Credit
    taken is summed separately. The same `id` twice is one adjustment. Raises InvalidValue, InvalidState.
    """
    if not amount_nano or (refund_of and amount_nano < 0):
        raise InvalidValue(gettext("Give an amount; a refund is positive."), param="amount_usd")
    if not reason.strip():
        raise InvalidValue(gettext("Give a reason: the customer reads it."), param="reason")
    locks.lock(f"adjustments:{by}")
    wallet = lock_wallet(organization=organization)
    if id is not None and (found := Adjustment.objects.filter(pk=id).first()):
        asked = (wallet.owner_id, amount_nano, refund_of, by)
        if (found.organization_id, found.amount_nano, found.source, found.requested_by) != asked:
            raise InvalidState(
                gettext("This form was already sent with other values. Open it again."), param="amount_usd"
            )
        return found
    if refund_of:
        _require_refundable(wallet, refund_of, amount_nano)
    wanted = Adjustment.objects.create(
        id=id or new_id("adj"),
        organization_id=wallet.owner_id,
        kind=AdjustmentKind.REFUND if refund_of else AdjustmentKind.ADJUSTMENT,
        source=refund_of,
        amount_nano=amount_nano,
        reason=reason.strip(),
        needs_approval=_needs_approval(wallet, amount_nano, by=by, now=now),
        requested_by=by,
    )
    audit.record(
        organization=wallet.owner_id, by=by, action="adjustment.requested", target=wanted.pk,
        amount_nano=amount_nano, reason=reason,
    )  # fmt: skip
    return wanted if wanted.needs_approval else _post(wanted, wallet, by=by, now=now)


@transaction.atomic
def approve_adjustment(*, adjustment_id: str, by: str, now: datetime.datetime) -> Adjustment:
    """Post an adjustment that another operator requested.

    Raises PermissionDenied for the operator's own request, InvalidState when it was decided before.
    """
    wanted = Adjustment.objects.get(pk=adjustment_id)
    wallet = lock_wallet(organization=wanted.organization_id)
    wanted.refresh_from_db()
    _require_open(wanted)
    if wanted.requested_by == by:
        raise PermissionDenied(gettext("Another operator must approve this."))
    return _post(wanted, wallet, by=by, now=now)


@transaction.atomic
def reject_adjustment(*, adjustment_id: str, by: str, now: datetime.datetime) -> Adjustment:
    """Reject an adjustment; its requester may withdraw it this way. Raises InvalidState when it was decided before."""
    wanted = Adjustment.objects.get(pk=adjustment_id)
    lock_wallet(organization=wanted.organization_id)
    wanted.refresh_from_db()
    _require_open(wanted)
    advance(wanted, to=AdjustmentStatus.REJECTED, transitions=ADJUSTMENT_TRANSITIONS, decided_by=by, decided_at=now)
    audit.record(organization=wanted.organization_id, by=by, action="adjustment.rejected", target=wanted.pk)
    return wanted


def _needs_approval(wallet: LedgerAccount, amount_nano: int, *, by: str, now: datetime.datetime) -> bool:
    alone = Adjustment.objects.filter(status=AdjustmentStatus.POSTED, needs_approval=False, decided_at__gt=now - _DAY)
    alone = alone.filter(amount_nano__gt=0) if amount_nano > 0 else alone.filter(amount_nano__lt=0)
    sums = alone.aggregate(
        of_operator=Sum("amount_nano", filter=Q(requested_by=by)),
        of_organization=Sum("amount_nano", filter=Q(organization_id=wallet.owner_id)),
    )
    return any(abs((posted or 0) + amount_nano) > SECOND_APPROVER_ABOVE_NANO for posted in sums.values())


def _require_open(wanted: Adjustment) -> None:
    if wanted.status != AdjustmentStatus.REQUESTED:
        raise InvalidState(gettext("It was %(status)s already.") % {"status": wanted.status}, param="status")


def _refundable(wallet: LedgerAccount, source: str) -> list[Hold]:
    charged = Hold.objects.filter(
        organization_id=wallet.owner_id, purpose=HoldPurpose.JOB, source=source, status=HoldStatus.CLOSED
    )
    return list(charged.filter(captured_nano__gt=F("refunded_nano")).order_by("pk"))


def _require_refundable(wallet: LedgerAccount, source: str, amount_nano: int) -> None:
    most = sum(hold.captured_nano - hold.refunded_nano for hold in _refundable(wallet, source))
    if amount_nano > most:
        raise InvalidValue(
            gettext("You can refund at most %(most)s for %(source)s: more was not charged, or is refunded already.")
            % {"most": dollars(most), "source": source},
            param="amount_usd",
        )


def _post(wanted: Adjustment, wallet: LedgerAccount, *, by: str, now: datetime.datetime) -> Adjustment:
    posted = (
        _post_refund(wanted, wallet, by)
        if wanted.kind == AdjustmentKind.REFUND
        else _post_adjustment(wanted, wallet, by)
    )
    advance(
        wanted,
        to=AdjustmentStatus.POSTED,
        transitions=ADJUSTMENT_TRANSITIONS,
        guard={"transaction": None},
        decided_by=by,
        decided_at=now,
        transaction=posted,
    )
    audit.record(
        organization=wanted.organization_id, by=by, action="adjustment.posted", target=wanted.pk,
        amount_nano=wanted.amount_nano,
    )  # fmt: skip
    if wanted.kind == AdjustmentKind.ADJUSTMENT and wanted.amount_nano > 0:
        note_granted(
            organization=wanted.organization_id,
            amount_nano=wanted.amount_nano,
            reason=wanted.reason,
            by=by,
            now=now,
        )
    return wanted


def _post_adjustment(wanted: Adjustment, wallet: LedgerAccount, by: str) -> LedgerTransaction:
    amount = wanted.amount_nano
    lots = {}
    if amount > 0:
        lot = open_lot(organization_id=wanted.organization_id, kind=LotKind.PROMOTIONAL, amount_nano=amount)
        lots = {lot.pk: amount}
    elif wallet.balance_nano + amount < 0:
        raise InvalidValue(
            gettext("You can take at most %(balance_nano)s.") % {"balance_nano": dollars(wallet.balance_nano)},
            param="amount_usd",
        )
    return post(
        organization=wanted.organization_id,
        kind=PostingKind.ADJUSTMENT,
        legs={account(organization=None, kind=AccountKind.ADJUSTMENT): -amount, wallet: amount},
        by=by,
        source=wanted.pk,
        idempotency_key=f"adjustment:{wanted.pk}",
        request={"adjustment": wanted.pk, "amount_nano": amount},
        reason=wanted.reason,
        lots=lots,
    )


def _post_refund(wanted: Adjustment, wallet: LedgerAccount, by: str) -> LedgerTransaction:
    _require_refundable(wallet, wanted.source, wanted.amount_nano)
    posted = post(
        organization=wanted.organization_id,
        kind=PostingKind.REFUND,
        legs={
            account(organization=None, kind=AccountKind.REVENUE): -wanted.amount_nano,
            wallet: wanted.amount_nano,
        },
        by=by,
        source=wanted.source,
        idempotency_key=f"adjustment:{wanted.pk}",
        request={"adjustment": wanted.pk, "amount_nano": wanted.amount_nano},
        reason=wanted.reason,
        lots=returns_for(
            organization_id=wanted.organization_id,
            sources=[wanted.source],
            amount_nano=wanted.amount_nano,
            now=db_now(),
        ),
    )
    left = wanted.amount_nano
    for hold in _refundable(wallet, wanted.source):
        part = min(left, hold.captured_nano - hold.refunded_nano)
        record_spending(organization=hold.organization_id, charges=[(Attribution.of_hold(hold), -part)])
        hold.refunded_nano += part
        hold.save(update_fields=["refunded_nano"])
        left -= part
    return posted
