"""What a job leaves: its model, events, result file, reports of failure, and the job that continues it."""

import time

import openai
import pytest

from apps.contracts import runs as wire
from apps.contracts.failures import FailureCode
from apps.interfaces.api.openai import files
from tests.factories.accounts import make_key
from tests.factories.finetuning import make_training_file
from tests.support.attempts import Attempt
from tests.support.sdk import create, openai_client


@pytest.mark.slow
def test_a_job_runs_to_a_model_and_its_events_tell_the_story(sdk, floor, file_id, claim):
    job = create(sdk, file_id)
    attempt: Attempt = claim().start()
    attempt.report(
        wire.StepCompleted,
        step=1,
        total_steps=10,
        epoch=0.1,
        train_loss=2.5,
        learning_rate=1e-3,
        grad_norm=1.0,
        trained_tokens=50,
        tokens_per_second=900.0,
        training_seconds=1.0,
    )
    attempt.checkpoint(step=5, seconds=9.0)
    assert sdk.fine_tuning.jobs.checkpoints.list(job.id).data[0].step_number == 5
    assert sdk.fine_tuning.jobs.retrieve(job.id).estimated_finish > time.time()
    attempt.succeed(floor.base_model)

    done = sdk.fine_tuning.jobs.retrieve(job.id)
    assert (done.status, done.estimated_finish) == ("succeeded", None)
    assert done.fine_tuned_model.startswith("ft:anneal-demo:")
    assert done.trained_tokens == 500
    metrics = [event for event in sdk.fine_tuning.jobs.list_events(job.id) if event.type == "metrics"]
    assert metrics[0].data["train_loss"] == 2.5


@pytest.mark.slow
def test_result_files_are_listed_between_the_uploaded_ones(sdk, floor, file_id, claim, rival, charlie, monkeypatch):
    results = []
    for _ in range(3):
        job = create(sdk, file_id)
        claim().start().succeed(floor.base_model)
        results.insert(0, sdk.fine_tuning.jobs.retrieve(job.id).result_files[0])
    newest = make_training_file(floor.organization, floor.base_model).pk
    monkeypatch.setattr(files, "LISTED_RESULTS", 2)  # a page may end sooner than it was asked to, and says so

    assert [file.id for file in sdk.files.list(purpose="fine-tune-results")] == results
    assert [file.id for file in sdk.files.list()] == [newest, *results, file_id]
    assert [file.id for file in sdk.files.list(order="asc", limit=1)] == [file_id, *reversed(results), newest]
    assert [file.id for file in sdk.files.list(after=results[1])] == [results[2], file_id]
    assert [file.id for file in sdk.files.list(purpose="fine-tune")] == [newest, file_id]
    listed = sdk.files.list(purpose="fine-tune-results").data[0]
    assert listed == sdk.files.retrieve(results[0]) and listed.bytes == len(sdk.files.content(results[0]).read())
    assert list(openai_client(make_key(rival, charlie)).files.list()) == []


@pytest.mark.slow
def test_a_finished_jobs_metrics_are_its_result_file(sdk, floor, file_id, claim, rival, charlie):
    job = create(sdk, file_id)
    attempt: Attempt = claim().start()
    for step, loss in ((1, 2.5), (2, 2.0), (2, 1.75)):  # the last again, as after a resume
        attempt.report(
            wire.StepCompleted,
            step=step,
            total_steps=2,
            epoch=0.1,
            train_loss=loss,
            learning_rate=1e-3,
            grad_norm=1.0,
            trained_tokens=50,
            tokens_per_second=900.0,
            training_seconds=1.0,
            train_mean_token_accuracy=0.5,
        )
    attempt.report(wire.EvaluationCompleted, step=2, valid_loss=1.5, valid_mean_token_accuracy=0.25)
    assert sdk.fine_tuning.jobs.retrieve(job.id).result_files == []
    attempt.succeed(floor.base_model)

    [result] = sdk.fine_tuning.jobs.retrieve(job.id).result_files

    content = sdk.files.content(result).read()
    assert content.decode().splitlines() == [
        "step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy",
        "1,2.5,0.5,,",
        "2,1.75,0.5,1.5,0.25",
    ]
    file = sdk.files.retrieve(result)
    assert (file.purpose, file.status, file.bytes) == ("fine-tune-results", "processed", len(content))
    with pytest.raises(openai.BadRequestError) as kept:
        sdk.files.delete(result)
    assert kept.value.param == "file_id"
    for unknown in (f"{result[:-1]}!", "file-result-", result.upper()):
        with pytest.raises(openai.NotFoundError):
            sdk.files.retrieve(unknown)
    stranger = openai_client(make_key(rival, charlie))
    for ask in (stranger.files.retrieve, stranger.files.content):
        with pytest.raises(openai.NotFoundError):
            ask(result)


@pytest.mark.slow
def test_a_job_names_the_export_that_it_could_not_make(sdk, file_id, floor, claim):
    job = create(sdk, file_id, extra_body={"exports": ["merged_16bit"]})
    attempt = claim().start()

    missing = wire.MissingPart(kind="merged_16bit", cause="the disk was full")
    attempt.succeed(floor.base_model, missing=(missing,))

    found = sdk.fine_tuning.jobs.retrieve(job.id)
    [named] = found.model_extra["missing"]
    assert found.status == "succeeded" and found.fine_tuned_model
    assert (named["kind"], named["cause"]) == ("merged_16bit", "the disk was full")
    assert "merge_and_unload" in named["fix"]


