"""What a private project hides beside jobs and keys: batches, their files, evals, retraining plans and stored
completions."""

import msgspec
import pytest
from django.core.files.uploadedfile import SimpleUploadedFile

from apps.accounts.models import Project, default_project_id
from apps.batches.completions.models import StoredCompletion
from apps.batches.completions.records import record_completions
from apps.batches.models import Batch, BatchFile
from apps.core.database.clock import db_now
from apps.core.errors import InvalidValue
from apps.finetuning.jobs.retraining.plans import list_plans
from apps.finetuning.models import FineTuningJob
from apps.serving.evals.models import Eval, EvalRun
from apps.serving.evals.sources import CompletionsSource, StoredCompletions, read_items
from tests.factories.accounts import SCOPED, give_project_role, make_key, make_private_project, make_project_key
from tests.factories.retraining import make_plan, make_production
from tests.factories.usage import make_completion

BATCHES, EVALS, PLANS = "/v1/batches", "/v1/evals", "/api/v1/fine_tuning/retraining_plans"
COMPLETIONS, DATASETS = "/v1/chat/completions", "/api/v1/datasets"
LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": []}}\n'
CRITERION = {"type": "string_check", "name": "x", "operation": "eq", "input": "a", "reference": "a"}


def post(client, path, **body):
    return client.post(path, body, format="json")


@pytest.fixture
def secret_project(organization, alice, bob) -> Project:
    return make_private_project(organization, alice, bob)


