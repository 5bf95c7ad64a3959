"""What the agent does with the publishing child's work, and without it: a trained adapter is never lost."""

import re
import sys

import msgspec
import pytest

from apps.contracts.evaluation import EvaluationPlan, Grader, GraderKind
from apps.contracts.failures import FailureCode
from apps.contracts.runs import CheckpointSaved, Phase, PhaseChanged, Stopped, Succeeded
from apps.contracts.worker_api import JudgeAccess
from gpu_workers.common.events import AdapterReady
from gpu_workers.trainer.children.executor import SubprocessExecutor
from gpu_workers.trainer.publication import Publisher, PublishSecrets, limit_seconds
from tests.support.agent import Draining, add_run, make_agent

PUBLISHER = "tests.integration.gpu_workers.scripted_publisher"


def publisher(behaviour: str) -> Publisher:
    return Publisher(SubprocessExecutor(thread_limit=1, command=(sys.executable, "-m", PUBLISHER, behaviour)))


@pytest.fixture
def promised(plane, models):
    """A run that promises the merged model and the GGUF."""
    spec = add_run(plane, models)
    plane.queue[0] = msgspec.structs.replace(spec, exports=("gguf", "merged_16bit"))


def tries(tmp_path, part, *, attempt=1):
    return int((tmp_path / "work" / f"tries-{attempt}-{part}").read_text())


@pytest.mark.slow
def test_report_probe_and_exports_are_delivered_with_the_adapter(plane, promised, tmp_path):

    make_agent(plane, tmp_path, "succeed", publisher=publisher("*=publish")).drain()

    [outcome] = plane.outcomes
    assert isinstance(outcome, Succeeded) and outcome.report is not None and outcome.report.rows == 3
    assert {"parity.json", "adapter_model.safetensors"} <= set(plane.stored_files(outcome.upload_id))
    assert [export.kind for export in outcome.exports] == ["gguf", "merged_16bit"] and outcome.missing == ()
    assert all("config.json" in plane.stored_files(export.upload_id) for export in outcome.exports)
    assert outcome.training_seconds == 2.0
    phases = [event.phase for event in plane.events_of(PhaseChanged)]
    assert phases[-2:] == [Phase.EVALUATING, Phase.UPLOADING]


@pytest.mark.slow
@pytest.mark.parametrize("judge", [JudgeAccess(url="http://x/v1", key="ann_web_secret", model="demo"), None])
def test_a_judges_key_reaches_the_child_alone_and_its_refusal_costs_no_lease(plane, models, tmp_path, judge):
    plane.judge = judge
    spec = add_run(plane, models)
    plan = EvaluationPlan(grader=Grader(kind=GraderKind.JUDGE, model="demo"))
    plane.queue[0] = msgspec.structs.replace(spec, evaluation=plan)

    make_agent(plane, tmp_path, "succeed", publisher=publisher("*=publish")).drain()

    [outcome] = plane.outcomes
    assert isinstance(outcome, Succeeded) and outcome.report is not None
    told = msgspec.json.decode((tmp_path / "work" / "publish-secrets").read_bytes(), type=PublishSecrets)
    assert told.judge == judge and bool(told.judge_refusal) == (judge is None)
    assert "ann_web_secret" not in (tmp_path / "work" / "secrets").read_text()  # what the training child was told


@pytest.mark.slow
def test_a_failed_evaluation_costs_the_report_alone(plane, promised, tmp_path):
    make_agent(plane, tmp_path, "succeed", publisher=publisher("evaluation=fail")).drain()

    [outcome] = plane.outcomes
    assert isinstance(outcome, Succeeded) and outcome.report is None
    assert "adapter_model.safetensors" in plane.stored_files(outcome.upload_id)
    assert len(outcome.exports) == 2
    assert [(each.kind, each.cause) for each in outcome.missing] == [
        ("evaluation", "its process ended unexpectedly (1)")
    ]
    assert tries(tmp_path, "evaluation") == 2


@pytest.mark.slow
def test_a_part_that_fails_once_is_made_again_alone(plane, promised, tmp_path):
    make_agent(plane, tmp_path, "succeed", publisher=publisher("merged_16bit=once")).drain()

    [outcome] = plane.outcomes
    assert len(outcome.exports) == 2 and outcome.missing == ()
    assert [tries(tmp_path, part) for part in ("evaluation", "gguf", "merged_16bit")] == [1, 1, 2]


@pytest.mark.slow
def test_what_cannot_be_made_is_named_and_not_tried_again(plane, promised, tmp_path):
    make_agent(plane, tmp_path, "succeed", publisher=publisher("gguf=refuse")).drain()

    [outcome] = plane.outcomes
    assert [export.kind for export in outcome.exports] == ["merged_16bit"]
    assert [(each.kind, each.cause) for each in outcome.missing] == [("gguf", "llama.cpp does not know this model")]
    assert tries(tmp_path, "gguf") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_refused", "cause"),
    [(True, "the platform did not accept it"), (False, "the object store answered 403")],
)
def test_an_export_that_cannot_be_stored_is_missing(plane, promised, tmp_path, monkeypatch, is_refused, cause):
    store, places = plane._object, plane._uploads

    def hand_out(body, lease_id):
        refused = is_refused and b'"model"' in body
        return (400, b'{"error": {"code": "invalid_value"}}') if refused else places(body, lease_id)

    monkeypatch.setattr(plane, "_uploads", hand_out)
    monkeypatch.setattr(plane, "_object", lambda *sent: (403, b"") if "/model-" in sent[1] else store(*sent))

    make_agent(plane, tmp_path, "succeed", publisher=publisher("*=publish")).drain()

    [outcome] = plane.outcomes
    assert isinstance(outcome, Succeeded) and outcome.exports == ()
    assert "manifest.json" in plane.stored_files(outcome.upload_id)
    assert [each.kind for each in outcome.missing] == ["gguf", "merged_16bit"]
    assert all(each.is_made is not is_refused for each in outcome.missing), "a refusal is final"
    assert all(each.cause == f"it was made, but {cause}" for each in outcome.missing)


