"""Completions with `store: true`: kept by the gateway's recorder, read and changed through OpenAI's SDK."""

import datetime
import json

import openai
import pytest

from apps.batches.completions import operations
from apps.batches.completions.models import StoredCompletion
from apps.core.database.clock import db_now
from apps.finetuning.models import Quota
from apps.finetuning.usage.storage import stored_bytes
from apps.interfaces.gateway.http.bodies import LARGE_BYTES
from tests.factories.serving import BASE_MODEL, make_tenant
from tests.support.gateway.processes import HI, WEATHER, error_of, wait_until
from tests.support.sdk import extended_client
from tests.twins.scripted_engine import Script

pytestmark = pytest.mark.django_db


def ask(gateway, tenant, text: str = "Hi", **fields: object) -> str:
    """Return the id of a stored completion, once it is in the database."""
    asked = {"model": BASE_MODEL, "messages": [{"role": "user", "content": text}], "store": True} | fields
    answer = gateway.openai(tenant.key).chat.completions.create(**asked)
    found = {chunk.id for chunk in answer}.pop() if fields.get("stream") else answer.id
    wait_until(lambda: StoredCompletion.objects.filter(pk=found).exists(), "the completion was not stored")
    return found


@pytest.mark.slow
def test_a_stored_completion_is_the_answer_and_can_be_listed_changed_and_deleted(gateway, tenant, engine):
    engine.scripts["sunny?"] = Script(calls=(("call_1", "weather", ('{"place":', '"Oslo"}')),), finish="tool_calls")
    sdk, completions = extended_client(tenant.key), extended_client(tenant.key).chat.completions
    given = {"temperature": 0.5, "seed": 7, "user": "u", "n": 2, "logprobs": True}
    first = ask(gateway, tenant, "Größe\0", metadata={"topic": "size", "step": "1"}, **given)
    second = ask(gateway, tenant, "sunny?", metadata={"topic": "weather"}, tools=[WEATHER], stream=True)

    kept = completions.retrieve(first)
    assert [choice.message.content for choice in kept.choices] == ["Hello there."] * 2
    assert (kept.model, kept.metadata, kept.usage.completion_tokens) == (BASE_MODEL, {"topic": "size", "step": "1"}, 6)
    assert (kept.choices[0].finish_reason, kept.choices[0].logprobs) == ("stop", None)
    assert (kept.temperature, kept.seed, kept.input_user) == (0.5, 7, "u")
    assert kept.request_id.startswith("req_")
    (call,) = completions.retrieve(second).choices[0].message.tool_calls
    assert (call.id, call.function.arguments) == ("call_1", '{"place":"Oslo"}')

    assert [each.id for each in completions.list(limit=1)] == [first, second]
    assert [each.id for each in completions.list(order="desc")] == [second, first]
    assert [each.id for each in completions.list(metadata={"topic": "size", "step": "1"})] == [first]
    assert list(completions.list(metadata={"topic": "size", "step": "2"})) == []
    assert list(completions.list(model="another")) == []
    assert len(list(completions.list(extra_query={"metadata": ""}))) == 2  # as OpenAI's client for Node sends null
    assert len(list(completions.list(model=BASE_MODEL, after=first))) == 1
    with pytest.raises(openai.BadRequestError, match="after"):
        completions.list(after="chatcmpl-none")
    (message,) = completions.messages.list(first)
    assert (message.id, message.role, message.content, message.content_parts) == (f"{first}-0", "user", "Größe\0", None)

    changed = completions.update(first, metadata={"topic": "small"})
    assert changed.metadata == completions.retrieve(first).metadata == {"topic": "small"}
    with pytest.raises(openai.BadRequestError, match="16 pairs"):
        completions.update(first, metadata={"k" * 65: "v"})
    assert completions.update(first, metadata=None).metadata == {}
    deleted = completions.delete(first)
    assert (deleted.id, deleted.deleted, deleted.object) == (first, True, "chat.completion.deleted")
    for call in (completions.retrieve, completions.delete, completions.messages.list):
        with pytest.raises(openai.NotFoundError):
            call(first)
    assert sdk.chat.completions.list().data[0].id == second


def test_messages_with_parts_are_kept_as_they_were_sent_and_paged(gateway, tenant):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "x" * LARGE_BYTES},
    ]
    kept = ask(gateway, tenant, messages=messages, max_tokens=3)
    listing = extended_client(tenant.key).chat.completions.messages

    found = list(listing.list(kept, limit=3))

    assert [each.role for each in found] == ["developer", "user", "assistant", "user"]
    assert (found[1].content, [part.text for part in found[1].content_parts]) == ("one\ntwo", ["one", "two"])
    assert [each.id for each in listing.list(kept, order="desc", limit=2).data] == [found[3].id, found[2].id]
    with pytest.raises(openai.BadRequestError, match="No such message"):
        listing.list(kept, after="chatcmpl-none")


