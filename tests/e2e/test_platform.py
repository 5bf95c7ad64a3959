"""A short main job through every real process, and the two deaths that hurt most."""

import json
import subprocess
from typing import Any, NamedTuple

import openai
import pytest

from gpu_workers.common.process_tree import identify, is_alive, list_descendants, read_command
from tests.e2e.platform import ROOT, Platform, until

_JUDGED_ROWS = 4


class Judged(NamedTuple):
    """A model with its report, and what its judge was charged."""

    model: str
    report: dict[str, Any]
    charged_usd: float


class Interrupted(NamedTuple):
    """A job that is under way again, itself when it was paused, and the bill before it."""

    job_id: str
    paused: Any
    books: dict[str, Any]


@pytest.fixture(scope="module")
def judged(platform: Platform, file_id: str) -> Judged:
    """A model trained by a whole job and graded by a judge; the judge's tokens, all of them, are on the bill."""
    before = platform.wait_for_settled_books()
    judge = {"type": "judge", "model": platform.model, "instructions": "Is it the same intent?"}
    job_id = platform.create_job(
        file_id,
        epochs=1,
        recipe={"epochs": 1, "validation_share": 0.01},
        evaluation={"grader": judge, "max_rows": 8, "max_answers": _JUDGED_ROWS},
    )
    job = platform.wait_for_end(job_id)
    assert job.status == "succeeded", job.error
    report = platform.client.models.retrieve(job.fine_tuned_model).model_extra["evaluation"]
    tokens = report["judge_input_tokens"] + report["judge_output_tokens"]
    billed = before["tokens_billed"] + tokens  # nobody else has asked anything since
    until(lambda: platform.billing()["tokens_billed"] == billed, 60, f"the bill is not {tokens} tokens longer")
    charged_usd = float(platform.billing()["inference_usd"]) - float(before["inference_usd"])
    platform.wait_until_answers(job.fine_tuned_model)
    return Judged(job.fine_tuned_model, report, charged_usd)


@pytest.fixture(scope="module")
def model(judged: Judged) -> str:
    return judged.model


@pytest.fixture(scope="module")
def interrupted(platform: Platform, file_id: str) -> Interrupted:
    """A job that paused at a checkpoint and resumed there, and whose trainer was killed then."""
    books = platform.wait_for_settled_books()
    job_id = platform.create_job(file_id, epochs=2, exports=["merged_16bit"])
    until(lambda: any(m.startswith("Step") for m in platform.messages(job_id)), 300, "no first step")
    jobs = platform.client.fine_tuning.jobs
    jobs.pause(job_id)
    until(lambda: platform.job(job_id).status == "paused", 120, "the job does not pause")
    paused = platform.job(job_id)
    resumed = f"Resumed from step {jobs.checkpoints.list(job_id).data[0].step_number}."
    jobs.resume(job_id)
    until(lambda: resumed in platform.messages(job_id), 300, "the job does not resume at its checkpoint")
    platform.kill("trainer")
    return Interrupted(job_id, paused, books)


def test_a_job_becomes_a_model_that_answers_and_is_paid_once(platform: Platform, model: str):
    text = platform.ask(model, "I lost my card, what now?")
    streamed = platform.client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "I lost my card, what now?"}],
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(streamed)

    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage.completion_tokens > 0
    bill = platform.wait_for_settled_books()
    assert bill["ledger_sum_nano"] == 0
    assert bill["tokens_billed"] > 0
    # What the gateway set aside returns when it has nothing more to do.
    until(lambda: float(platform.billing()["held_usd"]) == 0, 120, "money is still held")


