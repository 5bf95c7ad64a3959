import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import msgspec
import pytest

from apps.contracts.failures import FailureCode
from apps.contracts.runs import BaseModelRef, CheckpointSaved, Failed, LogLine, StepCompleted, Stopped, Succeeded
from apps.contracts.worker_api import ProbeRequest
from gpu_workers.common.process_tree import identify, is_alive
from gpu_workers.trainer import agent as agent_module
from gpu_workers.trainer.idle.rehearsals import Rehearser
from gpu_workers.trainer.lease_keeper import LeaseKeeper
from gpu_workers.trainer.supervision import escort, run_supervisor
from tests.support.agent import ROWS, Draining, add_run, make_agent
from tests.twins.control_plane import CREDENTIAL, ControlPlane


def child_pid(tmp_path: Path) -> int:
    files = list((tmp_path / "work" / "runs").glob("*/child.json"))
    return msgspec.json.decode(files[0].read_bytes())["pid"]


def begin(plane: ControlPlane, models: Path, tmp_path: Path, behaviour: str) -> Draining:
    """Have an agent take a run, and return after the run's first step."""
    add_run(plane, models)
    draining = Draining(make_agent(plane, tmp_path, behaviour))
    plane.wait_for(lambda: plane.events_of(StepCompleted))
    return draining


def probe_of(models: Path, **changes: object) -> ProbeRequest:
    reference = BaseModelRef(id="tiny", name="tiny", path=str(models))
    return ProbeRequest(base_model=reference, method="lora", micro_batch_size=1, sequence_length=8, **changes)


def test_a_run_is_claimed_executed_stored_and_reported(plane, models, tmp_path):
    add_run(plane, models)

    assert make_agent(plane, tmp_path, "succeed").drain() == 1

    [outcome] = plane.outcomes
    assert isinstance(outcome, Succeeded)
    assert (outcome.step, outcome.training_seconds, outcome.trained_tokens) == (20, 2.0, 200)
    stored = plane.stored_files(outcome.upload_id)
    assert stored["adapter_model.safetensors"] == b"weights at 20"
    assert [event.sequence for event in plane.events] == list(range(1, len(plane.events) + 1))
    assert len(plane.events_of(StepCompleted)) == 20
    assert [event.step for event in plane.events_of(CheckpointSaved)] == [10]
    assert list((tmp_path / "work" / "runs").iterdir()) == []


def test_a_run_that_cannot_fit_here_is_refused_before_anything_is_downloaded(plane, models, tmp_path):
    spec = add_run(plane, models)
    plane.queue[0] = msgspec.structs.replace(spec, estimated_peak_bytes=10**15)

    make_agent(plane, tmp_path, "succeed").drain()

    [outcome] = plane.outcomes
    assert isinstance(outcome, Failed) and outcome.code is FailureCode.OUT_OF_MEMORY
    assert "by its estimate" in outcome.message and outcome.training_seconds == 0.0
    assert not (tmp_path / "work" / "secrets").exists()  # no child was started


@pytest.mark.slow
def test_a_run_ends_a_measurement_which_is_taken_again_after_a_quiet_time(plane, models, tmp_path, monkeypatch):
    monkeypatch.setattr(agent_module, "_QUIET_SECONDS", 3.0)
    started = tmp_path / "started"
    plane.probes = [probe_of(models)]
    command = ("sh", "-c", f"date +%s >> {started}; [ $(wc -l < {started}) -gt 1 ] || exec sleep 120")
    agent = make_agent(plane, tmp_path, "succeed", probe_command=command)
    draining = Draining(agent)
    plane.wait_for(started.exists)

    add_run(plane, models)
    plane.wait_for(lambda: plane.outcomes)
    draining.join()

    assert isinstance(plane.outcomes[0], Succeeded)
    began_at = [int(line) for line in started.read_text().splitlines()]
    assert len(began_at) == 1 + 3  # those after it wrote no report, and three are enough
    assert began_at[1] > plane.ended_at + 1


