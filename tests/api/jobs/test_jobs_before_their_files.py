"""Jobs created before their file is validated: they wait for it, fail with it, or are cancelled."""

import openai
import pytest

from apps.datasets.tasks import validate
from apps.finetuning.tasks import admit_waiting
from tests.factories.datasets import jsonl
from tests.support.sdk import create


@pytest.mark.slow
def test_a_job_created_right_after_its_file_waits_for_it(sdk, floor):
    file = sdk.files.create(file=("rows.jsonl", jsonl(40)), purpose="fine-tune")

    job = create(sdk, file.id, extra_headers={"Idempotency-Key": "once"})
    again = create(sdk, file.id, extra_headers={"Idempotency-Key": "once"})

    assert (job.status, again.id, job.model_extra["held_usd"]) == ("validating_files", job.id, None)
    assert [listed.id for listed in sdk.fine_tuning.jobs.list()] == [job.id]
    assert f"Validating training file: {file.id}" in [
        event.message for event in sdk.fine_tuning.jobs.list_events(job.id)
    ]
    validate(file.id)
    admit_waiting()
    job = sdk.fine_tuning.jobs.retrieve(job.id)
    assert job.status == "queued" and float(job.model_extra["held_usd"]) > 0


def test_a_job_whose_file_turns_out_bad_names_file_line_and_fix(sdk, floor):
    file = sdk.files.create(file=("rows.jsonl", jsonl(40) + b'{"messages": 1}\n'), purpose="fine-tune")
    job = create(sdk, file.id)

    validate(file.id)
    admit_waiting()

    job = sdk.fine_tuning.jobs.retrieve(job.id)
    assert (job.status, job.error.code, job.error.param) == ("failed", "invalid_training_file", "training_file")
    assert job.error.message.startswith(f"rows.jsonl ({file.id}), line 41: ")
    assert float(job.model_extra["cost_usd"]) == 0


@pytest.mark.slow
def test_a_job_that_waits_for_its_file_can_be_cancelled(sdk, floor):
    file = sdk.files.create(file=("rows.jsonl", jsonl(40)), purpose="fine-tune")
    job = create(sdk, file.id)

    assert sdk.fine_tuning.jobs.cancel(job.id).status == "cancelled"
    validate(file.id)
    admit_waiting()

    assert sdk.fine_tuning.jobs.retrieve(job.id).status == "cancelled"
    assert sdk.files.delete(file.id).deleted


def test_a_dry_run_of_a_file_under_validation_says_when_to_ask_again(sdk, floor):
    file = sdk.files.create(file=("rows.jsonl", jsonl(40)), purpose="fine-tune")

    with pytest.raises(openai.InternalServerError) as refused:
        create(sdk, file.id, extra_body={"dry_run": True})

    error = refused.value
    assert (error.status_code, error.code, error.param) == (503, "file_still_validating", "training_file")
    assert error.response.headers["Retry-After"] == "2"
    assert "You can create the job now" in error.message
