"""OpenAI's calls for webhooks, through its own SDK."""

import time
from datetime import timedelta
from functools import partial
from itertools import count
from types import SimpleNamespace

import openai
import pytest

from apps.accounts.models import OrganizationEvent, WebhookDelivery, WebhookEndpoint
from apps.accounts.notices import endpoints
from apps.accounts.notices.events import EVENT_TYPES
from apps.core.database.clock import db_now
from apps.interfaces.api.openai import webhook_endpoints
from tests.factories.accounts import make_key
from tests.support.sdk import openai_client

URL = "https://hooks.example.com/anneal"


@pytest.fixture
def created(sdk) -> object:
    return sdk.webhooks.create(name="Jobs", url=URL, event_types=["eval.run.failed", "fine_tuning.job.succeeded"])


def test_an_endpoint_is_created_changed_and_deleted(sdk, created) -> None:
    row = WebhookEndpoint.objects.get()
    assert (row.name, row.url, row.format) == ("Jobs", URL, "standard")
    assert created.event_types == ["eval.run.failed", "fine_tuning.job.succeeded"], (
        "in the order in which they were sent"
    )
    assert created.signing_secret.startswith("whsec_")
    assert created.signing_secret_hint == f"whsec_…{created.signing_secret[-5:]}"
    assert sdk.webhooks.retrieve(created.id).to_dict() == {
        name: value for name, value in created.to_dict().items() if name != "signing_secret"
    }

    second = sdk.webhooks.create(name="Batches", url=URL, event_types=["batch.completed"])
    assert [each.id for each in sdk.webhooks.list(limit=1)] == [second.id, created.id]

    changed = sdk.webhooks.update(created.id, name="All jobs", event_types=["fine_tuning.job.failed"])
    assert (changed.name, changed.url, changed.event_types) == ("All jobs", URL, ["fine_tuning.job.failed"])
    deleted = sdk.webhooks.delete(created.id)
    assert (deleted.id, deleted.deleted) == (created.id, True)
    with pytest.raises(openai.NotFoundError):
        sdk.webhooks.retrieve(created.id)


def test_the_time_of_a_change_is_kept_and_an_unchanged_update_is_none(sdk, created) -> None:
    WebhookEndpoint.objects.update(updated_at="2026-01-01T00:00:00Z")

    types = created.event_types
    for same in ({"name": "Jobs"}, {"event_types": types[::-1]}, {"event_types": types * 2}):
        unchanged = sdk.webhooks.update(created.id, **same)
        assert (unchanged.updated_at, unchanged.event_types) == (1767225600, types)

    changed = sdk.webhooks.update(created.id, event_types=["batch.completed"] * 2)
    assert changed.updated_at > 1767225600 and changed.event_types == ["batch.completed"]
    assert sdk.webhooks.create(name="Twice", url=URL, event_types=types * 2).event_types == types


def test_a_retry_of_the_sdk_makes_no_second_endpoint(sdk, created, organization, alice) -> None:
    def send(client: openai.OpenAI, *, retries: int = 1, **changes: object) -> object:
        wanted = {"name": "Jobs", "url": URL, "event_types": created.event_types}
        return client.webhooks.create(**(wanted | changes), extra_headers={"X-Stainless-Retry-Count": str(retries)})

    again = send(sdk)
    others = {
        send(sdk, retries=0).id,
        send(sdk, name="Other").id,
        send(openai_client(make_key(organization, alice))).id,
    }

    assert again.id == created.id and again.signing_secret != created.signing_secret
    row = WebhookEndpoint.objects.get(pk=created.id)
    assert again.signing_secret_hint == endpoints.secret_hint(row) and row.previous_sealed is None
    assert len({created.id, *others}) == WebhookEndpoint.objects.count() == 4
    WebhookEndpoint.objects.update(created_at=db_now() - timedelta(minutes=11))
    assert send(sdk).id not in {created.id, *others}