@pytest.mark.parametrize(("is_first", "order"), [(True, ["probe", "rehearsal"]), (False, ["rehearsal", "probe"])])
def test_a_rehearsal_goes_before_a_measurement_unless_quotes_wait_for_that(plane, models, tmp_path, is_first, order):
    log = tmp_path / "order"
    plane.probes = [probe_of(models, is_first=is_first)]

    class Waiting(Rehearser):
        def run_one(self, *, should_stop):
            with log.open("a") as lines:
                lines.write("rehearsal\n")
            return log.read_text().count("rehearsal") == 1

    command = ("sh", "-c", f"echo probe >> {log}")
    make_agent(plane, tmp_path, "succeed", probe_command=command, rehearser=Waiting(None)).drain()

    assert list(dict.fromkeys(log.read_text().split())) == order


def test_the_manifest_is_stored_last(plane, models, tmp_path):
    add_run(plane, models)

    make_agent(plane, tmp_path, "succeed").drain()

    adapter = [path.rsplit("/", 1)[1] for path in plane.puts if "/adapter-" in path]
    assert sorted(adapter) == ["adapter_config.json", "adapter_model.safetensors", "manifest.json"]
    assert adapter[-1] == "manifest.json"


def test_the_child_sees_no_url_token_or_variable_of_the_platform(plane, models, tmp_path, monkeypatch):
    monkeypatch.setenv("ANNEAL_SIGNING_KEY", "platform-secret")
    monkeypatch.setenv("CELERY_BROKER_URL", "redis://platform-secret")
    spec = add_run(plane, models)
    plane.queue[0] = msgspec.structs.replace(
        spec, base_model=msgspec.structs.replace(spec.base_model, hub_token="hf_secret")
    )

    make_agent(plane, tmp_path, "succeed").drain()

    stdin, seen = (tmp_path / "work" / "secrets").read_text().split("\n", 1)
    assert "hf_secret" in stdin
    for secret in ("hf_secret", "platform-secret", plane.url, CREDENTIAL):
        assert secret not in seen


@pytest.mark.slow
def test_several_runs_are_worked_on_until_none_waits(plane, models, tmp_path):
    add_run(plane, models)
    add_run(plane, models, attempt=2)

    assert make_agent(plane, tmp_path, "succeed").drain() == 2

    assert plane.claims == 3
    assert len(plane.outcomes) == 2


@pytest.mark.slow
def test_a_stale_lease_kills_the_child_and_reports_nothing(plane, models, tmp_path):
    draining = begin(plane, models, tmp_path, "stubborn")
    child = identify(child_pid(tmp_path))

    plane.is_lease_stale = True
    draining.join()

    assert not is_alive(child)
    assert plane.outcomes == []


@pytest.mark.slow
def test_an_agent_cut_off_ends_its_child_before_the_lease_ends(plane, models, tmp_path, monkeypatch):
    monkeypatch.setattr(escort, "_KILL_AFTER_FENCE_SECONDS", 0.5)
    skew = [0.0]
    keeper = partial(LeaseKeeper, clock=lambda: time.monotonic() + skew[0])
    monkeypatch.setattr(escort, "LeaseKeeper", keeper)
    draining = begin(plane, models, tmp_path, "stubborn")
    child = identify(child_pid(tmp_path))

    plane.is_down = True
    skew[0] = plane.self_fence_seconds
    cut_off_at = time.monotonic()
    while is_alive(child):
        assert time.monotonic() - cut_off_at < 30  # of the 60 s of the lease
        time.sleep(0.05)
    plane.is_down, plane.is_lease_stale = False, True
    draining.join()

    assert plane.outcomes == []


@pytest.mark.slow
def test_a_short_outage_costs_no_event_and_no_run(plane, models, tmp_path):
    draining = begin(plane, models, tmp_path, "wait")

    plane.is_down = True
    time.sleep(1.5)
    plane.is_down = False
    plane.is_cancel_requested = True
    draining.join()

    assert isinstance(plane.outcomes[0], Stopped)
    assert [event.sequence for event in plane.events] == list(range(1, len(plane.events) + 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "reason"),
    [("is_cancel_requested", "cancelled"), ("is_pause_requested", "paused"), ("is_drain_requested", "preempted")],
)
def test_a_request_to_stop_keeps_a_checkpoint_and_bills_no_further(plane, models, tmp_path, flag, reason):
    draining = begin(plane, models, tmp_path, "wait")

    setattr(plane, flag, True)
    draining.join()

    [saved] = plane.events_of(CheckpointSaved)
    stopped = Stopped(
        reason=reason, step=saved.step, training_seconds=saved.training_seconds, trained_tokens=saved.trained_tokens
    )
    assert plane.outcomes == [stopped]
    assert "manifest.json" in plane.stored_files(saved.upload_id)


