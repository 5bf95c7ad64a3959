"""Signing in, models, chat, usage and estimates; and calls that are limited, fail or find no connection."""

import json
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from anneal.output import dollars

from apps.accounts.models import ApiKey
from apps.adapters.models import AdapterVersion
from apps.catalog.operations import set_price
from apps.core.database.clock import db_now
from apps.datasets.models import Upload
from apps.finetuning.models import Conversion, HubPush
from apps.serving.evals.models import Eval
from apps.serving.models import Alias
from tests.factories.datasets import jsonl
from tests.factories.finetuning import adapter_files
from tests.factories.serving import load, make_replica

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def model(floor, claim) -> str:
    job = floor.job(suffix="triage")
    claim().start().succeed(floor.base_model)
    job.refresh_from_db()
    return job.adapter_version.model_name


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
    assert anneal("logout", key=None, address=None).exit_code == 0 and key.secret not in stored.read_text()


def test_a_wrong_key_is_not_stored(anneal, db, tmp_path) -> None:
    refused = anneal("login", answer="ann_live_wrong\n", key=None)

    assert refused.exit_code == 3 and "anneal login" in refused.errors
    assert list((tmp_path / "home").rglob("credentials.json")) == []


@pytest.mark.parametrize("address", ["ftp://x", "http://[::1", "http://x:port", "anneal"])
def test_what_is_not_an_address_is_refused(anneal, address: str) -> None:
    assert anneal("usage", key="k", address=address).exit_code == 2


def test_what_cannot_be_a_key_is_refused(anneal, network) -> None:
    assert (anneal("usage", key="schlüssel").exit_code, network.calls) == (3, [])


# --- what every command does ------------------------------------------------------------------------------------------


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


# --- models -----------------------------------------------------------------------------------------------------------


def test_an_adapter_is_pushed_from_its_folder(anneal, floor, tmp_path) -> None:
    missing = anneal("models", "push", str(tmp_path), "--name", "mine")
    for name, content in adapter_files(floor.base_model).items():
        (tmp_path / name).write_bytes(content)

    pushed = anneal("models", "push", str(tmp_path), "--name", "mine", "--json")

    assert missing.exit_code == 4 and "adapter_model.safetensors" in missing.errors
    assert pushed.exit_code == 0, pushed.errors
    assert pushed.json["model"] == AdapterVersion.objects.get().model_name


def test_a_model_is_pulled_from_where_a_download_stopped(anneal, model, floor, network, tmp_path) -> None:
    whole, folder = adapter_files(floor.base_model)[WEIGHTS], tmp_path / "model"
    folder.mkdir()
    (folder / f"{WEIGHTS}.part").write_bytes(whole[:1000])

    pulled = anneal("models", "pull", model, "--to", str(folder), "--json")
    ranges = {call.url.path.rpartition("/")[2]: call.headers.get("Range") for call in network.calls}
    network.calls = []
    again = anneal("models", "pull", model, "--to", str(folder))

    assert pulled.exit_code == 0, pulled.errors
    assert (folder / WEIGHTS).read_bytes() == whole and ranges[WEIGHTS] == "bytes=1000-"
    assert {file["name"] for file in pulled.json["files"]} >= {WEIGHTS, "README.md", "adapter_config.json"}
    assert list(folder.glob("*.part")) == []
    assert len(network.calls) == 1 and "0 downloaded" in again.output


