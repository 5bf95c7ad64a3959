"""`anneal files`: checks like the server's, uploads that continue, downloads and lists."""

import json
from pathlib import Path

import msgspec
import pytest
from anneal import transfers

from apps.batches.completions.records import record_completions
from apps.datasets.models import DatasetVersion, TokenCount
from apps.datasets.tasks import validate
from tests.factories.datasets import jsonl, jsonl_of, make_ready_version, make_version
from tests.factories.usage import make_completion

BAD = jsonl() + b'{"messages": [{"role": "user", "content": "x"}]}\n{"messages": 3}\n{oops\n'


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(jsonl())
    return path


@pytest.mark.parametrize("content", [BAD, b"", b'{"a": 1}\n', b"PK\x03\x04", b"q,a\n1,2\n", b"[1,"])
def test_a_file_is_judged_as_the_server_judges_it(anneal, organization, tmp_path, content: bytes) -> None:
    path = tmp_path / "rows.csv" if b"q,a" in content else tmp_path / "rows.jsonl"
    path.write_bytes(content)
    version = make_version(organization, content, filename=path.name)
    validate(version.pk)
    version.refresh_from_db()

    here = anneal("files", "check", str(path), "--json")

    assert (here.exit_code, version.status) == (1, "invalid")
    assert here.json["validation"]["errors"] == version.errors
    assert here.json["validation"]["error_count"] == version.error_count
    assert here.json["sha256"] == version.sha256