def make_work(client) -> dict[str, str]:
    """Create a batch, its file, an eval and a run, and return their addresses."""
    sent = {"purpose": "batch", "file": SimpleUploadedFile("asks.jsonl", LINE)}
    file = client.post("/v1/files", sent, format="multipart").json()["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = post(client, BATCHES, **asked).json()
    config = {"type": "custom", "item_schema": {"type": "object"}}
    evaluated = post(client, EVALS, name="e", data_source_config=config, testing_criteria=[CRITERION]).json()
    source = {"type": "jsonl", "source": {"type": "file_content", "content": [{"item": {}, "sample": {}}]}}
    run = post(client, f"{EVALS}/{evaluated['id']}/runs", name="secret-run", data_source=source).json()
    return {
        "file": f"/v1/files/{file}", "batch": f"{BATCHES}/{batch['id']}", "eval": f"{EVALS}/{evaluated['id']}",
        "run": f"{EVALS}/{evaluated['id']}/runs/{run['id']}",
    }  # fmt: skip


@pytest.mark.slow
def test_batches_files_and_evals_are_in_the_project_of_their_key_and_hidden_with_it(
    api_client, client_for, organization, alice, ann, bob, rival, charlie, secret_project
):
    made = make_work(api_client(make_project_key(secret_project, bob)))
    rows = [Batch.objects.get(), BatchFile.objects.get(), Eval.objects.get()]
    assert {row.project_id for row in rows} == {secret_project.pk}

    readers = {
        "its member": (api_client(make_project_key(secret_project, bob)), 200),
        "an owner's key": (api_client(make_key(organization, alice)), 200),
        "an admin": (api_client(make_key(organization, ann, scopes=SCOPED)), 404),
        "an outsider": (api_client(make_key(rival, charlie)), 404),
        "nobody": (api_client(None), 401),
    }
    for who, (client, status) in readers.items():
        assert {client.get(path).status_code for path in made.values()} == {status}, who
        if status != 401:
            listed = "".join(client.get(path).content.decode() for path in (BATCHES, EVALS, "/v1/files"))
            names = [path.rpartition("/")[2] for name, path in made.items() if name != "run"]
            assert [name in listed for name in names] == [status == 200] * 3, who
    admin = readers["an admin"][0]
    refused = [
        post(admin, f"{made['batch']}/cancel"), post(admin, made["eval"], name="x"), admin.delete(made["eval"]),
        post(admin, f"{made['run']}/cancel"), admin.delete(made["run"]), admin.delete(made["file"]),
    ]  # fmt: skip
    assert {each.status_code for each in refused} == {404}
    pages = ["/batches", "/evals", f"/batches/{rows[0].pk}", f"/evals/{rows[2].pk}"]
    seen = {who: [client_for(who).get(page).status_code for page in pages] for who in (alice, bob, ann)}
    assert seen == {alice: [200] * 4, bob: [200] * 4, ann: [200, 200, 404, 404]}
    assert rows[2].pk not in client_for(ann).get("/evals").content.decode()
    member = client_for(bob)
    for chosen, is_listed in ((default_project_id(organization), False), (secret_project.pk, True)):
        member.post("/projects/choose", {"project": chosen})
        listed = member.get("/evals").content.decode() + b"".join(member.get("/batches/export")).decode()
        assert [row.pk in listed for row in (rows[0], rows[2])] == [is_listed] * 2, chosen
    run = EvalRun.objects.get()
    assert run.name not in client_for(ann).get(f"/evals/cancel?run={run.pk}").content.decode()


@pytest.mark.slow
def test_a_viewer_of_a_project_changes_none_of_its_batches_and_evals(
    api_client, client_for, organization, alice, bob, secret_project
):
    made = make_work(api_client(make_project_key(secret_project, alice)))
    give_project_role(secret_project, alice, bob, "viewer")
    Project.objects.filter(pk=secret_project.pk).update(is_private=False)
    other = api_client(make_key(organization, bob, scopes=SCOPED))
    source = {"type": "jsonl", "source": {"type": "file_content", "content": [{"item": {}, "sample": {}}]}}

    assert {other.get(path).status_code for path in made.values()} == {200}
    tried = [
        post(other, f"{made['batch']}/cancel"), other.delete(made["file"]), post(other, made["eval"], name="x"),
        post(other, f"{made['eval']}/runs", data_source=source), post(other, f"{made['run']}/cancel"),
        other.delete(made["run"]), other.delete(made["eval"]),
    ]  # fmt: skip
    assert {each.status_code for each in tried} == {403}
    batch = Batch.objects.get()
    sent = {"batch": batch.pk, "confirm": batch.input_file.filename}
    assert "does not allow changing" in client_for(bob).post("/batches/cancel", sent, follow=True).content.decode()
    batch.refresh_from_db()
    assert batch.status == "validating" and Eval.objects.get().name == "e"


@pytest.mark.slow
def test_a_retraining_plan_is_in_the_project_of_its_job(
    api_client, client_for, organization, alice, ann, bob, key, floor, claim, secret_project
):
    job = make_production(floor, key, claim)
    plan = make_plan(job, key)
    owner, admin = api_client(key), api_client(make_key(organization, ann, scopes=SCOPED))
    one = f"{PLANS}/{plan.pk}"
    assert owner.get(one).json()["project_id"] == default_project_id(organization)
    assert admin.get(one).status_code == 200

    FineTuningJob.objects.filter(pk=job.pk).update(project=secret_project)
    refused = [admin.get(one), post(admin, one, enabled=False), post(admin, f"{one}/retrainings"), admin.delete(one)]
    assert {each.status_code for each in refused} == {404} and admin.get(PLANS).json()["data"] == []
    assert owner.get(one).json()["project_id"] == secret_project.pk
    assert plan.name not in client_for(ann).get("/jobs/retraining").content.decode()

    give_project_role(secret_project, alice, bob, "viewer")
    viewer = client_for(bob)
    for chosen, is_listed in (("", True), (default_project_id(organization), False), (secret_project.pk, True)):
        viewer.post("/projects/choose", {"project": chosen})
        assert (plan.name in viewer.get("/jobs/retraining").content.decode()) == is_listed, chosen
    Project.objects.filter(pk=secret_project.pk).update(is_private=False)
    other = api_client(make_key(organization, bob, scopes=SCOPED))
    tried = [post(other, one, enabled=False), post(other, f"{one}/retrainings"), other.delete(one)]
    assert {each.status_code for each in tried} == {403}
    assert list_plans(organization=organization).get().is_enabled


def test_stored_completions_are_in_the_project_of_their_key_and_hidden_with_it(
    api_client, client_for, organization, alice, ann, bob, rival, charlie, secret_project
):
    key = make_project_key(secret_project, bob)
    choices = [{"index": 0, "message": {"role": "assistant", "content": "Yes."}}]
    record = make_completion(
        organization_id=organization.pk, key_id=key.key.pk, created=int(db_now().timestamp()),
        model_name="hidden-model",
        answer=msgspec.Raw(msgspec.json.encode({"choices": choices, "usage": {}})),
    )  # fmt: skip
    record_completions(records=[record])
    path, page = f"{COMPLETIONS}/{record.id}", f"/stored-completions/{record.id}"

    readers = {
        "its member": (api_client(key), 200),
        "an owner's key": (api_client(make_key(organization, alice)), 200),
        "an admin": (api_client(make_key(organization, ann, scopes=SCOPED)), 404),
        "an outsider": (api_client(make_key(rival, charlie)), 404),
        "nobody": (api_client(None), 401),
    }
    for who, (client, status) in readers.items():
        assert {client.get(each).status_code for each in (path, f"{path}/messages")} == {status}, who
        if status != 401:
            assert (record.id in client.get(COMPLETIONS).content.decode()) == (status == 200), who
    admin = readers["an admin"][0]
    assert {post(admin, path, metadata={"a": "b"}).status_code, admin.delete(path).status_code} == {404}
    seen = {who: client_for(who).get(page).status_code for who in (alice, bob, ann)}
    assert seen == {alice: 200, bob: 200, ann: 404}
    listed = client_for(ann).get("/stored-completions").content
    exported = b"".join(client_for(ann).get("/stored-completions/export"))
    assert record.id not in (listed + exported).decode() and "hidden-model" not in listed.decode()

    wanted = CompletionsSource(source=StoredCompletions())
    assert len(read_items(wanted, organization=organization, project_id=secret_project.pk, metadata={})) == 1
    with pytest.raises(InvalidValue, match="no items"):  # all members see the items of a run in an open project
        read_items(wanted, organization=organization, project_id=default_project_id(organization), metadata={})
    made = {"name": "answers", "stored_completions": {}}
    refused = post(readers["an owner's key"][0], DATASETS, **made)  # into the default project
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stored_completions")
    assert post(readers["its member"][0], DATASETS, **made).json()["status"] == "uploaded"


def test_a_viewer_of_a_project_changes_none_of_its_stored_completions(
    api_client, organization, alice, bob, secret_project
):
    key = make_project_key(secret_project, alice)
    record = make_completion(organization_id=organization.pk, key_id=key.key.pk, created=int(db_now().timestamp()))
    record_completions(records=[record])
    give_project_role(secret_project, alice, bob, "viewer")
    Project.objects.filter(pk=secret_project.pk).update(is_private=False)
    viewer, path = api_client(make_key(organization, bob, scopes=SCOPED)), f"{COMPLETIONS}/{record.id}"

    refused = [post(viewer, path, metadata={"a": "b"}), viewer.delete(path)]

    assert viewer.get(path).status_code == 200 and {each.status_code for each in refused} == {403}
    assert StoredCompletion.objects.get().deleted_at is None