@pytest.mark.slow
def test_an_adapter_without_a_place_is_a_reported_failure(plane, models, tmp_path, monkeypatch):
    add_run(plane, models)
    places, refusal = plane._uploads, (400, b'{"error": {"code": "invalid_value"}}')
    monkeypatch.setattr(plane, "_uploads", lambda *sent: refusal if b'"adapter"' in sent[0] else places(*sent))

    make_agent(plane, tmp_path, "succeed").drain()

    [outcome] = plane.outcomes
    assert outcome.code is FailureCode.INTERNAL_ERROR


@pytest.mark.slow
def test_a_part_that_hangs_is_ended_and_tried_once_more(plane, models, tmp_path):
    """In one of three runs at once each."""
    parts = ("evaluation", "gguf", "merged_16bit")
    plane.stall_seconds = 3.0
    for attempt, _ in enumerate(parts, start=1):
        add_run(plane, models, attempt=attempt)
    plane.queue = [msgspec.structs.replace(spec, exports=("gguf", "merged_16bit")) for spec in plane.queue]
    hanging = publisher(" ".join(f"{part}=hang" for part in parts))

    make_agent(plane, tmp_path, "succeed", publisher=hanging, devices=("0", "1", "2")).drain()

    for attempt, part in enumerate(parts, start=1):
        outcome = plane.ends[f"run_{attempt}"]
        assert isinstance(outcome, Succeeded)
        [missing] = outcome.missing
        assert missing.kind == part
        assert re.fullmatch(r"it made no progress for \d+ seconds", missing.cause)  # a busy machine notices it later
        assert tries(tmp_path, part, attempt=attempt) == 2


def test_the_time_of_a_part_grows_with_the_base_model():
    ready = AdapterReady(folder="adapter", manifest_sha256="", bytes=1, step=1, training_seconds=1.0, trained_tokens=1)
    large = msgspec.structs.replace(ready, base_bytes=141 * 10**9)

    assert limit_seconds(ready) == 1_800
    assert limit_seconds(large) > 4 * 3_600


@pytest.mark.slow
def test_a_worker_that_must_go_skips_the_evaluation_and_delivers(plane, models, tmp_path):
    add_run(plane, models)
    draining = Draining(make_agent(plane, tmp_path, "succeed", publisher=publisher("*=hang")))
    plane.wait_for(lambda: any(event.phase is Phase.EVALUATING for event in plane.events_of(PhaseChanged)))

    plane.is_drain_requested = True
    draining.join()

    [outcome] = plane.outcomes
    assert isinstance(outcome, Succeeded) and outcome.report is None


@pytest.mark.slow
def test_a_worker_that_must_go_leaves_promised_exports_to_the_next(plane, promised, tmp_path):
    draining = Draining(make_agent(plane, tmp_path, "succeed", publisher=publisher("gguf=hang")))
    plane.wait_for(lambda: (tmp_path / "work" / "tries-1-gguf").exists())

    plane.is_drain_requested = True
    draining.join()

    [outcome] = plane.outcomes
    assert isinstance(outcome, Stopped) and outcome.reason == "preempted"


@pytest.mark.slow
def test_a_cancellation_during_the_evaluation_is_obeyed(plane, models, tmp_path):
    add_run(plane, models)
    draining = Draining(make_agent(plane, tmp_path, "succeed", publisher=publisher("*=hang")))
    plane.wait_for(lambda: any(event.phase is Phase.EVALUATING for event in plane.events_of(PhaseChanged)))

    plane.is_cancel_requested = True
    draining.join()

    [outcome] = plane.outcomes
    assert isinstance(outcome, Stopped) and outcome.reason == "cancelled"


@pytest.mark.slow
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

    make_agent(plane, tmp_path, "succeed", publisher=publisher("*=publish")).drain()

    [outcome] = plane.outcomes
    [saved] = plane.events_of(CheckpointSaved)
    assert plane.events_of(PhaseChanged)[-1].phase is Phase.UPLOADING
    assert isinstance(outcome, Stopped)
    assert (outcome.reason, outcome.training_seconds) == ("cancelled", saved.training_seconds)
    assert not any(path.endswith("/manifest.json") for path in plane.puts if "/adapter-" in path)


@pytest.mark.slow
def test_a_pause_after_the_last_step_changes_nothing(plane, models, tmp_path):
    add_run(plane, models)
    draining = Draining(make_agent(plane, tmp_path, "succeed", publisher=publisher("*=slow")))
    plane.wait_for(lambda: any(event.phase is Phase.EVALUATING for event in plane.events_of(PhaseChanged)))

    plane.is_pause_requested = True
    draining.join()

    [outcome] = plane.outcomes
    assert isinstance(outcome, Succeeded) and outcome.report is not None
