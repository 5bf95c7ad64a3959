"""Refunds to the card: unspent paid credit is held, Stripe refunds it, and the books follow Stripe's result.

A refund made at Stripe itself is found by its webhook or the sweep. It reverses its credit; the part that was spent
becomes a debt. A refund that the bank returns becomes credit again.
"""

import datetime
import logging

from django.db import transaction
from django.db.models import Q, Sum
from django.utils.translation import gettext

from apps.billing.books.adjustments import SECOND_APPROVER_ABOVE_NANO
from apps.billing.credits import end_set_aside, set_credit_aside
from apps.billing.ledger import lock_wallet
from apps.billing.models import HoldPurpose
from apps.billing.operations import collect_receivable, grant_paid_credit, left_to_reverse, reverse_paid_credit
from apps.core import audit
from apps.core.database import locks
from apps.core.database.clock import db_now
from apps.core.database.transitions import try_advance
from apps.core.errors import InvalidState, PermissionDenied
from apps.core.messages import outbox
from apps.core.money import NANO_PER_CENT
from apps.payments.lifecycle import REFUND, RefundStatus, TopUpStatus
from apps.payments.models import CardRefund, TopUp
from apps.payments.stripe import gateway
from apps.payments.stripe.errors import StripeRefused
from apps.payments.stripe.objects import Refund
from apps.payments.topups import GIVEN_UP_AFTER

logger = logging.getLogger(__name__)

_DAY = datetime.timedelta(hours=24)
_ROUNDED_CENTS = 5


@transaction.atomic
def request_refund(*, topup: TopUp, credit_cents: int, by: str, reason: str) -> CardRefund:
    """Hold unspent credit of a payment and ask Stripe to refund it with its share of the tax.

    It waits for another operator if it brings the unapproved refunds of 24 hours, of this operator or of this
    organization, above the limit of adjustments. Raises InvalidState for a payment that is not paid, InvalidValue when
    less of it is unspent.
    """
    locks.lock(f"refunds:{by}")
    lock_wallet(organization=topup.organization_id)
    topup.refresh_from_db()
    if topup.status != TopUpStatus.PAID:
        raise InvalidState(gettext("Only a payment that arrived can be refunded."))
    recent = CardRefund.objects.filter(needs_approval=False, created_at__gt=db_now() - _DAY)
    sums = recent.exclude(status=RefundStatus.FAILED).aggregate(
        of_operator=Sum("credit_cents", filter=Q(requested_by=by)),
        of_organization=Sum("credit_cents", filter=Q(organization_id=topup.organization_id)),
    )
    limit_cents = SECOND_APPROVER_ABOVE_NANO // NANO_PER_CENT
    is_large = any((cents or 0) + credit_cents > limit_cents for cents in sums.values())
    refund = CardRefund(
        organization_id=topup.organization_id, topup=topup, credit_cents=credit_cents,
        tax_cents=_tax_with_credit(topup, credit_cents), reason=reason, requested_by=by, needs_approval=is_large,
        status=RefundStatus.WAITING if is_large else RefundStatus.REQUESTED,
    )  # fmt: skip
    held = set_credit_aside(
        organization=topup.organization_id,
        reference=topup.reference,
        amount_nano=credit_cents * NANO_PER_CENT,
        purpose=HoldPurpose.CARD_REFUND,
        by=by,
        idempotency_key=f"refund:{refund.pk}",
    )
    refund.hold_id = held.pk if held else ""
    refund.save(force_insert=True)
    audit.record(
        organization=topup.organization_id, by=by, action="refund.requested", target=refund.pk,
        credit_cents=credit_cents, reason=reason,
    )  # fmt: skip
    if not is_large:
        _publish(refund)
    return refund


def _publish(refund: CardRefund) -> None:
    key, payload = f"payments.refund:{refund.pk}", {"refund_id": refund.pk}
    outbox.publish(topic="payments.refund", key=key, payload=payload, organization=refund.organization_id)


@transaction.atomic
def approve_refund(*, refund: CardRefund, by: str) -> None:
    """Have Stripe send a refund that another operator requested.

    Raises PermissionDenied for the operator's own request, InvalidState when it was decided before.
    """
    row = _locked(refund)
    if row.requested_by == by:
        raise PermissionDenied(gettext("Another operator must approve this."))
    if not try_advance(row, to=RefundStatus.REQUESTED, transitions=REFUND, approved_by=by):
        raise InvalidState(gettext("This was already decided."), param="status")
    audit.record(organization=row.organization_id, by=by, action="refund.approved", target=row.pk)
    _publish(row)


@transaction.atomic
def reject_refund(*, refund: CardRefund, by: str) -> None:
    """Reject a refund that waits, and free its credit; its requester may withdraw it this way. Raises InvalidState."""
    row = _locked(refund)
    if row.status != RefundStatus.WAITING:
        raise InvalidState(gettext("This was already decided."), param="status")
    _apply_failure(row, "Rejected by an operator")
    audit.record(organization=row.organization_id, by=by, action="refund.rejected", target=row.pk)


