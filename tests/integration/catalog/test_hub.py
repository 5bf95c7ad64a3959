"""A base model named by repository and commit: listed, read from the hub, and in service."""

import gzip
import json
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from apps.catalog import hub, hub_lookups
from apps.catalog.models import BaseModel, HubLookup
from apps.catalog.operations import add_base_model, install_from_hub, request_install
from apps.catalog.queries import chat_renderer
from apps.core.database.clock import db_now
from apps.core.errors import InvalidState
from apps.core.models import OutboxMessage
from tests.factories.catalog import DEMO_FOLDER
from tests.twins import hub as twins
from tests.twins.hub import COMMIT, Fault, Hub, serve_hub

pytestmark = pytest.mark.django_db
CONFIG = json.loads((DEMO_FOLDER / "config.json").read_text())


@pytest.fixture
def twin(settings) -> Iterator[Hub]:
    with serve_hub(DEMO_FOLDER) as running:
        settings.HUB_URL, settings.HUB_BLOB_HOSTS = running.url, (running.blob_url.removeprefix("http://"),)
        yield running


def listed(**changes) -> BaseModel:
    given = {"repo": "acme/tiny", "revision": COMMIT, "config": CONFIG} | changes
    return add_base_model(name="tiny", display_name="Tiny", by="user_operator", now=db_now(), **given)


def install(model: BaseModel) -> BaseModel:
    install_from_hub(base_model=model)
    model.refresh_from_db()
    return model


def test_a_listed_model_is_installed_from_the_hub_without_its_weights(twin):
    model = listed()
    assert not model.is_installed
    assert OutboxMessage.objects.get(topic="base_model.install").payload == {"base_model_id": model.pk}

    model = install(model)

    assert model.is_installed and (model.path, model.install_error) == ("", "")
    assert model.parameter_count == 6_393_088
    assert len(model.files_sha256["model.safetensors"]) == 64
    assert "model.safetensors" not in twin.fetched and "README.md" not in twin.fetched
    assert chat_renderer(base_model=model).tokenizer.get_vocab_size() == 6144
    with pytest.raises(InvalidState, match="already"):
        request_install(base_model=model, by="user_operator", now=db_now())


def test_a_gated_model_opens_to_its_token_alone(twin):
    twin.only.token = "hf_right"

    refused = install(listed())
    assert not refused.is_installed
    assert "is gated: accept its licence" in refused.install_error

    assert install(listed(hub_token="hf_right")).is_installed


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"repo": "acme/unknown"}, "The hub has no acme/unknown"),
        ({"revision": "f" * 40}, "acme/tiny has no commit ffff"),
    ],
)
def test_what_the_hub_does_not_have_is_said_on_the_row(twin, changes, words):
    assert words in install(listed(**changes)).install_error


def test_a_repository_without_safetensors_or_tokenizer_is_refused(twin):
    del twin.files["model.safetensors"], twin.files["tokenizer.json"]

    assert install(listed()).install_error == "The repository lacks tokenizer.json."


def test_a_hub_that_is_down_is_asked_again_when_the_operator_wants(twin):
    twin.is_down = True
    model = install(listed())
    assert "could not be downloaded from the hub" in model.install_error

    twin.is_down = False
    request_install(base_model=model, by="user_operator", now=db_now())

    assert install(model).is_installed


def looked_up(repo: str = "acme/tiny", **given) -> HubLookup:
    lookup = hub_lookups.request_lookup(repo=repo, by="user_operator", now=db_now(), **given)
    hub_lookups.look_up(lookup=lookup, now=db_now())
    lookup.refresh_from_db()
    return lookup


@pytest.mark.slow
def test_a_lookup_finds_commit_files_licence_and_architecture_and_its_model_installs_at_that_commit(twin):
    twin.only.card = {"license": "other", "license_name": "tiny-terms", "license_link": "https://acme.test/terms"}

    lookup = looked_up()

    assert lookup.refusal == "" and lookup.repository["revision"] == COMMIT
    assert (lookup.repository["licence"], lookup.repository["licence_url"]) == ("tiny-terms", "https://acme.test/terms")
    sizes = {file["name"]: (file["bytes"], len(file["sha256"])) for file in lookup.repository["files"]}
    assert sizes["model.safetensors"] == (len(twin.files["model.safetensors"]), 64) and "README.md" not in sizes
    assert lookup.model["config"]["model_type"] == CONFIG["model_type"]
    assert "model.safetensors" not in twin.fetched

    name = hub_lookups.propose_name(lookup=lookup)
    model = install(hub_lookups.install_found(lookup=lookup, name=name, by="user_operator", now=db_now()))
    assert (model.name, model.revision, model.licence, model.is_installed) == ("tiny", COMMIT, "tiny-terms", True)


@pytest.mark.slow
def test_a_newer_commit_is_offered_beside_the_installed_one(twin):
    old = install(hub_lookups.install_found(lookup=looked_up(), name="tiny", by="user_operator", now=db_now()))
    newer = twin.publish("acme/tiny", twin.files | {"README.md": b"better"}).head

    hub_lookups.check_revisions(now=db_now())
    old.refresh_from_db()
    assert (old.revision, old.newer_revision) == (COMMIT, newer)

    lookup = looked_up()
    assert hub_lookups.find_installed(lookup=lookup) == old
    name = hub_lookups.propose_name(lookup=lookup)
    beside = hub_lookups.install_found(lookup=lookup, name=name, by="user_operator", now=db_now())
    assert (beside.name, beside.revision) == (f"tiny-{newer[:7]}", newer)
    assert BaseModel.objects.get(name="tiny").revision == COMMIT


