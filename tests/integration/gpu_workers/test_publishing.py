"""What the agent does with the publishing child's work, and without it: a trained adapter is never lost."""

import sys

import msgspec
import pytest

from apps.contracts.evaluation import EvaluationPlan, Grader, GraderKind
from apps.contracts.runs import CheckpointSaved, LogLine, Phase, PhaseChanged, Stopped, Succeeded
from apps.contracts.worker_api import JudgeAccess
from gpu_workers.executor import SubprocessExecutor
from gpu_workers.publishing import Publisher, PublishSecrets
from tests.support.agent import Draining, add_run, make_agent

PUBLISHER = "tests.integration.gpu_workers.scripted_publisher"


def publisher(behaviour: str) -> Publisher:
    return Publisher(SubprocessExecutor(thread_limit=1, command=(sys.executable, "-m", PUBLISHER, behaviour)))


def test_report_probe_and_merged_model_are_delivered_with_the_adapter(plane, models, tmp_path):
    add_run(plane, models)

    make_agent(plane, tmp_path, "succeed", publisher=publisher("publish")).drain()

    [outcome] = plane.outcomes
    assert isinstance(outcome, Succeeded) and outcome.report is not None and outcome.report.rows == 3
    assert {"parity.json", "adapter_model.safetensors"} <= set(plane.stored_files(outcome.upload_id))
    [export] = outcome.exports
    assert export.kind == "merged_16bit" and "config.json" in plane.stored_files(export.upload_id)
    assert outcome.training_seconds == 2.0
    phases = [event.phase for event in plane.events_of(PhaseChanged)]
    assert phases[-2:] == [Phase.EVALUATING, Phase.UPLOADING]


@pytest.mark.parametrize("judge", [JudgeAccess(url="http://x/v1", key="ann_web_secret", model="demo"), None])
def test_a_judges_key_reaches_the_child_alone_and_its_refusal_costs_no_lease(plane, models, tmp_path, judge):
    plane.judge = judge
    spec = add_run(plane, models)
    plan = EvaluationPlan(grader=Grader(kind=GraderKind.JUDGE, model="demo"))
    plane.queue[0] = msgspec.structs.replace(spec, evaluation=plan)

    make_agent(plane, tmp_path, "succeed", publisher=publisher("publish")).drain()

    [outcome] = plane.outcomes
    assert isinstance(outcome, Succeeded) and outcome.report is not None
    told = msgspec.json.decode((tmp_path / "work" / "publish-secrets").read_bytes(), type=PublishSecrets)
    assert told.judge == judge and bool(told.judge_refusal) == (judge is None)
    assert "ann_web_secret" not in (tmp_path / "work" / "secrets").read_text()  # what the training child was told


def test_a_failed_evaluation_costs_the_report_and_not_the_adapter(plane, models, tmp_path):
    add_run(plane, models)

    make_agent(plane, tmp_path, "succeed", publisher=publisher("fail")).drain()

    [outcome] = plane.outcomes
    assert isinstance(outcome, Succeeded) and outcome.report is None
    assert "adapter_model.safetensors" in plane.stored_files(outcome.upload_id)
    assert "could not be evaluated" in plane.events_of(LogLine)[-1].message


def test_a_worker_that_must_go_skips_the_evaluation_and_delivers(plane, models, tmp_path):
    add_run(plane, models)
    draining = Draining(make_agent(plane, tmp_path, "succeed", publisher=publisher("hang")))
    plane.wait_for(lambda: any(event.phase is Phase.EVALUATING for event in plane.events_of(PhaseChanged)))

    plane.is_drain_requested = True
    draining.join()

    [outcome] = plane.outcomes
    assert isinstance(outcome, Succeeded) and outcome.report is None


def test_a_cancellation_during_the_evaluation_is_obeyed(plane, models, tmp_path):
    add_run(plane, models)
    draining = Draining(make_agent(plane, tmp_path, "succeed", publisher=publisher("hang")))
    plane.wait_for(lambda: any(event.phase is Phase.EVALUATING for event in plane.events_of(PhaseChanged)))

    plane.is_cancel_requested = True
    draining.join()

    [outcome] = plane.outcomes
    assert isinstance(outcome, Stopped) and outcome.reason == "cancelled"


def test_a_cancellation_during_the_upload_is_obeyed(plane, models, tmp_path, monkeypatch):
    add_run(plane, models)
    store = plane._object

    def store_slowly(method, path, body):
        if method == "PUT" and "/adapter-" in path and not plane.is_cancel_requested:
            plane.is_cancel_requested = True
            beats = len(plane.beats)
            plane.wait_for(lambda: len(plane.beats) > beats + 1)  # the agent was told
        return store(method, path, body)

    monkeypatch.setattr(plane, "_object", store_slowly)

    make_agent(plane, tmp_path, "succeed", publisher=publisher("publish")).drain()

    [outcome] = plane.outcomes
    [saved] = plane.events_of(CheckpointSaved)
    assert plane.events_of(PhaseChanged)[-1].phase is Phase.UPLOADING
    assert isinstance(outcome, Stopped)
    assert (outcome.reason, outcome.training_seconds) == ("cancelled", saved.training_seconds)
    assert not any(path.endswith("/manifest.json") for path in plane.puts if "/adapter-" in path)


def test_a_pause_after_the_last_step_changes_nothing(plane, models, tmp_path):
    add_run(plane, models)
    draining = Draining(make_agent(plane, tmp_path, "succeed", publisher=publisher("slow")))
    plane.wait_for(lambda: any(event.phase is Phase.EVALUATING for event in plane.events_of(PhaseChanged)))

    plane.is_pause_requested = True
    draining.join()

    [outcome] = plane.outcomes
    assert isinstance(outcome, Succeeded) and outcome.report is not None
