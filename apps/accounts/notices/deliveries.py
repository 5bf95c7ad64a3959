"""Delivery of events to webhook endpoints: at least once, with the same `webhook-id` at each attempt.

Each attempt is a message of the outbox's lane `webhooks`, which serves organizations in turn. Attempts are repeated
with growing delays for about a day. An endpoint is disabled if all attempts fail for DISABLED_AFTER and a delivery has
failed, or by an answer 410.
"""

import base64
import datetime
import hashlib
import hmac
import random

import msgspec
from django.conf import settings
from django.db import transaction
from django.db.models import F

from apps.accounts.models import (
    DeliveryStatus,
    EndpointStatus,
    OrganizationEvent,
    WebhookDelivery,
    WebhookEndpoint,
    WebhookFormat,
)
from apps.accounts.notices.events import announce
from apps.accounts.notices.notifications import MANAGERS
from apps.accounts.notices.outgoing import PostAnswer, post
from apps.core.database.clock import db_now
from apps.core.messages import outbox
from apps.core.secrets.sealing import place_of, unseal

# Seconds before each further attempt: about a day in all. Each is varied by a fifth, so that retries spread out.
DELAYS_SECONDS = (5, 30, 120, 600, 1_800, 3_600, 10_800, 21_600, 43_200)
ATTEMPTS = len(DELAYS_SECONDS) + 1
DISABLED_AFTER = datetime.timedelta(days=5)
MAX_PENDING = 1_000  # deliveries of an endpoint; further ones fail at once and can be replayed
TEST_TYPE = "webhook.test"
_JITTER = 0.2
_GONE = 410
_TEXT_CHARACTERS = 500


def fan_out(*, event_id: str) -> None:
    """Queue the delivery of an event to each active endpoint that asks for its type. Safe to repeat."""
    event = OrganizationEvent.objects.filter(pk=event_id).first()
    if event is None:  # the event was a repeated one
        return
    active = WebhookEndpoint.objects.for_organization(event.organization_id).filter(paused_at=None, disabled_because="")
    for endpoint in active.filter(event_types__contains=[event.type]).order_by("id"):
        queue_delivery(endpoint=endpoint, event=event)


@transaction.atomic
def queue_delivery(*, endpoint: WebhookEndpoint, event: OrganizationEvent) -> WebhookDelivery:
    """Return the delivery of an event to an endpoint. A new one is queued, or fails at once if too many are pending."""
    pending = endpoint.deliveries.filter(status=DeliveryStatus.PENDING)
    new: dict[str, object] = {"attempts_left": ATTEMPTS}
    if pending[:MAX_PENDING].count() >= MAX_PENDING:
        new = {"attempts_left": 0, "status": DeliveryStatus.FAILED, "error": "Too many deliveries were pending."}
    delivery, _ = WebhookDelivery.objects.get_or_create(
        organization_id=endpoint.organization_id, endpoint=endpoint, event=event, defaults=new
    )
    if delivery.status == DeliveryStatus.PENDING:
        publish_attempt(delivery)
    return delivery


def publish_attempt(
    delivery: WebhookDelivery,
    *,
    not_before: datetime.datetime | None = None,
    resumed_at: datetime.datetime | None = None,
) -> None:
    """Queue the next attempt.

    A repeated call for the same attempt changes nothing, except after `resumed_at`: a pause dropped the earlier one.
    """
    resumed = f":{resumed_at.isoformat()}" if resumed_at else ""
    outbox.publish(
        topic="webhook.deliver",
        key=f"{delivery.pk}:{delivery.attempts}{resumed}",
        payload={"delivery_id": delivery.pk, "attempt": delivery.attempts},
        organization=delivery.organization_id,
        not_before=not_before,
    )


def deliver(*, delivery_id: str, attempt: int) -> None:
    """Make one attempt and record its answer. An attempt that was recorded before is not repeated.

    While the endpoint is paused, the delivery stays as it is until the endpoint is resumed.
    """
    rows = WebhookDelivery.objects.select_related("endpoint", "event")
    delivery = rows.filter(pk=delivery_id, status=DeliveryStatus.PENDING, attempts=attempt).first()
    if delivery is None:
        return
    endpoint, now = delivery.endpoint, db_now()
    if endpoint.status == EndpointStatus.PAUSED:
        return
    if endpoint.status == EndpointStatus.ACTIVE:
        body = body_of(endpoint, delivery.event)
        answer = post(endpoint.url, body=body, headers=_headers(endpoint, delivery.event, body, now))
    else:
        answer = PostAnswer(error=f"The endpoint is {endpoint.status}.")
    _record(delivery, answer, db_now())


