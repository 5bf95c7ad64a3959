"""Arguments, bodies and standard input that are not text or name nothing."""

import json
import tomllib
from pathlib import Path

import httpx
import pytest
from anneal.api import Api
from anneal.failures import ExitCode, Failure

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


def test_a_key_on_standard_input_is_never_taken_for_the_address(anneal, network) -> None:
    me = {"organization": {"name": "Acme"}}
    network.inner = Answers(httpx.Response(200, json=me))

    done = anneal("login", answer="ann_live_piped\n", key=None, address=None)

    assert done.exit_code == 0 and "as Acme" in done.output
    assert "ann_live_piped" not in done.output + done.errors


def test_a_proxy_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")

    with pytest.raises(Failure, match="ALL_PROXY") as refused:
        Api("https://anneal.example", "k")
    assert refused.value.exit_code == ExitCode.UNREACHABLE


def test_a_row_with_half_of_a_character_is_left_out_and_named(anneal, tmp_path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "ok"}], "functions": []}
        for text in ("hello", "hi \ud83d")
    ]
    (tmp_path / "old.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    done = anneal("files", "convert", str(tmp_path / "old.jsonl"))

    assert "half of a character" in done.output + done.errors and "line 2" in (done.output + done.errors).lower()
    assert (tmp_path / "old.converted.jsonl").read_text().count("\n") == 1
