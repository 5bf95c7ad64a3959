"""Webhook endpoints: create, change, pause, rotate the secret, delete; test them and replay deliveries."""

import base64
import datetime
import os
import re
from collections.abc import Sequence
from typing import Any

from django.db import transaction
from django.utils.translation import gettext

from apps.accounts.models import (
    DeliveryStatus,
    EndpointStatus,
    Organization,
    OrganizationEvent,
    WebhookDelivery,
    WebhookEndpoint,
    WebhookFormat,
)
from apps.accounts.notices.deliveries import ATTEMPTS, TEST_TYPE, publish_attempt, queue_delivery, secret_place
from apps.accounts.notices.events import EVENT_TYPES
from apps.accounts.notices.outgoing import check_url
from apps.core import audit
from apps.core.audit_log import count_of_hour
from apps.core.database.clock import db_now
from apps.core.database.locks import lock, lock_row
from apps.core.database.tenancy import OrganizationQuerySet
from apps.core.errors import InvalidState, InvalidValue, NotFound, RateLimited
from apps.core.ids import new_id
from apps.core.messages.translation import translated
from apps.core.secrets.sealing import seal, unseal

MAX_ENDPOINTS = 20
MAX_PENDING = 100  # deliveries of an endpoint, before tests and replays are refused; events have a higher limit
MAX_TESTS_PER_HOUR, MAX_RESUMES_PER_HOUR, MAX_REPLAYS_PER_HOUR = 60, 60, 1_000  # of an organization
OVERLAP = datetime.timedelta(hours=24)  # in which the previous secret signs as well
_SECRET_BYTES = 32
_HINT_CHARACTERS = 5  # the last one is padding
_MAX_NAME = 100  # of the column
_NOT_OF_A_LINE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # control characters and breaks
_AGAIN_SECONDS = 300
_RETRY_WINDOW = datetime.timedelta(minutes=10)


def list_endpoints(*, organization: Organization) -> OrganizationQuerySet:
    """Return the endpoints, oldest first."""
    return WebhookEndpoint.objects.for_organization(organization).order_by("id")


def get_endpoint(*, organization: Organization, endpoint_id: str) -> WebhookEndpoint:
    """Return an endpoint. Raises NotFound."""
    found: WebhookEndpoint | None = None
    if "\x00" not in endpoint_id:
        found = WebhookEndpoint.objects.for_organization(organization).filter(pk=endpoint_id).first()
    if found is None:
        raise NotFound(gettext("No such webhook."))
    return found


def list_deliveries(*, endpoint: WebhookEndpoint) -> OrganizationQuerySet:
    """Return the delivery log of an endpoint, newest first."""
    rows = WebhookDelivery.objects.for_organization(endpoint.organization_id).filter(endpoint=endpoint)
    return rows.select_related("event").order_by("-id")


@transaction.atomic
def create_endpoint(
    *, organization: Organization, url: str, event_types: Sequence[str], format: str, by: str, name: str = "",
    is_retry: bool = False,
) -> tuple[WebhookEndpoint, str]:  # fmt: skip
    """Return a new endpoint and its secret, which is shown only once. Raises InvalidValue, InvalidState.

    A client's automatic retry returns the endpoint that the same request created within minutes, with a new secret.
    """
    name = name.strip()
    types = list(dict.fromkeys(event_types))
    wanted: dict[str, Any] = {"name": name, "url": url, "event_types": types, "format": format}
    _check(**wanted)
    lock(f"webhooks:{organization.pk}")
    if is_retry:
        since = db_now() - _RETRY_WINDOW
        made = list_endpoints(organization=organization).filter(created_by=by, created_at__gte=since, **wanted)
        if found := made.last():
            secret = rotate_secret(endpoint=found, by=by, now=db_now(), keeps_old=False)
            found.refresh_from_db()
            return found, secret
    if list_endpoints(organization=organization).count() >= MAX_ENDPOINTS:
        raise InvalidState(
            gettext("An organization has at most %(max_endpoints)s webhooks. Delete one first.")
            % {"max_endpoints": MAX_ENDPOINTS}
        )
    endpoint = WebhookEndpoint(id=new_id("we"), organization_id=organization.pk, created_by=by, **wanted)
    secret = _new_secret()
    endpoint.secret_sealed = seal(secret, place=secret_place(endpoint, "secret_sealed"))
    endpoint.save(force_insert=True)
    endpoint.refresh_from_db()
    _audit(endpoint, "created", by, **wanted)
    return endpoint, secret


