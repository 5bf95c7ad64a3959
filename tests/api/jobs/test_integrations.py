"""Experiment trackers by the customer's own key: it is stored sealed and reaches only the run's worker."""

import openai
import pytest

from apps.core.models import AuditEntry
from apps.finetuning.models import FineTuningJob, JobEvent, TrackerKey
from tests.factories.accounts import make_key
from tests.support.attempts import Attempt
from tests.support.sdk import openai_client

SECRET = "wandb-key-0123456789abcdef"
WANDB = {"type": "wandb", "wandb": {"project": "triage", "name": "first", "entity": "acme", "tags": ["a", "b"]}}


def call(client, key, method: str, kind: str = "", body: dict | None = None):
    return getattr(client, method)(
        f"/api/v1/integrations{kind and '/' + kind}",
        body,
        headers={"Authorization": f"Bearer {key.secret}"},
        **({} if method == "get" else {"content_type": "application/json"}),
    )


def create(key, file_id, *integrations):
    return openai_client(key).fine_tuning.jobs.create(
        model="anneal-demo", training_file=file_id, integrations=list(integrations)
    )


def test_a_key_goes_in_and_never_comes_out(client, key, floor):
    stored = call(client, key, "put", "wandb", {"key": SECRET})
    listed = call(client, key, "get")

    assert stored.json()["key_hint"] == SECRET[-4:]
    assert [row["type"] for row in listed.json()["data"]] == ["wandb"]
    for answer in (stored, listed):
        assert SECRET not in answer.content.decode()
    assert SECRET.encode() not in bytes(TrackerKey.objects.get().secret_sealed)
    assert SECRET not in str(list(AuditEntry.objects.values()))


def test_a_job_reports_with_the_stored_key_which_no_object_of_it_holds(client, key, file_id, claim):
    call(client, key, "put", "wandb", {"key": SECRET})

    job = create(key, file_id, WANDB)
    attempt: Attempt = claim()

    [tracker] = attempt.claimed.spec.trackers
    assert (tracker.kind, tracker.project, tracker.name, tracker.entity) == ("wandb", "triage", "first", "acme")
    assert (tracker.tags, tracker.secret) == (("a", "b"), SECRET)
    assert job.integrations[0].wandb.project == "triage"
    assert SECRET not in str(FineTuningJob.objects.values().get())
    assert SECRET not in str(list(JobEvent.objects.values()))


def test_a_job_whose_key_was_taken_away_runs_without_it(client, key, file_id, claim):
    call(client, key, "put", "wandb", {"key": SECRET})
    create(key, file_id, WANDB)

    assert call(client, key, "delete", "wandb").json()["deleted"]
    assert claim().claimed.spec.trackers == ()


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (WANDB, "integrations[0]"),  # no key is stored
        ({"type": "comet", "comet": {"project": "p"}}, "integrations[0].type"),
        ({"type": "wandb", "wandb": {}}, "integrations[0].wandb"),
        ({"type": "wandb"}, "integrations[0].wandb"),
        ({"type": "wandb", "wandb": {"project": "p", "api_key": "x"}}, "integrations[0].wandb"),
        ({"type": "wandb", "wandb": {"project": ""}}, "integrations[0].wandb"),
    ],
)
def test_an_integration_that_cannot_work_is_refused_at_creation(key, file_id, given, param):
    with pytest.raises(openai.BadRequestError) as refused:
        create(key, file_id, given)

    assert refused.value.body["param"] == param
    assert not FineTuningJob.objects.exists()


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        ("comet", {"key": SECRET}, "kind"),
        ("wandb", {"key": "short"}, "key"),
        ("wandb", {"key": "with a space in it"}, "key"),
        ("wandb", {"key": SECRET, "url": "https://x.example"}, "url"),
        ("mlflow", {"key": SECRET}, "url"),
        ("mlflow", {"key": SECRET, "url": "http://mlflow.example.com"}, "url"),
        ("mlflow", {"key": SECRET, "url": "https://user:pass@mlflow.example.com"}, "url"),
    ],
)
def test_a_key_that_cannot_be_used_is_refused(client, key, floor, kind, body, param):
    answer = call(client, key, "put", kind, body)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not TrackerKey.objects.exists()


def test_another_organizations_key_is_neither_seen_nor_used(client, key, floor, rival, charlie, file_id):
    call(client, make_key(rival, charlie), "put", "wandb", {"key": SECRET})

    assert call(client, key, "get").json()["data"] == []
    with pytest.raises(openai.BadRequestError, match="No key of Weights & Biases"):
        create(key, file_id, WANDB)


def test_the_metrics_of_a_job_are_a_tensorboard_file(client, key, file_id):
    job = create(key, file_id)
    path = f"/api/v1/fine_tuning/jobs/{job.id}/tensorboard"

    answer = client.get(path, headers={"Authorization": f"Bearer {key.secret}"})

    assert answer.status_code == 200 and b"brain.Event:2" in answer.content
    assert "events.out.tfevents." in answer.headers["Content-Disposition"]