def test_a_problem_is_shown_with_its_line_and_fix(anneal, tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(BAD)

    shown = anneal("files", "check", str(path))

    assert shown.exit_code == 1
    assert "Line 13: The last message is from user" in shown.output and "[invalid_json]" in shown.output


@pytest.mark.slow
def test_a_good_file_is_uploaded_and_listed(anneal, rows) -> None:
    checked = anneal("files", "check", str(rows))
    uploaded = anneal("files", "upload", str(rows), "--no-wait", "--json")
    listed = anneal("files", "list", "--json")

    assert (checked.exit_code, "No problems." in checked.output) == (0, True)
    assert (uploaded.exit_code, uploaded.json["status"]) == (0, "uploaded")
    assert [file["id"] for file in listed.json["data"]] == [uploaded.json["id"]]
    assert uploaded.json["id"] in anneal("files", "list").output


@pytest.mark.slow
def test_a_file_is_shown_downloaded_and_deleted_once_that_is_confirmed(
    anneal, organization, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bad, good = make_version(organization, BAD), make_ready_version(organization)
    validate(bad.pk)
    shown, pulled = anneal("files", "show", bad.pk), anneal("files", "pull", bad.pk, "--json")
    there = anneal("files", "pull", bad.pk, "--to", "new/rows.jsonl")
    silent, declined = anneal("files", "delete", good.pk), anneal("files", "delete", good.pk, answer="n\n")
    left = DatasetVersion.objects.filter(pk=good.pk, deleted_at=None).exists()
    deleted = anneal("files", "delete", good.pk, "--yes")

    assert (shown.exit_code, "Line 13: The last message is from user" in shown.output) == (0, True), shown.errors
    assert (pulled.json["path"], Path(f"{bad.pk}.jsonl").read_bytes()) == (f"{bad.pk}.jsonl", BAD)
    assert there.exit_code == 0 and Path("new/rows.jsonl").read_bytes() == BAD
    assert (silent.exit_code, declined.exit_code, left) == (1, 1, True) and "Nothing was deleted." in declined.errors
    assert (deleted.exit_code, deleted.output) == (0, f"{good.pk} is deleted.\n")
    assert {anneal("files", *each).exit_code for each in (("show", good.pk), ("pull", good.pk))} == {4}
    assert anneal("files", "delete", good.pk, "--yes").exit_code == 4


def test_a_file_that_a_template_refuses_is_shown_with_its_row(anneal, floor) -> None:
    version = make_ready_version(floor.organization)
    TokenCount.objects.create(
        version=version, base_model=floor.base_model, organization=floor.organization, tokens=0, trained_tokens=0,
        chat_template_sha256=floor.base_model.chat_template_sha256, longest_row_tokens=0, histogram=[],
        refusal={"line": 12, "code": "template_rejected", "message": "It takes no tools.", "fix": "Remove them."},
    )  # fmt: skip

    shown = anneal("files", "show", version.pk)

    assert shown.exit_code == 0 and "Line 12: It takes no tools. Remove them. [template_rejected]" in shown.output


@pytest.mark.slow
def test_a_file_is_made_of_stored_completions_and_checked(anneal, organization, checking_server) -> None:
    asked = {"messages": [{"role": "user", "content": "Hi"}]}
    answered = {"choices": [{"message": {"role": "assistant", "content": "Hello."}}], "usage": {}}
    kept = [
        make_completion(
            organization_id=organization.pk,
            metadata={"topic": topic},
            request=msgspec.Raw(msgspec.json.encode(asked)),
            answer=msgspec.Raw(msgspec.json.encode(answered)),
        )
        for topic in ["billing"] * 12 + ["other"]
    ]
    record_completions(records=kept)
    words = ("files", "from-completions", "distilled")

    made = anneal(*words, "--model", "tiny", "--metadata", "topic=billing", "--json")
    none = anneal(*words, "--metadata", "topic=cats")

    assert (made.exit_code, made.json["status"], made.json["validation"]["rows"]) == (0, "processed", 12), made.errors
    assert none.exit_code == 5 and "No stored completion" in none.errors


@pytest.mark.parametrize(
    ("purpose", "line"),
    [("evals", {"item": {"a": 1}}), ("batch", {"custom_id": "1", "method": "POST", "url": "/v1/completions"})],
)
def test_files_of_items_and_of_requests_are_not_checked_as_training_rows(anneal, tmp_path, purpose, line) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps(line), encoding="utf-8-sig")

    uploaded = anneal("files", "upload", str(path), "--purpose", purpose, "--json")

    assert (uploaded.exit_code, uploaded.json["status"], uploaded.json["purpose"]) == (0, "processed", purpose)


def test_a_bad_file_is_not_uploaded(anneal, tmp_path, network) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(BAD)

    refused = anneal("files", "upload", str(path))

    assert (refused.exit_code, network.calls) == (1, [])
    assert "Nothing was uploaded." in refused.errors


def test_an_interrupted_upload_continues_with_the_next_part(anneal, rows, network, monkeypatch) -> None:
    monkeypatch.setattr(transfers, "PART_BYTES", 400)
    network.cut = lambda request: (
        request.url.path.endswith("/parts") and network.paths("POST").count(request.url.path) > 2
    )
    first = anneal("files", "upload", str(rows), "--no-wait")
    network.cut, network.calls = lambda request: False, []

    second = anneal("files", "upload", str(rows), "--no-wait", "--json")

    parts = -(-rows.stat().st_size // 400)
    assert first.exit_code == 6 and "does not answer" in first.errors
    assert second.exit_code == 0 and "/v1/uploads" not in network.paths("POST")
    assert len([path for path in network.paths("POST") if path.endswith("/parts")]) == parts - 2
    stored = DatasetVersion.objects.get(pk=second.json["id"])
    assert stored.bytes == rows.stat().st_size


@pytest.mark.slow
@pytest.mark.parametrize("stopped_at", ["/parts", "/complete"])
def test_an_upload_that_expired_meanwhile_begins_again(anneal, rows, network, monkeypatch, stopped_at) -> None:
    monkeypatch.setattr(transfers, "PART_BYTES", 400)
    network.cut = lambda request: request.url.path.endswith(stopped_at)
    anneal("files", "upload", str(rows), "--no-wait")
    network.cut = lambda request: False
    upload = network.paths("POST")[-1].removesuffix(stopped_at)
    network.inner.handle_request(_post(network, f"{upload}/cancel"))

    again = anneal("files", "upload", str(rows), "--no-wait", "--json")

    assert (again.exit_code, again.json["bytes"]) == (0, rows.stat().st_size)


def _post(network, path: str):
    before = network.calls[-1]
    return type(before)("POST", f"http://testserver{path}", headers={"Authorization": before.headers["Authorization"]})


def test_parquet_needs_its_reader(anneal, tmp_path, monkeypatch) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 and no table")
    monkeypatch.setattr("anneal.commands.files.find_spec", lambda name: None)

    refused = anneal("files", "check", str(tmp_path / "rows.parquet"))

    assert refused.exit_code == 2 and "anneal[parquet]" in refused.errors


def test_a_wrong_mapping_is_refused_before_anything_is_sent(anneal, rows, network) -> None:
    refused = anneal("files", "upload", str(rows), "--mapping", json.dumps({"format": "bot"}), "--json")

    assert (refused.exit_code, network.calls) == (2, [])
    assert json.loads(refused.errors)["error"]["param"] == "mapping.format"


CALLED = {
    "functions": [{"name": "find", "parameters": {"type": "object", "properties": {}}}],
    "messages": [
        {"role": "user", "content": "Where is it?"},
        {"role": "assistant", "content": None, "function_call": {"name": "find", "arguments": "{}"}},
        {"role": "function", "name": "find", "content": "Here."},
        {"role": "assistant", "content": "It is here."},
    ],
}
ASKED = {"messages": [{"role": "user", "content": "What is 6 x 7?"}]}


def test_one_row_is_counted_in_the_singular(anneal, tmp_path) -> None:
    path = tmp_path / "old.jsonl"
    path.write_bytes(jsonl_of(CALLED) + b'{"messages": "\xff"}\n')

    done = anneal("files", "convert", str(path))

    assert "1 row is kept, 1 had functions, which are tools now, 1 is left out." in done.output


def test_old_rows_are_converted_and_the_others_named_with_their_reason(anneal, tmp_path) -> None:
    orphan = {"messages": [*CALLED["messages"][:1], *CALLED["messages"][2:]]}
    path = tmp_path / "old.jsonl"
    rows = [CALLED, ASKED | {"reference_answer": {"n": 42}}, ASKED | {"hint": "x"}, orphan]
    path.write_bytes(b"\xef\xbb\xbf" + jsonl_of(*rows) + b'{"messages": "\xff"}\n' + jsonl(10))

    done = anneal("files", "convert", str(path), "--json")
    checked = anneal("files", "check", str(tmp_path / "old.converted.jsonl"))
    by_key = anneal("files", "convert", str(path), "--answer-key", "hint", "--to", str(tmp_path / "new.jsonl"))
    itself = anneal("files", "convert", str(path), "--to", str(path))

    assert (done.exit_code, done.json["rows"], done.json["functions"], done.json["answers"]) == (1, 12, 1, 1)
    assert [problem["line"] for problem in done.json["problems"]] == [3, 4, 5]
    assert "Its own keys: hint." in done.json["problems"][0]["message"]
    assert (checked.exit_code, "12 rows" in checked.output) == (0, True), checked.output
    first, second = (json.loads(line) for line in (tmp_path / "old.converted.jsonl").read_text().splitlines()[:2])
    assert first["messages"][2]["tool_call_id"] == first["messages"][1]["tool_calls"][0]["id"]
    assert first["tools"][0]["function"]["name"] == "find" and "functions" not in first
    assert second["messages"][1] == {"role": "assistant", "content": '{"n": 42}'} and "reference_answer" not in second
    assert by_key.exit_code == 1 and "Line 2 is left out: The row has no `hint`" in by_key.output
    assert itself.exit_code == 2
