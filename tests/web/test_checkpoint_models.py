"""A checkpoint as a model that answers: from the job's page and the API into the playground, before the job ends."""

import html

import pytest

from apps.adapters.models import AdapterVersion
from apps.core.object_store import read_object
from apps.finetuning.models import Checkpoint
from apps.serving.operations import deploy
from tests.factories.finetuning import adapter_files, checkpoint_files


@pytest.fixture
def attempt(floor, claim):
    floor.job(suffix="triage")
    attempt = claim()
    attempt.start()
    rank = attempt.claimed.spec.hyperparameters.lora_rank
    attempt.checkpoint(4, 8.0, files=checkpoint_files() | adapter_files(floor.base_model, rank=rank))
    return attempt


@pytest.fixture
def checkpoint(attempt) -> Checkpoint:
    return Checkpoint.objects.get()


def test_a_member_tries_a_checkpoint_in_the_playground_while_the_job_runs(checkpoint, client_for, alice) -> None:
    client = client_for(alice)
    assert "Try" in client.get(f"/jobs/{checkpoint.job_id}").content.decode()

    answer = client.post(f"/checkpoints/{checkpoint.pk}/try")

    version = AdapterVersion.objects.get()
    assert version.model_name.endswith(":ckpt-step-4")
    assert answer.status_code == 302 and "/playground?model=ft" in answer["Location"]
    deploy(version=version, by="system")  # as the outbox does
    page = html.unescape(client.get(answer["Location"]).content.decode())
    assert '<optgroup label="Checkpoints">' in page and "triage, step 4" in page
    client.post(f"/checkpoints/{checkpoint.pk}/try")
    assert AdapterVersion.objects.count() == 1


def test_the_api_names_it_and_what_answers_outlives_the_checkpoint(
    floor,
    attempt,
    checkpoint,
    api_client,
    key,
) -> None:
    http = api_client(key)
    [listed] = http.get(f"/v1/fine_tuning/jobs/{checkpoint.job_id}/checkpoints").json()["data"]

    served = http.post(f"/api/v1/checkpoints/{checkpoint.pk}/serve").json()
    attempt.succeed(floor.base_model)

    assert served["model"] == listed["fine_tuned_model_checkpoint"]
    early, final = AdapterVersion.objects.order_by("number")
    assert (early.adapter_id, early.number, final.number) == (final.adapter_id, 1, 2)
    assert {file["name"] for file in early.manifest["files"]} == {"adapter_config.json", "adapter_model.safetensors"}
    assert read_object(f"{early.object_prefix}/adapter_config.json")
    assert http.post(f"/api/v1/checkpoints/{checkpoint.pk}/serve").status_code == 404


def test_a_checkpoint_without_an_adapter_is_refused(attempt, api_client, key) -> None:
    attempt.checkpoint(6, 12.0)
    checkpoint = Checkpoint.objects.get(step=6)

    answer = api_client(key).post(f"/api/v1/checkpoints/{checkpoint.pk}/serve")

    assert (answer.status_code, "no adapter" in answer.json()["error"]["message"]) == (400, True)
