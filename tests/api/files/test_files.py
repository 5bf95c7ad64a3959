"""/v1/files as OpenAI's own SDK uses it, and as strangers try to."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import openai
import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import connection
from django.test.utils import CaptureQueriesContext
from rest_framework.test import APIClient

from apps.accounts.login.key_operations import IssuedKey
from apps.accounts.models import Organization, User
from apps.accounts.roles import SCOPES
from apps.catalog.models import BaseModel
from apps.core.database.clock import db_now
from apps.core.models import AuditEntry
from apps.datasets.intake import versions
from apps.datasets.models import DatasetVersion
from apps.datasets.operations import RowRefused, count_tokens
from apps.datasets.validation.leases import _Lease, validate_version
from apps.finetuning.usage.quotas import set_quota
from apps.interfaces.api.openai import files
from tests.factories.accounts import make_key
from tests.factories.catalog import make_base_model
from tests.factories.chat import TOOL_ROW
from tests.factories.datasets import jsonl, jsonl_of, make_ready_version, make_version
from tests.support.sdk import extended_client, openai_client

OLD_SDK = Path(__file__).resolve().parents[3] / ".anneal/openai-1.109.1"
BOUNDARY = "anneal-boundary"


@pytest.fixture
def client(key: IssuedKey) -> openai.OpenAI:
    return openai_client(key)


def upload(client: openai.OpenAI, content: bytes | None = None, **fields: object):
    file = ("train.jsonl", jsonl() if content is None else content)
    return client.files.create(**({"file": file, "purpose": "fine-tune"} | fields))


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("sdk", ["installed", "1.109.1"])
def test_every_call_works_with_both_generations_of_the_sdk(live_server, organization, alice, sdk: str) -> None:
    assert sdk == "installed" or OLD_SDK.exists(), f"{OLD_SDK} is missing: make setup-dev"
    make_base_model()
    folder = "" if sdk == "installed" else str(OLD_SDK)
    session = Path(__file__).with_name("sdk_session.py")
    command = [sys.executable, str(session), live_server.url, make_key(organization, alice).secret, folder]

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        _validate_when_uploaded(process)
        output, errors = process.communicate(timeout=300)

    assert process.returncode == 0, errors
    seen = json.loads(output)
    assert seen["version"] == (openai.__version__ if sdk == "installed" else "1.109.1")
    created, processed = seen["created"], seen["processed"]
    assert (created["status"], created["filename"], created["purpose"]) == ("uploaded", "train.jsonl", "fine-tune")
    assert created["id"].startswith("file-") and isinstance(created["created_at"], int)
    assert created["expires_at"] - created["created_at"] == 7200
    assert (processed["status"], processed["validation"]["rows"]) == ("processed", 12)
    assert seen["listed"] == [created["id"]] and seen["content_is_equal"]
    assert seen["models"] == ["anneal-demo"] and seen["model"]["object"] == "model"
    assert seen["deleted"] == {"id": created["id"], "object": "file", "deleted": True}
    upload, part = seen["upload"], seen["part"]
    assert (upload["status"], upload["object"], upload["bytes"]) == ("completed", "upload", upload["file"]["bytes"])
    assert upload["expires_at"] - upload["created_at"] == 3600 and upload["file"]["object"] == "file"
    assert seen["upload_is_equal"] and seen["wrong_md5"] == [400, "invalid_checksum", "md5"]
    assert part["object"] == "upload.part" and part["upload_id"].startswith("upload_")
    assert seen["ordered"] == "a" * 20 + "b" * 10
    assert seen["cancelled"] == "cancelled" and seen["closed"] == [400, "upload_closed"]
    assert seen["left"] == [] and seen["after"] == [404, "file_not_found", True]


def _validate_when_uploaded(process: subprocess.Popen[str]) -> None:
    """Do what the task would: validate, then count for the installed models."""
    from apps.datasets.tasks import validate

    deadline = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline:
        if version := DatasetVersion.objects.filter(status="uploaded").first():
            validate(version.pk)
            return
        time.sleep(0.05)
    connection.close()


class TestCreate:
    @pytest.mark.parametrize("order", [("purpose", "file"), ("file", "purpose")])
    def test_takes_the_fields_in_any_order(self, key, api_client, order: tuple[str, str]) -> None:
        parts = {
            "purpose": b'name="purpose"\r\n\r\nfine-tune',
            "file": b'name="file"; filename="a.jsonl"\r\n\r\n' + jsonl(),
        }
        body = b"".join(
            b"--%s\r\nContent-Disposition: form-data; %s\r\n" % (BOUNDARY.encode(), parts[name]) for name in order
        )

        response = api_client(key).generic(
            "POST", "/v1/files", body + f"--{BOUNDARY}--\r\n".encode(), f"multipart/form-data; boundary={BOUNDARY}"
        )

        assert response.status_code == 200
        assert (response.json()["filename"], response.json()["bytes"]) == ("a.jsonl", len(jsonl()))

    def test_is_recorded_with_the_key_that_did_it(self, client, key) -> None:
        file = upload(client)

        entry = AuditEntry.objects.get(action="dataset.uploaded")
        assert (entry.actor, entry.target) == (key.key.pk, file.id)

    @pytest.mark.parametrize("purpose", ["assistants", "vision", "user_data", "nonsense"])
    def test_refuses_purposes_we_have_no_use_for(self, client, purpose: str) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            upload(client, purpose=purpose)

        assert (refused.value.param, refused.value.code) == ("purpose", "invalid_value")
        assert "fine-tune" in refused.value.message

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"purpose": "fine-tune"}, "file"),
            ({"purpose": "fine-tune", "file": "text"}, "file"),
            ({"file": "FILE"}, "purpose"),
            ({"file": "FILE", "purpose": "fine-tune", "expires_after[seconds]": "9"}, "expires_after.anchor"),
            (
                {
                    "file": "FILE",
                    "purpose": "evals",
                    "expires_after[anchor]": "created_at",
                    "expires_after[seconds]": "x",
                },
                "expires_after.seconds",
            ),
            ({"file": "FILE", "purpose": "fine-tune", "sha256": "0"}, "sha256"),
            ({"file": "FILE", "purpose": ["fine-tune", "batch"]}, "purpose"),
        ],
    )
    def test_names_the_field_that_is_missing_or_wrong(self, key, api_client, body: dict, param: str) -> None:
        if body.get("file") == "FILE":
            body = body | {"file": SimpleUploadedFile("a.jsonl", jsonl())}

        response = api_client(key).post("/v1/files", body, format="multipart")

        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert not DatasetVersion.objects.exists()

    def test_refuses_two_files_and_a_lifetime_beyond_any_number(self, key, api_client) -> None:
        two = [SimpleUploadedFile(name, jsonl()) for name in ("a.jsonl", "b.jsonl")]
        lifetime = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "9" * 20}
        refused = [
            api_client(key).post("/v1/files", {"purpose": "fine-tune", **fields}, format="multipart").json()["error"]
            for fields in ({"file": two}, {"file": SimpleUploadedFile("a.jsonl", jsonl()), **lifetime})
        ]

        assert [error["param"] for error in refused] == ["file", "expires_after.seconds"]
        assert "is sent 2 times" in refused[0]["message"] and "must expire between" in refused[1]["message"]
        assert not DatasetVersion.objects.exists()

    def test_refuses_a_body_that_is_no_form(self, key, api_client) -> None:
        response = api_client(key).post("/v1/files", {"purpose": "fine-tune"}, format="json")

        assert response.status_code == 415

    def test_refuses_a_file_that_is_too_large(self, client, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(versions, "MAX_FILE_BYTES", 100)

        with pytest.raises(openai.APIStatusError) as refused:
            upload(client)

        assert (refused.value.status_code, refused.value.code) == (413, "file_too_large")

    def test_refuses_a_file_beyond_the_storage_quota_and_the_sdk_does_not_retry(self, key, organization, olga) -> None:
        set_quota(organization=organization, by=olga.pk, now=db_now(), storage_bytes=100)

        with pytest.raises(openai.RateLimitError) as refused:
            upload(openai_client(key, max_retries=2))

        assert (refused.value.code, refused.value.response.headers["x-should-retry"]) == ("insufficient_quota", "false")


class TestReport:
    def test_a_bad_file_says_line_field_and_fix(self, client, organization) -> None:
        version = make_ready_version(organization, jsonl() + b'{"messages": [{"role": "robot", "content": "x"}]}\n')

        file = client.files.wait_for_processing(version.pk, poll_interval=0.01)

        assert file.status == "error"
        assert file.status_details and file.status_details.startswith("Line 13: ")
        assert file.model_extra and file.model_extra["validation"]["error_count"] == 1
        assert file.model_extra["validation"]["errors"][0] == {
            "line": 13, "code": "invalid_role", "message": "`messages[0]` has the role `robot`.",
            "param": "messages[0].role", "fix": "Use system, developer, user, assistant or tool.",
        }  # fmt: skip

    def test_a_file_being_validated_is_uploaded_to_the_sdk(self, client, organization) -> None:
        version = make_version(organization)
        _Lease(version, db_now()).take()

        assert client.files.retrieve(version.pk).status == "uploaded"

    def test_tokens_are_told_by_model_once_counted(self, client, organization) -> None:
        version = make_ready_version(organization)
        count = count_tokens(version=version, base_model=make_base_model())

        file = client.files.retrieve(version.pk)

        assert file.model_extra and file.model_extra["validation"]["tokens"] == {
            "anneal-demo": {
                "tokens": count.tokens,
                "trained_tokens": count.trained_tokens,
                "longest_row_tokens": count.longest_row_tokens,
            }
        }

    def test_a_model_that_refuses_the_file_has_no_tokens_and_an_old_template_none(self, client, organization) -> None:
        version, base_model = make_ready_version(organization, jsonl(11) + jsonl_of(TOOL_ROW)), make_base_model()
        with pytest.raises(RowRefused):
            count_tokens(version=version, base_model=base_model)

        tokens = client.files.retrieve(version.pk).model_extra["validation"]["tokens"]
        BaseModel.objects.filter(pk=base_model.pk).update(chat_template_sha256="f" * 64)
        later = client.files.retrieve(version.pk).model_extra["validation"]["tokens"]

        refusal = tokens["anneal-demo"].pop("refusal")
        assert (refusal["line"], refusal["code"], tokens, later) == (12, "template_rejected", {"anneal-demo": {}}, {})
        assert refusal["message"] and refusal["fix"]


class TestList:
    def test_pages_by_limit_after_and_order(self, client, organization) -> None:
        newest_first = [make_version(organization, filename=f"{n}.jsonl").pk for n in range(3)][::-1]

        assert [file.id for file in client.files.list(limit=1)] == newest_first
        assert [file.id for file in client.files.list(order="asc", limit=2)] == newest_first[::-1]
        assert [file.id for file in client.files.list(after=newest_first[0])] == newest_first[1:]

    def test_chooses_by_purpose(self, key, organization) -> None:
        make_version(organization)
        wanted = make_version(organization, purpose="evals")

        assert [file.id for file in extended_client(key).files.list(purpose="evals")] == [wanted.pk]

    @pytest.mark.parametrize(
        ("query", "param"),
        [("limit=0", "limit"), ("limit=10001", "limit"), ("order=up", "order"), ("after=file-x", "after")],
    )
    def test_names_a_bad_parameter(self, key, api_client, query: str, param: str) -> None:
        response = api_client(key).get(f"/v1/files?{query}")

        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


class TestDelete:
    def test_is_refused_while_a_job_uses_the_file(self, client, organization) -> None:
        from tests.factories.finetuning import TrainingSetup

        job = TrainingSetup(organization).job()

        with pytest.raises(openai.BadRequestError) as refused:
            client.files.delete(job.training_file_id)

        assert refused.value.code == "file_in_use"


Keys = Callable[[str], IssuedKey | str | None]


@pytest.fixture
def keys(organization: Organization, alice: User, rival: Organization, charlie: User) -> Keys:
    """A key for each kind of caller; a viewer's key holds the one scope a viewer has."""

    def make(caller: str) -> IssuedKey | str | None:
        match caller:
            case "owner":
                return make_key(organization, alice)
            case "member":
                return make_key(organization, alice, scopes=frozenset(SCOPES) - {"adapter.delete"})
            case "viewer":
                return make_key(organization, alice, scopes=frozenset({"view"}))
            case "outsider":
                return make_key(rival, charlie)
            case _:
                return None

    return make


