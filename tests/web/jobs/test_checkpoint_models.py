"""A checkpoint as a model that answers: from the job's page and the API into the playground, before the job ends."""

import datetime
import io
import zipfile

import pytest

from apps.adapters.models import AdapterVersion
from apps.contracts import runs as wire
from apps.core.database.clock import db_now
from apps.core.models import AuditEntry, OutboxMessage
from apps.core.objects.store import read_object
from apps.finetuning.models import Checkpoint
from apps.finetuning.recipes.checkpoint_names import name_of
from apps.finetuning.results.checkpoint_models import request_model
from apps.finetuning.results.retention import sweep_checkpoints
from apps.finetuning.tasks import serve_named_checkpoint
from apps.serving.operations import undeploy
from tests.factories.accounts import give_project_role, make_organization
from tests.factories.finetuning import adapter_files, checkpoint_files
from tests.support.pages import text


@pytest.fixture
def attempt(floor, claim):
    floor.job(suffix="triage")
    attempt = claim().start()
    rank = attempt.claimed.spec.hyperparameters.lora_rank
    attempt.checkpoint(4, 8.0, files=checkpoint_files() | adapter_files(floor.base_model, rank=rank))
    return attempt


@pytest.fixture
def checkpoint(attempt) -> Checkpoint:
    return Checkpoint.objects.get()


@pytest.mark.slow
def test_a_member_tries_a_checkpoint_in_the_playground_while_the_job_runs(checkpoint, client_for, alice) -> None:
    client = client_for(alice)
    assert "Try" in client.get(f"/jobs/{checkpoint.job_id}?tab=checkpoints").content.decode()

    answer = client.post(f"/checkpoints/{checkpoint.pk}/try")

    assert AdapterVersion.objects.get().model_name.endswith(":ckpt-step-4")
    assert answer.status_code == 302 and "/playground?model=ft" in answer["Location"]
    page = text(client.get(answer["Location"]))
    assert '<optgroup label="Checkpoints">' in page and "triage, step 4" in page
    client.post(f"/checkpoints/{checkpoint.pk}/try")
    assert AdapterVersion.objects.count() == 1


@pytest.mark.slow
def test_a_viewer_of_its_project_serves_no_checkpoint(checkpoint, organization, client_for, alice, bob) -> None:
    job = checkpoint.job
    give_project_role(job.project, alice, bob, "viewer")

    answer = client_for(bob).post(f"/checkpoints/{checkpoint.pk}/try", follow=True)

    assert answer.redirect_chain == [(f"/jobs/{job.pk}?tab=checkpoints", 302)]
    assert "does not allow changing" in text(answer) and not AdapterVersion.objects.exists()


@pytest.mark.slow
def test_a_viewer_downloads_the_adapter_of_a_checkpoint_and_the_log_has_it(
    checkpoint, client_for, vera, charlie
) -> None:
    client = client_for(vera)
    address = f"/checkpoints/{checkpoint.pk}/download"
    assert f'href="{address}"' in client.get(f"/jobs/{checkpoint.job_id}?tab=checkpoints").content.decode()

    client.head(address)
    assert not AuditEntry.objects.filter(action="checkpoint.downloaded").exists(), "nothing was sent"
    answer = client.get(address)

    archive = zipfile.ZipFile(io.BytesIO(b"".join(answer.streaming_content)))
    files = {"triage-step-4/adapter_config.json", "triage-step-4/adapter_model.safetensors"}
    assert set(archive.namelist()) == files
    assert AuditEntry.objects.filter(action="checkpoint.downloaded", target=checkpoint.pk).exists()
    make_organization("Rival", owner=charlie)
    assert client_for(charlie).get(address).status_code == 404


@pytest.mark.slow
def test_the_api_names_it_and_what_answers_outlives_the_checkpoint(
    floor,
    attempt,
    checkpoint,
    api_client,
    key,
) -> None:
    http = api_client(key)
    [listed] = http.get(f"/v1/fine_tuning/jobs/{checkpoint.job_id}/checkpoints").json()["data"]

    limits = f"/api/v1/models/{listed['fine_tuned_model_checkpoint']}/limits"
    fixed = http.get(limits).json()["fixed"]
    served = http.post(f"/api/v1/checkpoints/{checkpoint.pk}/serve").json()
    attempt.succeed(floor.base_model)

    assert http.get(limits).json()["fixed"] == fixed and fixed["lora_alpha"], "it can be continued as before"
    assert served["model"] == listed["fine_tuned_model_checkpoint"]
    early, final = AdapterVersion.objects.get(number=None), AdapterVersion.objects.get(number=1)
    assert early.adapter_id == final.adapter_id
    assert (early.label, final.label) == ("step 4", "version 1")
    assert {file["name"] for file in early.manifest["files"]} == {"adapter_config.json", "adapter_model.safetensors"}
    assert read_object(f"{early.object_prefix}/adapter_config.json")
    [kept] = http.get(f"/v1/fine_tuning/jobs/{checkpoint.job_id}/checkpoints").json()["data"]
    assert kept["fine_tuned_model_checkpoint"] == served["model"]
    assert http.post(f"/api/v1/checkpoints/{checkpoint.pk}/serve").status_code == 200


