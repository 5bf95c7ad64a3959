"""Our own calls on files: columns and repair; and what /v1/uploads answers to strangers."""

import hashlib
import json

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile

from apps.batches.files import MAX_FILE_BYTES
from apps.core import audit
from apps.core.database.clock import db_now
from apps.datasets.models import DatasetVersion, Upload
from apps.datasets.problems import SHOWN_CHARACTERS
from apps.datasets.validation.leases import validate_version
from apps.finetuning.usage.storage import counted_bytes
from tests.factories.accounts import make_key
from tests.factories.datasets import jsonl, make_ready_version, make_upload

pytestmark = pytest.mark.django_db
TABLE = b"utterance,label\n" + b"Hi,greeting\n" * 12
MAPPING = {"format": "prompt_completion", "columns": {"prompt": "utterance", "completion": "label"}}


def test_columns_are_shown_previewed_and_chosen(key, api_client, organization) -> None:
    version = make_ready_version(organization, TABLE, filename="a.csv")
    client = api_client(key)
    url = f"/api/v1/files/{version.pk}/columns"

    before = client.get(url).json()
    previewed = client.get(
        url, {"mapping": '{"format": "prompt_completion", "columns": {"prompt": "utterance", "completion": "label"}}'}
    ).json()
    chosen = client.post(url, {"mapping": MAPPING}, format="json")
    validate_version(version_id=version.pk, now=db_now())
    file = client.get(f"/v1/files/{version.pk}").json()

    assert (before["container"], before["columns"], before["mapping"]) == ("csv", ["utterance", "label"], None)
    assert previewed["rows"][0]["kept"] == (
        '{"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"greeting"}]}'
    )
    assert (chosen.status_code, chosen.json()["status"]) == (200, "uploaded")
    assert (file["status"], file["kind"], file["format"], file["container"]) == (
        "processed", "chat", "prompt_completion", "csv",
    )  # fmt: skip


def test_a_row_too_long_to_preview_is_no_error(key, api_client, organization) -> None:
    whole, cut = (b"x" * (SHOWN_CHARACTERS - len('{"utterance":"","label":"greeting"}') + more) for more in (0, 1))
    long = b"utterance,label\n" + b"".join(b"%s,greeting\n" % text for text in (cut, whole)) + b"Hi,greeting\n" * 12
    version = make_ready_version(organization, long, filename="a.csv")

    rows = api_client(key).get(f"/api/v1/files/{version.pk}/columns", {"mapping": json.dumps(MAPPING)}).json()["rows"]

    assert [row["is_cut"] for row in rows] == [True, False, False, False, False]
    assert [row["error"] for row in rows] == [None] * 5 and rows[1]["kept"]
    assert [len(row["source"]) for row in rows[:2]] == [SHOWN_CHARACTERS] * 2


def test_a_preview_leaves_out_what_the_file_leaves_out(key, api_client, organization) -> None:
    version = make_ready_version(organization, b'{"utterance": "Hi", "label": "greeting", "score": NaN}\n' * 12)

    row = api_client(key).get(f"/api/v1/files/{version.pk}/columns", {"mapping": json.dumps(MAPPING)}).json()["rows"][0]

    assert row["error"] is None and "greeting" in row["kept"]


@pytest.mark.parametrize(
    ("mapping", "param"),
    [
        ({"format": "alpaca"}, "mapping.format"),
        ({"format": "text", "columns": {"nope": "x"}}, "mapping.columns.nope"),
        ({}, "mapping.format"),
    ],
)
def test_a_wrong_mapping_names_its_field(key, api_client, organization, mapping: dict, param: str) -> None:
    version = make_ready_version(organization, TABLE, filename="a.csv")

    response = api_client(key).post(f"/api/v1/files/{version.pk}/columns", {"mapping": mapping}, format="json")

    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_bad_rows_are_repaired_into_a_new_file(key, api_client, organization) -> None:
    version = make_ready_version(organization, jsonl() + b'{"broken\n')
    client = api_client(key)

    made = client.post(f"/api/v1/files/{version.pk}/repair", {"mode": "drop"}, format="json").json()
    early = client.get(f"/v1/files/{made['id']}/content")
    validate_version(version_id=made["id"], now=db_now())
    file = client.get(f"/v1/files/{made['id']}").json()

    error = early.json()["error"]
    assert (early.status_code, error["code"], error["param"]) == (400, "file_not_ready", "file_id")
    assert made["derived_from"] == version.pk and made["id"] != version.pk
    assert (file["status"], file["validation"]["rows"]) == ("processed", 12)
    again = client.post(f"/api/v1/files/{made['id']}/repair", {}, format="json")
    assert (again.status_code, again.json()["error"]["code"]) == (400, "file_not_repairable")


def test_all_kept_problems_come_with_the_file_and_few_with_the_list(key, api_client, organization) -> None:
    version = make_ready_version(organization, b'{"messages": 1}\n' * 1_500)

    one = api_client(key).get(f"/v1/files/{version.pk}").json()["validation"]
    listed = api_client(key).get("/v1/files").json()["data"][0]["validation"]

    assert (one["error_count"], len(one["errors"])) == (1_500, 1_000)
    assert (listed["error_count"], len(listed["errors"])) == (1_500, 20)


