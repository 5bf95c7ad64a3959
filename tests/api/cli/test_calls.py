"""Signing in, chat, keys, costs and the audit log; and calls that are limited, fail or lose their answer."""

import json
import stat

import httpx
import pytest
import typer
from anneal.commands import account

from apps.accounts.models import ApiKey
from apps.adapters.models import AdapterVersion
from apps.datasets.models import Upload
from apps.finetuning.models import FineTuningJob, HubPush
from apps.serving.evals.models import Eval
from apps.serving.models import Alias
from tests.factories.accounts import make_key
from tests.factories.datasets import jsonl
from tests.factories.finetuning import adapter_files
from tests.factories.serving import load, make_replica
from tests.support.sdk import Answers

# --- signing in -------------------------------------------------------------------------------------------------------


def test_a_key_is_stored_for_its_address_and_for_this_user_only(anneal, key, organization, tmp_path) -> None:
    signed_in = anneal("login", "--base-url", "http://testserver/v1/", answer=f"{key.secret}\n", key=None, address=None)
    stored = next((tmp_path / "home").rglob("credentials.json"))
    used = anneal("usage", key=None, address=None)
    elsewhere = anneal("usage", key=None, address="http://elsewhere")

    assert signed_in.exit_code == 0 and organization.name in signed_in.output and key.secret not in signed_in.output
    assert stat.S_IMODE(stored.stat().st_mode) == 0o600
    assert used.exit_code == 0 and "Available" in used.output
    assert (elsewhere.exit_code, "anneal login" in elsewhere.errors) == (3, True)
    assert anneal("logout", key=None, address="http://elsewhere").exit_code == 0
    assert anneal("usage", key=None, address=None).exit_code == 0, "the address used last is still the default"
    assert anneal("logout", key=None, address=None).exit_code == 0 and key.secret not in stored.read_text()


def test_a_wrong_key_is_not_stored(anneal, db, tmp_path) -> None:
    refused = anneal("login", answer="ann_live_wrong\n", key=None)

    assert refused.exit_code == 3 and "anneal login" in refused.errors
    assert list((tmp_path / "home").rglob("credentials.json")) == []


def test_a_key_of_the_environment_needs_no_folder_for_this_user(anneal, network, tmp_path) -> None:
    (tmp_path / "home").write_text("no folder")
    (tmp_path / "rows.jsonl").write_bytes(jsonl())

    uploaded = anneal("files", "upload", str(tmp_path / "rows.jsonl"), "--no-wait")
    signed_in = anneal("login")

    assert uploaded.exit_code == 0 and Upload.objects.get().status == "completed", uploaded.errors
    assert signed_in.exit_code == 7 and str(tmp_path / "home") in signed_in.errors