def body_of(endpoint: WebhookEndpoint, event: OrganizationEvent) -> bytes:
    """Return the body for an endpoint: OpenAI's event object, or a message for Slack."""
    if endpoint.format == WebhookFormat.SLACK:
        text = event.title.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        link = f"<{settings.PUBLIC_URL}{event.path}|{text}>"
        section = {"type": "section", "text": {"type": "mrkdwn", "text": f"{link}\n{event.type}"}}
        return msgspec.json.encode({"text": text, "blocks": [section]})
    return msgspec.json.encode(
        {
            "id": event.pk,
            "object": "event",
            "created_at": int(event.created_at.timestamp()),
            "type": event.type,
            "data": {"id": event.subject} | event.data,
        }
    )


def secret_place(endpoint: WebhookEndpoint, column: str) -> bytes:
    return place_of(table=WebhookEndpoint._meta.db_table, column=column, row_id=endpoint.pk)


def _headers(
    endpoint: WebhookEndpoint, event: OrganizationEvent, body: bytes, now: datetime.datetime
) -> dict[str, str]:
    """Return the headers of Standard Webhooks, with a signature of each secret that is valid now."""
    columns = ["secret_sealed"]
    if endpoint.previous_until is not None and endpoint.previous_until > now:
        columns.append("previous_sealed")
    stamp = int(now.timestamp())
    signed = f"{event.pk}.{stamp}.".encode() + body
    signatures = []
    for column in columns:
        secret = unseal(bytes(getattr(endpoint, column)), place=secret_place(endpoint, column))
        key = base64.b64decode(secret.removeprefix("whsec_"))
        signatures.append("v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode())
    return {
        "content-type": "application/json",
        "user-agent": "Anneal-Webhooks",
        "webhook-id": event.pk,
        "webhook-timestamp": str(stamp),
        "webhook-signature": " ".join(signatures),
    }


@transaction.atomic
def _record(delivery: WebhookDelivery, answer: PostAnswer, now: datetime.datetime) -> None:
    is_delivered = answer.status is not None and 200 <= answer.status < 300
    is_last = answer.status == _GONE or delivery.attempts_left <= 1 or delivery.endpoint.status != EndpointStatus.ACTIVE
    status = DeliveryStatus.FAILED if is_last else DeliveryStatus.PENDING
    rows = WebhookDelivery.objects.filter(
        pk=delivery.pk, status=DeliveryStatus.PENDING, attempts=delivery.attempts
    )  # fmt: skip
    changed = rows.update(
        status=DeliveryStatus.DELIVERED if is_delivered else status,
        attempts=F("attempts") + 1,
        attempts_left=max(delivery.attempts_left - 1, 0),
        response_code=answer.status,
        response_text=answer.text[:_TEXT_CHARACTERS],
        error=answer.error[:200],
        duration_ms=answer.duration_ms,
        attempted_at=now,
    )
    if not changed:
        return
    endpoints = WebhookEndpoint.objects.filter(pk=delivery.endpoint_id)
    if is_delivered:
        endpoints.exclude(failing_since=None).update(failing_since=None)
        return
    if delivery.endpoint.status != EndpointStatus.ACTIVE:
        return
    endpoints.filter(failing_since=None).update(failing_since=now)
    if answer.status == _GONE:
        _disable(delivery.endpoint, "It answered 410 Gone.", now)
    elif is_last and endpoints.filter(failing_since__lte=now - DISABLED_AFTER).exists():
        _disable(delivery.endpoint, f"Every delivery failed for {DISABLED_AFTER.days} days.", now)
    if not is_last:
        delay = DELAYS_SECONDS[ATTEMPTS - delivery.attempts_left] * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311
        delivery.attempts += 1
        publish_attempt(delivery, not_before=now + datetime.timedelta(seconds=delay))


def _disable(endpoint: WebhookEndpoint, why: str, now: datetime.datetime) -> None:
    """Disable an endpoint, once, and notify owners and admins."""
    if WebhookEndpoint.objects.filter(pk=endpoint.pk, disabled_because="").update(disabled_because=why):
        announce(
            organization=endpoint.organization_id,
            type="webhook.disabled",
            subject=endpoint.pk,
            title=lambda: f"A webhook was disabled: {why}",
            path=f"/organization/webhooks/{endpoint.pk}",
            key=f"webhook-disabled:{endpoint.pk}:{now.isoformat()}",
            roles=MANAGERS,
        )
