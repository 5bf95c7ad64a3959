"""The inbox of Stripe's events: verify, store once, answer. Then the present object is fetched and the books follow.

An event reports that something happened, not the present state: events come late, twice, out of order, or not at all.
Each kind of object has one function that syncs its present state, so every order of events ends in the same books.
`ingest_missed` finds lost events in Stripe's own list.
"""

import datetime
import logging
from collections.abc import Callable, Iterable

from celery.exceptions import SoftTimeLimitExceeded
from django.db import OperationalError, transaction
from django.db.models import F, QuerySet, Window
from django.db.models.functions import RowNumber

from apps.core.database.transitions import advance
from apps.core.messages import outbox
from apps.payments.customers import sync_card
from apps.payments.disputes import sync_dispute
from apps.payments.lifecycle import EVENT, EventStatus, TopUpStatus
from apps.payments.models import StripeCustomer, StripeEvent, TopUp
from apps.payments.refunds import sync_refund
from apps.payments.stripe import gateway
from apps.payments.stripe.errors import StripeUnavailable
from apps.payments.stripe.objects import Notice
from apps.payments.topups import sync_checkout, sync_topup

logger = logging.getLogger(__name__)

_HANDLED_AGAIN_AFTER = datetime.timedelta(seconds=30)
_MAX_ATTEMPTS = 20  # then it waits for an operator; an unavailable Stripe does not count


class PaymentUnknown(Exception):
    """A refund or dispute of an unknown payment: another system uses the account, or an event was never seen."""


def receive(*, body: bytes, signature: str) -> bool:
    """Verify and store one webhook; return True, also for a repeated one. Raises BadSignature. Does not call Stripe."""
    return store([gateway.read_webhook(body=body, signature=signature)]) == 1


@transaction.atomic
def store(notices: Iterable[Notice]) -> int:
    """Store events in the inbox, once by id, and ring for each in its customer's turn; return how many were given.

    The outbox's key drops a repeated doorbell.
    """
    notices = list(notices)
    rows = [
        StripeEvent(
            id=notice.id,
            type=notice.type,
            api_version=notice.api_version,
            object_id=notice.object_id,
            object_type=notice.object_type,
            customer_id=notice.customer_id,
            created_at=notice.created_at,
        )
        for notice in notices
    ]
    StripeEvent.objects.bulk_create(rows, ignore_conflicts=True)
    for notice in notices:
        _ring(notice.id, 0, share=notice.customer_id)
    return len(rows)


def _ring(event_id: str, attempts: int, *, share: str = "") -> None:
    """Have a task handle an event, once for each number of attempts."""
    key, payload = f"payments.event:{event_id}:{attempts}", {"event_id": event_id}
    outbox.publish(topic="payments.event", key=key[:200], payload=payload, organization=share[:64])


@transaction.atomic
def ring_unhandled(*, now: datetime.datetime) -> None:
    """Have the events handled again that could not be handled, in their customers' turns. Does not call Stripe."""
    for event in _unhandled(now):
        _ring(event.pk, event.attempts, share=event.customer_id)


def handle(*, event_id: str) -> None:
    """Sync the present state of the event's object. Calls Stripe. Handling it again changes nothing.

    An exception leaves the event in the inbox, to be handled again.
    """
    event = StripeEvent.objects.get(pk=event_id)
    if event.status != EventStatus.RECEIVED:
        return
    sync = _SYNCS.get(event.object_type)
    is_ours = sync(event.object_id) if sync else False
    with transaction.atomic():
        advance(event, to=EventStatus.DONE if is_ours else EventStatus.IGNORED, transitions=EVENT, last_error="")


def handle_or_record(*, event_id: str) -> None:
    """Handle an event, or store for operators why it cannot be handled.

    Raises StripeUnavailable, OperationalError and SoftTimeLimitExceeded, after which it is handled again.
    """
    try:
        handle(event_id=event_id)
    except (StripeUnavailable, OperationalError, SoftTimeLimitExceeded):
        raise
    except Exception as error:  # noqa: BLE001 - a process edge: one event must not stop the others
        why = f"{type(error).__name__}: {error}"[:300]
        StripeEvent.objects.filter(pk=event_id).update(last_error=why, attempts=F("attempts") + 1)
        logger.critical("event %s of Stripe cannot be handled: %s", event_id, why)


