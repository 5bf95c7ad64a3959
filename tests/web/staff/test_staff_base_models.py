"""The operator's form for base models: a folder of the workers, or a repository at one commit."""

import json

import pytest

from apps.catalog.models import BaseModel
from apps.core.models import AuditEntry, OutboxMessage
from tests.factories.catalog import DEMO_FOLDER, make_listed_model

FORM = "/staff/base-models"
COMMIT = "a" * 40
NAMED = {"name": "tiny", "display_name": "Tiny 6M", "licence": "Apache-2.0"}
REPOSITORY = NAMED | {
    "repo": "acme/tiny",
    "revision": COMMIT,
    "config": (DEMO_FOLDER / "config.json").read_text(),
    "hub_token": "hf_secret_of_the_operator",
}


@pytest.fixture
def console(client_for, olga):
    return client_for(olga)


def test_a_folder_is_installed_at_once(console):
    added = console.post(FORM, NAMED | {"path": str(DEMO_FOLDER)}, follow=True)

    model = BaseModel.objects.get(name="tiny")
    assert model.is_installed and (model.path, model.licence) == (str(DEMO_FOLDER), "Apache-2.0")
    assert "Tiny 6M was added. Set its token prices next." in added.content.decode()
    assert AuditEntry.objects.get(action="base_model.added").target == model.pk


def test_a_gated_repository_is_listed_and_asked_for_with_a_token_nobody_sees_again(console):
    added = console.post(FORM, REPOSITORY, follow=True)

    model = BaseModel.objects.get(name="tiny")
    assert (model.repo, model.revision, model.is_installed) == ("acme/tiny", COMMIT, False)
    assert model.context_length == json.loads(REPOSITORY["config"])["max_position_embeddings"]
    assert OutboxMessage.objects.get(topic="base_model.install").payload == {"base_model_id": model.pk}
    page = added.content.decode()
    assert "Its files are being read from the hub." in page and "acme/tiny" in page
    stored = json.dumps([*AuditEntry.objects.values("details")], default=str) + str(model.hub_token.__dict__)
    assert REPOSITORY["hub_token"] not in page + stored


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"path": str(DEMO_FOLDER)}, "Give either a local path or a hub repository."),
        ({"repo": "", "revision": "", "config": ""}, "Give either a local path or a hub repository."),
        ({"revision": "main"}, "40 hex digits"),
        ({"config": "{"}, "Enter a valid JSON."),
        ({"config": json.dumps({"model_type": "llama"})}, "config.json: it has no num_attention_heads"),
        ({"name": "Tiny_6M"}, "lower-case letters"),
        ({"repo": "", "path": "/etc"}, "/etc"),
    ],
)
def test_what_cannot_be_a_base_model_is_refused_beside_its_field_and_nothing_stays(console, changes, words):
    refused = console.post(FORM, REPOSITORY | changes)

    assert refused.status_code == 422
    assert words in refused.content.decode()
    assert not BaseModel.objects.filter(display_name="Tiny 6M").exists()
    assert REPOSITORY["hub_token"] not in refused.content.decode()


def test_models_are_found_by_name_repository_or_licence_with_a_link_to_the_licence(console):
    make_listed_model("qwen3-8b", repo="Qwen/Qwen3-8B", licence="Apache-2.0")
    make_listed_model("gemma-2-2b", repo="google/gemma-2-2b", licence="Gemma Terms of Use")

    by_name, by_licence = (console.get(FORM, {"q": text}).content.decode() for text in ("QWEN", "gemma terms"))

    assert "qwen3-8b" in by_name and "gemma-2-2b" not in by_name and "2 models." in by_name
    assert 'href="https://huggingface.co/google/gemma-2-2b" rel="noreferrer">Gemma Terms of Use</a>' in by_licence
    assert "qwen3-8b" not in by_licence
    assert "No base model matches" in console.get(FORM, {"q": "%"}).content.decode()
