"""What a private project hides of its models, by the API and on pages."""

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile

from apps.accounts.models import Project, default_project_id
from apps.adapters.models import Adapter, AdapterVersion
from apps.core.database.clock import db_now
from apps.core.errors import PermissionDenied
from apps.finetuning.conversions import orders
from apps.finetuning.models import Conversion
from apps.finetuning.results.hub_pushes import request_push
from apps.serving import operations
from apps.serving.aliases import delete_alias, point_alias, roll_back
from apps.serving.models import Alias
from tests.factories.accounts import SCOPED, give_project_role, make_key, make_private_project, make_project_key
from tests.factories.finetuning import adapter_files, make_checkpoint
from tests.factories.serving import make_adapter, make_replica

UNKNOWN = "ft:nothing:here:at:0000000000"


@pytest.fixture
def secret_project(organization, alice, bob) -> Project:
    return make_private_project(organization, alice, bob)


@pytest.fixture
def version(floor, secret_project) -> AdapterVersion:
    """A model of the private project that a replica has loaded."""
    make_replica(floor.base_model, "unix:///nowhere")
    version = make_adapter(floor.organization, floor.base_model)
    Adapter.objects.filter(pk=version.adapter_id).update(project=secret_project, name="secret-bot")
    return AdapterVersion.objects.select_related("adapter__base_model").get(pk=version.pk)


@pytest.fixture
def alias(version, alice) -> Alias:
    return point_alias(version=version, name="production", by=alice.pk, now=db_now())


@pytest.fixture
def clients(api_client, organization, alice, ann, bob, rival, charlie, secret_project):
    """Clients by who asks."""
    other = make_private_project(organization, alice, ann, name="Other")
    scoped = SCOPED | {"adapter.delete"}
    return {
        "its member": api_client(make_project_key(secret_project, bob)),
        "an owner": api_client(make_key(organization, alice)),
        "an admin": api_client(make_key(organization, ann, scopes=scoped)),
        "another project": api_client(make_project_key(other, ann)),
        "an outsider": api_client(make_key(rival, charlie)),
        "nobody": api_client(None),
    }


def post(client, path, **body):
    return client.post(path, body, format="json")


@pytest.mark.slow
def test_a_model_is_hidden_with_its_project(clients, version, alias):
    name, native = version.model_name, f"/api/v1/models/{version.model_name}"
    reads = [f"/v1/models/{name}", f"/v1/models/{alias.model_name}", f"/api/v1/adapters/{version.pk}",
             f"{native}/serving", f"{native}/files", f"{native}/conversions", f"{native}/pushes",
             f"/api/v1/aliases/{alias.pk}"]  # fmt: skip
    shown = clients["its member"].get(f"/api/v1/adapters/{version.pk}").json()
    assert shown["project_id"] == version.adapter.project_id

    statuses = {"its member": 200, "an owner": 200, "nobody": 401}
    for who, client in clients.items():
        status = statuses.get(who, 404)
        assert {client.get(path).status_code for path in reads} == {status}, who
        listed = [client.get(path).content.decode() for path in ("/v1/models", "/api/v1/adapters", "/api/v1/aliases")]
        assert [name in text for text in listed] == [status == 200] * 3, who
        assert (alias.model_name in listed[0]) == (status == 200)


@pytest.mark.slow
def test_a_hidden_model_answers_as_an_unknown_one(clients, floor, version, alias):
    admin = clients["an admin"]
    checkpoint = make_checkpoint(floor.organization, floor.base_model, step=4)
    type(checkpoint.job).objects.filter(pk=checkpoint.job_id).update(project=version.adapter.project_id)

    def answers(model: str, version_id: str, alias_id: str, alias_name: str, checkpoint_id: str):
        native = f"/api/v1/models/{model}"
        job = {"training_file": floor.job().training_file_id}
        asked = [
            admin.get(f"/v1/models/{model}"), admin.delete(f"/v1/models/{model}"),
            admin.get(f"/v1/models/{alias_name}"), admin.get(f"/api/v1/adapters/{version_id}"),
            admin.delete(f"/api/v1/adapters/{version_id}"), admin.get(f"{native}/serving"),
            post(admin, f"{native}/serving", is_served=False), admin.get(f"{native}/files"),
            admin.get(f"{native}/conversions"), post(admin, f"{native}/conversions", kind="merged_16bit"),
            post(admin, f"{native}/pushes", repository="a/b", token="hf_12345678"),
            post(admin, "/api/v1/aliases", name="other", version=model), admin.get(f"/api/v1/aliases/{alias_id}"),
            admin.delete(f"/api/v1/aliases/{alias_id}"), post(admin, f"/api/v1/aliases/{alias_id}/rollback"),
            post(admin, "/v1/fine_tuning/jobs", model=model, **job),
            post(admin, "/v1/fine_tuning/jobs", model=checkpoint_id, **job),
            post(admin, f"/api/v1/checkpoints/{checkpoint_id}/serve"),
        ]  # fmt: skip
        given = (model, version_id, alias_id, alias_name, checkpoint_id, job["training_file"])
        found = []
        for each in asked:
            text = each.content.decode()
            for value in given:
                text = text.replace(value, "ID")
            found.append((each.status_code, text))
        return found

    found = answers(version.model_name, version.pk, alias.pk, alias.model_name, checkpoint.pk)
    unknown = ("adpv_00000000000000000000000000", "alias_00000000000000000000000000", "ft:nothing:here:at:production",
               checkpoint.pk[:-8] + "00000000")  # fmt: skip
    assert found == answers(UNKNOWN, *unknown)
    assert all(400 <= status < 500 for status, _ in found), found
    version.refresh_from_db()
    assert version.deleted_at is None and Alias.objects.filter(pk=alias.pk).exists()


