"""/v1/webhook_endpoints: OpenAI's calls for webhooks. Ours, at /api/v1/webhooks, also pause, list and replay."""

import time
from typing import Literal, TypedDict

import msgspec
from django.utils.translation import gettext
from rest_framework.request import Request

from apps.accounts.models import WebhookDelivery, WebhookEndpoint, WebhookFormat
from apps.accounts.notices import endpoints
from apps.accounts.notices.events import EVENT_TYPES
from apps.accounts.roles import Permission
from apps.core.database.clock import db_now
from apps.core.database.tenancy import tenant
from apps.core.errors import InvalidState, NotFound
from apps.interfaces.api.native.webhooks import EventTypes, WebhookView
from apps.interfaces.api.requests.idempotency import is_client_retry
from apps.interfaces.api.requests.pagination import ListObject, PageQuery, page
from apps.interfaces.api.views import ApiView

_MANAGE = Permission.WEBHOOK_MANAGE
# A test holds a place of the web process while it waits. Each look is one short transaction.
_TEST_SECONDS, _LOOK_SECONDS = 3.0, 0.2


class CreateEndpoint(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    url: str
    event_types: EventTypes


class ChangeEndpoint(msgspec.Struct, forbid_unknown_fields=True):
    """What is left out stays as it is."""

    name: str | None = None
    url: str | None = None
    event_types: EventTypes | None = None


class RotateSecret(msgspec.Struct, forbid_unknown_fields=True):
    keep_old_secret_active_for_24_hours: bool = False


class TestEndpoint(msgspec.Struct, forbid_unknown_fields=True):
    event_type: str


class EndpointObject(TypedDict):
    object: Literal["webhook_endpoint"]
    id: str
    name: str
    url: str
    event_types: list[str]
    signing_secret_hint: str
    created_at: int
    updated_at: int


class EndpointWithSecret(EndpointObject):
    """`signing_secret` (`whsec_…`) is shown only in this answer."""

    signing_secret: str


class DeletedEndpoint(TypedDict):
    id: str
    object: Literal["webhook_endpoint.deleted"]
    deleted: Literal[True]


class EndpointTestResult(TypedDict):
    """The endpoint answered with `status_code`, which may be that of an error."""

    object: Literal["webhook_endpoint.test"]
    webhook_endpoint_id: str
    event_type: str
    status_code: int
    success: Literal[True]


class EventTypeList(TypedDict):
    object: Literal["list"]
    data: list[str]


class EndpointList(ApiView):
    required_scope = {"GET": _MANAGE, "POST": _MANAGE}
    examples = {
        "POST": {
            "name": "Jobs",
            "url": "https://hooks.example.com/anneal",
            "event_types": ["fine_tuning.job.succeeded"],
        }
    }

    def get(self, request: Request, query: PageQuery) -> ListObject[EndpointObject]:
        """List webhook endpoints, newest first."""
        return page(query, endpoints.list_endpoints(organization=self.organization), _object)

    def post(self, request: Request, body: CreateEndpoint) -> EndpointWithSecret:
        """Create a webhook endpoint. Its signing secret is only in this answer."""
        endpoint, secret = endpoints.create_endpoint(
            organization=self.organization, name=body.name, url=body.url, event_types=body.event_types,
            format=WebhookFormat.STANDARD, by=self.actor, is_retry=is_client_retry(request),
        )  # fmt: skip
        return {**_object(endpoint), "signing_secret": secret}


class EndpointDetail(WebhookView):
    required_scope = {"GET": _MANAGE, "POST": _MANAGE, "DELETE": _MANAGE}
    examples = {"POST": {"event_types": ["fine_tuning.job.succeeded", "fine_tuning.job.failed"]}}

    def get(self, request: Request, webhook_id: str) -> EndpointObject:
        """Return a webhook endpoint."""
        return _object(self.endpoint(webhook_id))

    def post(self, request: Request, webhook_id: str, body: ChangeEndpoint) -> EndpointObject:
        """Change a webhook endpoint."""
        changed = endpoints.change_endpoint(
            endpoint=self.endpoint(webhook_id), by=self.actor, now=db_now(), **msgspec.structs.asdict(body)
        )
        return _object(changed)

    def delete(self, request: Request, webhook_id: str) -> DeletedEndpoint:
        """Delete a webhook endpoint with its delivery log."""
        endpoints.delete_endpoint(endpoint=self.endpoint(webhook_id), by=self.actor)
        return {"id": webhook_id, "object": "webhook_endpoint.deleted", "deleted": True}


class EndpointRotation(WebhookView):
    required_scope = {"POST": _MANAGE}
    examples = {"POST": {"keep_old_secret_active_for_24_hours": True}}

    def post(self, request: Request, webhook_id: str, body: RotateSecret) -> EndpointWithSecret:
        """Replace the signing secret. The old one is invalid at once, unless you keep it active for 24 hours."""
        endpoint, keeps_old = self.endpoint(webhook_id), body.keep_old_secret_active_for_24_hours
        secret = endpoints.rotate_secret(endpoint=endpoint, by=self.actor, now=db_now(), keeps_old=keeps_old)
        return {**_object(self.endpoint(webhook_id)), "signing_secret": secret}


class EndpointTest(WebhookView):
    required_scope = {"POST": _MANAGE}
    takes_idempotency_key = False  # the answer is known only after the transaction that would store it
    examples = {"POST": {"event_type": "fine_tuning.job.succeeded"}}

    def post(self, request: Request, webhook_id: str, body: TestEndpoint) -> EndpointTestResult:
        """Send a sample event and return the status of its answer. The id in its `data` is that of the endpoint."""
        delivery = endpoints.send_test(
            endpoint=self.endpoint(webhook_id), by=self.actor, event_type=body.event_type
        )  # fmt: skip
        result: EndpointTestResult = {
            "object": "webhook_endpoint.test",
            "webhook_endpoint_id": webhook_id,
            "event_type": body.event_type,
            "status_code": 0,
            "success": True,
        }

        def complete() -> None:
            result["status_code"] = _answered(delivery)

        self.after_commit = complete  # until then, no worker sees the delivery
        return result


class EventTypeNames(ApiView):
    required_scope = {"GET": _MANAGE}

    def get(self, request: Request) -> EventTypeList:
        """List the types of events that an endpoint can receive."""
        return {"object": "list", "data": list(EVENT_TYPES)}


def _answered(delivery: WebhookDelivery) -> int:
    """Return the status of the answer to the first attempt.

    Raises InvalidState if there is none in time, and NotFound if the webhook is deleted meanwhile.
    """
    log = f"GET /api/v1/webhooks/{delivery.endpoint_id}/deliveries shows each attempt."
    deadline = time.monotonic() + _TEST_SECONDS
    while True:
        with tenant(organization=delivery.organization_id):
            found = WebhookDelivery.objects.filter(pk=delivery.pk).first()
        if found is None:
            raise NotFound(gettext("No such webhook."))
        if found.response_code is not None:
            return found.response_code
        if found.attempts:
            raise InvalidState(f"The sample was not delivered: {found.error.rstrip('.')}. {log}")
        if time.monotonic() > deadline:
            raise InvalidState(f"There is no answer after {_TEST_SECONDS:.0f} seconds. The sample stays queued. {log}")
        time.sleep(_LOOK_SECONDS)


def _object(row: WebhookEndpoint) -> EndpointObject:
    return {
        "object": "webhook_endpoint",
        "id": row.pk,
        "name": row.name,
        "url": row.url,
        "event_types": row.event_types,
        "signing_secret_hint": endpoints.secret_hint(row),
        "created_at": int(row.created_at.timestamp()),
        "updated_at": int(row.updated_at.timestamp()),
    }