@pytest.mark.parametrize("keeps", [True, False])
def test_the_old_secret_stays_active_only_if_that_was_asked(sdk, created, keeps: bool) -> None:
    rotated = sdk.webhooks.rotate_secret(created.id, keep_old_secret_active_for_24_hours=keeps)

    row = WebhookEndpoint.objects.get()
    assert rotated.signing_secret != created.signing_secret
    assert rotated.signing_secret_hint == f"whsec_…{rotated.signing_secret[-5:]}"
    assert (row.previous_sealed is not None) == (row.previous_until is not None) == keeps


def test_all_types_of_events_are_listed(sdk) -> None:
    assert sdk.webhooks.event_types.list().data == list(EVENT_TYPES)


@pytest.mark.parametrize("status", [204, 503])
def test_a_sample_event_returns_the_status_of_its_answer(sdk, created, monkeypatch, status: int) -> None:
    def answer(seconds: float) -> None:
        WebhookDelivery.objects.update(attempts=1, response_code=status)

    monkeypatch.setattr(webhook_endpoints, "time", SimpleNamespace(monotonic=time.monotonic, sleep=answer))

    result = sdk.webhooks.test(created.id, event_type="batch.completed")

    assert (result.status_code, result.success, result.webhook_endpoint_id) == (status, True, created.id)
    assert OrganizationEvent.objects.get().type == result.event_type == "batch.completed"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attempts": 1, "error": "Connection refused."}, "was not delivered: Connection refused. GET"),
        ({}, "no answer after 3 seconds"),
    ],
)
def test_a_sample_event_without_an_answer_is_an_error_that_names_the_log(
    sdk, created, monkeypatch, changes: dict[str, object], reason: str
) -> None:
    def change(seconds: float) -> None:
        if changes:
            WebhookDelivery.objects.update(**changes)

    clock = SimpleNamespace(monotonic=partial(next, count()), sleep=change)  # a second passes at each look
    monkeypatch.setattr(webhook_endpoints, "time", clock)

    with pytest.raises(openai.BadRequestError, match=reason) as refused:
        sdk.webhooks.test(created.id, event_type="batch.completed")

    assert f"/api/v1/webhooks/{created.id}/deliveries" in str(refused.value)


def test_a_webhook_that_is_deleted_while_its_sample_waits_is_not_found(sdk, created, monkeypatch) -> None:
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: WebhookEndpoint.objects.all().delete())
    monkeypatch.setattr(webhook_endpoints, "time", clock)

    with pytest.raises(openai.NotFoundError):
        sdk.webhooks.test(created.id, event_type="batch.completed")


def test_a_change_of_one_setting_keeps_what_changed_meanwhile(created, alice) -> None:
    read_before = WebhookEndpoint.objects.get()
    WebhookEndpoint.objects.update(url="https://new.example.com/")

    changed = endpoints.change_endpoint(endpoint=read_before, name="  Other ", by=alice.pk, now=db_now())

    assert (changed.name, changed.url) == ("Other", "https://new.example.com/")


def test_a_sample_event_takes_no_idempotency_key(sdk, created) -> None:
    with pytest.raises(openai.BadRequestError, match="takes no Idempotency-Key"):
        sdk.webhooks.test(created.id, event_type="batch.completed", extra_headers={"Idempotency-Key": "a"})
    assert not WebhookDelivery.objects.exists()


def test_what_is_wrong_is_named(sdk, created, organization, alice) -> None:
    for call, param in (
        (lambda: sdk.webhooks.create(name="a" * 101, url=URL, event_types=["batch.completed"]), "name"),
        (lambda: sdk.webhooks.create(name="a", url="http://10.0.0.1/", event_types=["batch.completed"]), "url"),
        (lambda: sdk.webhooks.update(created.id, event_types=["response.completed"]), "event_types"),
        (lambda: sdk.webhooks.test(created.id, event_type="response.completed"), "event_type"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            call()
        assert refused.value.param == param
    with pytest.raises(openai.PermissionDeniedError):
        openai_client(make_key(organization, alice, scopes=frozenset({"inference"}))).webhooks.list()
    assert not WebhookDelivery.objects.exists()
