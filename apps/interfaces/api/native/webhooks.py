"""/api/v1/webhooks: endpoints that are sent the organization's events, their delivery log, tests and replays."""

from typing import Annotated, Literal, TypedDict

import msgspec
from rest_framework.request import Request

from apps.accounts.models import EndpointStatus, WebhookDelivery, WebhookEndpoint
from apps.accounts.notices import endpoints
from apps.accounts.notices.events import EVENT_TYPES
from apps.accounts.roles import Permission
from apps.core.database.clock import db_now
from apps.interfaces.api.requests.pagination import ListObject, LongPageQuery, PageQuery, page
from apps.interfaces.api.requests.times import unix_seconds
from apps.interfaces.api.views import ApiView

_MANAGE = Permission.WEBHOOK_MANAGE
EventTypes = Annotated[list[str], msgspec.Meta(max_length=len(EVENT_TYPES), description="Types of events to send.")]


class WebhookRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`format` is `standard` (OpenAI's event object) or `slack` (a message for an incoming webhook)."""

    url: str
    event_types: EventTypes
    format: str = "standard"
    name: str = ""


class WebhookChange(msgspec.Struct, forbid_unknown_fields=True):
    """What is left out stays as it is. `is_paused: false` also resumes a webhook that failures disabled."""

    name: str | None = None
    url: str | None = None
    event_types: EventTypes | None = None
    format: str | None = None
    is_paused: bool | None = None


class DeliveriesQuery(PageQuery):
    status: Literal["pending", "delivered", "failed"] | None = None
    event_type: Annotated[str, msgspec.Meta(max_length=64)] | None = None


class WebhookObject(TypedDict):
    object: Literal["webhook_endpoint"]
    id: str
    name: str
    url: str
    event_types: list[str]
    format: str
    status: EndpointStatus
    disabled_because: str | None
    created_at: int
    updated_at: int


class WebhookWithSecret(WebhookObject):
    """`secret` (`whsec_…`) is shown only in this answer."""

    secret: str


class DeletedWebhook(TypedDict):
    id: str
    object: Literal["webhook_endpoint"]
    deleted: Literal[True]


class WebhookDeliveryObject(TypedDict):
    object: Literal["webhook_delivery"]
    id: str
    event_id: str
    event_type: str
    status: str
    attempts: int
    response_code: int | None
    response_text: str
    error: str | None
    duration_ms: int | None
    attempted_at: int | None
    created_at: int


class WebhookView(ApiView):
    """The base of the calls on one endpoint."""

    def endpoint(self, webhook_id: str) -> WebhookEndpoint:
        return endpoints.get_endpoint(organization=self.organization, endpoint_id=webhook_id)


class WebhookList(ApiView):
    required_scope = {"GET": _MANAGE, "POST": _MANAGE}
    examples = {"POST": {"url": "https://hooks.example.com/anneal", "event_types": ["fine_tuning.job.succeeded"]}}

    def get(self, request: Request, query: LongPageQuery) -> ListObject[WebhookObject]:
        """List webhooks, oldest first."""
        rows = endpoints.list_endpoints(organization=self.organization)
        return page(query, rows, _object, order=("created_at", "id"))

    def post(self, request: Request, body: WebhookRequest) -> WebhookWithSecret:
        """Create a webhook. Its secret is only in this answer."""
        endpoint, secret = endpoints.create_endpoint(
            organization=self.organization, name=body.name, url=body.url, event_types=body.event_types,
            format=body.format, by=self.actor,
        )  # fmt: skip
        return {**_object(endpoint), "secret": secret}


class WebhookDetail(WebhookView):
    required_scope = {"GET": _MANAGE, "POST": _MANAGE, "DELETE": _MANAGE}
    examples = {"POST": {"is_paused": True}}

    def get(self, request: Request, webhook_id: str) -> WebhookObject:
        """Return a webhook."""
        return _object(self.endpoint(webhook_id))

    def post(self, request: Request, webhook_id: str, body: WebhookChange) -> WebhookObject:
        """Change, pause or resume a webhook."""
        endpoint = self.endpoint(webhook_id)
        wanted = {field: getattr(body, field) for field in ("name", "url", "event_types", "format")}
        if any(value is not None for value in wanted.values()):
            endpoint = endpoints.change_endpoint(endpoint=endpoint, by=self.actor, now=db_now(), **wanted)
        if body.is_paused is not None:
            endpoint = endpoints.set_paused(
                endpoint=endpoint, is_paused=body.is_paused, by=self.actor, now=db_now()
            )  # fmt: skip
        return _object(endpoint)

    def delete(self, request: Request, webhook_id: str) -> DeletedWebhook:
        """Delete a webhook with its delivery log."""
        endpoints.delete_endpoint(endpoint=self.endpoint(webhook_id), by=self.actor)
        return {"id": webhook_id, "object": "webhook_endpoint", "deleted": True}


class WebhookRotation(WebhookView):
    required_scope = {"POST": _MANAGE}

    def post(self, request: Request, webhook_id: str) -> WebhookWithSecret:
        """Replace the secret. For 24 hours, deliveries are signed with the old one as well."""
        endpoint = self.endpoint(webhook_id)
        secret = endpoints.rotate_secret(endpoint=endpoint, by=self.actor, now=db_now())
        return {**_object(endpoint), "secret": secret}


class WebhookTest(WebhookView):
    required_scope = {"POST": _MANAGE}

    def post(self, request: Request, webhook_id: str) -> WebhookDeliveryObject:
        """Send an event of the type `webhook.test`."""
        return _delivery(endpoints.send_test(endpoint=self.endpoint(webhook_id), by=self.actor))


class WebhookDeliveries(WebhookView):
    required_scope = {"GET": _MANAGE}

    def get(self, request: Request, webhook_id: str, query: DeliveriesQuery) -> ListObject[WebhookDeliveryObject]:
        """List the delivery log, newest first. It is kept for 30 days, up to 1,000 deliveries."""
        deliveries = endpoints.list_deliveries(endpoint=self.endpoint(webhook_id))
        rows = deliveries.filter(status=query.status) if query.status else deliveries
        rows = rows.filter(event__type=query.event_type) if query.event_type else rows
        return page(query, rows, _delivery, places=deliveries)


class WebhookReplay(WebhookView):
    required_scope = {"POST": _MANAGE}

    def post(self, request: Request, webhook_id: str, delivery_id: str) -> WebhookDeliveryObject:
        """Send an event of the log again, with the same `webhook-id`."""
        return _delivery(
            endpoints.replay(endpoint=self.endpoint(webhook_id), delivery_id=delivery_id, by=self.actor)
        )  # fmt: skip


def _object(row: WebhookEndpoint) -> WebhookObject:
    return {
        "object": "webhook_endpoint",
        "id": row.pk,
        "name": row.name,
        "url": row.url,
        "event_types": row.event_types,
        "format": row.format,
        "status": row.status,
        "disabled_because": row.disabled_because or None,
        "created_at": int(row.created_at.timestamp()),
        "updated_at": int(row.updated_at.timestamp()),
    }


def _delivery(row: WebhookDelivery) -> WebhookDeliveryObject:
    return {
        "object": "webhook_delivery",
        "id": row.pk,
        "event_id": row.event_id,
        "event_type": row.event.type,
        "status": row.status,
        "attempts": row.attempts,
        "response_code": row.response_code,
        "response_text": row.response_text,
        "error": row.error or None,
        "duration_ms": row.duration_ms,
        "attempted_at": unix_seconds(row.attempted_at),
        "created_at": int(row.created_at.timestamp()),
    }
