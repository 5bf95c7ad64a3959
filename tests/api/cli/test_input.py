"""Arguments, bodies and standard input that are not text or name nothing."""

import json
import tomllib
from pathlib import Path

import httpx
import pytest
from anneal import session

from tests.support.sdk import Answers


def test_the_version_is_that_of_the_wheel(anneal) -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "cli/pyproject.toml").read_text())["project"]

    assert anneal("--version", key=None).output == f"anneal {project['version']}\n"


@pytest.mark.parametrize("words", [("chat", "anneal-demo", "\udcff"), ("--project", "\udcff", "usage")])
def test_an_argument_that_is_no_text_is_refused_and_shown(anneal, network, words) -> None:
    refused = anneal(*words, key="k")

    assert (refused.exit_code, network.calls) == (2, [])
    assert r"'\xff': It is not UTF-8 text." in " ".join(refused.errors.split())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("jobs", "list", "--json", "--limit", "many"), "Invalid value for '--limit'"),
        (("jobs", "show", "--json"), "Missing argument"),
        (("--nonsense", "usage", "--json"), "No such option: --nonsense"),
        (("jobs", "nonsense", "--json"), "No such command"),
        (("jobs", "retry", "\udcff", "--json"), "It is not UTF-8 text."),
        (("estimate", "--json", "--model", "m"), "Give --model and --file"),
        (("estimate", "--json", "--model", "m", "--gpu", "h100", "--quantization", "nf4"), "give --method qlora"),
        (("estimate", "--json", "--model", "m", "--gpu", "h100", "--file", "f"), "or --gpu for an offline estimate"),
    ],
)
def test_errors_in_the_arguments_are_json_if_that_was_asked_for(anneal, network, words, named) -> None:
    refused = anneal(*words, key="k")
    plain = anneal(*(word for word in words if word != "--json"), key="k")

    assert (refused.exit_code, refused.output, plain.exit_code, network.calls) == (2, "", 2, [])
    error = json.loads(refused.errors)["error"]
    assert named in error["message"] and error["type"] == "cli_error"
    assert not plain.errors.startswith("{")


@pytest.mark.parametrize(
    ("name", "value", "exit_code"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:1", 6),
        ("ALL_PROXY", "gopher://x:1", 6),
        ("NO_PROXY", "10.0.0.0/8,fd00::/8", 6),
        ("SSL_CERT_FILE", "/nonexistent", 7),
    ],
)
def test_a_variable_that_cannot_be_used_is_named_in_a_sentence(anneal, network, monkeypatch, name, value, exit_code):
    monkeypatch.setattr(session, "transport", None)  # another transport goes around proxies
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv(name, value)
    monkeypatch.delenv("no_proxy", raising=False)  # it counts before NO_PROXY

    ended = anneal("usage", key="k", address="http://anneal.invalid")

    assert ended.exit_code == exit_code and name in ended.errors, ended.errors


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("chat", "anneal-demo", "-"), "Standard input, line 2, byte 3: this is not UTF-8 text."),
        (("chat", "anneal-demo"), "not UTF-8 text"),
        (("evals", "create", "e", "--body", "-"), "Standard input, line 2, byte 3"),
        (("evals", "create", "e", "--body", "file"), "file, line 2, byte 3"),
        (("apply", "--file", "file"), "file, line 2, byte 3"),
    ],
)
def test_input_that_is_no_text_is_refused_with_its_place(anneal, network, tmp_path, monkeypatch, words, named) -> None:
    content = b"{}\n  \xff\n" if words[-1] != "anneal-demo" else b"\xff\n"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_bytes(content)

    refused = anneal(*words, key="k", answer=content)

    assert (refused.exit_code, network.calls) == (2, []) and named in refused.errors, refused.errors


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_a_number_that_is_no_json_is_refused_before_any_call(anneal, network, number) -> None:
    words = ("jobs", "create", "--model", "m", "--file", "file-1", "--set", f"learning_rate={number}", "--yes")

    refused = anneal(*words, key="k")

    assert (refused.exit_code, network.calls) == (2, []) and "infinite or NaN" in refused.errors


def test_a_body_may_begin_with_a_byte_order_mark(anneal, network, tmp_path) -> None:
    made = {"id": "eval_1", "name": "e", "created_at": 0, "testing_criteria": []}
    network.inner = Answers(httpx.Response(200, json=made))
    (tmp_path / "body.json").write_bytes(b"\xef\xbb\xbf{}")

    words = ("evals", "create", "e", "--check", "eq=a", "--body", str(tmp_path / "body.json"))
    assert anneal(*words, key="k").exit_code == 0


def test_names_with_codes_of_emoji_are_shown_as_they_are(anneal, network) -> None:
    name = "ft:anneal-demo:acme:vs:5wy2"
    listed = {"object": "list", "data": [{"id": name, "parent": ":vs:", "created": 0}]}
    deployed = {"model": name, "state": "served", "reason": None}
    network.inner = Answers(*(httpx.Response(200, json=each) for each in (listed, deployed)))

    table, line = anneal("models", "list", key="k"), anneal("models", "deploy", name, key="k")

    assert name in table.output and table.output.count(":vs:") == 2 and name in line.output


def test_json_is_written_whole_where_the_output_is_not_utf_8(anneal, network) -> None:
    made = {"id": "key_1", "name": "日本", "secret": "ann_live_1"}
    network.inner = Answers(httpx.Response(200, json=made))

    shown = anneal("keys", "create", "日本", "--scope", "view", "--json", key="k", charset="ascii")

    assert (shown.exit_code, shown.json) == (0, made), shown.errors


def test_a_name_that_the_system_does_not_allow_for_a_file_is_no_file(anneal, network) -> None:
    refused = anneal("batches", "create", "a" * 300, key="k")

    assert (refused.exit_code, network.calls) == (2, []) and "neither a file here nor" in refused.errors


def test_an_empty_name_or_file_is_refused_before_any_call(anneal, network, tmp_path) -> None:
    (tmp_path / "none.jsonl").write_text("\n")

    for words, told in (
        (("models", "deploy", ""), "is empty"),
        (("jobs", "show", " "), "is empty"),
        (("batches", "create", str(tmp_path / "none.jsonl"), "--yes"), "has no requests"),
    ):
        refused = anneal(*words, key="k")
        assert (refused.exit_code, network.calls, told in refused.errors) == (2, [], True), refused.errors


def test_a_row_with_half_of_a_character_is_left_out_and_named(anneal, tmp_path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "ok"}], "functions": []}
        for text in ("hello", "hi \ud83d")
    ]
    (tmp_path / "old.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    done = anneal("files", "convert", str(tmp_path / "old.jsonl"))

    assert "half of a character" in done.output + done.errors and "line 2" in (done.output + done.errors).lower()
    assert (tmp_path / "old.converted.jsonl").read_text().count("\n") == 1
