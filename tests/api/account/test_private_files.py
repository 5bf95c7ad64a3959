"""What a private project hides of its datasets, by the API and on pages."""

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile

from apps.accounts.members.visibility import seeing, sight_of_key
from apps.accounts.models import Project, default_project_id
from apps.adapters.models import AdapterVersion
from apps.batches.models import BatchFile
from apps.contracts import runs as wire
from apps.contracts.failures import FailureCode
from apps.core.database.clock import db_now
from apps.core.errors import PermissionDenied
from apps.datasets import operations
from apps.datasets.intake import revisions, versions
from apps.datasets.models import Dataset, DatasetVersion, Upload
from apps.datasets.validation.leases import validate_version
from apps.datasets.validation.repair import RepairMode
from apps.finetuning.jobs.retraining.launches import require_actor
from apps.finetuning.models import Retraining
from tests.factories.accounts import (
    SCOPED,
    give_project_role,
    make_key,
    make_private_project,
    make_project_key,
)
from tests.factories.datasets import jsonl, make_ready_version, make_version
from tests.factories.retraining import make_plan, make_production
from tests.factories.serving import make_version as make_adapter_version

FILES, DATASETS = "/v1/files", "/api/v1/datasets"
BROKEN = jsonl(12) + b'{"messages": []}\n'


@pytest.fixture
def secret_project(organization, alice, bob) -> Project:
    return make_private_project(organization, alice, bob)


@pytest.fixture
def clients(api_client, organization, alice, ann, bob, rival, charlie, secret_project):
    """Clients by who asks."""
    other = make_private_project(organization, alice, ann, name="Other")
    return {
        "its member": api_client(make_project_key(secret_project, bob)),
        "an owner": api_client(make_key(organization, alice)),
        "an admin": api_client(make_key(organization, ann, scopes=SCOPED)),
        "another project": api_client(make_project_key(other, ann)),
        "an outsider": api_client(make_key(rival, charlie)),
        "nobody": api_client(None),
    }


def upload(client, content: bytes = b"", name: str = "secret.jsonl") -> DatasetVersion:
    sent = {"purpose": "fine-tune", "file": SimpleUploadedFile(name, content or jsonl())}
    id = client.post(FILES, sent, format="multipart").json()["id"]
    found = validate_version(version_id=id, now=db_now())
    assert found is not None
    return found


def status_of(client, path: str) -> int:
    answer = client.get(path)
    if answer.streaming:
        answer.getvalue()
    return answer.status_code


def post(client, path, **body):
    return client.post(path, body, format="json")


@pytest.mark.slow
def test_a_file_is_in_the_project_of_its_key_and_hidden_with_it(clients, secret_project):
    version = upload(clients["its member"])
    assert version.dataset.project_id == secret_project.pk
    shown = clients["its member"].get(f"{DATASETS}/{version.dataset_id}").json()
    assert shown["project_id"] == secret_project.pk

    one, native, dataset = f"{FILES}/{version.pk}", f"/api/v1/files/{version.pk}", f"{DATASETS}/{version.dataset_id}"
    reads = [one, f"{one}/content", f"{native}/rows", f"{native}/findings", f"{native}/columns", dataset,
             f"{dataset}/versions"]  # fmt: skip
    statuses = {"its member": 200, "an owner": 200, "nobody": 401}
    for who, client in clients.items():
        status = statuses.get(who, 404)
        assert {status_of(client, path) for path in reads} == {status}, who
        listed = client.get(FILES).content.decode() + client.get(f"{DATASETS}?q=secret").content.decode()
        assert (version.pk in listed, version.dataset_id in listed) == (status == 200, status == 200), who