def test_a_download_that_breaks_goes_on_at_once(anneal, model, floor, network, tmp_path) -> None:
    whole, inner = adapter_files(floor.base_model)[WEIGHTS], network.inner

    class Breaking(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield whole[:500]
            raise httpx.ReadError("connection reset")

    class Once(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.path.endswith(WEIGHTS):
                network.inner = inner
                return httpx.Response(200, stream=Breaking())
            return inner.handle_request(request)

    network.inner = Once()

    assert anneal("models", "pull", model, "--to", str(tmp_path / "model")).exit_code == 0
    assert (tmp_path / "model" / WEIGHTS).read_bytes() == whole
    assert [call.headers.get("Range") for call in network.calls if call.url.path.endswith(WEIGHTS)] == [
        None, "bytes=500-",
    ]  # fmt: skip


def test_a_model_is_converted_for_a_price_that_is_confirmed(anneal, model) -> None:
    set_price(sku="conversion:bytes", unit="bytes", price_nano=10**10, per=10**9, by="user_1", now=db_now())

    unknown = anneal("models", "convert", model, "--to", "ggml", "--yes")
    declined = anneal("models", "convert", model, "--to", "merged_16bit", answer="n\n")
    refused = anneal("models", "convert", model, "--to", "gguf", "--yes")
    ordered = anneal("models", "convert", model, "--to", "merged_16bit", "--yes", "--json")
    again = anneal("models", "convert", model, "--to", "merged_16bit")

    assert (unknown.exit_code, declined.exit_code, refused.exit_code) == (2, 1, 5)
    assert "At most $" in declined.errors and "GGUF" in refused.errors
    assert ordered.exit_code == 0 and ordered.json["status"] == "waiting", ordered.errors
    assert again.exit_code == 0 and "waits for an idle trainer" in again.output
    assert anneal("models", "convert", model, "--to", "gguf", "--cancel").exit_code == 5, "it was not ordered"
    stopped = anneal("models", "convert", model, "--to", "merged_16bit", "--cancel")
    assert stopped.exit_code == 0 and stopped.output.strip() == "The order is cancelled. You pay nothing."
    assert anneal("models", "convert", model, "--to", "merged_16bit", "--yes", "--json").json["status"] == "waiting"
    Conversion.objects.exclude(status="cancelled").update(status="running")
    assert anneal("models", "convert", model, "--to", "merged_16bit", "--cancel").exit_code == 5
    assert "is making it" in anneal("models", "convert", model, "--to", "merged_16bit").output
    Conversion.objects.exclude(status="cancelled").update(status="succeeded")
    assert "anneal models pull" in anneal("models", "convert", model, "--to", "merged_16bit").output


def test_a_model_is_pushed_to_the_hub_with_a_token_that_is_never_shown(anneal, model, monkeypatch, settings) -> None:
    off = anneal("models", "publish", model, "--to", "acme/support", answer="hf_a-token\n")
    settings.HUB_PUSHES = True
    asked = anneal("models", "publish", model, "--to", "acme/support", answer="hf_a-token\n")
    monkeypatch.setenv("HF_TOKEN", "hf_a-token")
    given = anneal("models", "publish", model, "--to", "acme/support", "--json")
    listed = anneal("models", "publications", model)

    assert off.exit_code == 5 and "hf upload" in off.errors
    assert asked.exit_code == 0, asked.errors
    assert (given.exit_code, given.json["status"], listed.exit_code) == (0, "waiting", 0), given.errors
    assert "acme/support" in listed.output
    assert "hf_a-token" not in "".join(f"{each.output}{each.errors}" for each in (off, asked, given, listed))


def test_a_folder_that_cannot_be_written_is_named(anneal, model, tmp_path) -> None:
    (tmp_path / "file").touch()

    failed = anneal("models", "pull", model, "--to", str(tmp_path / "file"))

    assert failed.exit_code == 7 and str(tmp_path / "file") in failed.errors


def test_a_part_of_another_file_is_replaced(anneal, model, floor, tmp_path) -> None:
    whole, folder = adapter_files(floor.base_model)[WEIGHTS], tmp_path / "model"
    folder.mkdir()
    (folder / f"{WEIGHTS}.part").write_bytes(b"x" * 1000)

    assert anneal("models", "pull", model, "--to", str(folder)).exit_code == 0
    assert (folder / WEIGHTS).read_bytes() == whole


def test_models_are_listed_and_unknown_ones_are_not_found(anneal, model) -> None:
    assert model in anneal("models", "list").output
    assert anneal("models", "pull", "ft:anneal-demo:acme:no:1").exit_code == 4
    assert anneal("models", "pull", model, "--export", "gguf").exit_code == 4


@pytest.mark.parametrize(
    "words",
    [
        ("pull",),
        ("deploy",),
        ("convert", "--to", "gguf"),
        ("publish", "--to", "acme/support", "--token", "hf_x"),
        ("publications",),
    ],
)
def test_what_needs_a_fine_tuned_model_says_so_of_a_base_model(anneal, model, words) -> None:
    refused = anneal("models", *words, "anneal-demo")

    assert refused.exit_code == 4
    assert "'anneal-demo' is a base model: send requests to it as it is, or fine-tune it." in refused.errors


def test_a_model_is_deployed_stopped_and_named_by_an_alias(anneal, model, floor) -> None:
    stopped = anneal("models", "deploy", model, "--stop", "--json")
    deployed = anneal("models", "deploy", model)
    early = anneal("models", "alias", "production", model)
    load(AdapterVersion.objects.get(model_name=model), make_replica(floor.base_model, "http://127.0.0.1:1"))
    named = anneal("models", "alias", "production", model)

    assert (stopped.exit_code, stopped.json["model"]) == (0, model)
    assert deployed.exit_code == 0 and f"{model} is " in deployed.output
    assert early.exit_code == 5 and "No replica has loaded this version yet" in early.errors
    assert named.exit_code == 0 and f"now points to {model}." in named.output


# --- estimates --------------------------------------------------------------------------------------------------------


def test_an_estimate_is_asked_of_the_server_or_made_offline(anneal, file_id, network) -> None:
    served = anneal("estimate", "--model", "anneal-demo", "--file", file_id)
    network.calls = []
    offline = anneal("estimate", "--model", "Llama-3.1-8B", "--gpu", "h100", "--tokens", "10e6", "--json", key=None)

    assert served.exit_code == 0 and "local-cpu" in served.output and "recommended" in served.output
    assert offline.exit_code == 0 and offline.json["model"] == "Llama-3.1-8B" and network.calls == []
    assert anneal("estimate", "--model", "Llama-3.1-8B").exit_code == 2


def test_a_limit_is_never_shown_lower_than_it_is() -> None:
    shown = [dollars(usd, is_limit=True) for usd in ("0.121", "0.0000521", "3", "1234.5601", "0")]

    assert shown == ["$0.13", "$0.000053", "$3.00", "$1,234.57", "$0.00"]
    assert [dollars("0.121"), dollars("-12.5")] == ["$0.12", "-$12.50"]


# --- chat, and calls that do not succeed at once ----------------------------------------------------------------------


def chunk(**fields: object) -> str:
    return f"data: {json.dumps({'id': 'c', 'object': 'chat.completion.chunk', 'choices': [], **fields})}\n\n"


def piece(text: str, reason: str | None = None) -> str:
    return chunk(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": reason}])


class Answers(httpx.BaseTransport):
    """Gives prepared answers in turn."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.left = list(answers)
        self.bodies: list[object] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.bodies.append(json.loads(request.read() or b"null"))
        answer = self.left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


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


# --- keys -------------------------------------------------------------------------------------------------------------


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


# --- lost answers -----------------------------------------------------------------------------------------------------


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