def list_stuck(*, limit: int = 50) -> list[StripeEvent]:
    """Return the events that could not be handled, oldest first, at most `limit`."""
    failed = StripeEvent.objects.filter(status=EventStatus.RECEIVED).exclude(last_error="")
    return list(failed.order_by("received_at")[:limit])


def list_unhandled(*, now: datetime.datetime) -> list[str]:
    """Return events that failed or were not handled yet: the oldest of each customer, then the second, and so on."""
    return [event.pk for event in _unhandled(now)]


def _unhandled(now: datetime.datetime) -> QuerySet[StripeEvent]:
    waiting = StripeEvent.objects.filter(
        status=EventStatus.RECEIVED, received_at__lt=now - _HANDLED_AGAIN_AFTER, attempts__lt=_MAX_ATTEMPTS
    )
    turn = Window(RowNumber(), partition_by=F("customer_id"), order_by="received_at")
    return waiting.annotate(turn=turn).order_by("turn", "received_at")[:100]


def ingest_missed(*, since: datetime.datetime, until: datetime.datetime) -> int:
    """Store the events of a period that never arrived; return how many there were. Calls Stripe."""
    notices = {notice.id: notice for notice in gateway.list_events(since=since, until=until)}
    known = set(StripeEvent.objects.filter(pk__in=notices).values_list("pk", flat=True))
    missed = [notice for identifier, notice in notices.items() if identifier not in known]
    if missed:
        logger.warning("%d events of Stripe never reached us and were read from its list", len(missed))
        store(missed)
    return len(missed)


# --- One function for each kind of object: calls Stripe, returns whether it is ours -----------------------------------


def _sync_invoice(invoice_id: str) -> bool:
    found = gateway.get_invoice(invoice_id=invoice_id)
    topup_id = found.metadata.get("topup_id", "")
    if not TopUp.objects.filter(pk=topup_id).exists():
        return False
    sync_topup(topup_id=topup_id)
    return True


def _sync_refund(refund_id: str) -> bool:
    found = gateway.get_refund(refund_id=refund_id)
    sync_refund(refund=found, topup=_paid_topup_of(found.payment_intent_id))
    return True


def _sync_dispute(dispute_id: str) -> bool:
    found = gateway.get_dispute(dispute_id=dispute_id)
    sync_dispute(dispute=found, topup=_paid_topup_of(found.payment_intent_id))
    return True


def _sync_card_of(**customers: str) -> bool:
    customer = StripeCustomer.objects.filter(**customers).first()
    if customer is not None:
        sync_card(customer=customer)
    return customer is not None


def _log_fraud_warning(warning_id: str) -> bool:
    logger.critical("Stripe warns of fraud: %s. Refund the payment before it is disputed.", warning_id)
    return True


def _topup_of(payment_intent_id: str) -> TopUp | None:
    """Return the synced top-up of a payment; None when it is not one of ours."""
    topup = TopUp.objects.filter(payment_intent_id=payment_intent_id).first()
    if topup is None:
        payment = gateway.get_payment(payment_intent_id=payment_intent_id)
        topup = TopUp.objects.filter(pk=payment.metadata.get("topup_id", "")).first()
    if topup is not None and topup.status != TopUpStatus.PAID:
        sync_topup(topup_id=topup.pk)
        topup.refresh_from_db()
    return topup


def _paid_topup_of(payment_intent_id: str) -> TopUp:
    """Return the top-up of a refunded or disputed payment, credited first. Raises PaymentUnknown."""
    topup = _topup_of(payment_intent_id)
    if topup is None or topup.status != TopUpStatus.PAID:
        raise PaymentUnknown(payment_intent_id)
    return topup


_SYNCS: dict[str, Callable[[str], bool]] = {
    "checkout.session": lambda checkout_id: sync_checkout(checkout_id=checkout_id),
    "payment_intent": lambda payment_intent_id: _topup_of(payment_intent_id) is not None,
    "invoice": _sync_invoice,
    "refund": _sync_refund,
    "dispute": _sync_dispute,
    "customer": lambda customer_id: _sync_card_of(stripe_id=customer_id),
    "payment_method": lambda payment_method_id: _sync_card_of(payment_method_id=payment_method_id),
    "radar.early_fraud_warning": _log_fraud_warning,
}