@pytest.mark.slow
def test_a_failed_job_explains_itself(sdk, floor, file_id, claim):
    job = create(sdk, file_id)
    attempt: Attempt = claim().start()
    attempt.finish(wire.Failed(code=FailureCode.OUT_OF_MEMORY, message="Out of memory at step 3.", log_tail="the end"))

    error = sdk.fine_tuning.jobs.retrieve(job.id).error

    assert (error.code, error.message) == ("out_of_memory", "Out of memory at step 3.")
    extra = error.model_extra
    assert (extra["blame"], extra["suggestion"]["changes"]["method"]) == ("platform", "qlora")
    assert extra["evidence"][0] == {"name": "Reported", "value": "Out of memory at step 3."}
    assert float(extra["suggestion"]["estimated_cost_usd"]) > 0 and extra["log_tail"] == "the end"
    [listed] = sdk.fine_tuning.jobs.list()
    assert listed.error.model_extra["blame"] == "platform"

    with pytest.raises(openai.BadRequestError) as risen:
        start_again(sdk, job.id, budget={"quoted_max_usd": "0.000001"})
    with pytest.raises(openai.BadRequestError) as nothing:
        start_again(sdk, job.id, budget={"max_cost_usd": "0"})
    again = start_again(sdk, job.id, budget={"quoted_max_usd": extra["suggestion"]["hold_usd"]})

    assert nothing.value.param == "budget.max_cost_usd", "0 is a cap, and not the suggested one"
    assert (risen.value.code, risen.value.param) == ("maximum_raised", "budget.quoted_max_usd")
    assert (again["status"], again["recipe"]["method"]) == ("queued", "qlora")
    assert again["held_usd"] == extra["suggestion"]["hold_usd"]
    assert again["estimate"]["cost_nano_p50"] == round(float(extra["suggestion"]["estimated_cost_usd"]) * 1e9)
    assert start_again(sdk, job.id)["id"] == again["id"]


def start_again(sdk: openai.OpenAI, job_id: str, **body: object) -> dict:
    address = f"{sdk.base_url}".replace("/v1/", f"/api/v1/fine_tuning/jobs/{job_id}/retry")
    return sdk.post(address, body=body, cast_to=object)


def test_only_a_failed_job_is_started_again_and_with_money_that_was_named(sdk, file_id):
    job = create(sdk, file_id)

    with pytest.raises(openai.BadRequestError) as refused:
        start_again(sdk, job.id)
    with pytest.raises(openai.BadRequestError) as misread:
        start_again(sdk, job.id, budget={"max_cost_usd": "lots"})

    assert (refused.value.code, refused.value.param) == ("invalid_state", "fine_tuning_job_id")
    assert misread.value.param == "budget.max_cost_usd"


@pytest.mark.slow
def test_a_key_that_may_not_move_aliases_retries_no_job_of_apply(sdk, file_id, floor, alice):
    job = create(sdk, file_id, metadata={"apply.name": "support-bot"})

    with pytest.raises(openai.PermissionDeniedError, match="lacks the scope"):
        start_again(openai_client(make_key(floor.organization, alice, scopes=frozenset({"view", "job.write"}))), job.id)


@pytest.mark.slow
def test_a_key_that_may_not_write_files_starts_no_mended_one(floor, alice, claim):
    job = floor.job()
    claim().finish(wire.Failed(code=FailureCode.INVALID_TRAINING_FILE, message="Line 3: no answer."))
    scopes = frozenset({"view", "job.write"})

    with pytest.raises(openai.PermissionDeniedError, match=r"dataset\.write"):
        start_again(openai_client(make_key(floor.organization, alice, scopes=scopes)), job.pk)
    again = start_again(openai_client(make_key(floor.organization, alice, scopes=scopes | {"dataset.write"})), job.pk)

    assert again["status"] == "validating_files"


@pytest.mark.slow
def test_a_job_continues_a_fine_tuned_model_in_its_shape(sdk, floor, file_id, claim):
    create(sdk, file_id, extra_body={"lora": {"rank": 8, "use_rslora": True}})
    claim().start().succeed(floor.base_model)
    model = sdk.fine_tuning.jobs.list().data[0].fine_tuned_model

    with pytest.raises(openai.BadRequestError) as refused:
        create(sdk, file_id, model=model, extra_body={"lora": {"rank": 16}})
    job = create(sdk, file_id, model=model)
    second: Attempt = claim()

    recipe = job.model_extra["recipe"]
    assert refused.value.param == "lora.rank"
    assert (recipe["lora_rank"], recipe["use_rslora"], job.model_extra["continues"]["model"]) == (8, True, model)
    assert (job.model, job.model_extra["base_model"]) == (model, "anneal-demo")
    start = second.claimed.spec.start_from
    assert {file.name for file in start.files} == {"adapter_config.json", "adapter_model.safetensors", "manifest.json"}
    assert second.claimed.spec.resume_from is None