@pytest.mark.slow
def test_a_hidden_file_answers_as_an_unknown_one(clients, floor, organization, key, claim):
    job_of_plan, open_file = make_production(floor, key, claim).pk, make_ready_version(organization).pk
    hidden, unknown = upload(clients["its member"], BROKEN), "file-00000000000000000000000000"
    admin, dataset = clients["an admin"], Dataset.objects.get(pk=hidden.dataset_id)
    criterion = {"type": "string_check", "name": "x", "operation": "eq", "input": "a", "reference": "a"}
    config = {"type": "custom", "item_schema": {"type": "object"}}
    evaluated = post(admin, "/v1/evals", name="e", data_source_config=config, testing_criteria=[criterion]).json()
    mapping = {"format": "prompt_completion", "columns": {"prompt": "q", "completion": "a"}}

    def answers(id: str, dataset_id: str, name: str) -> list[tuple[int, str]]:
        job = {"model": floor.base_model.name, "training_file": id}
        validated = job | {"training_file": open_file, "validation_file": id}
        source = {"type": "jsonl", "source": {"type": "file_id", "id": id}}
        plan = {"name": "p", "source_job": job_of_plan, "dataset": dataset_id, "held_out": dataset_id,
                "alias": "production", "max_usd": "20", "min_new_rows": 4}  # fmt: skip
        asked = [
            admin.get(f"{FILES}/{id}"), admin.delete(f"{FILES}/{id}"), admin.get(f"{DATASETS}/{dataset_id}"),
            admin.delete(f"{DATASETS}/{dataset_id}"), post(admin, f"/api/v1/files/{id}/repair", mode="drop"),
            post(admin, f"/api/v1/files/{id}/columns", mapping=mapping), post(admin, "/v1/fine_tuning/jobs", **job),
            post(admin, "/v1/fine_tuning/jobs", **validated), post(admin, "/api/v1/estimates", **job),
            post(admin, f"/v1/evals/{evaluated['id']}/runs", name="r", data_source=source),
            post(admin, "/api/v1/fine_tuning/retraining_plans", **plan),
            post(admin, "/api/v1/fine_tuning/retraining_plans", **plan | {"dataset": name}),
        ]  # fmt: skip
        return [
            (each.status_code, each.content.decode().replace(id, "ID").replace(dataset_id, "ID").replace(name, "NAME"))
            for each in asked
        ]

    found = answers(hidden.pk, dataset.pk, dataset.name)
    assert found == answers(unknown, "ds_00000000000000000000000000", "nothing")
    assert all(400 <= status < 500 for status, _ in found), found
    hidden.refresh_from_db()
    assert hidden.deleted_at is None


@pytest.mark.slow
def test_pages_and_search_leave_out_hidden_files(client_for, organization, alice, ann, bob, vera, charlie, clients):
    version = upload(clients["its member"])
    one = f"/datasets/{version.pk}"
    pages = [one, f"{one}/changes", f"{one}/columns", f"{one}/row?line=1", f"{one}/delete", f"{one}/download"]
    seen = {who: [client_for(who).get(page).status_code for page in pages] for who in (alice, bob, ann, charlie, vera)}
    assert seen[alice] == seen[bob] == [200] * 5 + [302]
    assert seen[ann] == seen[charlie] == [404] * 6
    assert seen[vera] == [404] * 2 + [403] * 3 + [404], "a viewer changes no file"
    lists = ["/datasets", "/search?q=secret", "/jobs/new?step=dataset", "/evals/run/new", "/"]
    for who, is_listed in ((bob, True), (ann, False)):
        client = client_for(who)
        texts = [client.get(page, follow=True).content.decode() for page in lists[:3]]
        assert [version.pk in text for text in texts] == [is_listed] * 3, who
        assert (version.pk in b"".join(client.get("/datasets/export")).decode()) == is_listed
    member = client_for(bob)
    for chosen, is_listed in ((default_project_id(organization), False), (version.dataset.project_id, True)):
        member.post("/projects/choose", {"project": chosen})
        assert (version.pk in member.get("/datasets").content.decode()) == is_listed, chosen
    admin = client_for(ann)
    assert admin.post(f"{one}/delete", {"confirm": version.filename}).status_code == 404
    assert admin.post(f"{one}/restore").status_code == admin.post(f"{one}/split", {"share": "0.1"}).status_code == 404
    open_version = make_ready_version(organization)
    assert admin.get(f"/datasets/{open_version.pk}/changes?since={version.pk}").status_code == 404


