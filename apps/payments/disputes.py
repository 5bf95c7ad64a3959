"""Disputes: the books follow the cash. Withdrawn cash leaves the wallet or is owed; returned cash comes back.

Stripe lists the movements of a dispute in order and never removes one. Each is posted once by its position in that
list, so the order of the webhooks does not matter.
"""

import logging

from django.db import transaction

from apps.billing.ledger import lock_wallet
from apps.billing.operations import collect_receivable, grant_paid_credit, reverse_paid_credit
from apps.core import audit
from apps.core.money import NANO_PER_CENT
from apps.payments.models import CardDispute, TopUp
from apps.payments.refunds import divided, divided_of_rest
from apps.payments.stripe.objects import CashMovement, Dispute
from apps.payments.topups import PaymentMismatch

logger = logging.getLogger(__name__)


@transaction.atomic
def sync_dispute(*, dispute: Dispute, topup: TopUp) -> CardDispute:
    """Bring the books to Stripe's state of a dispute. May be called any number of times, in any order.

    Raises PaymentMismatch for a movement in another currency.
    """
    lock_wallet(organization=topup.organization_id)
    row, is_new = CardDispute.objects.get_or_create(
        stripe_id=dispute.id,
        defaults={
            "organization_id": topup.organization_id,
            "topup": topup,
            "status": dispute.status,
            "reason": dispute.reason[:80],
            "amount_cents": dispute.amount_cents,
        },
    )
    if is_new:
        logger.critical("dispute %s of %s over %d cents", dispute.id, topup.organization_id, dispute.amount_cents)
    for number, movement in enumerate(dispute.movements[row.movements_seen :], start=row.movements_seen + 1):
        _post(row, topup, movement)
        row.movements_seen = number
    if not row.is_closed:
        row.status = dispute.status
    row.save(update_fields=["movements_seen", "status"])
    audit.record(
        organization=topup.organization_id, by="stripe", action="dispute.synced", target=row.pk, status=row.status
    )
    return row


def _post(row: CardDispute, topup: TopUp, movement: CashMovement) -> None:
    if movement.obstacle:
        raise PaymentMismatch(f"{movement.id}: {movement.obstacle}")
    divide = divided_of_rest if movement.amount_cents < 0 else divided
    credit_cents, tax_cents = divide(topup, abs(movement.amount_cents))
    credit_nano = credit_cents * NANO_PER_CENT
    if movement.amount_cents < 0:
        reverse_paid_credit(
            organization=row.organization_id,
            reference=topup.reference,
            amount_nano=credit_nano,
            tax_nano=tax_cents * NANO_PER_CENT,
            by="stripe",
            reason="Payment disputed",
            idempotency_key=f"stripe:{movement.id}",
        )
        collect_receivable(wallet=lock_wallet(organization=row.organization_id), by="stripe", cause=movement.id)
    elif movement.amount_cents > 0:
        grant_paid_credit(
            organization=row.organization_id,
            amount_nano=credit_nano,
            tax_nano=tax_cents * NANO_PER_CENT,
            reference=f"stripe:{movement.id}",
            by="stripe",
            reason="Dispute decided for us",
        )