@pytest.mark.slow
def test_a_pause_waits_while_the_control_plane_reads_its_checkpoint(plane, models, tmp_path, monkeypatch):
    monkeypatch.setattr(run_supervisor, "_EVENTS_SECONDS", 0.0)
    take_events, unread = plane._events, [(503, b'{"error": {"code": "files_unread"}}')] * 3

    def read_first(body, lease_id):
        return unread.pop() if unread and b"checkpoint_saved" in body else take_events(body, lease_id)

    monkeypatch.setattr(plane, "_events", read_first)
    draining = begin(plane, models, tmp_path, "wait")

    plane.is_pause_requested = True
    draining.join()

    [saved], [outcome] = plane.events_of(CheckpointSaved), plane.outcomes
    assert not unread and outcome.step == saved.step > 0


@pytest.mark.slow
def test_a_machine_that_is_wanted_ends_the_wait_of_a_pause(plane, models, tmp_path, monkeypatch):
    for name, seconds in {"_PATIENT_SECONDS": 30.0, "_IN_HASTE_SECONDS": 0.5, "_EVENTS_IN_HASTE_SECONDS": 0.0}.items():
        monkeypatch.setattr(run_supervisor, name, seconds)
    add_run(plane, models)
    take_events, refused_at = plane._events, []

    def refuse_checkpoints(body, lease_id):
        if b"checkpoint_saved" not in body:
            return take_events(body, lease_id)
        refused_at.append(time.monotonic())
        return 500, b""

    monkeypatch.setattr(plane, "_events", refuse_checkpoints)
    agent = make_agent(plane, tmp_path, "wait")
    draining = Draining(agent)
    plane.wait_for(lambda: plane.events_of(StepCompleted))
    plane.is_pause_requested = True
    plane.wait_for(lambda: len(refused_at) > 3)
    assert refused_at[3] - refused_at[0] > 0.9, "it was sent again and again"

    agent.request_stop()
    draining.join(10)

    assert [outcome.step for outcome in plane.outcomes] == [0]


def test_a_stopping_agent_hands_its_run_back_and_claims_no_more(plane, models, tmp_path):
    add_run(plane, models)
    add_run(plane, models, attempt=2)
    agent = make_agent(plane, tmp_path, "wait")
    draining = Draining(agent)
    plane.wait_for(lambda: plane.events_of(StepCompleted))

    agent.request_stop()
    draining.join()

    assert [outcome.reason for outcome in plane.outcomes] == ["preempted"]
    assert len(plane.queue) == 1


def test_a_child_that_fails_is_reported_with_its_code(plane, models, tmp_path):
    add_run(plane, models)

    make_agent(plane, tmp_path, "fail").drain()

    [outcome] = plane.outcomes
    assert (outcome.code, outcome.message) == (FailureCode.NO_TRAINABLE_TOKENS, "Nothing to train.")


def test_a_child_that_is_killed_counts_what_its_stored_checkpoint_made_durable(plane, models, tmp_path):
    add_run(plane, models)

    draining = Draining(make_agent(plane, tmp_path, "hang"))
    plane.wait_for(lambda: plane.events_of(CheckpointSaved))

    os.kill(child_pid(tmp_path), signal.SIGKILL)

    draining.join()
    [outcome] = plane.outcomes
    assert isinstance(outcome, Failed)
    assert outcome.code is FailureCode.INTERNAL_ERROR
    assert outcome.code.is_retryable
    assert outcome.training_seconds == 0.5


