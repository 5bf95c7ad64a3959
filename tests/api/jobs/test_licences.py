"""A licence that binds its users is accepted before anything is trained under it, once for the organization."""

import openai
import pytest

from apps.catalog.models import LicenceAcceptance
from apps.finetuning.models import FineTuningJob
from tests.factories.finetuning import TrainingSetup
from tests.support.sdk import extended_client, openai_client

LICENCE = "Llama 3.1 Community License"
URL = "/api/v1/models/anneal-demo/licence"


@pytest.fixture
def floor(organization) -> TrainingSetup:
    floor = TrainingSetup(organization)
    floor.base_model.licence = LICENCE
    floor.base_model.save(update_fields=["licence"])
    return floor


def headers(key) -> dict[str, str]:
    return {"Authorization": f"Bearer {key.secret}"}


def test_a_job_is_refused_until_the_licence_is_accepted(client, key, file_id):
    sdk = openai_client(key)
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.fine_tuning.jobs.create(model="anneal-demo", training_file=file_id)

    error = refused.value.body
    assert (error["code"], error["param"]) == ("licence_not_accepted", "model")
    assert LICENCE in error["message"] and f"POST {URL}" in error["message"]
    assert not FineTuningJob.objects.exists()

    asked = client.get(URL, headers=headers(key)).json()
    assert (asked["must_be_accepted"], asked["accepted_at"]) == (True, None)
    accepted = client.post(
        URL, {"licence": asked["licence"]}, headers=headers(key), content_type="application/json"
    ).json()
    assert accepted["accepted_at"] and accepted["accepted_by"].startswith("key_")
    assert sdk.fine_tuning.jobs.create(model="anneal-demo", training_file=file_id).status == "queued"


def test_a_dry_run_says_that_the_licence_is_missing(key, file_id):
    answer = extended_client(key).fine_tuning.jobs.create(
        model="anneal-demo", training_file=file_id, extra_body={"dry_run": True}
    )

    assert "licence_not_accepted" in str(answer.model_extra)


def test_another_name_than_the_licences_accepts_nothing(client, key, floor):
    answer = client.post(URL, {"licence": "MIT"}, headers=headers(key), content_type="application/json")

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "licence")
    assert not LicenceAcceptance.objects.exists()


def test_a_licence_that_changed_must_be_accepted_anew(client, key, floor):
    client.post(URL, {"licence": LICENCE}, headers=headers(key), content_type="application/json")
    floor.base_model.licence = "Llama 3.3 Community License"
    floor.base_model.save(update_fields=["licence"])

    assert client.get(URL, headers=headers(key)).json()["accepted_at"] is None


@pytest.mark.parametrize(
    ("licence", "is_asked"),
    [
        ("Apache-2.0", False),
        ("MIT", False),
        ("", False),
        ("Gemma Terms of Use", True),
        ("Apache-2.0 except 3B (Qwen Research) and 72B (Qwen License)", True),
        ("MIT for DeepSeek weights; base-model licence also applies", True),
        ("MIT AND Llama 3.1 Community License", True),
    ],
)
def test_only_licences_that_bind_their_users_are_asked_for(floor, licence, is_asked):
    floor.base_model.licence = licence

    assert floor.base_model.demands_acceptance is is_asked
