"""Pausing and resuming a job, as OpenAI's own SDK does it."""

import openai
import pytest

from tests.factories.accounts import make_key
from tests.support.attempts import Attempt
from tests.support.sdk import create, extended_client


def test_pausing_a_queued_job_is_a_wrong_state(sdk, file_id):
    job = create(sdk, file_id)

    with pytest.raises(openai.BadRequestError) as refused:
        sdk.fine_tuning.jobs.pause(job.id)

    assert refused.value.code == "invalid_state"


@pytest.mark.slow
@pytest.mark.usefixtures("metered")
def test_a_running_job_pauses_and_resumes_through_the_sdk(key, floor, file_id, claim):
    sdk = extended_client(key)
    job = create(sdk, file_id, extra_body={"budget": {"max_cost_usd": "0.09"}})
    attempt: Attempt = claim().start()

    assert sdk.fine_tuning.jobs.pause(job.id).status == "pausing"
    attempt.pause(step=5, seconds=9.0)
    paused = sdk.fine_tuning.jobs.retrieve(job.id)
    assert (paused.status, paused.model_extra["cost_usd"], paused.model_extra["held_usd"]) == ("paused", "0.009", "0")
    assert [row.step_number for row in sdk.fine_tuning.jobs.checkpoints.list(job.id)] == [5]
    resumed = sdk.fine_tuning.jobs.resume(job.id)

    assert (resumed.status, resumed.model_extra["held_usd"]) == ("queued", "0.081")
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.fine_tuning.jobs.resume(job.id)
    assert refused.value.code == "invalid_state"


@pytest.mark.slow
@pytest.mark.usefixtures("metered")
def test_a_resume_may_raise_the_cap(api_client, key, floor, claim):
    job = floor.job(spend_cap_nano=60_000_000)
    attempt: Attempt = claim().start()
    attempt.beat(training_seconds=46.0)
    attempt.pause(step=5, seconds=47.0)
    url = f"/v1/fine_tuning/jobs/{job.pk}/resume"

    refused = api_client(key).post(url)
    raised = api_client(key).post(url, {"budget": {"max_cost_usd": "0.12"}}, format="json")

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "budget.max_cost_usd")
    assert (raised.json()["status"], raised.json()["spend_cap_usd"], raised.json()["held_usd"]) == (
        "queued",
        "0.12",
        "0.073",
    )


@pytest.mark.slow
@pytest.mark.parametrize("action", ["pause", "resume"])
def test_who_may_pause_and_resume(
    action,
    api_client,
    organization,
    floor,
    claim,
    alice,
    bob,
    vera,
    rival,
    charlie,
):
    floor.job()
    attempt: Attempt = claim().start()
    url = f"/v1/fine_tuning/jobs/{attempt.claimed.spec.job_id}/{action}"
    keys = [None, make_key(rival, charlie), make_key(organization, vera, scopes=frozenset({"view"}))]

    refused = [api_client(key).post(url).status_code for key in keys]

    assert refused == [401, 404, 403]
    assert attempt.beat().is_pause_requested is False
    expected = 200 if action == "pause" else 400  # a running job cannot be resumed: they are let in, and told so
    member = make_key(organization, bob, scopes=frozenset({"view", "job.write"}))
    assert api_client(member).post(url).status_code == expected
    assert api_client(make_key(organization, alice)).post(url).status_code == 400
