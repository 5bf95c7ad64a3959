"""A short main job through every real process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

from apps.interfaces.web.shell.code_samples import first_job_samples
from apps.interfaces.web.shell.first_job import SAMPLE
from tests.e2e.platform import ROOT, Platform, until

_JUDGED_ROWS = 2


class Trained(NamedTuple):
    """A job that ended and was graded by a judge. All tokens between the two bills are the judge's."""

    ended: Any
    before: dict[str, Any]
    after: dict[str, Any]
    report: dict[str, Any]


@pytest.fixture(scope="module")
def trained(platform: Platform, file_id: str) -> Trained:
    before = platform.wait_for_settled_books()
    judge = {"type": "judge", "model": platform.model, "instructions": "Is it the same intent?"}
    job_id = platform.create_job(
        file_id,
        epochs=1,
        recipe={"epochs": 1, "validation_share": 0.02},
        evaluation={"grader": judge, "max_rows": 8, "max_answers": _JUDGED_ROWS},
    )
    job = platform.wait_for_end(job_id)
    assert job.status == "succeeded", job.error
    report = platform.client.models.retrieve(job.fine_tuned_model).model_extra["evaluation"]
    tokens = report["judge_input_tokens"] + report["judge_output_tokens"]
    billed = before["tokens_billed"] + tokens  # no other request was made since
    until(lambda: platform.billing()["tokens_billed"] == billed, 60, f"the bill is not {tokens} tokens longer")
    after = platform.wait_for_settled_books()
    platform.wait_until_answers(job.fine_tuned_model)
    return Trained(job, before, after, report)


@pytest.fixture(scope="module")
def model(trained: Trained) -> str:
    return trained.ended.fine_tuned_model


def test_a_job_becomes_a_model_that_answers_and_is_paid_once(platform: Platform, trained: Trained, model: str):
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
    charged = trained.after["tokens_billed"]
    until(lambda: platform.billing()["tokens_billed"] > charged, 60, "the answers are not on the bill")
    bill = platform.wait_for_settled_books()
    assert bill["ledger_sum_nano"] == 0
    assert float(bill["training_usd"]) - float(trained.before["training_usd"]) == pytest.approx(
        float(trained.ended.model_extra["cost_usd"])
    )
    # What the gateway set aside returns when it has nothing more to do.
    until(lambda: float(platform.billing()["held_usd"]) == 0, 120, "money is still held")


def test_a_judge_on_the_real_engine_grades_both_models_and_its_tokens_are_billed(platform: Platform, trained: Trained):
    report = trained.report

    assert (report["grader"], report["judge"], report["answers"]) == ("judge", platform.model, _JUDGED_ROWS)
    assert report["judge_calls"] == 2 * _JUDGED_ROWS, report["notes"]
    assert report["judge_input_tokens"] > 100 * report["judge_calls"]
    assert report["judge_output_tokens"] >= report["judge_calls"]
    assert float(trained.after["inference_usd"]) > float(trained.before["inference_usd"])
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


def test_the_openapi_document_describes_the_public_api(platform: Platform):
    document = json.loads(platform.native.get("/schema").text)

    assert {"/v1/files", "/v1/fine_tuning/jobs", "/v1/models", "/api/v1/estimates"} <= set(document["paths"])


@pytest.mark.nightly
def test_the_quickstart_trains_and_asks_as_pasted(platform: Platform, file_id: str, settings: Any, tmp_path: Path):
    settings.PUBLIC_URL = platform.url
    sample_url = f"{platform.url}/static/{SAMPLE}"
    samples = first_job_samples(model=platform.model, sample_url=sample_url)
    python = next(sample["code"] for sample in samples if sample["key"] == "python")

    environment = os.environ | {"ANNEAL_API_KEY": platform.account["api_key"]}
    done = subprocess.run(
        [sys.executable, "-c", python], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )

    assert done.returncode == 0, done.stderr
    *states, answer = done.stdout.splitlines()
    assert states[-1] == "succeeded" and answer