@pytest.mark.parametrize(
    ("caller", "read", "write"),
    [("owner", 200, 200), ("member", 200, 200), ("viewer", 200, 403), ("outsider", 404, 404), ("anonymous", 401, 401)],
)
def test_who_may_do_what(organization, keys: Keys, api_client, caller: str, read: int, write: int) -> None:
    version = make_ready_version(organization)
    client: APIClient = api_client(keys(caller))
    url = f"/v1/files/{version.pk}"

    assert client.get(url).status_code == read
    content = client.get(f"{url}/content")
    assert content.status_code == read
    if read == 200:
        assert b"".join(content) == jsonl()
    listed = client.get("/v1/files")
    assert version.pk in listed.content.decode() or read != 200
    assert version.pk not in listed.content.decode() or read == 200
    form = {"purpose": "fine-tune", "file": SimpleUploadedFile("a.jsonl", jsonl())}
    created = client.post("/v1/files", form, format="multipart")
    assert created.status_code == (200 if caller == "outsider" else write)
    assert client.delete(url).status_code == write


@pytest.mark.parametrize(("method", "tail"), [("get", ""), ("get", "/content"), ("delete", "")])
def test_foreign_and_unknown_ids_get_the_same_answer(key, rival, api_client, method: str, tail: str) -> None:
    foreign, unknown = make_ready_version(rival).pk, "file-" + "0" * 26

    answers = [
        getattr(api_client(key), method)(f"/v1/files/{identifier}{tail}").content.decode().replace(identifier, "ID")
        for identifier in (foreign, unknown)
    ]

    assert answers[0] == answers[1]
    assert DatasetVersion.objects.get(pk=foreign).status == "ready"


def test_a_file_is_validated_by_the_task_its_upload_asks_for(client) -> None:
    file = upload(client)

    validate_version(version_id=file.id, now=db_now())

    assert client.files.retrieve(file.id).status == "processed"


@pytest.mark.django_db(transaction=True)
def test_a_list_of_bad_files_stays_small(
    client: openai.OpenAI, organization: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad file has up to a thousand errors, and thousands of files are listed at once by default."""
    bad = [make_ready_version(organization, jsonl() + b'{"messages": 1}\n' * 100) for _ in range(3)]
    monkeypatch.setattr(files, "LISTED_FILES", 2)

    with CaptureQueriesContext(connection) as statements:
        page = client.files.list()

    assert [file.id for file in page.data] == [bad[2].pk, bad[1].pk] and page.has_more
    assert {file.id for file in client.files.list()} == {version.pk for version in bad}  # the SDK turns the pages
    report = page.data[0].model_extra["validation"]
    assert (report["error_count"], [error["line"] for error in report["errors"]]) == (100, list(range(13, 33)))
    assert not any('"errors",' in statement["sql"] for statement in statements.captured_queries)
