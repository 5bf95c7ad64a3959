"""Events reach the customer's programs: signed, and at least once."""

import datetime
import json
import threading
from collections.abc import Callable, Iterator

import openai
import pytest
from django.db import connection, transaction

from apps.accounts.models import DeliveryStatus, Notification, OrganizationEvent, WebhookDelivery, WebhookEndpoint
from apps.accounts.notices import deliveries, endpoints, notifications
from apps.accounts.notices.events import announce, announce_batch
from apps.core.database.clock import db_now
from apps.core.errors import InvalidState, NotFound, RateLimited
from apps.core.messages.outbox import deliver_due
from apps.core.models import AuditEntry, OutboxMessage
from tests.factories.accounts import make_key
from tests.support.database import beside
from tests.support.sdk import openai_client
from tests.twins.http_server import Answer, Request, serve_http

pytestmark = pytest.mark.django_db
TYPES = ["fine_tuning.job.succeeded", "batch.completed"]


class Receiver:
    """A program of the customer: records what it gets and answers with `status`."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.status = 204

    def answer(self, request: Request) -> Answer:
        self.requests.append(request)
        return Answer(self.status, b"" if self.status == 204 else b"<b>no\x00</b>")


@pytest.fixture
def receiver(settings) -> Iterator[Receiver]:
    settings.PRIVATE_WEBHOOKS = True
    receiver = Receiver()
    with serve_http(receiver.answer) as url:
        receiver.url = f"{url}/hook?team=a"
        yield receiver


@pytest.fixture
def create(organization, alice, receiver) -> Callable[..., tuple[WebhookEndpoint, str]]:
    def make(**changes: object) -> tuple[WebhookEndpoint, str]:
        given = {"organization": organization, "url": receiver.url, "event_types": TYPES, "format": "standard"}
        return endpoints.create_endpoint(by=alice.pk, **(given | changes))

    return make


def succeed(organization, job_id: str = "ftjob-1") -> None:
    announce(
        organization=organization, type=TYPES[0], subject=job_id, title=lambda: "Ready: <b> & co", path="/jobs/1",
        key=job_id,
    )  # fmt: skip


def send_due() -> None:
    """Deliver what is due, and what waits for its retry."""
    for lane in ("control", "webhooks"):
        OutboxMessage.objects.filter(lane="webhooks", sent_at=None).update(next_attempt_at=db_now())
        deliver_due(lane=lane)


def unwrap(request: Request, secret: str) -> object:
    client = openai.OpenAI(api_key="unused", webhook_secret=secret)
    return client.webhooks.unwrap(request.body.decode(), dict(request.headers))


@pytest.mark.slow
def test_events_are_verified_by_openais_sdk_also_after_a_rotation(organization, rival, alice, create, receiver):
    endpoint, secret = create()
    succeed(organization)
    succeed(organization)  # the same event
    succeed(rival, "ftjob-of-rival")
    announce_batch(organization=organization, batch_id="batch_1", status="completed", path="/batches/batch_1")
    announce_batch(organization=organization, batch_id="batch_1", status="failed", path="/batches/batch_1")

    send_due()

    got = [unwrap(request, secret) for request in receiver.requests]
    assert [(event.type, event.data.id) for event in got] == [(TYPES[0], "ftjob-1"), (TYPES[1], "batch_1")]
    assert receiver.requests[0].headers["webhook-id"] == got[0].id
    assert receiver.requests[0].path == "/hook?team=a"
    assert {row.status for row in endpoints.list_deliveries(endpoint=endpoint)} == {DeliveryStatus.DELIVERED}

    renewed = endpoints.rotate_secret(endpoint=endpoint, by=alice.pk, now=db_now())
    endpoints.send_test(endpoint=endpoint, by=alice.pk)
    send_due()
    assert unwrap(receiver.requests[-1], secret).type == unwrap(receiver.requests[-1], renewed).type == "webhook.test"
    endpoints.send_test(endpoint=endpoint, by=alice.pk, event_type="eval.run.succeeded")
    send_due()
    sample = unwrap(receiver.requests[-1], renewed)
    assert (sample.type, sample.data.id) == ("eval.run.succeeded", endpoint.pk)

    WebhookEndpoint.objects.update(previous_until=db_now())
    endpoints.send_test(endpoint=endpoint, by=alice.pk)
    send_due()
    with pytest.raises(openai.InvalidWebhookSignatureError):
        unwrap(receiver.requests[-1], secret)


@pytest.mark.slow
def test_a_failed_delivery_is_retried_with_its_id_then_fails_and_is_replayed(organization, alice, create, receiver):
    endpoint, _ = create()
    receiver.status = 500
    succeed(organization)

    for _ in range(deliveries.ATTEMPTS + 1):
        send_due()

    delivery = endpoints.list_deliveries(endpoint=endpoint).get()
    assert len(receiver.requests) == delivery.attempts == deliveries.ATTEMPTS
    assert len({request.headers["webhook-id"] for request in receiver.requests}) == 1
    assert (delivery.status, delivery.response_code, delivery.response_text) == ("failed", 500, "<b>no</b>")

    receiver.status = 200
    endpoints.replay(endpoint=endpoint, delivery_id=delivery.pk, by=alice.pk)
    with pytest.raises(InvalidState):
        endpoints.replay(endpoint=endpoint, delivery_id=delivery.pk, by=alice.pk)
    send_due()
    delivery.refresh_from_db()
    endpoint.refresh_from_db()
    assert (delivery.status, endpoint.failing_since) == ("delivered", None)
    assert receiver.requests[-1].headers["webhook-id"] == delivery.event_id


def test_a_pause_keeps_deliveries_from_before_it_and_uses_up_none_of_their_attempts(
    organization, alice, create, receiver
):
    endpoint, _ = create()
    receiver.status = 500
    succeed(organization)
    send_due()

    def set_paused(is_paused: bool) -> None:
        endpoints.set_paused(endpoint=endpoint, is_paused=is_paused, by=alice.pk, now=db_now())

    for _ in range(2):
        set_paused(True)
        send_due()
        set_paused(False)
        set_paused(True)
        send_due()
    succeed(organization, "ftjob-meanwhile")
    send_due()
    delivery = endpoints.list_deliveries(endpoint=endpoint).get()
    assert (delivery.status, delivery.attempts, delivery.attempts_left) == ("pending", 1, deliveries.ATTEMPTS - 1)

    receiver.status = 204
    set_paused(False)
    send_due()
    delivery.refresh_from_db()
    assert (delivery.status, delivery.attempts, len(receiver.requests)) == ("delivered", 2, 2)


def test_only_a_resume_that_changes_something_is_counted_and_audited(alice, create, monkeypatch):
    monkeypatch.setattr(endpoints, "MAX_RESUMES_PER_HOUR", 1)
    endpoint, _ = create()

    for is_paused in (False, False, True, True, False, False):
        endpoints.set_paused(endpoint=endpoint, is_paused=is_paused, by=alice.pk, now=db_now())

    audited = AuditEntry.objects.filter(target=endpoint.pk).order_by("pk").values_list("action", flat=True)
    assert list(audited) == ["webhook.created", "webhook.paused", "webhook.resumed"]


def test_retries_wait_longer_each_time(organization, create, receiver):
    create()
    receiver.status = 503
    succeed(organization)
    waits = []
    for attempts in range(1, deliveries.ATTEMPTS):
        send_due()
        message = OutboxMessage.objects.get(lane="webhooks", key__endswith=f":{attempts}")
        waits.append((message.next_attempt_at - db_now()).total_seconds())

    for wait, planned in zip(waits, deliveries.DELAYS_SECONDS, strict=True):
        assert planned * 0.8 - 10 <= wait <= planned * 1.2


def test_an_attempt_that_was_killed_after_the_request_is_repeated_with_its_id(
    organization, create, receiver, monkeypatch
):
    create()
    succeed(organization)
    with monkeypatch.context() as killed:
        killed.setattr(deliveries, "_record", lambda *given: 1 / 0)
        send_due()

    send_due()
    send_due()

    first, second = receiver.requests
    assert first.headers["webhook-id"] == second.headers["webhook-id"]
    assert first.body == second.body


@pytest.mark.parametrize("reason", ["gone", "days"])
def test_an_endpoint_that_only_fails_is_disabled_and_managers_are_notified(
    organization, alice, ann, bob, create, receiver, reason
):
    endpoint, _ = create()
    receiver.status = 410 if reason == "gone" else 500
    succeed(organization)
    if reason == "days":
        send_due()
        WebhookEndpoint.objects.update(failing_since=db_now() - deliveries.DISABLED_AFTER - datetime.timedelta(1))
        send_due()
        endpoint.refresh_from_db()
        assert endpoint.status == "active", "a delivery that will be retried disables nothing"
        WebhookDelivery.objects.update(attempts_left=1)
    for _ in range(3):
        send_due()

    endpoint.refresh_from_db()
    assert endpoint.status == "disabled"
    assert len(receiver.requests) == (1 if reason == "gone" else 3)
    assert WebhookDelivery.objects.get().status == DeliveryStatus.FAILED
    assert set(Notification.objects.values_list("user__email", flat=True)) == {alice.email, ann.email}
    resumed = endpoints.set_paused(endpoint=endpoint, is_paused=False, by=alice.pk, now=db_now())
    assert resumed.status == "active"


def test_beyond_the_limit_of_pending_deliveries_an_event_waits_for_its_replay(
    organization, alice, create, receiver, monkeypatch
):
    endpoint, _ = create()
    monkeypatch.setattr(deliveries, "MAX_PENDING", 1)
    succeed(organization, "ftjob-1")
    succeed(organization, "ftjob-2")
    deliver_due(lane="control")

    failed, pending = endpoints.list_deliveries(endpoint=endpoint)
    assert (failed.status, failed.error) == ("failed", "Too many deliveries were pending.")
    assert pending.status == "pending"
    send_due()
    assert len(receiver.requests) == 1

    endpoints.replay(endpoint=endpoint, delivery_id=failed.pk, by=alice.pk)
    send_due()
    assert receiver.requests[-1].headers["webhook-id"] == failed.event_id


@pytest.mark.django_db(transaction=True)
def test_openais_call_sends_a_sample_while_it_waits_for_the_answer(organization, alice, create, receiver):
    endpoint, secret = create()
    sdk, is_over = openai_client(make_key(organization, alice)), threading.Event()
    receiver.status = 418

    def deliver() -> None:
        while not is_over.wait(0.05):
            send_due()
        connection.close()

    worker = threading.Thread(target=deliver)
    worker.start()
    try:
        result = sdk.webhooks.test(endpoint.pk, event_type="batch.completed")
    finally:
        is_over.set()
        worker.join()

    assert (result.status_code, result.event_type) == (418, "batch.completed")
    assert unwrap(receiver.requests[0], secret).data.id == endpoint.pk


def test_an_organization_tests_and_replays_a_limited_number_of_times_an_hour(
    organization, rival, alice, charlie, create, receiver, monkeypatch
):
    monkeypatch.setattr(endpoints, "MAX_TESTS_PER_HOUR", 1)
    monkeypatch.setattr(endpoints, "MAX_REPLAYS_PER_HOUR", 1)
    endpoint, _ = create()
    delivery = endpoints.send_test(endpoint=endpoint, by=alice.pk)
    send_due()
    endpoints.replay(endpoint=endpoint, delivery_id=delivery.pk, by=alice.pk)
    send_due()
    other, _ = create()  # deleted endpoints and other ones count together

    for attempt in (
        lambda: endpoints.send_test(endpoint=other, by=alice.pk),
        lambda: endpoints.replay(endpoint=endpoint, delivery_id=delivery.pk, by=alice.pk),
    ):
        with pytest.raises(RateLimited, match="1 times within an hour"):
            attempt()
    send_due()
    assert len(receiver.requests) == 2

    of_rival, _ = create(organization=rival)
    endpoints.send_test(endpoint=of_rival, by=charlie.pk)


@pytest.mark.django_db(transaction=True)
def test_of_two_tests_at_once_the_second_counts_the_first(alice, create, monkeypatch):
    monkeypatch.setattr(endpoints, "MAX_TESTS_PER_HOUR", 1)
    (one, _), (other, _) = create(), create()

    _, second = beside(
        lambda: endpoints.send_test(endpoint=one, by=alice.pk), lambda: endpoints.send_test(endpoint=other, by=alice.pk)
    )

    assert isinstance(second, RateLimited)


def test_pending_deliveries_outlast_the_log(organization, create, monkeypatch):
    endpoint, _ = create()
    for number in range(3):
        succeed(organization, f"ftjob-{number}")
    deliver_due(lane="control")
    newest, *_ = endpoints.list_deliveries(endpoint=endpoint)
    WebhookDelivery.objects.filter(pk=newest.pk).update(status=DeliveryStatus.FAILED)
    monkeypatch.setattr(notifications, "MAX_LOGGED", 0)
    monkeypatch.setattr(notifications, "MAX_KEPT", 0)

    notifications.prune(now=db_now())

    assert [row.status for row in endpoints.list_deliveries(endpoint=endpoint)] == ["pending", "pending"]
    assert OrganizationEvent.objects.count() == 2


def test_slack_gets_a_message_in_which_names_are_only_text(organization, create, receiver):
    create(format="slack")
    succeed(organization)

    send_due()

    message = json.loads(receiver.requests[0].body)
    assert message["text"] == "Ready: &lt;b&gt; &amp; co"
    assert message["blocks"][0]["text"]["text"].startswith("<http")


def test_an_organization_has_a_limited_number_and_sees_only_its_own(organization, rival, create, monkeypatch):
    monkeypatch.setattr(endpoints, "MAX_ENDPOINTS", 1)
    endpoint, _ = create()

    with pytest.raises(InvalidState), transaction.atomic():
        create()
    with pytest.raises(NotFound):
        endpoints.get_endpoint(organization=rival, endpoint_id=endpoint.pk)


@pytest.mark.parametrize("act", [
    lambda endpoint, by: endpoints.change_endpoint(
        endpoint=endpoint, url=endpoint.url, event_types=TYPES, format="standard", by=by, now=db_now()
    ),
    lambda endpoint, by: endpoints.set_paused(endpoint=endpoint, is_paused=True, by=by, now=db_now()),
    lambda endpoint, by: endpoints.rotate_secret(endpoint=endpoint, by=by, now=db_now()),
    lambda endpoint, by: endpoints.send_test(endpoint=endpoint, by=by),
])  # fmt: skip
def test_a_webhook_that_was_deleted_meanwhile_is_not_found(alice, create, act):
    endpoint, _ = create()
    endpoints.delete_endpoint(endpoint=WebhookEndpoint.objects.get(), by=alice.pk)

    with pytest.raises(NotFound):
        act(endpoint, alice.pk)