@transaction.atomic
def change_endpoint(
    *,
    endpoint: WebhookEndpoint,
    by: str,
    now: datetime.datetime,
    name: str | None = None,
    url: str | None = None,
    event_types: Sequence[str] | None = None,
    format: str | None = None,
) -> WebhookEndpoint:
    """Change the settings of an endpoint; None leaves one as it is. Raises InvalidValue, NotFound."""
    endpoint = lock_row(endpoint)
    given = {"name": name, "url": url, "event_types": event_types, "format": format}
    wanted: dict[str, Any] = {
        field: getattr(endpoint, field) if value is None else value for field, value in given.items()
    }
    wanted["name"] = wanted["name"].strip()
    _check(**wanted)
    is_same = set(wanted["event_types"]) == set(endpoint.event_types)
    wanted["event_types"] = endpoint.event_types if is_same else list(dict.fromkeys(wanted["event_types"]))
    if all(getattr(endpoint, field) == value for field, value in wanted.items()):
        return endpoint
    for field, value in (wanted | {"updated_at": now}).items():
        setattr(endpoint, field, value)
    endpoint.save(update_fields=[*wanted, "updated_at"])
    _audit(endpoint, "changed", by, **wanted)
    return endpoint


@transaction.atomic
def set_paused(*, endpoint: WebhookEndpoint, is_paused: bool, by: str, now: datetime.datetime) -> WebhookEndpoint:
    """Pause an endpoint, or resume a paused or disabled one. Events from the meantime are not sent later.

    Deliveries that were pending go on at once. Raises RateLimited, NotFound.
    """
    endpoint = lock_row(endpoint)
    if endpoint.paused_at if is_paused else endpoint.status == EndpointStatus.ACTIVE:
        return endpoint
    if is_paused:
        endpoint.paused_at = now
    else:
        _require_pace(endpoint, "webhook.resumed", MAX_RESUMES_PER_HOUR)
        for delivery in endpoint.deliveries.filter(status=DeliveryStatus.PENDING):
            publish_attempt(delivery, resumed_at=now)
        endpoint.paused_at, endpoint.disabled_because, endpoint.failing_since = None, "", None
    endpoint.save(update_fields=["paused_at", "disabled_because", "failing_since"])
    _audit(endpoint, "paused" if is_paused else "resumed", by)
    return endpoint


@transaction.atomic
def rotate_secret(*, endpoint: WebhookEndpoint, by: str, now: datetime.datetime, keeps_old: bool = True) -> str:
    """Return a new secret, which is shown only once.

    For OVERLAP, deliveries are signed with the old one as well, unless `keeps_old` is false. Raises NotFound.
    """
    endpoint = lock_row(endpoint)
    old = unseal(bytes(endpoint.secret_sealed), place=secret_place(endpoint, "secret_sealed"))
    secret = _new_secret()
    endpoint.previous_sealed = seal(old, place=secret_place(endpoint, "previous_sealed")) if keeps_old else None
    endpoint.previous_until = now + OVERLAP if keeps_old else None
    endpoint.secret_sealed = seal(secret, place=secret_place(endpoint, "secret_sealed"))
    endpoint.updated_at = now
    endpoint.save(update_fields=["secret_sealed", "previous_sealed", "previous_until", "updated_at"])
    _audit(endpoint, "rotated", by)
    return secret


@transaction.atomic
def delete_endpoint(*, endpoint: WebhookEndpoint, by: str) -> None:
    """Delete an endpoint with its delivery log."""
    _audit(endpoint, "deleted", by, url=endpoint.url)
    endpoint.delete()


@transaction.atomic
def send_test(*, endpoint: WebhookEndpoint, by: str, event_type: str = TEST_TYPE) -> WebhookDelivery:
    """Queue a sample event of this type for this endpoint alone; its subject is the endpoint.

    Raises InvalidValue, InvalidState, RateLimited, NotFound.
    """
    if event_type != TEST_TYPE:
        _check_types([event_type], param="event_type")
    lock(f"webhooks:{endpoint.organization_id}")
    endpoint = lock_row(endpoint)
    _require_room(endpoint)
    _require_pace(endpoint, "webhook.tested", MAX_TESTS_PER_HOUR)
    event_id = new_id("evt")
    event = OrganizationEvent.objects.create(
        id=event_id,
        organization_id=endpoint.organization_id,
        type=event_type,
        subject=endpoint.pk,
        title="Test event",
        path=f"/organization/webhooks/{endpoint.pk}",
        key=event_id,
    )
    _audit(endpoint, "tested", by, type=event_type)
    return queue_delivery(endpoint=endpoint, event=event)