@pytest.mark.slow
def test_samples_of_a_hidden_file_are_hidden_and_its_failed_job_is_retried_by_those_who_see_it(
    clients, client_for, alice, ann, bob, floor, claim, secret_project
):
    job = floor.job()  # in an open project
    Dataset.objects.filter(pk=job.training_file.dataset_id).update(project=secret_project)
    attempt = claim().start()
    sample = wire.Sample(prompt="Charged twice", reference="billing", answer="Refund")
    attempt.report(wire.SamplesGenerated, step=4, samples=(sample,))
    url = f"/v1/fine_tuning/jobs/{job.pk}"

    for who, client, is_seen in (("its member", bob, True), ("an owner", alice, True), ("an admin", ann, False)):
        events = clients[who].get(f"{url}/events")
        assert events.status_code == 200
        assert ("Charged twice" in events.content.decode()) == is_seen, who
        page = client_for(client).get(f"/jobs/{job.pk}?tab=samples")
        assert ("Charged twice" in page.content.decode()) == is_seen, who

    worse = {"row": 1, "prompt": "Charged twice", "reference": "billing", "base_loss": 0.1, "tuned_loss": 0.9}
    version = make_adapter_version(floor.organization, floor.base_model)
    report = {"rows": 9, "comparisons": [], "worse_rows": 1, "worse": [worse]}
    AdapterVersion.objects.filter(pk=version.pk).update(source=attempt.run.pk, report=report)
    listed = clients["an owner"].get("/v1/models").json()["data"]
    assert [each["evaluation"]["worse_rows"] for each in listed if each.get("evaluation")] == [1]
    assert "Charged twice" not in str(listed)
    for who, client, is_seen in (("its member", bob, True), ("an owner", alice, True), ("an admin", ann, False)):
        found = clients[who].get(f"/v1/models/{version.model_name}").json()["evaluation"]
        assert (found["worse_rows"], bool(found["worse"])) == (1, is_seen), who
        page = client_for(client).get(f"/adapters/{version.pk}")
        assert page.status_code == 200 and ("Charged twice" in page.content.decode()) == is_seen, who

    attempt.finish(wire.Failed(code=FailureCode.OUT_OF_MEMORY, message="No room."))
    refused = post(clients["an admin"], f"/api{url}/retry")
    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "file_id")


def test_a_name_in_use_in_a_hidden_project_is_free_elsewhere(clients):
    hidden, shown = upload(clients["its member"]), upload(clients["an admin"])
    assert (hidden.dataset.name, hidden.number) == (shown.dataset.name, shown.number) == ("secret", 1)
    assert hidden.dataset_id != shown.dataset_id
    assert upload(clients["its member"]).number == 2


def test_what_is_made_of_a_file_stays_in_its_project(secret_project, organization, alice, clients):
    broken = upload(clients["its member"], BROKEN)
    now = db_now()
    made = [
        revisions.repair_version(version=broken, mode=RepairMode.DROP, by=alice.pk, now=now),
        revisions.derive(broken, "train", by=alice.pk, now=now, part="training"),
    ]
    assert {each.dataset.project_id for each in made} == {secret_project.pk}


def test_an_upload_in_parts_is_in_the_project_of_its_key(clients, secret_project):
    content = jsonl()
    asked = {"purpose": "fine-tune", "filename": "parts.jsonl", "bytes": len(content), "mime_type": "application/jsonl"}
    member, admin = clients["its member"], clients["an admin"]
    begun = post(member, "/v1/uploads", **asked).json()["id"]
    part = {"data": SimpleUploadedFile("part", content)}
    assert admin.post(f"/v1/uploads/{begun}/parts", part, format="multipart").status_code == 404
    part = {"data": SimpleUploadedFile("part", content)}
    sent = member.post(f"/v1/uploads/{begun}/parts", part, format="multipart").json()["id"]
    done = post(member, f"/v1/uploads/{begun}/complete", part_ids=[sent])
    assert done.status_code == 200 and Dataset.objects.get().project_id == secret_project.pk
    assert post(admin, f"/v1/uploads/{begun}/complete", part_ids=[sent]).status_code == 404
    assert post(admin, f"/v1/uploads/{begun}/cancel").status_code == 404


LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "secret"}}\n'


@pytest.mark.parametrize(("purpose", "content"), [("batch", LINE), ("evals", b'{"item": {"q": "secret"}}\n')])
def test_an_upload_that_an_owner_completes_stays_in_its_project(purpose, content, clients, secret_project):
    member, owner = clients["its member"], clients["an owner"]
    asked = {"purpose": purpose, "filename": "parts.jsonl", "bytes": len(content), "mime_type": "application/jsonl"}
    begun = post(member, "/v1/uploads", **asked).json()["id"]
    part = {"data": SimpleUploadedFile("part", content)}
    sent = member.post(f"/v1/uploads/{begun}/parts", part, format="multipart").json()["id"]

    done = post(owner, f"/v1/uploads/{begun}/complete", part_ids=[sent]).json()

    file, upload = BatchFile.objects.get(pk=done["file"]["id"]), Upload.objects.get(pk=begun)
    assert (file.project_id, file.created_by) == (secret_project.pk, upload.created_by)
    assert status_of(clients["an admin"], f"{FILES}/{done['file']['id']}/content") == 404


