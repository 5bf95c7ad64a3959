"""The header Idempotency-Key: one effect for each value, and the same answer to each repeat."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import connection
from django.test import Client

from apps.accounts.login.key_operations import IssuedKey
from apps.accounts.models import ApiKey
from apps.batches.models import Batch
from apps.core.database import idempotency
from apps.core.database.clock import db_now
from apps.core.models import IdempotentAnswer
from apps.core.tasks import prune_idempotent_answers
from apps.datasets.intake import uploads
from apps.datasets.models import DatasetVersion, Upload
from apps.finetuning.usage.quotas import set_quota
from apps.serving.evals.models import EvalRun
from tests.factories.accounts import make_key
from tests.factories.datasets import jsonl
from tests.factories.money import give_credit, place_hold
from tests.factories.serving import make_served_model
from tests.support.api.bad_requests import UPLOAD, UPLOADS

KEYS = "/api/v1/keys"
NIGHTLY = {"name": "nightly", "scopes": ["view"]}
Post = Callable[..., Any]


@pytest.fixture
def post() -> Post:
    def call(key: IssuedKey, path: str, body: Any, value: str) -> Any:
        headers = {"Authorization": f"Bearer {key.secret}", "Idempotency-Key": value}
        return Client(headers=headers).post(path, body, content_type="application/json")

    return call


def error_of(answer: Any) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


@pytest.mark.slow
def test_a_value_has_one_effect_and_one_answer(key, organization, rival, alice, charlie, post, monkeypatch) -> None:
    first = post(key, KEYS, NIGHTLY, "k1")
    again = post(key, KEYS, dict(reversed(NIGHTLY.items())), "k1")

    assert first.status_code == 200 and "Idempotent-Replayed" not in first.headers
    assert (again.status_code, again.headers["Idempotent-Replayed"]) == (200, "true")
    assert (again.content, again.headers["Content-Type"]) == (first.content, first.headers["Content-Type"])
    nightly = ApiKey.objects.filter(name="nightly")
    assert [made.pk for made in nightly] == [first.json()["id"]]
    [kept] = IdempotentAnswer.objects.all()
    assert first.json()["secret"].encode() not in bytes(kept.answer_sealed)

    reused = (422, "idempotency_key_reused", "Idempotency-Key")
    assert error_of(post(key, KEYS, NIGHTLY | {"name": "other"}, "k1")) == reused
    assert error_of(post(key, f"{KEYS}/{key.key.pk}/rotate", NIGHTLY, "k1")) == reused

    colleague, stranger = make_key(organization, alice), make_key(rival, charlie)
    ids = {post(one, KEYS, NIGHTLY, "k1").json()["id"] for one in (key, colleague, stranger)}
    assert len(ids) == 3  # each API key has values of its own

    assert post(key, KEYS, NIGHTLY | {"scopes": ["magic"]}, "k2").status_code == 400
    assert post(key, KEYS, NIGHTLY, "k2").status_code == 200  # an error changed nothing, so the value is still free
    assert nightly.all().count() == 4

    monkeypatch.setattr(idempotency, "MAX_ANSWERS", 3)
    assert error_of(post(key, KEYS, NIGHTLY, "k3")) == (429, "insufficient_quota", "Idempotency-Key")
    assert post(key, KEYS, NIGHTLY, "k2").headers["Idempotent-Replayed"]
    IdempotentAnswer.objects.filter(organization=organization).update(created_at=db_now() - timedelta(hours=25))
    prune_idempotent_answers()
    assert IdempotentAnswer.objects.count() == 1
    assert post(key, KEYS, NIGHTLY, "k1").json()["id"] != first.json()["id"]

    monkeypatch.setattr(idempotency, "MAX_ANSWER_BYTES", 10)
    assert error_of(post(key, KEYS, NIGHTLY, "k4")) == (400, "invalid_value", "Idempotency-Key")
    assert nightly.all().count() == 5


def test_a_repeated_upload_makes_one_file_though_its_form_has_another_boundary(key, post) -> None:
    def upload(boundary: str, rows: bytes) -> Any:
        part = 'Content-Disposition: form-data; name="{}"'
        form = "\r\n".join(
            [
                f"--{boundary}", part.format("purpose"), "", "fine-tune",
                f"--{boundary}", part.format('file"; filename="rows.jsonl'), "", rows.decode(),
                f"--{boundary}--", "",
            ]
        )  # fmt: skip
        headers = {"Authorization": f"Bearer {key.secret}", "Idempotency-Key": "once"}
        content_type = f"multipart/form-data; boundary={boundary}"
        return Client(headers=headers).generic("POST", "/v1/files", form, content_type=content_type)

    first, again, other = upload("one", jsonl(12)), upload("two", jsonl(12)), upload("one", jsonl(13))

    assert first.json()["bytes"] == len(jsonl(12)) and again.content == first.content
    assert [version.pk for version in DatasetVersion.objects.all()] == [first.json()["id"]]
    assert error_of(other) == (422, "idempotency_key_reused", "Idempotency-Key")


def test_the_answers_that_an_organization_keeps_are_limited_in_size(key, post, monkeypatch) -> None:
    grader = {"type": "string_check", "name": "n", "input": "x" * 8_000, "reference": "y", "operation": "eq"}
    path, body = "/v1/fine_tuning/alpha/graders/validate", {"grader": grader}
    monkeypatch.setattr(idempotency, "MAX_KEPT_BYTES", 10_000)

    assert [post(key, path, body, value).status_code for value in ("a", "b", "c")] == [200, 200, 429]
    assert post(key, path, body, "a").headers["Idempotent-Replayed"] == "true"


@pytest.mark.django_db(transaction=True)
def test_of_two_requests_at_once_one_has_an_effect(key, post, monkeypatch) -> None:
    create, has_begun, may_end = uploads.create_upload, threading.Event(), threading.Event()

    def slowly(**fields: Any) -> Upload:
        has_begun.set()
        may_end.wait(30)
        return create(**fields)

    def call() -> Any:
        try:
            return post(key, UPLOADS, UPLOAD, "twin")
        finally:
            connection.close()

    monkeypatch.setattr(uploads, "create_upload", slowly)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(call)
        assert has_begun.wait(30)
        twin = threads.submit(call).result()
        may_end.set()

        assert error_of(twin) == (409, "idempotency_in_progress", "Idempotency-Key")
        assert twin.headers["Retry-After"] == "1"
        assert first.result().status_code == 200
    assert post(key, UPLOADS, UPLOAD, "twin").content == first.result().content
    assert Upload.objects.count() == 1


LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": []}}\n'
CRITERION = {"type": "string_check", "name": "x", "operation": "eq", "input": "a", "reference": "a"}


@pytest.mark.slow
def test_a_retry_of_the_sdk_makes_no_second_batch_and_no_second_run(api_client, organization, alice) -> None:
    """The SDK sends no Idempotency-Key. It counts its retries, such as the one after a timeout."""

    def send(client: Any, path: str, body: Any, retries: int = 0) -> str:
        headers = {"X-Stainless-Retry-Count": str(retries)}
        return client.post(path, body, format="json", headers=headers).json()["id"]

    client, other = (api_client(make_key(organization, alice)) for _ in range(2))
    sent = {"purpose": "batch", "file": SimpleUploadedFile("asks.jsonl", LINE)}
    file = client.post("/v1/files", sent, format="multipart").json()["id"]
    batch = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    config = {"type": "custom", "item_schema": {"type": "object"}}
    evaluated = send(client, "/v1/evals", {"data_source_config": config, "testing_criteria": [CRITERION]})
    source = {"type": "jsonl", "source": {"type": "file_content", "content": [{"item": {}, "sample": {}}]}}

    for path, body in (("/v1/batches", batch), (f"/v1/evals/{evaluated}/runs", {"data_source": source})):
        first = send(client, path, body)
        assert send(client, path, body, retries=1) == first
        others = {
            send(client, path, body),
            send(client, path, body | {"metadata": {"a": "b"}}, retries=1),
            send(other, path, body, retries=1),
        }
        assert len({first, *others}) == 4

    for made in (Batch, EvalRun):
        made.objects.update(created_at=db_now() - timedelta(minutes=11))
    send(client, "/v1/batches", batch, retries=1)
    assert (Batch.objects.count(), EvalRun.objects.count()) == (5, 4)


@pytest.mark.slow
def test_a_retry_of_the_sdk_gets_what_it_made_after_credit_and_storage_are_used_up(
    api_client, organization, alice, olga
) -> None:
    client = api_client(make_key(organization, alice))
    make_served_model("small", "unix:///nowhere")
    give_credit(organization, 1)
    sent = {"purpose": "batch", "file": SimpleUploadedFile("asks.jsonl", LINE)}
    file = client.post("/v1/files", sent, format="multipart").json()["id"]
    batch = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    config = {"data_source_config": {"type": "custom", "item_schema": {"type": "object"}}}
    criteria = [{"type": "string_check", "name": "x", "operation": "eq", "input": "a", "reference": "a"}]
    evaluated = client.post("/v1/evals", config | {"testing_criteria": criteria}, format="json").json()["id"]
    asked = {"type": "template", "template": [{"role": "user", "content": "Hello"}]}
    items = {"type": "file_content", "content": [{"item": {}}]}
    source = {"type": "completions", "model": "small", "input_messages": asked, "source": items}
    requests = {"/v1/batches": batch, f"/v1/evals/{evaluated}/runs": {"data_source": source}}
    made = {path: client.post(path, body, format="json").json()["id"] for path, body in requests.items()}

    place_hold(organization, 1)
    set_quota(organization=organization, by=olga.pk, now=db_now(), storage_bytes=1)

    for path, body in requests.items():
        assert client.post(path, body, format="json").status_code == 429
        again = client.post(path, body, format="json", headers={"X-Stainless-Retry-Count": "1"})
        assert again.json().get("id") == made[path], again.content