@transaction.atomic
def replay(*, endpoint: WebhookEndpoint, delivery_id: str, by: str) -> WebhookDelivery:
    """Send an event of the log again with the same `webhook-id`. Raises NotFound, InvalidState, RateLimited."""
    found = None if "\x00" in delivery_id else list_deliveries(endpoint=endpoint).filter(pk=delivery_id).first()
    if found is None:
        raise NotFound(gettext("No such delivery."))
    lock(f"webhooks:{endpoint.organization_id}")
    _require_room(endpoint)
    _require_pace(endpoint, "webhook.replayed", MAX_REPLAYS_PER_HOUR)
    ended = WebhookDelivery.objects.filter(pk=found.pk).exclude(status=DeliveryStatus.PENDING)
    if not ended.update(status=DeliveryStatus.PENDING, attempts_left=ATTEMPTS):
        raise InvalidState(gettext("This event is still being delivered. Wait for its last attempt."))
    delivery = list_deliveries(endpoint=endpoint).get(pk=found.pk)
    publish_attempt(delivery)
    _audit(endpoint, "replayed", by, event=delivery.event_id)
    return delivery


def _require_room(endpoint: WebhookEndpoint) -> None:
    if endpoint.status != EndpointStatus.ACTIVE:
        raise InvalidState(gettext("This webhook is %(status)s. Resume it first.") % {"status": endpoint.status})
    if endpoint.deliveries.filter(status=DeliveryStatus.PENDING).count() >= MAX_PENDING:
        raise InvalidState(
            gettext("%(max_pending)s deliveries to this webhook are pending. Wait until some have ended.")
            % {"max_pending": MAX_PENDING}
        )


def _require_pace(endpoint: WebhookEndpoint, action: str, most: int) -> None:
    """Raise RateLimited if the organization did this `most` times within an hour. Deleted endpoints count too."""
    if count_of_hour(organization=endpoint.organization_id, action=action) >= most:
        raise RateLimited(
            gettext("Your organization did this %(most)s times within an hour, the most allowed. Try again later.")
            % {"most": f"{most:,}"},
            retry_after_seconds=_AGAIN_SECONDS,
        )


def secret_hint(endpoint: WebhookEndpoint) -> str:
    """Return the end of the secret, by which its owner tells it from others."""
    secret = unseal(bytes(endpoint.secret_sealed), place=secret_place(endpoint, "secret_sealed"))
    return f"whsec_…{secret[-_HINT_CHARACTERS:]}"


def _check(*, name: str, url: str, event_types: Sequence[str], format: str) -> None:
    if len(name) > _MAX_NAME or _NOT_OF_A_LINE.search(name):
        raise InvalidValue(
            gettext("A webhook's name has at most %(most)s characters on one line.") % {"most": _MAX_NAME}, param="name"
        )
    try:
        check_url(url)
    except ValueError as error:
        raise InvalidValue(translated(str(error)), param="url") from error
    if format not in WebhookFormat.values:
        raise InvalidValue(
            gettext("format is one of %(values)s.") % {"values": ", ".join(WebhookFormat.values)}, param="format"
        )
    if not event_types:
        raise InvalidValue(gettext("Choose at least one type of event."), param="event_types")
    _check_types(event_types, param="event_types")


def _check_types(event_types: Sequence[str], *, param: str) -> None:
    if unknown := sorted(set(event_types) - set(EVENT_TYPES)):
        raise InvalidValue(
            gettext("No event has the type '%(unknown)s'. Use a type of docs/webhooks.md, such as batch.completed.")
            % {"unknown": unknown[0][:64]},
            param=param,
        )


def _new_secret() -> str:
    return "whsec_" + base64.b64encode(os.urandom(_SECRET_BYTES)).decode()


def _audit(endpoint: WebhookEndpoint, what: str, by: str, **details: object) -> None:
    audit.record(
        organization=endpoint.organization_id, by=by, action=f"webhook.{what}", target=endpoint.pk, **details
    )  # fmt: skip