@pytest.mark.slow
def test_its_name_is_known_to_every_call_before_a_request_uses_it(floor, organization, checkpoint, api_client, key):
    http, name = api_client(key), name_of(checkpoint)
    body = {"model": name, "training_file": checkpoint.job.training_file_id, "dry_run": True}

    model = http.get(f"/v1/models/{name}").json()
    serving = http.get(f"/api/v1/models/{name}/serving").json()
    limits = http.get(f"/api/v1/models/{name}/limits").json()
    rehearsed = http.post("/v1/fine_tuning/jobs", body, format="json")
    assert (model["id"], model["parent"]) == (name, floor.base_model.name)
    assert (serving["model"], serving["state"]) == (name, "off")
    assert limits["fixed"]["lora_rank"] == checkpoint.job.hyperparameters["lora_rank"]
    assert rehearsed.status_code == 200
    made = http.post("/v1/fine_tuning/jobs", body | {"dry_run": False}, format="json").json()
    assert (made["model"], made["base_model"]) == (name, floor.base_model.name)
    assert made["continues"] == {"checkpoint": checkpoint.pk, "model": name}
    assert not AdapterVersion.objects.exists()

    early = http.post("/api/v1/aliases", {"name": "early", "version": name}, format="json")
    assert (early.status_code, early.json()["error"]["code"]) == (400, "invalid_state")
    missing = http.post("/api/v1/aliases", {"name": "late", "version": f"{name}9"}, format="json")
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "version")
    served = http.post(f"/api/v1/models/{name}/serving", {"is_served": True}, format="json").json()
    assert served["model"] == AdapterVersion.objects.get().model_name == name


def test_a_name_that_was_never_served_is_made_when_it_is_asked_for(floor, organization, checkpoint, rival) -> None:
    name = name_of(checkpoint)
    variants = [f"{name}9", name.replace("step-4", "step-٤"), f"{name[:-1]}{'9' * 5000}", name.partition(":ckpt")[0]]

    assert not any(request_model(organization_id=organization.pk, model_name=each) for each in variants)
    assert not request_model(organization_id=rival.pk, model_name=name)
    assert request_model(organization_id=organization.pk, model_name=name)
    assert request_model(organization_id=organization.pk, model_name=name)  # the same effect, once
    [asked] = OutboxMessage.objects.filter(topic="checkpoint.named")
    assert (asked.lane, asked.share) == ("data-middle", organization.pk), "a large copy delays no short task"
    serve_named_checkpoint(**asked.payload)

    assert AdapterVersion.objects.get().model_name == name
    assert not request_model(organization_id=organization.pk, model_name=name)  # it has a route now
    Checkpoint.objects.update(deleted_at=db_now())
    serve_named_checkpoint(**asked.payload)  # late: nothing to do, and nothing to try again


@pytest.mark.slow
def test_the_newest_the_best_and_one_of_each_epoch_are_kept_and_listed(floor, claim, api_client, key) -> None:
    floor.job(hyperparameters={"epochs": 5})
    attempt = claim().start(total_steps=50)
    rank = attempt.claimed.spec.hyperparameters.lora_rank
    files = checkpoint_files() | adapter_files(floor.base_model, rank=rank)
    for step, loss in ((4, 3.0), (9, 0.5), (12, 0.2), (19, 0.4), (25, 0.6), (27, 0.7), (28, 0.8), (49, 0.9)):
        attempt.report(wire.EvaluationCompleted, step=step, valid_loss=loss)
        attempt.checkpoint(step, 8.0, files=files | {"scheduler.pt": str(step).encode()})
    job_id = attempt.claimed.spec.job_id

    def listed() -> list[int]:
        rows = api_client(key).get(f"/v1/fine_tuning/jobs/{job_id}/checkpoints").json()["data"]
        return [row["step_number"] for row in rows]

    assert listed() == [49, 28, 19, 12, 9]
    attempt.succeed(floor.base_model)
    assert listed() == [49, 28, 19, 12, 9]
    sweep_checkpoints(now=db_now() + datetime.timedelta(days=31))
    assert listed() == []


def test_a_checkpoint_that_no_engine_loads_names_no_model(floor, claim, api_client, key) -> None:
    floor.job(hyperparameters={"use_dora": True})
    attempt = claim().start()
    attempt.checkpoint(4, 8.0)

    url = f"/v1/fine_tuning/jobs/{attempt.claimed.spec.job_id}/checkpoints"
    [listed] = api_client(key).get(url).json()["data"]

    assert listed["fine_tuned_model_checkpoint"] is None


def test_a_checkpoint_without_an_adapter_is_refused(attempt, api_client, key) -> None:
    attempt.checkpoint(6, 12.0)
    checkpoint = Checkpoint.objects.get(step=6)

    answer = api_client(key).post(f"/api/v1/checkpoints/{checkpoint.pk}/serve")

    assert (answer.status_code, "no adapter" in answer.json()["error"]["message"]) == (400, True)


@pytest.mark.slow
def test_a_finished_job_leads_to_the_playground_or_to_an_adapter_that_is_not_served(floor, attempt, client_for, alice):
    attempt.succeed(floor.base_model)
    [version] = AdapterVersion.objects.all()
    address = f"/jobs/{attempt.claimed.spec.job_id}"

    served = client_for(alice).get(address).content.decode()
    undeploy(version=version, by=alice.pk, now=db_now())
    stopped = client_for(alice).get(address).content.decode()

    assert "Try it" in served and "See adapter" not in served
    assert "Try it" not in stopped and f"/adapters/{version.pk}" in stopped
