"""OpenAI's Batch API, from the upload to the files of answers, through the gateway."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from django.conf import settings as django_settings

from apps.accounts.login.key_operations import revoke_key
from apps.accounts.models import ApiKey, KeyKind
from apps.accounts.queries import KeyLimits
from apps.batches import worker
from apps.batches.models import Batch, BatchRequest
from apps.batches.signatures import HEADER, sign
from apps.billing.budget_settings import set_budget
from apps.billing.models import UsageConflict
from apps.billing.queries import get_ledger_sum_nano, get_spending
from apps.billing.usage.metering import rate_usage
from apps.core.database.clock import db_now
from apps.core.ids import new_ulid
from apps.core.money import rated
from tests.factories.accounts import make_key
from tests.factories.serving import BASE_MODEL, INPUT_NANO, OUTPUT_NANO, PER, make_served_model, make_tenant
from tests.support.database import database_url
from tests.support.gateway.processes import HI, error_of, usage_of, wait_for_usage, wait_until
from tests.support.sdk import openai_client
from tests.twins.scripted_engine import Script

pytestmark = pytest.mark.django_db
CHAT = "/v1/chat/completions"
HOLD = [{"role": "user", "content": "hold"}]


def line(custom_id: str, text: str = "Hi", **changes: object) -> dict[str, object]:
    body = {"model": BASE_MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 16}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body} | changes


def upload(sdk: openai.OpenAI, lines: list[object], encoding: str = "utf-8") -> str:
    content = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines)
    return sdk.files.create(file=("asks.jsonl", content.encode(encoding)), purpose="batch").id


def begin(sdk: openai.OpenAI, lines: list[object], encoding: str = "utf-8", **fields: object) -> openai.types.Batch:
    asked = {"input_file_id": upload(sdk, lines, encoding), "endpoint": CHAT, "completion_window": "24h"} | fields
    return sdk.batches.create(**asked)


def rows_of(sdk: openai.OpenAI, file_id: str | None) -> dict[str, dict]:
    rows = [json.loads(row) for row in sdk.files.content(file_id).text.splitlines()] if file_id else []
    assert len({row["custom_id"] for row in rows}) == len(rows)
    return {row["custom_id"]: row for row in rows}


def work_shortly(times: int) -> None:
    """Let requests be sent once at a time: a batch that must wait does so for longer."""
    for _ in range(times):
        worker.work(seconds=1)


def assert_charged_once(tenant, count: int) -> None:
    wait_until(lambda: len([event for event in usage_of(tenant) if event.input_tokens]) >= count, "not recorded")
    events = [event for event in usage_of(tenant) if event.input_tokens]
    assert len(events) == count
    assert all(event.key_id == tenant.key.key.pk and event.pk.startswith("useb_") for event in events)
    rate_usage()
    cost = sum(
        rated(quantity=sum(getattr(event, way) for event in events), price_nano=nano // 2, per=PER)
        for way, nano in (("input_tokens", INPUT_NANO), ("output_tokens", OUTPUT_NANO))
    )
    assert abs(get_spending(organization=tenant.organization).inference_nano - cost) <= 1
    assert get_ledger_sum_nano() == 0
    assert not UsageConflict.objects.filter(organization=tenant.organization).exists()


@pytest.mark.slow
def test_a_batch_is_answered_charged_and_kept_as_files(tenant, engine):
    sdk = openai_client(tenant.key)
    unknown = {"model": "nothing", "messages": HI}
    batch = begin(sdk, [line("a"), "", line("b", "Bye"), line("c", body=unknown)], metadata={"team": "core"})
    assert (batch.status, batch.metadata) == ("validating", {"team": "core"})
    with pytest.raises(openai.BadRequestError, match="still reads this file"):
        sdk.files.delete(batch.input_file_id)

    worker.work(seconds=20)

    done = sdk.batches.retrieve(batch.id)
    assert (done.status, done.model, done.errors) == ("completed", BASE_MODEL, None)
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (3, 2, 1)
    assert done.in_progress_at <= done.finalizing_at <= done.completed_at < done.expires_at
    assert done.expires_at - done.created_at == 86400
    answers, errors = rows_of(sdk, done.output_file_id), rows_of(sdk, done.error_file_id)
    assert list(answers) == ["a", "b"]
    response = answers["a"]["response"]
    assert response["status_code"] == 200
    assert openai.types.chat.ChatCompletion(**response["body"]).choices[0].message.content == "Hello there."
    assert errors["c"]["response"]["status_code"] == 404
    assert done.usage.input_tokens == 22
    assert not BatchRequest.objects.filter(batch=batch.id).exists()
    assert_charged_once(tenant, 2)
    listed = {file.id: file.purpose for file in sdk.files.list()}
    assert listed[done.output_file_id] == "batch_output"
    assert [each.id for each in sdk.batches.list(limit=1)] == [batch.id]
    sdk.files.delete(batch.input_file_id)
    with pytest.raises(openai.NotFoundError):
        sdk.files.content(batch.input_file_id)


@pytest.mark.slow
def test_a_worker_killed_in_the_middle_answers_and_charges_each_request_once(tenant, gateway, engine):
    sdk = openai_client(tenant.key)
    engine.scripts["slow"] = Script(tokens=("x",) * 4, delay_seconds=0.1)
    names = [f"r{number}" for number in range(40)]
    batch = begin(sdk, [line(name, "slow") for name in names])
    environ = os.environ | {
        "ANNEAL_GATEWAY_URL": f"unix://{gateway.socket}",
        "ANNEAL_OBJECT_STORE": django_settings.OBJECT_STORE,
        "DATABASE_URL": database_url("sys"),
        "DJANGO_SETTINGS_MODULE": "apps.config.settings.dev",
    }
    code = "import django; django.setup(); from apps.batches.worker import work; work()"
    victim = subprocess.Popen([sys.executable, "-c", code], env=environ, cwd=Path(__file__).parents[4])
    try:
        wait_until(lambda: Batch.objects.get(pk=batch.id).completed >= 4, "nothing was answered", seconds=60)
    finally:
        victim.kill()
        victim.wait()
    assert Batch.objects.get(pk=batch.id).completed < len(names)

    wait_until(lambda: sdk.batches.retrieve(batch.id).status == "completed" or worker.work(seconds=20), "not completed")

    done = sdk.batches.retrieve(batch.id)
    assert done.status == "completed"
    assert list(rows_of(sdk, done.output_file_id)) == names
    assert (done.request_counts.completed, done.error_file_id) == (len(names), None)
    assert_charged_once(tenant, len(names))
    assert {event.output_tokens for event in usage_of(tenant)} <= {0, 4}, "an answer that was given up is charged"


@pytest.mark.slow
def test_a_request_waits_for_a_place_and_repeats_a_failed_answer_and_is_charged_once(world, tenant, gateway, engine):
    sdk = openai_client(tenant.key)
    batch = begin(sdk, [line("a", "turn")])
    engine.scripts["hold"] = Script(delay_seconds=30)
    half = django_settings.REPLICA_PLACES // 2  # one for each choice
    with gateway.left(world.rival.key, CHAT, {"model": BASE_MODEL, "messages": HOLD, "n": half}):
        wait_until(lambda: any(body.get("messages") == HOLD for body in engine.bodies), "places are free")
        work_shortly(2)
        assert (BatchRequest.objects.get(batch=batch.id).failures, usage_of(tenant)) == (0, [])
    engine.scripts["turn"] = Script(status=503, error={"message": "full", "code": "replica_busy"})
    work_shortly(worker.MAX_FAILURES + 1)
    assert BatchRequest.objects.get(batch=batch.id).failures == 0, "no engine has worked on it"
    engine.scripts["turn"] = Script(fails_after=1)
    work_shortly(1)
    assert BatchRequest.objects.get(batch=batch.id).failures == 1
    del engine.scripts["turn"]

    worker.work(seconds=20)

    assert sdk.batches.retrieve(batch.id).request_counts.completed == 1
    assert_charged_once(tenant, 1)
    tokens = ApiKey.objects.filter(organization=tenant.organization, kind=KeyKind.MEMBER)
    assert tokens.count() == 1, "each task made a key of its own"


@pytest.mark.slow
def test_a_request_without_a_price_fails_and_one_that_kills_engines_fails_after_some_tries(tenant, engine):
    unpriced = make_served_model("batch-unpriced", engine.url, is_priced=False)
    engine.scripts["killer"] = Script(breaks_after=0)
    sdk = openai_client(tenant.key)
    batch = begin(sdk, [line("a", body={"model": unpriced.name, "messages": HI}), line("b", "killer")])

    work_shortly(worker.MAX_FAILURES + 1)
    worker.work(seconds=20)

    errors = rows_of(sdk, sdk.batches.retrieve(batch.id).error_file_id)
    codes = [errors[name]["response"]["body"]["error"]["code"] for name in ("a", "b")]
    assert codes == ["price_not_set", "service_unavailable"]


@pytest.mark.slow
def test_bad_lines_fail_the_batch_and_are_named(tenant):
    sdk = openai_client(tenant.key)
    bad = [
        line("a"), line("a"), "{", "[]", line("b", method="GET"), line("c", url="/v1/embeddings"), line("d\0"),
        line("e", body={"messages": HI}), line("f", body={"model": BASE_MODEL, "stream": True}), line(""),
        '{"custom_id": "\ud800"}'.encode("utf-8", "surrogatepass").decode("latin-1"), "x" * (4 * 2**20 + 10),
        '{"custom_id": "\\ud800"}',
    ]  # fmt: skip
    batch = begin(sdk, bad)

    worker.work(seconds=20)

    failed = sdk.batches.retrieve(batch.id)
    assert (failed.status, failed.output_file_id, failed.request_counts.total) == ("failed", None, 0)
    assert [error.line for error in failed.errors.data] == list(range(2, 14))
    assert failed.errors.data[0].code == "duplicate_custom_id"
    said = {error.line: (error.param, error.message) for error in failed.errors.data}
    assert said[4] == (None, "The body must be an object, not [].")
    assert said[8] == ("body.model", "Missing required parameter: 'body.model'. Send it as a string.")
    assert not re.search(r"msgspec|repr|None|\$|`", str([message for _, message in said.values()]))
    assert "half of a surrogate pair" in said[13][1]
    assert usage_of(tenant) == []
    empty = begin(sdk, [""])
    worker.work(seconds=20)
    assert sdk.batches.retrieve(empty.id).errors.data[0].code == "empty_file"


@pytest.mark.slow
def test_a_byte_order_mark_is_read_over_and_another_encoding_is_named(tenant):
    sdk = openai_client(tenant.key)
    batches = [begin(sdk, [line("a"), line("b")], encoding) for encoding in ("utf-8-sig", "utf-16")]

    worker.work(seconds=20)

    marked, wide = (sdk.batches.retrieve(batch.id) for batch in batches)
    assert (marked.status, marked.request_counts.completed) == ("completed", 2)
    assert wide.status == "failed"
    told = "the file looks binary or UTF-16. Save the file as UTF-8 text, one JSON object per line."
    assert told in wide.errors.data[0].message


def test_foreign_files_and_other_endpoints_are_refused(tenant, world):
    theirs = upload(openai_client(world.rival.key), [line("a")])
    sdk = openai_client(tenant.key)
    with pytest.raises(openai.NotFoundError, match="No such file"):
        sdk.batches.create(input_file_id=theirs, endpoint=CHAT, completion_window="24h")
    for changes in ({"endpoint": "/v1/embeddings"}, {"completion_window": "1h"}, {"metadata": {"k" * 65: "v"}}):
        with pytest.raises(openai.BadRequestError) as refused:
            begin(sdk, [line("a")], **changes)
        assert refused.value.param == next(iter(changes))


@pytest.mark.slow
def test_a_batch_stops_when_the_credit_ends_or_its_key_is_revoked_or_it_is_cancelled(world, engine):
    poor = make_tenant("Poor", world.base_model, credit_nano=1)
    sdk = openai_client(poor.key)
    unpaid = begin(sdk, [line("a"), line("b")])
    worker.work(seconds=20)
    ended = sdk.batches.retrieve(unpaid.id)
    assert (ended.status, ended.request_counts.failed) == ("completed", 2)
    assert {row["error"]["code"] for row in rows_of(sdk, ended.error_file_id).values()} == {"insufficient_quota"}

    other = make_key(poor.organization, poor.owner)
    expired = begin(openai_client(other), [line("a")])
    ApiKey.objects.filter(pk=other.key.pk).update(expires_at=db_now())
    worker.work(seconds=20)
    ended = sdk.batches.retrieve(expired.id)
    assert rows_of(sdk, ended.error_file_id)["a"]["error"]["code"] == "invalid_api_key"

    other = make_key(poor.organization, poor.owner)
    orphaned = begin(openai_client(other), [line("a")])
    revoke_key(organization=poor.organization, key_id=other.key.pk, by=poor.owner, now=db_now())
    worker.work(seconds=20)
    ended = sdk.batches.retrieve(orphaned.id)
    assert rows_of(sdk, ended.error_file_id)["a"]["error"]["code"] == "invalid_api_key"

    cancelled = begin(sdk, [line("a")])
    assert sdk.batches.cancel(cancelled.id).status == "cancelling"
    worker.work(seconds=20)
    ended = sdk.batches.retrieve(cancelled.id)
    assert (ended.status, ended.output_file_id, ended.error_file_id) == ("cancelled", None, None)
    with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
        sdk.batches.cancel(unpaid.id)


@pytest.mark.slow
def test_a_batch_counts_under_the_budget_and_the_limits_of_its_key(tenant, engine):
    limited = make_key(tenant.organization, tenant.owner, limits=KeyLimits(requests_per_minute=1))
    sdk = openai_client(limited)
    batch = begin(sdk, [line("a"), line("b")])
    work_shortly(3)
    counts = sdk.batches.retrieve(batch.id).request_counts
    assert (counts.completed, counts.failed) == (1, 0), "the key's limit is one request a minute"
    assert wait_for_usage(tenant, 1)[0].key_id == limited.key.pk
    sdk.batches.cancel(batch.id)

    set_budget(
        organization=tenant.organization, scope="key", target=tenant.key.key.pk, limit_nano=1, mode="block",
        by=tenant.owner.pk, now=db_now(),
    )  # fmt: skip
    sdk = openai_client(tenant.key)
    batch = begin(sdk, [line("a")])
    worker.work(seconds=20)
    worker.work(seconds=20)
    ended = sdk.batches.retrieve(batch.id)
    assert rows_of(sdk, ended.error_file_id)["a"]["error"]["code"] == "insufficient_quota"
    assert len(usage_of(tenant)) == 1


def test_a_customer_cannot_choose_the_id_of_a_request(tenant, gateway):
    ulid = new_ulid()
    forged = sign(ulid, authorization="Bearer another")
    answer = gateway.http(tenant.key).post(CHAT, json={"model": BASE_MODEL, "messages": HI}, headers={HEADER: forged})

    assert answer.status_code == 200, error_of(answer)
    assert ulid not in wait_for_usage(tenant, 1)[0].id
