"""Celery tasks of payments, on a separate queue, which is also a lane of the outbox."""

from celery import shared_task

from apps.core.database.clock import db_now
from apps.payments import autorecharge, dunning, reconciliation, topups, webhooks
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


@shared_task(name="payments.sweep")
def sweep(**_: object) -> None:
    """Ring for what was lost or refused: answers, webhooks, confirmations. The outbox repeats requests itself."""
    if gateway.is_configured():
        now = db_now()
        webhooks.ring_unhandled(now=now)
        topups.sweep_topups(now=now)
        autorecharge.sweep_charges(now=now)


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