def test_without_a_home_folder_none_is_made_or_read_here(anneal, network, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("typer.get_app_dir", lambda name: f"~/.config/{name}")
    monkeypatch.chdir(tmp_path)
    planted = tmp_path / "~/.config/anneal/credentials.json"
    planted.parent.mkdir(parents=True)
    planted.write_text(json.dumps({"current": "http://elsewhere"}))
    network.inner = Answers(httpx.Response(200, json={"object": "list", "data": []}))

    listed = anneal("models", "list", key="k", address=None)

    assert listed.exit_code == 0 and [call.url.host for call in network.calls] == ["127.0.0.1"], listed.errors


def test_an_interrupted_prompt_ends_like_any_interruption(anneal, network, monkeypatch) -> None:
    def interrupt(*words: object, **options: object) -> None:
        raise typer.Abort

    monkeypatch.setattr(account, "ask_secret", interrupt)

    assert (anneal("login", key=None).exit_code, network.calls) == (130, [])


def test_a_piped_key_is_no_address_and_is_never_shown(anneal, network) -> None:
    secret = "ann_live_SECRETKEY123"
    me = {"organization": {"name": "Acme", "regions": None}}
    network.inner = Answers(httpx.Response(200, json=me))

    signed_in = anneal("login", answer=f"{secret}\n", key=None, address=None)
    mistaken = anneal("usage", key="k", address=secret)

    assert (signed_in.exit_code, str(network.calls[0].url)) == (0, "http://127.0.0.1:8000/api/v1/me"), signed_in.errors
    assert network.calls[0].headers["Authorization"] == f"Bearer {secret}"
    assert mistaken.exit_code == 2 and "An API key is not an address." in mistaken.errors
    assert "SECRETKEY" not in signed_in.output + signed_in.errors + mistaken.output + mistaken.errors


@pytest.mark.parametrize("address", ["ftp://x", "http://[::1", "http://x:port", "anneal"])
def test_what_is_not_an_address_is_refused(anneal, address: str) -> None:
    assert anneal("usage", key="k", address=address).exit_code == 2


def test_what_cannot_be_a_key_is_refused(anneal, network) -> None:
    assert (anneal("usage", key="schlüssel").exit_code, network.calls) == (3, [])


# --- chat, and calls that do not succeed at once ----------------------------------------------------------------------


def chunk(**fields: object) -> str:
    return f"data: {json.dumps({'id': 'c', 'object': 'chat.completion.chunk', 'choices': [], **fields})}\n\n"


def piece(text: str, reason: str | None = None) -> str:
    return chunk(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": reason}])


def refused(status: int, code: str, **headers: str) -> httpx.Response:
    error = {"message": f"It is {code}.", "type": "t", "param": None, "code": code}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, json={"error": error}, headers=named)


def test_too_many_requests_with_keys_of_our_own_say_what_to_do(anneal, network) -> None:
    """The server advises to leave out the header, which a person who types a command has not sent."""
    error = {"message": "Send it without.", "type": "t", "param": "Idempotency-Key", "code": "insufficient_quota"}
    network.inner = Answers(httpx.Response(429, json={"error": error}, headers={"x-should-retry": "false"}))

    ended = anneal("keys", "create", "nightly", "--scope", "view", key="k")

    assert ended.exit_code == 5 and "Run the command again later" in ended.errors


def test_an_answer_is_written_as_it_comes_and_cannot_control_the_terminal(anneal, network) -> None:
    stream = piece("Hel") + piece("lo\x1b[2J", "stop") + chunk(usage={"total_tokens": 5}) + "data: [DONE]\n\n"
    network.inner = Answers(*(httpx.Response(200, text=stream) for _ in range(3)))

    shown = anneal("chat", "anneal-demo", "Hi", "--system", "Be brief.", key="k")
    as_json = anneal("chat", "anneal-demo", "-", "--json", answer="Hi", key="k")
    talk = anneal("chat", "anneal-demo", answer="Hi\n", key="k")

    assert (shown.exit_code, shown.output) == (0, "Hello\N{REPLACEMENT CHARACTER}[2J\n")
    assert as_json.json | {"content": ""} == {
        "object": "chat.answer", "model": "anneal-demo", "content": "", "finish_reason": "stop",
        "usage": {"total_tokens": 5},
    }  # fmt: skip
    assert talk.exit_code == 0 and "Hello" in talk.output
    assert [message["role"] for message in network.inner.bodies[0]["messages"]] == ["system", "user"]


def test_an_error_in_the_stream_ends_the_command(anneal, network) -> None:
    error = {"message": "The model stopped.", "type": "server_error", "param": None, "code": "server_error"}
    network.inner = Answers(httpx.Response(200, text=piece("Hel") + f"data: {json.dumps({'error': error})}\n\n"))

    ended = anneal("chat", "anneal-demo", "Hi", key="k")

    assert (ended.exit_code, ended.output) == (6, "Hel") and "The model stopped." in ended.errors


def test_calls_are_repeated_while_the_service_is_limited_or_away(anneal, network) -> None:
    listed = httpx.Response(200, json={"object": "list", "data": []})
    away, limited = refused(503, "service_unavailable"), refused(429, "rate_limit_exceeded", retry_after="0.001")
    network.inner = Answers(away, limited, httpx.ConnectError("no route"), listed)

    found = anneal("models", "list", "--json", key="k")

    assert found.exit_code == 0 and found.json["data"] == []
    assert found.errors.count("Next attempt in") == 3


@pytest.mark.parametrize(
    ("answers", "exit_code", "calls"),
    [
        ([httpx.ConnectError("no route")] * 5, 6, 5),
        ([refused(500, "server_error")] * 5, 6, 5),
        ([refused(429, "insufficient_quota", x_should_retry="false")], 5, 1),
        ([refused(403, "insufficient_permissions")], 3, 1),
        ([httpx.Response(502, text="<html>")] * 5, 6, 5),
        ([httpx.Response(200, text="<html>")], 5, 1),
        ([httpx.Response(302, headers={"Location": "/login"})], 5, 1),
    ],
)
def test_each_failure_has_its_exit_code_and_one_sentence(anneal, network, answers, exit_code, calls) -> None:
    network.inner = Answers(*answers)

    failed = anneal("models", "list", key="k")

    assert (failed.exit_code, len(network.calls), failed.output) == (exit_code, calls, "")
    assert failed.errors.splitlines()[-1].endswith(".") and "Traceback" not in failed.errors


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("keys", "revoke", "key_1"), "<html>"),
        (("chat", "anneal-demo", "Hi"), "data: <html>"),
        (("chat", "anneal-demo", "Hi"), "data: []"),
        (("login",), '{"status": "ok"}'),
        (("login",), "[]"),
    ],
)
def test_an_answer_of_another_service_is_refused_in_one_sentence(anneal, network, words, answer) -> None:
    network.inner = Answers(httpx.Response(200, text=answer))

    refused = anneal(*words, key="k")

    assert refused.exit_code == 5 and "Check that the base URL is that of an Anneal installation." in refused.errors


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_key_is_created_rotated_and_revoked(anneal, network) -> None:
    words = ("keys", "create", "nightly", "--scope", "view", "--days", "7", "--requests-per-minute", "60")
    made = anneal(*words)
    listed = anneal("keys", "list", "--status", "active", "--json").json["data"]
    first = next(each for each in listed if each["name"] == "nightly")
    rotated = anneal("keys", "rotate", first["id"], "--overlap-hours", "0", "--json").json
    revoked = anneal("keys", "revoke", rotated["id"])
    table = anneal("keys", "list")

    assert made.output.strip().startswith(first["prefix"]) and first["id"] in made.errors
    assert (first["scopes"], first["requests_per_minute"]) == (["view"], 60) and first["expires_at"]
    assert rotated["secret"] not in table.output and made.output.strip() not in table.output
    assert revoked.exit_code == 0 and anneal("login", answer="", key=rotated["secret"]).exit_code == 3
    assert anneal("keys", "create", "x", "--scope", "fly").exit_code == 5
    assert anneal("keys", "revoke", "../me").exit_code == 4
    assert anneal("keys", "create", "x", "--scope", "view", "--project", "proj_unknown").exit_code == 4


