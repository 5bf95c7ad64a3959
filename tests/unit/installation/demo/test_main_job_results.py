"""The main job's file, its adapter and its bill, and the messages of its failures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from demo.main_job import __main__ as command
from demo.main_job import jobs
from demo.main_job import state as states
from demo.main_job.adapters import serve
from demo.main_job.answers import Billing, JobEstimate, JobMembers
from demo.main_job.bills import bill_lines
from demo.main_job.journey import train_and_serve
from demo.main_job.platform import DemoFailed, Platform
from demo.main_job.stages import Stage
from demo.main_job.state import State
from demo.main_job.training_file import upload
from tests.support.scripted_main_job import ScriptedPlatform, succeed

pytestmark = pytest.mark.usefixtures("clock")
Train = Callable[[], Any]


def test_what_another_database_knew_is_made_again(
    scripted: ScriptedPlatform,
    platform: Platform,
    state: State,
    stage: Stage,
    train: Train,
    home: Path,
) -> None:
    state["file_id"], state["lora"] = "file-of-yesterday", "ftjob-of-yesterday"
    scripted.fates = [[succeed]]

    assert upload(platform, state, stage, home / "demo") == "file-2"
    assert train().id == "ftjob-1"

    assert json.loads((home / "demo/state.json").read_text()) == {"file_id": "file-2", "lora": "ftjob-1"}


def test_a_file_whose_check_was_interrupted_is_waited_for_and_not_sent_twice(
    scripted: ScriptedPlatform, platform: Platform, state: State, stage: Stage, home: Path
) -> None:
    state["file_id"] = scripted.add_file("uploaded")["id"]

    assert upload(platform, state, stage, home / "demo") == "file-2"
    assert len(scripted.files) == 2


def serve_job(scripted: ScriptedPlatform, **changes: Any) -> Any:
    return argparse.Namespace(fine_tuned_model="ft:one", **changes)


def test_an_adapter_that_was_deleted_is_trained_again(
    scripted: ScriptedPlatform, platform: Platform, state: State, stage: Stage
) -> None:
    state["lora"] = scripted.add_job("succeeded", fine_tuned_model="ft:deleted")["id"]
    scripted.fates = [[succeed]]

    model, job = train_and_serve(platform, state, stage, "file-1", name="lora", quantization=None)

    assert (model, job.id) == ("ft:ftjob-2", "ftjob-2")


def test_an_adapter_that_is_refused_again_and_again_ends_the_main_job(
    scripted: ScriptedPlatform, platform: Platform, state: State, stage: Stage
) -> None:
    def refuse(platform: ScriptedPlatform, job: dict[str, Any]) -> None:
        succeed(platform, job)
        platform.models[job["fine_tuned_model"]] |= {"status": "refused", "state": "off"}

    scripted.fates = [[refuse]] * jobs.MAX_JOBS

    with pytest.raises(DemoFailed, match="No adapter of 3 jobs could be served") as failed:
        train_and_serve(platform, state, stage, "file-1", name="lora", quantization=None)

    assert failed.value.process == "serving-agent"


def test_an_adapter_that_was_taken_out_of_service_is_served_again(
    scripted: ScriptedPlatform, platform: Platform, stage: Stage
) -> None:
    scripted.add_model("ft:one", state="off")

    assert serve(platform, stage, serve_job(scripted)) == "ft:one"

    assert scripted.sent("/serving$") == [{"is_served": True}]


def test_an_engine_that_still_loads_is_waited_for_with_a_sentence(
    scripted: ScriptedPlatform,
    platform: Platform,
    stage: Stage,
    home: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    scripted.add_model("ft:one", state="waiting")
    scripted.models["ft:one"]["silent"] = 100

    assert serve(platform, stage, serve_job(scripted)) == "ft:one"

    said = capsys.readouterr().out
    assert "The engine (the process vllm) is still loading the base model or the adapter." in said
    assert f"{home}/logs/vllm.log" in said


def test_the_bill_says_what_was_quoted_charged_and_returned() -> None:
    job = JobMembers(
        step=9,
        pool="local-cpu",
        queue_position=None,
        waiting_reason=None,
        cost_usd="0.0403",
        spend_cap_usd="1.20",
        billed_gpu_seconds=241.8,
        estimate=JobEstimate(train_seconds_p10=200.4, train_seconds_p50=230.0, train_seconds_p90=265.2),
    )
    bill = Billing(
        tokens_billed=61_234,
        unrated_requests=0,
        inference_usd="0.0012",
        available_usd="24.96",
        held_usd="0",
        ledger_sum_nano=0,
    )

    lines = [text for _, text in bill_lines(job, bill)]

    assert lines == [
        "training was quoted at 230 s (200 to 265 s)",
        "the job is billed 241.8 s = $0.0403; $1.1597 of the $1.20 set aside returned",
        "all inference so far: 61,234 tokens = $0.0012",
        "balance $24.9600, held $0.0000; all ledger entries add up to 0, as they must",
    ]


# --- its file, and how it fails -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{", "[]", '{"lora": "ftj'])
def test_a_state_file_that_was_cut_off_counts_as_none(text: str, home: Path) -> None:
    path = home / "demo/state.json"
    path.write_text(text)

    state = State(path)
    assert not state["lora"]
    state["lora"] = "ftjob-1"

    assert State(path)["lora"] == "ftjob-1"


def test_a_write_of_the_state_that_is_cut_off_keeps_the_old_one(
    home: Path, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    state["lora"] = "ftjob-1"

    def die(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(states.os, "fsync", die)
    with pytest.raises(KeyboardInterrupt):
        state["lora"] = "ftjob-2"

    assert State(home / "demo/state.json")["lora"] == "ftjob-1"


def asked_for(home: Path) -> argparse.Namespace:
    return argparse.Namespace(home=home, began_at=0.0, rows=1, then_score=0)


def failure(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def test_a_failure_names_its_reason_and_the_log(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "run_main_job", failure(DemoFailed("It is broken.", process="trainer")))

    assert command.run(asked_for(home)) == {"error": "It is broken."}

    said = capsys.readouterr().out
    assert "It is broken." in said and f"The log to read: {home}/logs/trainer.log" in said


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (401, None, ["is not accepted any more", "suspended", "run `make demo` again: it makes a new key"]),
        (429, "rate_limit_exceeded", ["Too fast.", "Wait a minute and run the main job again"]),
        (429, "insufficient_quota", ["Too fast.", "/staff/organizations"]),
    ],
)
def test_a_refusal_of_the_platform_says_what_to_do(
    status: int, code: str | None, words: list[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    response = httpx2.Response(status, request=httpx2.Request("GET", "http://127.0.0.1:8000/v1/files"))
    kind = {401: openai.AuthenticationError, 429: openai.RateLimitError}[status]
    refused = kind("refused", response=response, body={"message": "Too fast.", "code": code})
    monkeypatch.setattr(command, "run_main_job", failure(refused))

    reason = command.run(asked_for(home))["error"]

    assert all(each in reason for each in words)


@pytest.mark.parametrize("name", ["demo.json", "ports.json"])
def test_without_a_platform_it_says_how_to_start_one(home: Path, name: str) -> None:
    (home / name).write_text("{")

    assert "start it with `make demo`" in command.run(asked_for(home))["error"]


def test_a_second_main_job_waits_for_the_first(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner: list[dict[str, Any]] = []

    def run_main_job(*_: Any, **__: Any) -> dict[str, Any]:
        inner.append(command.run(asked_for(home)))
        raise DemoFailed("over")

    monkeypatch.setattr(command, "run_main_job", run_main_job)
    command.run(asked_for(home))

    assert "runs already, in another process" in inner[0]["error"]


@pytest.mark.parametrize(
    ("variable", "around"),
    [(None, ""), ("https_proxy", ""), ("http_proxy", "--noproxy '*' "), ("ALL_PROXY", "--noproxy '*' ")],
)
def test_the_printed_command_goes_around_a_proxy(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str | None,
    around: str,
) -> None:
    for name in command.PROXIES:
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "http://proxy.example.com:3128")
    monkeypatch.setattr(command, "run_main_job", lambda *_, **__: {"model": "demo:v1"})

    command.run(asked_for(home))
    assert f"\ncurl {around}http://127.0.0.1:8000/v1/chat/completions \\\n" in capsys.readouterr().out