def test_a_judge_on_the_real_engine_grades_both_models_and_its_tokens_are_billed(platform: Platform, judged: Judged):
    report = judged.report

    assert (report["grader"], report["judge"], report["answers"]) == ("judge", platform.model, _JUDGED_ROWS)
    assert report["judge_calls"] == 2 * _JUDGED_ROWS, report["notes"]
    assert report["judge_input_tokens"] > 100 * report["judge_calls"]
    assert report["judge_output_tokens"] >= report["judge_calls"]
    assert judged.charged_usd > 0
    [graded] = [one for one in report["comparisons"] if one["name"] == "judge"]
    assert graded["rows"] == _JUDGED_ROWS, report["notes"]
    assert all(0 <= graded[side]["value"] <= 1 for side in ("base", "tuned"))


@pytest.mark.parametrize(("environment", "words"), [(".venv-engines", "is hidden from workers"), (".venv", "")])
def test_workers_reached_objects_by_signed_urls_alone(platform: Platform, model: str, environment: str, words: str):
    adapter = next(platform.objects.glob("org/*/runs/*/a*/adapter/*/adapter_model.safetensors"))

    reading = [ROOT / environment / "bin/python", "-c", "import sys; open(sys.argv[1], 'rb')", adapter]
    done = subprocess.run(reading, env=platform.environment, capture_output=True, text=True)

    assert (done.returncode == 0, words in done.stderr) == (not words, True)


def test_a_model_answers_only_with_a_certificate(platform: Platform, model: str):
    found = platform.client.models.retrieve(model).model_extra

    assert (found["status"], found["status_reason"]) == ("ready", None)
    parity = found["parity"]
    assert parity["tuned_difference"] < parity["tolerance"] < parity["effect"]
    assert parity["is_template_equal"] is True and parity["engine"].startswith("vllm ")


def test_base_and_adapter_answer_side_by_side_and_strangers_get_404(platform: Platform, model: str):
    assert platform.ask(platform.model) != platform.ask(model)

    with pytest.raises(openai.NotFoundError) as unknown:
        platform.ask("ft:anneal-demo:someone-else:x:0123456789")
    assert unknown.value.code == "model_not_found"
    names = [listed.id for listed in platform.client.models.list()]
    assert {platform.model, model} <= set(names)


def test_an_over_long_prompt_names_the_field(platform: Platform, model: str):
    with pytest.raises(openai.BadRequestError) as refused:
        platform.ask(model, "card " * 3000)

    assert refused.value.code == "context_length_exceeded"
    assert refused.value.param == "messages"


def test_a_killed_engine_leaves_no_orphan_and_answers_again(platform: Platform, model: str, interrupted: Interrupted):
    """While the interrupted job waits for its next trainer and goes on."""
    launcher = identify(platform.pid("vllm"))
    titles = {process: read_command(process) for process in list_descendants(launcher.pid)}
    for title in ("VLLM::EngineCore", "VLLM::Worker"):
        assert any(each.startswith(title) for each in titles.values()), titles

    platform.kill("vllm")

    until(lambda: not any(map(is_alive, [launcher, *titles])), 10, "engine processes are still there")
    assert platform.wait_until_answers(model, 180)


def test_a_paused_job_whose_trainer_is_killed_ends_once_and_is_paid_once(platform: Platform, interrupted: Interrupted):
    job = platform.wait_for_end(interrupted.job_id)

    assert job.status == "succeeded", job.error
    messages = platform.messages(job.id)
    assert messages.count("The job has successfully completed") == 1
    assert "The worker fell silent" in messages
    paused = interrupted.paused.model_extra
    assert paused["held_usd"] == "0"
    assert float(job.model_extra["cost_usd"]) > float(paused["cost_usd"]) > 0
    after = platform.wait_for_settled_books()
    assert after["ledger_sum_nano"] == 0
    assert float(after["training_usd"]) - float(interrupted.books["training_usd"]) == pytest.approx(
        float(job.model_extra["cost_usd"])
    )
    platform.wait_until_answers(job.fine_tuned_model)


def test_the_openapi_document_describes_the_public_api(platform: Platform):
    document = json.loads(platform.native.get("/schema").text)

    assert {"/v1/files", "/v1/fine_tuning/jobs", "/v1/models", "/api/v1/estimates"} <= set(document["paths"])