# --- service accounts, costs and the audit log ------------------------------------------------------------------------


def test_a_service_account_is_created_for_a_key_and_deleted_with_it(anneal, network) -> None:
    account = anneal("keys", "accounts", "create", "nightly", "--role", "viewer").output.strip()
    secret = anneal("keys", "create", "ci", "--scope", "view", "--service-account", account).output.strip()
    listed = anneal("keys", "accounts", "list")
    silent = anneal("keys", "accounts", "delete", account)
    works = anneal("keys", "accounts", "list", key=secret).exit_code
    deleted = anneal("keys", "accounts", "delete", account, "--yes")

    assert all(word in listed.output for word in (account, "nightly", "viewer"))
    assert (silent.exit_code, works) == (1, 0) and "Nothing was deleted." in silent.errors
    assert deleted.exit_code == 0 and anneal("keys", "accounts", "list", key=secret).exit_code == 3
    assert anneal("keys", "accounts", "create", "x", "--role", "boss").exit_code == 5
    assert anneal("keys", "accounts", "delete", account, "--yes").exit_code == 4


@pytest.mark.slow
def test_costs_are_shown_by_day_or_by_what_spent_them(anneal, model) -> None:
    days = anneal("costs", "--json").json
    subjects, table = anneal("costs", "--by", "subject", "--json").json["data"], anneal("costs", "--by", "subject")
    job = FineTuningJob.objects.get()
    before = anneal("costs", "--last", "2020-01-31")

    assert [each["kind"] for each in days["data"]] == ["training"] and days["group_by"] == "day"
    assert [(each["group"], each["cost_usd"]) for each in subjects] == [(job.pk, days["total_usd"])]
    assert job.pk in table.output and table.output.splitlines()[-1].startswith("Total")
    assert before.exit_code == 0 and "$0.00" in before.output
    assert anneal("costs", "--by", "moon").exit_code == 5


def test_the_audit_log_is_listed_by_those_who_may_read_it(anneal, network, organization, alice) -> None:
    anneal("keys", "create", "nightly", "--scope", "view")
    wanted = ("audit", "--action", "key.", "--since", "2020-01-01")
    shown, found = anneal(*wanted), anneal(*wanted, "--limit", "1", "--json").json["data"]
    reader = make_key(organization, alice, scopes=frozenset({"view"})).secret

    assert [each["action"] for each in found] == ["key.create"]
    assert found[0]["target"] in shown.output and found[0]["actor"] in shown.output
    assert anneal("audit", "--until", "2020-01-01", "--json").json["data"] == []
    assert anneal("audit", "--since", "yesterday").exit_code == 5
    assert anneal("audit", key=reader).exit_code == 3


# --- lost answers -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_command_whose_answer_was_lost_makes_one_thing(anneal, key, model, network, settings, floor, tmp_path):
    settings.HUB_PUSHES = True
    load(AdapterVersion.objects.get(), make_replica(floor.base_model, "unix:///nowhere"))
    for name, content in adapter_files(floor.base_model).items():
        (tmp_path / name).write_bytes(content)
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(jsonl())
    network.is_forgetful = True
    made = {
        ApiKey: ("keys", "create", "nightly", "--scope", "view"),
        Eval: ("evals", "create", "sums", "--check", "eq={{item.answer}}"),
        Alias: ("models", "alias", "production", model),
        Upload: ("files", "upload", str(rows), "--no-wait"),
        HubPush: ("models", "publish", model, "--to", "acme/triage", "--token", "hf_secret"),
        AdapterVersion: ("models", "push", str(tmp_path), "--name", "mine"),
    }
    before = {kind: kind.objects.count() for kind in made}

    for kind, words in made.items():
        done = anneal(*words)
        assert done.exit_code == 0, (words, done.errors)
        assert kind.objects.count() == before[kind] + 1, words
    posts = [call for call in network.calls if call.method == "POST" and not call.url.path.endswith("/parts")]
    keys = [call.headers.get("Idempotency-Key") for call in posts]
    assert None not in keys and len(keys) == 2 * len(set(keys)) > 12
