"""Celery tasks of payments, on a separate queue, and the outbox's doorbells.

The outbox delivers inside a transaction, where calls to Stripe are forbidden: its handlers only start tasks. `sweep`
repeats lost tasks.
"""

from typing import Any

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


def ring_page(*, key: str, payload: dict[str, Any]) -> None:
    make_page.delay(page_id=payload["page_id"])


def ring_refund(*, key: str, payload: dict[str, Any]) -> None:
    send_refund.delay(refund_id=payload["refund_id"])


def ring_event(*, key: str, payload: dict[str, Any]) -> None:
    handle_event.delay(event_id=payload["event_id"])


def ring_charge(*, key: str, payload: dict[str, Any]) -> None:
    charge.delay(topup_id=payload["topup_id"])


def ring_topup(*, key: str, payload: dict[str, Any]) -> None:
    sync_topup.delay(topup_id=payload["topup_id"])


@shared_task(name="payments.make_page", **_PATIENT)
def make_page(*, page_id: str, **_: object) -> None:
    topups.make_page(page_id=page_id)


@shared_task(name="payments.send_refund", **_PATIENT)
def send_refund(*, refund_id: str, **_: object) -> None:
    refunds.send_refund(refund_id=refund_id)


@shared_task(name="payments.sync_topup", **_PATIENT)
def sync_topup(*, topup_id: str, **_: object) -> None:
    topups.sync_topup(topup_id=topup_id)


@shared_task(name="payments.charge", **_PATIENT)
def charge(*, topup_id: str, **_: object) -> None:
    autorecharge.charge(topup_id=topup_id)


@shared_task(name="payments.handle_event", **_PATIENT)
def handle_event(*, event_id: str, **_: object) -> None:
    webhooks.handle_or_note(event_id=event_id)


@shared_task(name="payments.sweep")
def sweep(**_: object) -> None:
    """Repeat what was lost: doorbells, answers, webhooks."""
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