def _tax_with_credit(topup: TopUp, credit_cents: int) -> int:
    """Return the tax refunded with part of a payment: its share, or the rest if refunds take all of its credit."""
    refunds = CardRefund.objects.filter(topup=topup).exclude(status=RefundStatus.FAILED)
    gone = refunds.aggregate(credit=Sum("credit_cents", default=0), tax=Sum("tax_cents", default=0))
    if gone["credit"] + credit_cents == topup.amount_cents:
        return topup.tax_cents - gone["tax"]
    return topup.tax_cents * credit_cents // topup.amount_cents


def divided(topup: TopUp, cents: int) -> tuple[int, int]:
    """Return how much of `cents` of a payment is credit, and how much tax. Each part's tax is rounded down."""
    tax = cents * topup.tax_cents // (topup.amount_cents + topup.tax_cents)
    return cents - tax, tax


def divided_of_rest(topup: TopUp, cents: int) -> tuple[int, int]:
    """Return `divided` of cents that leave a payment.

    After other parts, the last one may have a few cents more credit than the payment has left. These are tax.
    """
    credit, tax = divided(topup, cents)
    left = left_to_reverse(organization=topup.organization_id, reference=topup.reference) // NANO_PER_CENT
    rounded = credit - left
    return (left, tax + rounded) if topup.tax_cents and left and 0 < rounded <= _ROUNDED_CENTS else (credit, tax)


def send_refund(*, refund_id: str) -> None:
    """Have Stripe send the refund, once. Calls Stripe. Raises StripeUnavailable, after which it may be repeated.

    Stripe may no longer know the key of a first attempt long ago, whose answer was lost. So it is asked for the refund.
    """
    refund = CardRefund.objects.select_related("topup").get(pk=refund_id)
    if refund.status != RefundStatus.REQUESTED:
        return
    payment_intent_id, sent = refund.topup.payment_intent_id or "", None
    if refund.created_at <= db_now() - GIVEN_UP_AFTER:
        sent = gateway.find_refund(payment_intent_id=payment_intent_id, refund_id=refund.pk)
    try:
        sent = sent or gateway.create_refund(
            payment_intent_id=payment_intent_id,
            amount_cents=refund.credit_cents + refund.tax_cents,
            refund_id=refund.pk,
            key=refund.pk,
        )
    except StripeRefused as error:
        with transaction.atomic():
            _apply_failure(_locked(refund), error.message)
        return
    sync_refund(refund=sent, topup=refund.topup)


@transaction.atomic
def sync_refund(*, refund: Refund, topup: TopUp) -> None:
    """Bring the books to Stripe's state of a refund. May be called any number of times, in any order."""
    lock_wallet(organization=topup.organization_id)
    row = _row_of(refund, topup)
    if row.stripe_id is None:
        row.stripe_id = refund.id
        row.save(update_fields=["stripe_id"])
    if refund.status == RefundStatus.FAILED:
        _apply_failure(row, refund.failure)
    elif refund.status == RefundStatus.SUCCEEDED:
        _apply_success(row)
    else:
        try_advance(row, to=RefundStatus.PENDING, transitions=REFUND)


def _row_of(found: Refund, topup: TopUp) -> CardRefund:
    """Return the row of Stripe's refund, creating one for a refund made at Stripe itself."""
    row = CardRefund.objects.filter(stripe_id=found.id).first()
    row = row or CardRefund.objects.filter(pk=found.metadata.get("refund_id", "")).first()
    if row is not None:
        return row
    credit_cents, tax_cents = divided_of_rest(topup, found.amount_cents)
    return CardRefund.objects.create(
        organization_id=topup.organization_id, topup=topup, credit_cents=credit_cents, tax_cents=tax_cents,
        stripe_id=found.id, reason="Refunded at Stripe", requested_by="stripe",
    )  # fmt: skip


def _apply_success(row: CardRefund) -> None:
    if row.status == RefundStatus.FAILED or not try_advance(row, to=RefundStatus.SUCCEEDED, transitions=REFUND):
        return
    if row.hold_id:
        end_set_aside(
            hold_id=row.hold_id, is_paid_out=True, by="stripe", reason="Refunded to the card",
            tax_nano=row.tax_cents * NANO_PER_CENT,
        )  # fmt: skip
    else:
        reverse_paid_credit(
            organization=row.organization_id,
            reference=row.topup.reference,
            amount_nano=row.credit_cents * NANO_PER_CENT,
            tax_nano=row.tax_cents * NANO_PER_CENT,
            by="stripe",
            reason="Refunded at Stripe",
            idempotency_key=f"stripe:{row.stripe_id}",
        )
        collect_receivable(wallet=lock_wallet(organization=row.organization_id), by="stripe", cause=row.pk)


def _apply_failure(row: CardRefund, failure: str) -> None:
    before = row.status
    if not try_advance(row, to=RefundStatus.FAILED, transitions=REFUND, failure=failure[:200]):
        return
    if before == RefundStatus.SUCCEEDED:
        grant_paid_credit(
            organization=row.organization_id,
            amount_nano=row.credit_cents * NANO_PER_CENT,
            tax_nano=row.tax_cents * NANO_PER_CENT,
            reference=f"stripe:{row.stripe_id}:returned",
            by="stripe",
            reason="The bank returned a refund",
        )
    elif row.hold_id:
        end_set_aside(hold_id=row.hold_id, is_paid_out=False, by="stripe", reason="The refund failed")


def _locked(refund: CardRefund) -> CardRefund:
    lock_wallet(organization=refund.organization_id)
    refund.refresh_from_db()
    return refund
