"""A base model named by repository and commit: listed, read from the hub, and in service."""

import json
from collections.abc import Iterator

import pytest

from apps.catalog.models import BaseModel
from apps.catalog.operations import add_base_model, install_from_hub, request_install
from apps.catalog.queries import chat_renderer
from apps.core.database.clock import db_now
from apps.core.errors import InvalidState
from apps.core.models import OutboxMessage
from tests.factories.catalog import DEMO_FOLDER
from tests.twins.hub import COMMIT, Hub, serve_hub

pytestmark = pytest.mark.django_db
CONFIG = json.loads((DEMO_FOLDER / "config.json").read_text())


@pytest.fixture
def hub(settings) -> Iterator[Hub]:
    with serve_hub(DEMO_FOLDER) as running:
        settings.HUB_URL = running.url
        yield running


def listed(**changes) -> BaseModel:
    given = {"repo": "acme/tiny", "revision": COMMIT, "config": CONFIG} | changes
    return add_base_model(name="tiny", display_name="Tiny", by="user_operator", now=db_now(), **given)


def install(model: BaseModel) -> BaseModel:
    install_from_hub(base_model=model)
    model.refresh_from_db()
    return model


def test_a_listed_model_is_installed_from_the_hub_without_its_weights(hub):
    model = listed()
    assert not model.is_installed
    assert OutboxMessage.objects.get(topic="base_model.install").payload == {"base_model_id": model.pk}

    model = install(model)

    assert model.is_installed and (model.path, model.install_error) == ("", "")
    assert model.parameter_count == 6_393_088
    assert len(model.files_sha256["model.safetensors"]) == 64
    assert "model.safetensors" not in hub.fetched and "README.md" not in hub.fetched
    assert chat_renderer(base_model=model).tokenizer.get_vocab_size() == 6144
    with pytest.raises(InvalidState, match="already"):
        request_install(base_model=model, by="user_operator", now=db_now())


def test_a_gated_model_opens_to_its_token_alone(hub):
    hub.only.token = "hf_right"

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
def test_what_the_hub_does_not_have_is_said_on_the_row(hub, changes, words):
    assert words in install(listed(**changes)).install_error


def test_a_repository_without_safetensors_or_tokenizer_is_refused(hub):
    del hub.files["model.safetensors"], hub.files["tokenizer.json"]

    assert install(listed()).install_error == "The repository lacks tokenizer.json."


def test_a_hub_that_is_down_is_asked_again_when_the_operator_wants(hub):
    hub.is_down = True
    model = install(listed())
    assert "did not hand over" in model.install_error

    hub.is_down = False
    request_install(base_model=model, by="user_operator", now=db_now())

    assert install(model).is_installed