@pytest.mark.slow
def test_refusals_name_the_page_of_the_licence_the_token_and_the_wait(twin):
    twin.only.token, twin.revoked_tokens = "hf_right", {"hf_revoked"}

    assert f"accept its licence at {twin.url}/acme/tiny, and give a token" in looked_up().refusal
    assert f"accept the licence at {twin.url}/acme/tiny with it" in looked_up(hub_token="hf_other").refusal
    assert "wrong, expired or revoked" in looked_up(hub_token="hf_revoked").refusal
    twin.faults = [Fault("limited")]
    assert looked_up(hub_token="hf_right").refusal == "The hub limits our requests: try again in 0 seconds."
    found = looked_up(hub_token="hf_right")
    assert found.model and found.repository["is_gated"]
    assert twin.blob_bearers == set()
    hub_lookups.install_found(lookup=found, name="tiny", by="user_operator", now=db_now())
    assert looked_up().model  # by the token that the base model keeps


@pytest.mark.slow
def test_an_untrusted_hub_leads_nowhere_else_and_its_damaged_or_endless_answers_fail(twin, settings, monkeypatch):
    twin.faults = [Fault("flipped", "resolve-cache")]
    assert "arrived damaged: its hash differs" in looked_up().refusal
    twin.faults = [Fault("flipped", "/blobs/")]
    assert "tokenizer.json of acme/tiny arrived damaged" in looked_up().refusal

    monkeypatch.setattr(hub, "_ANSWER_LIMIT_BYTES", 1_000)
    assert "is longer than" in looked_up().refusal or "too large for text" in looked_up().refusal
    monkeypatch.undo()

    settings.HUB_URL, settings.HUB_BLOB_HOSTS = twin.url, ()
    host = urlsplit(twin.blob_url).hostname
    assert f"The hub redirects to {host}, which is not one of its hosts" in looked_up().refusal


def test_a_compressed_answer_is_refused_because_it_may_unpack_to_any_length(twin, monkeypatch):
    answer, accepted = twin._answer, set()

    def compress(request):
        accepted.add(request.headers["Accept-Encoding"])
        given = answer(request)
        headers = {**given.headers, "Content-Encoding": "gzip"}
        return given._replace(content=gzip.compress(given.content), headers=headers)

    monkeypatch.setattr(twin, "_answer", compress)

    assert looked_up().refusal == "The hub sent a compressed answer, which was not requested."
    assert accepted == {"identity"}


@pytest.mark.parametrize(
    ("said", "words"), [({"cardData": "x"}, "cannot be read"), ({"sha": "f" * 40}, "describes another commit")]
)
def test_a_description_that_is_malformed_or_of_another_commit_is_refused(twin, monkeypatch, said, words):
    describe = twins._model_info
    monkeypatch.setattr(twins, "_model_info", lambda *given, **more: describe(*given, **more) | said)

    model = install(listed())

    assert words in model.install_error and not model.is_installed


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("model.safetensors.index.json", '{"weight_map": {"a": "x\\u0000"}}', "lacks x"),
        ("chat_template.jinja", "\0", "NUL"),
        ("special_tokens_map.json", "[]", "cannot be read"),
    ],
)
def test_text_files_with_values_that_cannot_be_stored_or_read_are_refused(twin, name, content, words):
    twin.files[name] = content.encode()

    assert words in looked_up().refusal
    assert words in install(listed()).install_error


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model_type": "mystery"}, "mystery"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({"hidden_size": 10**9, "num_hidden_layers": 10**4}, "trillion"),
        ({"torch_dtype": "\0"}, "NUL"),
        ({"rope_theta": float("nan")}, "NaN"),
        ({"torch_dtype": "\ud800"}, "invalid character"),
        ({"max_position_embeddings": 2**30}, "a billion tokens"),
    ],
)
def test_a_model_that_cannot_run_is_refused_with_its_reason_before_anything_is_installed(twin, changed, words):
    twin.files["config.json"] = json.dumps(CONFIG | changed).encode()

    lookup = looked_up()

    assert words in lookup.refusal and lookup.model is None and lookup.repository
    with pytest.raises(InvalidState, match="can be installed"):
        hub_lookups.install_found(lookup=lookup, name="tiny", by="user_operator", now=db_now())


def test_shards_that_the_index_names_must_exist_and_a_second_copy_of_the_weights_is_left_out(twin):
    twin.files["consolidated.safetensors"] = b"x" * 9
    twin.files["model.safetensors.index.json"] = json.dumps(
        {"weight_map": {"a": "model-00002-of-2.safetensors"}}
    ).encode()

    lookup = looked_up()

    assert lookup.refusal.startswith("The repository lacks model-00002-of-2.safetensors")
    assert "consolidated.safetensors" not in {file["name"] for file in lookup.repository["files"]}