@pytest.mark.slow
def test_pages_and_search_leave_out_hidden_models(client_for, alice, ann, bob, rival, charlie, version, alias):
    one = f"/adapters/{version.pk}"
    pages = [one, f"{one}/delete", f"{one}/push"]
    seen = {who: [client_for(who).get(page).status_code for page in pages] for who in (alice, bob, ann, charlie)}
    assert seen[alice][0] == seen[bob][0] == 200 and 404 not in seen[alice] + seen[bob]
    assert seen[ann] == seen[charlie] == [404] * 3
    lists = ["/adapters", "/search?q=secret-bot", "/search?q=production", "/playground", "/jobs/new?step=model"]
    for who, is_listed in ((alice, True), (bob, True), (ann, False)):
        client = client_for(who)
        texts = [client.get(page, follow=True).content.decode() for page in lists]
        if is_listed:
            assert [version.model_name in text or alias.model_name in text for text in texts[:4]] == [True] * 4, who
        else:
            assert not any(version.model_name in text or "secret-bot" in text for text in texts), who
        assert (version.model_name in b"".join(client.get("/adapters/export")).decode()) == is_listed
    admin = client_for(ann)
    sent = [admin.post(f"{one}/deploy"), admin.post(f"{one}/alias", {"name": "x"}), admin.post(f"{one}/warm"),
            admin.post(f"/aliases/{alias.pk}/rollback")]  # fmt: skip
    assert {each.status_code for each in sent} == {404}
    member = client_for(bob)
    default = default_project_id(version.organization_id)
    for chosen, is_listed in ((default, False), (version.adapter.project_id, True)):
        member.post("/projects/choose", {"project": chosen})
        assert (version.model_name in member.get("/adapters").content.decode()) == is_listed, chosen


@pytest.mark.slow
def test_a_model_is_in_the_project_of_its_job(floor, claim, secret_project):
    job = floor.job()
    type(job).objects.filter(pk=job.pk).update(project=secret_project)
    claim().start().succeed(floor.base_model)
    version = AdapterVersion.objects.select_related("adapter").get()
    assert version.adapter.project_id == secret_project.pk


@pytest.mark.slow
def test_an_uploaded_adapter_is_in_the_project_of_its_key_or_form(
    clients, client_for, floor, secret_project, organization, ann, bob
):
    files = adapter_files(floor.base_model)

    def sent() -> dict[str, object]:
        return {"name": "bot", "adapter_config": SimpleUploadedFile("c.json", files["adapter_config.json"]),
                "weights": SimpleUploadedFile("w", files["adapter_model.safetensors"])}  # fmt: skip

    for who in ("its member", "an admin"):
        answer = clients[who].post("/api/v1/adapters", sent(), format="multipart")
        assert (answer.status_code, answer.json()["version"]) == (200, 1), "the name is free in each project"
    projects = set(Adapter.objects.values_list("project_id", flat=True))
    assert projects == {secret_project.pk, default_project_id(organization)}
    assert "Secret" in client_for(bob).get("/adapters/upload").content.decode()
    assert "Secret" not in client_for(ann).get("/adapters/upload").content.decode()
    chosen = {"project": secret_project.pk}
    assert client_for(ann).post("/adapters/upload", sent() | chosen).status_code == 422
    assert client_for(bob).post("/adapters/upload", sent() | chosen).status_code == 302
    assert Adapter.objects.get(project=secret_project).versions.count() == 2


def test_a_viewer_of_a_project_changes_none_of_its_models(version, alias, alice, bob, secret_project, settings):
    settings.HUB_PUSHES = True
    give_project_role(secret_project, alice, bob, "viewer")
    now, by = db_now(), bob.pk
    pushed = {"export": "", "repository": "bob/mine", "token": "hf_token-of-bob"}
    ordered = Conversion.objects.create(
        organization=version.organization, version=version, kind="gguf", created_by=alice.pk, created_at=now, bytes=1,
        price_nano=0,
    )  # fmt: skip
    for change in (
        lambda: operations.undeploy(version=version, by=by, now=now),
        lambda: operations.deploy(version=version, by=by),
        lambda: operations.delete_model(
            organization=version.organization, model_name=version.model_name, by=by, now=now
        ),
        lambda: point_alias(version=version, name="other", by=by, now=now),
        lambda: roll_back(alias=alias, by=by, now=now),
        lambda: delete_alias(alias=alias, by=by),
        lambda: orders.order(version=version, kind="merged_16bit", shown_nano=0, by=by, now=now),
        lambda: orders.cancel(conversion=ordered, by=by),
        lambda: request_push(version=version, by=by, now=now, **pushed),
    ):
        with pytest.raises(PermissionDenied):
            change()