@pytest.mark.parametrize(("path", "body"), [("complete", {"part_ids": []}), ("cancel", {}), ("parts", {})])
def test_an_upload_of_another_tenant_is_unknown(key, rival, api_client, path: str, body: dict) -> None:
    upload = make_upload(rival)
    if path == "parts":
        body = {"data": SimpleUploadedFile("part", b"bytes")}

    response = api_client(key).post(
        f"/v1/uploads/{upload.pk}/{path}", body, format="multipart" if path == "parts" else "json"
    )

    assert (response.status_code, response.json()["error"]["code"]) == (404, "upload_not_found")


ASK = b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": []}}\n'


@pytest.mark.parametrize(
    ("purpose", "content", "is_dataset"),
    [
        ("batch", ASK * 3, False),
        ("evals", b'  {"item": {"question": "How?"}}\n' * 3, False),
        ("evals", jsonl(), True),
        ("fine-tune", jsonl(), True),
    ],
)
def test_an_upload_becomes_what_the_same_file_sent_at_once_would(
    key, organization, api_client, purpose: str, content: bytes, is_dataset: bool
) -> None:
    client = api_client(key)
    announced = {"bytes": len(content), "filename": "a.jsonl", "purpose": purpose, "mime_type": "application/jsonl"}
    upload = client.post("/v1/uploads", announced, format="json").json()
    pieces = [content[:5], content[5:40], content[40:]]  # shorter than a line
    sent = [
        client.post(f"/v1/uploads/{upload['id']}/parts", {"data": SimpleUploadedFile("part", each)}, format="multipart")
        for each in pieces
    ]
    body = {"part_ids": [each.json()["id"] for each in sent]}
    address = f"/v1/uploads/{upload['id']}/complete"

    wrong = client.post(address, body | {"md5": "0" * 32}, format="json")
    done = client.post(address, body | {"md5": hashlib.md5(content).hexdigest()}, format="json").json()
    again = client.post(address, body, format="json").json()

    assert wrong.json()["error"]["code"] == "invalid_checksum"
    assert again == done and done["status"] == "completed"
    file = done["file"]
    assert (file["purpose"], file["bytes"], file["filename"]) == (purpose, len(content), "a.jsonl")
    assert b"".join(client.get(f"/v1/files/{file['id']}/content").streaming_content) == content
    assert DatasetVersion.objects.filter(pk=file["id"]).exists() == is_dataset
    assert [each["id"] for each in client.get("/v1/files").json()["data"]] == [file["id"]]
    assert counted_bytes(organization=organization) == len(content)
    assert client.delete(f"/v1/files/{file['id']}").status_code == 200
    late = client.post(address, body, format="json")
    assert (late.status_code, late.json()["file"]) == (200, None)


def test_announced_uploads_count_as_changes_of_the_hour(key, api_client, monkeypatch) -> None:
    monkeypatch.setattr(audit, "_FEW", 3)
    monkeypatch.setattr(audit, "MAX_PER_HOUR", 3)
    client = api_client(key)
    announced = {"bytes": 9, "filename": "a.jsonl", "purpose": "fine-tune", "mime_type": "application/jsonl"}
    answers = []

    for _ in range(5):
        answer = client.post("/v1/uploads", announced, format="json")
        answers.append(answer.status_code)
        if answer.status_code == 200:
            assert client.post(f"/v1/uploads/{answer.json()['id']}/cancel").status_code == 200

    assert answers[0] == 200 and answers[-1] == 429
    assert Upload.objects.count() == answers.count(200) < 4


def test_items_of_evals_are_known_as_such_also_with_an_idempotency_key(key, api_client) -> None:
    """The digest of the request has read the file to its end."""
    file = SimpleUploadedFile("items.jsonl", b'{"item": {"question": "How?"}}\n')
    form = {"purpose": "evals", "file": file}

    made = api_client(key).post("/v1/files", form, format="multipart", headers={"Idempotency-Key": "once"}).json()

    assert made["status"] == "processed" and not DatasetVersion.objects.exists()


def test_an_upload_for_a_batch_has_the_limit_of_its_file(key, api_client) -> None:
    announced = {"bytes": MAX_FILE_BYTES + 1, "filename": "a.jsonl", "purpose": "batch"}

    answer = api_client(key).post("/v1/uploads", announced, format="json")

    assert (answer.status_code, answer.json()["error"]["param"]) == (413, "bytes")
    assert "200 MiB" in answer.json()["error"]["message"]


def test_a_file_in_place_of_a_text_is_named(key, api_client) -> None:
    form = {"purpose": SimpleUploadedFile("a", b"b"), "file": SimpleUploadedFile("a.jsonl", b"{}")}

    error = api_client(key).post("/v1/files", form, format="multipart").json()["error"]

    assert (error["param"], error["message"]) == ("purpose", "Invalid value for 'purpose': a file. Use a string.")


def test_a_viewer_may_not_upload(organization, alice, api_client) -> None:
    viewer = make_key(organization, alice, scopes=frozenset({"view"}))
    body = {"bytes": 9, "filename": "a", "purpose": "fine-tune", "mime_type": "x"}

    assert api_client(viewer).post("/v1/uploads", body, format="json").status_code == 403
    assert not DatasetVersion.objects.exists()


def test_a_mapping_may_come_with_the_upload(key, api_client) -> None:
    file = SimpleUploadedFile("a.csv", TABLE)
    form = {"file": file, "purpose": "fine-tune", "mapping": json.dumps(MAPPING)}

    made = api_client(key).post("/v1/files", form, format="multipart").json()
    validated = validate_version(version_id=made["id"], now=db_now())

    assert validated and (validated.status, validated.kind, validated.rows) == ("ready", "chat", 12)