def test_nothing_is_stored_unasked_nor_of_a_refused_or_failed_request(gateway, tenant, engine):
    engine.scripts["fails"] = Script(fails_after=2)
    http = gateway.http(tenant.key)
    body = {"model": BASE_MODEL, "messages": HI}
    for change in ({}, {"store": False}, {"store": None}, {"metadata": {"a": "b"}}):
        assert http.post("/v1/chat/completions", json=body | change).status_code == 200
    failing = body | {"store": True, "messages": [{"role": "user", "content": "fails"}]}
    assert http.post("/v1/chat/completions", json=failing).status_code >= 500
    asked = len(engine.bodies)
    for change, param in (
        ({"store": "yes"}, "store"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"store": True, "metadata": {"a": "\0"}}, "metadata"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
    ):
        refused = http.post("/v1/chat/completions", json=body | change)
        assert (refused.status_code, error_of(refused)["param"]) == (400, param)

    assert len(engine.bodies) == asked
    last = ask(gateway, tenant)
    assert list(StoredCompletion.objects.for_organization(tenant.organization).values_list("pk", flat=True)) == [last]


def test_completions_count_as_storage_and_a_full_organization_is_told_before_an_engine_works(
    gateway, world, tenant, engine
):
    before = stored_bytes(organizations=[tenant.organization.pk])[tenant.organization.pk]
    kept = StoredCompletion.objects.get(pk=ask(gateway, tenant, "x" * 1000))
    after = stored_bytes(organizations=[tenant.organization.pk])[tenant.organization.pk]
    full = make_tenant("Full", world.base_model)
    Quota.objects.create(organization=full.organization, storage_bytes=1, updated_by="system", updated_at=db_now())
    http, asked = gateway.http(full.key), len(engine.bodies)
    body = {"model": BASE_MODEL, "messages": HI}

    refused = http.post("/v1/chat/completions", json=body | {"store": True})

    assert after - before == kept.bytes > 1000
    error = error_of(refused)
    assert (refused.status_code, error["code"], error["param"]) == (429, "insufficient_quota", "store")
    assert refused.headers["x-should-retry"] == "false"
    assert len(engine.bodies) == asked
    assert http.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.chaos
def test_what_a_killed_gateway_had_answered_is_stored_by_the_next(gateway, tenant):
    client, answered = gateway.openai(tenant.key), []
    for _ in range(5):
        answer = client.chat.completions.create(model=BASE_MODEL, messages=HI, store=True)
        answered.append(answer.id)
    gateway.kill()
    gateway.start()

    stored = StoredCompletion.objects.for_organization(tenant.organization)

    wait_until(lambda: set(stored.values_list("pk", flat=True)) == set(answered), "a completion is lost", seconds=60)


@pytest.mark.slow
def test_stored_completions_become_a_dataset_and_end_with_their_time(gateway, tenant, settings, monkeypatch):
    ask(gateway, tenant, "one", metadata={"use": "yes"})
    ask(gateway, tenant, "two", metadata={"use": "no"})
    sdk = extended_client(tenant.key)
    source = {"metadata": {"use": "yes"}}

    file = sdk.post("/../api/v1/datasets", cast_to=object, body={"name": "distilled", "stored_completions": source})
    with pytest.raises(openai.BadRequestError, match="No stored completion"):
        sdk.post(
            "/../api/v1/datasets", cast_to=object, body={"name": "none", "stored_completions": {"model": "another"}}
        )

    row = json.loads(sdk.files.content(file["id"]).text)
    assert row == {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "Hello there."}]}
    newest = StoredCompletion.objects.order_by("-created_at", "-id").first()
    monkeypatch.setattr(operations, "MAX_READ_BYTES", newest.bytes)
    file = sdk.post("/../api/v1/datasets", cast_to=object, body={"name": "cut", "stored_completions": {}})
    assert len(sdk.files.content(file["id"]).text.splitlines()) == 1
    later = db_now() + datetime.timedelta(days=settings.STORED_COMPLETION_DAYS + 1)
    assert operations.delete_expired(now=db_now()) == 0
    assert operations.delete_expired(now=later) >= 2
    assert not StoredCompletion.objects.exists()
