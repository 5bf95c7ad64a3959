"""/v1/models: base models and the caller's own; deleting one of them for good."""

import openai
import pytest

from apps.accounts.models import default_project_id
from apps.accounts.roles import SCOPES
from apps.adapters.models import Adapter, AdapterVersion
from apps.catalog.operations import retire_base_model
from apps.core.database.clock import db_now
from apps.core.ids import new_id, ulid_of
from apps.core.models import OutboxMessage
from apps.core.objects.store import object_key
from apps.serving.operations import deploy
from tests.factories.accounts import make_key
from tests.factories.catalog import make_base_model, make_listed_model
from tests.support.sdk import openai_client


@pytest.fixture
def base_model(db):
    return make_base_model()


@pytest.fixture
def client(key) -> openai.OpenAI:
    return openai_client(key)


def make_adapter(organization, base_model, name: str = "ft:a/b:org:triage:01") -> AdapterVersion:
    """A deployed version under a name with every character that is hard to route."""
    adapter = Adapter.objects.create(
        organization=organization, project_id=default_project_id(organization), name="triage", base_model=base_model
    )
    identifier = new_id("adpv")
    version = AdapterVersion.objects.create(
        pk=identifier, organization=organization, adapter=adapter, number=1, model_name=name,
        lora_name=f"a-{ulid_of(identifier)}", source="run_1", bytes=1, rank=8, method="lora",
        object_prefix=object_key(organization.pk, "runs", "r", "a1", "adapter", "m"), manifest={"files": []},
        manifest_sha256="0" * 64, target_modules=["q_proj"], chat_template_sha256="",
    )  # fmt: skip
    deploy(version=version, by="system")
    return version


def test_the_list_holds_installed_base_models_and_ones_own(client, organization, rival, base_model) -> None:
    make_listed_model()
    own = make_adapter(organization, base_model)
    make_adapter(rival, base_model, "ft:anneal-demo:rival::02")

    models = {model.id: model for model in client.models.list()}

    assert models.keys() == {"anneal-demo", own.model_name}
    assert isinstance(models["anneal-demo"].created, int)
    assert models[own.model_name].owned_by == organization.slug


def test_a_name_with_colons_and_slashes_is_found_and_deleted(client, organization, base_model) -> None:
    version = make_adapter(organization, base_model)

    assert client.models.retrieve(version.model_name).id == version.model_name
    assert client.models.delete(version.model_name).deleted is True

    with pytest.raises(openai.NotFoundError) as gone:
        client.models.retrieve(version.model_name)
    assert gone.value.code == "model_not_found"
    version.refresh_from_db()
    assert version.deleted_at and not version.adapter.versions.filter(deployments__removed_at=None).exists()
    assert OutboxMessage.objects.filter(topic="objects.delete").exists()


def test_a_base_model_cannot_be_deleted(client, base_model) -> None:
    with pytest.raises(openai.PermissionDeniedError) as refused:
        client.models.delete(base_model.name)

    assert refused.value.param == "model"
    assert client.models.retrieve(base_model.name)


def test_a_retired_base_model_is_no_longer_listed(client, base_model) -> None:
    retire_base_model(base_model=base_model, by="system", now=db_now())

    assert list(client.models.list()) == []


@pytest.mark.parametrize("scopes", [frozenset({"view"}), frozenset(SCOPES) - {"adapter.delete"}])
def test_deleting_needs_its_own_scope(organization, alice, base_model, scopes) -> None:
    version = make_adapter(organization, base_model)
    client = openai_client(make_key(organization, alice, scopes=scopes))

    assert client.models.retrieve(version.model_name)
    with pytest.raises(openai.PermissionDeniedError):
        client.models.delete(version.model_name)


def test_an_anonymous_caller_learns_nothing(api_client, base_model) -> None:
    assert api_client().get("/v1/models").status_code == 401
    assert api_client().get("/v1/models/anneal-demo").status_code == 401
    assert api_client().delete("/v1/models/anneal-demo").status_code == 401


@pytest.mark.parametrize("method", ["get", "delete"])
def test_foreign_and_unknown_names_get_the_same_answer(key, rival, base_model, api_client, method: str) -> None:
    foreign = make_adapter(rival, base_model, "ft:anneal-demo:rival::02").model_name
    unknown = "ft:anneal-demo:rival::99"

    answers = [
        (response.status_code, response.content.decode().replace(name, "NAME"))
        for name in (foreign, unknown)
        for response in [getattr(api_client(key), method)(f"/v1/models/{name}")]
    ]

    assert answers[0] == answers[1]
    assert answers[0][0] == 404