def test_a_dataset_that_was_changed_is_not_trained_on(plane, models, tmp_path):
    add_run(plane, models)
    plane.objects["/objects/train.jsonl"] = b"x" * len(ROWS)

    make_agent(plane, tmp_path, "succeed").drain()

    assert plane.outcomes[0].code is FailureCode.OBJECT_STORE_UNAVAILABLE


def test_a_base_model_outside_the_roots_is_refused(plane, models, tmp_path):
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    (outside / "config.json").write_text("{}")
    add_run(plane, outside)

    make_agent(plane, tmp_path, "succeed").drain()

    assert plane.outcomes[0].code is FailureCode.BASE_MODEL_UNAVAILABLE


def test_a_torn_checkpoint_is_not_resumed_from(plane, models, tmp_path):
    add_run(plane, models)
    make_agent(plane, tmp_path, "succeed").drain()
    [saved] = plane.events_of(CheckpointSaved)
    reference = plane.checkpoint_ref(saved)
    plane.objects[f"/objects/uploads/{saved.upload_id}/adapter_model.safetensors"] = b"weights at 1"
    add_run(plane, models, attempt=2, resume_from=reference)

    make_agent(plane, tmp_path, "succeed").drain()

    assert plane.outcomes[1].code is FailureCode.CHECKPOINT_INVALID


def test_one_refused_event_does_not_hold_up_the_others(plane, models, tmp_path):
    plane.refuse_event = lambda event: isinstance(event, CheckpointSaved)
    add_run(plane, models)

    make_agent(plane, tmp_path, "succeed").drain()

    assert isinstance(plane.outcomes[0], Succeeded)
    assert len(plane.events_of(StepCompleted)) == 20
    assert plane.events_of(CheckpointSaved) == []


def test_a_store_that_refuses_files_is_the_platforms_failure(plane, models, tmp_path, monkeypatch):
    monkeypatch.setattr(plane, "_object", lambda method, path, body: (403, b"") if method == "PUT" else (200, ROWS))
    add_run(plane, models)

    make_agent(plane, tmp_path, "succeed").drain()

    assert plane.outcomes[0].code is FailureCode.OBJECT_STORE_UNAVAILABLE
    assert [event.level for event in plane.events_of(LogLine)] == ["warn"]


@pytest.mark.slow
def test_heartbeats_carry_the_progress(plane, models, tmp_path):
    add_run(plane, models)
    draining = Draining(make_agent(plane, tmp_path, "wait"))
    plane.wait_for(lambda: any(beat.step > 0 for beat in plane.beats))
    plane.is_cancel_requested = True
    draining.join()

    beat = next(beat for beat in plane.beats if beat.step > 0)
    assert beat.phase == "training"
    assert beat.training_seconds == pytest.approx(beat.step / 10)
    assert beat.memory_bytes > 0


AGENT_PROCESS = """
import sys
from pathlib import Path
from tests.support.agent import make_agent

class Plane: url = sys.argv[1]
make_agent(Plane, Path(sys.argv[2]), "stubborn").drain()
"""


@pytest.mark.slow
def test_killing_the_agent_kills_its_child_and_the_next_agent_starts_clean(plane, models, tmp_path):
    add_run(plane, models)
    process = subprocess.Popen([sys.executable, "-c", AGENT_PROCESS, plane.url, str(tmp_path)])
    plane.wait_for(lambda: plane.events_of(StepCompleted))
    child = identify(child_pid(tmp_path))

    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    plane.wait_for(lambda: not is_alive(child), timeout_seconds=30)
    plane.forget_lease()
    add_run(plane, models, attempt=2)
    make_agent(plane, tmp_path, "succeed").drain()

    assert [type(outcome) for outcome in plane.outcomes] == [Succeeded]


def test_an_orphan_of_an_earlier_agent_is_killed_before_the_first_claim(plane, models, tmp_path):
    run_dir = tmp_path / "work" / "runs" / "run_1-1"
    run_dir.mkdir(parents=True)
    orphan = subprocess.Popen(["sleep", "60"], start_new_session=True)
    (run_dir / "child.json").write_bytes(msgspec.json.encode(identify(orphan.pid)))

    make_agent(plane, tmp_path, "succeed")

    assert orphan.wait(30) == -signal.SIGKILL
    assert not run_dir.exists()