def test_a_viewer_of_a_project_changes_none_of_its_uploads(
    api_client, client_for, organization, clients, secret_project, alice, bob
):
    asked = {"purpose": "fine-tune", "filename": "a.jsonl", "bytes": 100, "mime_type": "application/jsonl"}
    begun = post(clients["its member"], "/v1/uploads", **asked).json()["id"]
    plan = {"filename": "big.jsonl", "bytes": 100, "name": "", "project": secret_project.pk}
    planned = client_for(bob).post("/datasets/uploads", plan, content_type="application/json").json()["id"]
    Project.objects.filter(pk=secret_project.pk).update(is_private=False)
    give_project_role(secret_project, alice, bob, "viewer")
    viewer, browser = api_client(make_key(organization, bob, scopes=SCOPED)), client_for(bob)

    part, one = {"data": SimpleUploadedFile("part", b"x" * 100)}, f"/datasets/uploads/{planned}"
    tried = [
        viewer.post(f"/v1/uploads/{begun}/parts", part, format="multipart"),
        post(viewer, f"/v1/uploads/{begun}/complete", part_ids=[]),
        post(viewer, f"/v1/uploads/{begun}/cancel"),
        browser.post(f"{one}/sign", {"numbers": [1]}, content_type="application/json"),
        browser.post(f"{one}/complete"),
        browser.post(f"{one}/cancel"),
    ]

    assert [each.status_code for each in tried] == [403] * 6
    assert set(Upload.objects.values_list("status", flat=True)) == {"pending"}


@pytest.mark.slow
def test_the_form_uploads_into_a_chosen_project_that_the_member_works_in(
    client_for, organization, alice, ann, bob, secret_project
):
    def send(who, project: str):
        sent = {"project": project, "file": SimpleUploadedFile("a.jsonl", jsonl())}
        return client_for(who).post("/datasets/upload", sent)

    assert "Secret" in client_for(bob).get("/datasets/upload").content.decode()
    assert "Secret" not in client_for(ann).get("/datasets/upload").content.decode()
    assert send(bob, secret_project.pk).status_code == 302
    assert send(bob, "").status_code == 302
    assert set(Dataset.objects.values_list("project_id", flat=True)) == {
        secret_project.pk, default_project_id(organization)
    }  # fmt: skip
    assert send(ann, secret_project.pk).status_code == 422
    give_project_role(secret_project, alice, bob, "viewer")
    refused = send(bob, secret_project.pk)
    assert refused.status_code == 422 and "Choose another project" in refused.content.decode()
    plan = {"filename": "big.jsonl", "bytes": 100, "name": "", "project": secret_project.pk}
    statuses = [
        client_for(who).post("/datasets/uploads", plan, content_type="application/json").status_code
        for who in (alice, bob, ann)
    ]
    assert statuses == [200, 403, 404] and Upload.objects.get().project_id == secret_project.pk


def test_a_viewer_of_a_project_changes_none_of_its_files(clients, organization, secret_project, alice, bob):
    version = upload(clients["its member"], BROKEN)
    give_project_role(secret_project, alice, bob, "viewer")
    for change in (
        lambda: operations.delete_version(version=version, by=bob.pk, now=db_now()),
        lambda: operations.dismiss_errors(version=version, by=bob.pk, now=db_now()),
        lambda: revisions.repair_version(version=version, mode=RepairMode.DROP, by=bob.pk, now=db_now()),
    ):
        with pytest.raises(PermissionDenied):
            change()


def test_hidden_files_count_toward_the_limit_of_files(organization, clients, monkeypatch):
    upload(clients["its member"])
    monkeypatch.setattr(versions, "MAX_FILES", 1)
    with seeing(sight_of_key(project_id="proj_other", scopes=())), pytest.raises(versions.StorageFull):
        make_version(organization)


@pytest.mark.slow
def test_a_job_shows_no_rows_of_a_file_that_is_hidden(client_for, floor, ann, bob, secret_project):
    job = floor.job()
    tab = f"/jobs/{job.pk}?tab=dataset"
    assert "Hello" in client_for(ann).get(tab).content.decode()
    Dataset.objects.filter(pk=job.training_file.dataset_id).update(project=secret_project)
    assert "Hello" not in client_for(ann).get(tab).content.decode()
    assert "Hello" in client_for(bob).get(tab).content.decode()


@pytest.mark.slow
def test_a_retraining_needs_a_maker_who_sees_the_datasets(organization, ann, floor, key, claim, secret_project):
    job = make_production(floor, key, claim)
    narrow = make_key(organization, ann, scopes=SCOPED)
    plan = make_plan(job, narrow)
    retraining = Retraining(plan=plan, organization=organization, created_by=narrow.key.pk)
    require_actor(retraining, db_now())
    Dataset.objects.filter(pk=plan.held_out_id).update(project=secret_project)
    plan.held_out.refresh_from_db()
    with pytest.raises(PermissionDenied):
        require_actor(retraining, db_now())
