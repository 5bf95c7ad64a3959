"""`anneal files`: checks like the server's, uploads that continue, and lists."""

import json

import pytest
from anneal import transfers

from apps.datasets.models import DatasetVersion
from apps.datasets.tasks import validate
from tests.factories.datasets import jsonl, jsonl_of, make_version

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
