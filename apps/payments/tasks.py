"""Celery tasks of payments, on a separate queue, which is also a lane of the outbox. `sweep` repeats what failed."""

from celery import shared_task

from apps.core.database.clock import db_now
from apps.payments import autorecharge, dunning, reconciliation, refunds, topups, webhooks
from apps.payments.models import ReconciliationKind
from apps.payments.stripe import gateway, invoice_copies, meter_mirror
from apps.payments.stripe.errors import StripeUnavailable

# Stripe answers 429 to limit the rate; its package does not repeat those.
_PATIENT = {
    "autoretry_for": (StripeUnavailable,),
    "retry_backoff": 2,
    "retry_backoff_max": 60,
    "retry_jitter": True,
    "max_retries": 5,
}


@shared_task(name="payments.send_refund", **_PATIENT)
def send_refund(*, refund_id: str, **_: object) -> None:
    refunds.send_refund(refund_id=refund_id)


@shared_task(name="payments.charge", **_PATIENT)
def charge(*, topup_id: str, **_: object) -> None:
    autorecharge.charge(topup_id=topup_id)


@shared_task(name="payments.handle_event", **_PATIENT)
def handle_event(*, event_id: str, **_: object) -> None:
    webhooks.handle_or_record(event_id=event_id)


@shared_task(name="payments.sweep")
def sweep(**_: object) -> None:
    """Repeat what was lost or refused: requests, answers, webhooks."""
    if not gateway.is_configured():
        return
    now = db_now()
    for event_id in webhooks.list_unhandled(now=now):
        handle_event.delay(event_id=event_id)
    for refund_id in refunds.list_unsent(now=now):
        send_refund.delay(refund_id=refund_id)
    for topup_id in autorecharge.list_uncharged(now=now):
        charge.delay(topup_id=topup_id)
    topups.sweep_topups(now=now)
    autorecharge.drop_unconfirmed(now=now)


@shared_task(name="payments.recharge")
def recharge(**_: object) -> None:
    """Start a charge where credit ran low."""
    if gateway.is_configured():
        autorecharge.start_due(now=db_now())


# A month of movements takes time. The task may be cut off at any point and repeated.
@shared_task(name="payments.reconcile", soft_time_limit=540, time_limit=600, **_PATIENT)
def reconcile(*, kind: str, **_: object) -> None:
    if gateway.is_configured():
        now = db_now()
        for invoice_id in invoice_copies.list_uncopied() if kind == ReconciliationKind.HOURLY else ():
            copy_invoice.delay(invoice_id=invoice_id)
        reconciliation.reconcile(kind=ReconciliationKind(kind), now=now)


@shared_task(name="payments.review_standings")
def review_standings(**_: object) -> None:
    dunning.review_standings(now=db_now())


@shared_task(name="payments.copy_invoice", **_PATIENT)
def copy_invoice(*, invoice_id: str, **_: object) -> None:
    invoice_copies.copy_invoice(invoice_id=invoice_id, now=db_now())


@shared_task(name="payments.mirror_usage")
def mirror_usage(**_: object) -> None:
    if gateway.is_configured():
        meter_mirror.mirror_usage(now=db_now())
